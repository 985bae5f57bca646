"""Names in checkpoints: the sections of ours, and parameters in torchtitan's.

    NAME                                a parameter, by its FQN
    optimizer.state.NAME.exp_avg        what the optimizer keeps of it
    between.NAME.error                  what a feature keeps of it, here PowerSGD
    train_state.step                    for torchtitan; a resume reads state.json (state.py)

    section_of("optimizer.state.norm.weight.step")      # "optimizer"
    names = TorchtitanNames("qwen3_moe")                # raises ConfigError for other families
    names.of("layers.0.attention.wq.weight")            # "layers.0.attention.qkv_linear.wq.weight"
    names.ours("lm_head.weight")                        # "output.weight"

torchtitan (0.3.0) has the same parameters. Those of its Llama 3 have the same layout, rotary pairs
included; those of its Qwen3 have rotary pairs as transformers does. torchtitan 0.2 has our names.
"""

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import find_family
from titan_lite.feature import part_of_each

# what the tensors of features are, by the first word of their names
OF_FEATURES: dict[str, str] = {}
for _keys in part_of_each("keys"):
    OF_FEATURES |= _keys.TENSORS
SECTIONS = (  # first words of names that are no parameters
    "optimizer",
    *OF_FEATURES,
    "train_state",
    "lr_scheduler",  # in torchtitan's checkpoints alone
    "dataloader",  # in torchtitan's checkpoints alone
)
_OF_ALL = {  # our module: torchtitan's
    "attention.wq": "attention.qkv_linear.wq",
    "attention.wk": "attention.qkv_linear.wk",
    "attention.wv": "attention.qkv_linear.wv",
    "output": "lm_head",
}


def section_of(name: str) -> str:
    """Return the first word of a name in SECTIONS, and "model" for a parameter."""
    first, _, _ = name.partition(".")
    return first if first in SECTIONS else "model"


class TorchtitanNames:
    """The names of a family's tensors in torchtitan's checkpoints. Raises ConfigError for a family
    that is not there.
    """

    def __init__(self, family: str):
        found = find_family(family).torchtitan
        if found is None:
            raise ConfigError(
                f"model.name = {shown(family)}: torchtitan's checkpoints have another layout of"
                " this family, or none; use a Hugging Face folder"
            )
        self.rotary = found.rotary
        self.theirs = {**_OF_ALL, **found.names}
        self._ours = {theirs: ours for ours, theirs in self.theirs.items()}

    def of(self, fqn: str) -> str:
        """Return the name of a parameter or buffer there."""
        return _renamed(fqn, self.theirs)

    def ours(self, name: str) -> str:
        """Invert `of`."""
        return _renamed(name, self._ours)

    def has(self, buffer: str) -> bool:
        """Return True if a buffer, by its FQN, has a place there."""
        return _in_block(buffer) in self.theirs

    def is_rotary(self, fqn: str) -> bool:
        """Return True if the rows of a parameter are in another order there."""
        return _in_block(fqn).rpartition(".")[0] in self.rotary


def _renamed(fqn: str, names: dict[str, str]) -> str:
    """Return a name, such as "layers.0.attention.wq.weight", with another tensor or module."""
    inner = _in_block(fqn)
    layer = fqn.removesuffix(inner)
    module, _, tensor = inner.rpartition(".")
    return layer + names.get(inner, f"{names.get(module, module)}.{tensor}")


def _in_block(fqn: str) -> str:
    """Return the name of a tensor in its block, or the FQN of one that is in none."""
    return fqn.split(".", 2)[2] if fqn.startswith("layers.") else fqn
