"""Names in checkpoints: the sections of ours, and parameters in torchtitan's.

    NAME                                a parameter, by its FQN
    optimizer.state.NAME.exp_avg        what the optimizer keeps of it
    between.NAME.error                  what gradient compression keeps of it (powersgd.py)
    train_state.step                    for torchtitan; a resume reads state.json (state.py)

    section_of("optimizer.state.norm.weight.step")      # "optimizer"
    to_torchtitan("layers.0.attention.wq.weight")       # "layers.0.attention.qkv_linear.wq.weight"
    from_torchtitan("lm_head.weight")                   # "output.weight"

torchtitan's Llama 3 (0.3.0) has the same parameters in the same layout, rotary pairs included, so
that names are all that differs.
"""

SECTIONS = (  # first words of names that are no parameters
    "optimizer",
    "between",  # gradient compression between copies (distributed/powersgd.py)
    "train_state",
    "lr_scheduler",  # in torchtitan's checkpoints alone
    "dataloader",  # in torchtitan's checkpoints alone
)
TORCHTITAN = {  # our module: torchtitan's
    "attention.wq": "attention.qkv_linear.wq",
    "attention.wk": "attention.qkv_linear.wk",
    "attention.wv": "attention.qkv_linear.wv",
    "output": "lm_head",
}
OURS = {theirs: ours for ours, theirs in TORCHTITAN.items()}


def section_of(name: str) -> str:
    """Return the first word of a name in SECTIONS, and "model" for a parameter."""
    first, _, _ = name.partition(".")
    return first if first in SECTIONS else "model"


def to_torchtitan(fqn: str) -> str:
    """Return torchtitan's name of a parameter."""
    return _renamed(fqn, TORCHTITAN)


def from_torchtitan(name: str) -> str:
    """Invert `to_torchtitan`."""
    return _renamed(name, OURS)


def _renamed(fqn: str, modules: dict[str, str]) -> str:
    """Return a parameter's name, such as "layers.0.attention.wq.weight", with another module."""
    module, _, parameter = fqn.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, number, module = module.split(".", 2)
        layer = f"layers.{number}."
    return f"{layer}{modules.get(module, module)}.{parameter}"
