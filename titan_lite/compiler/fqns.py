"""Questions about parameters' names, the same for eager mode and for graphs.

block_of("layers.3.attention.wq.weight")            # "layers.3", the bucket that it travels in
parameters_within(model, ["layers.3", "output"])    # FQNs of the parameters of these modules
"""

from collections.abc import Iterable

from torch import nn


def block_of(fqn: str, last: str = "norm") -> str:
    """ "layers.3.attention.wq.weight" -> "layers.3"; "norm.weight" -> last, the block that `last_block` names; "output.weight" ->
    "output", which is alone, as the embedding is: it is large, and what is alone in a bucket is not copied out of it."""
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else last if parts[0] == "norm" else parts[0]


def last_block(fqns: Iterable[str]) -> str:
    """The transformer block that the last norm travels with: that of the highest number; "norm", alone, where there is none."""
    numbers = [int(fqn.split(".")[1]) for fqn in fqns if fqn.startswith("layers.")]
    return f"layers.{max(numbers)}" if numbers else "norm"


def lies_within(fqn: str, prefixes: Iterable[str]) -> bool:
    """True where a prefix is the name, or that of a module around it: "layers.3.w" is within "layers.3", "layers.31.w" is not."""
    return any(f"{fqn}.".startswith(f"{prefix}.") for prefix in prefixes)


def parameters_within(model: nn.Module, prefixes: Iterable[str]) -> tuple[str, ...]:
    """FQNs of the parameters that lie within one of `prefixes`.

    Tied weights lie where any of their names does; their FQN is the first one.
    """
    prefixes, first, within = tuple(prefixes), dict[nn.Parameter, str](), dict[str, None]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        fqn = first.setdefault(parameter, name)
        if lies_within(name, prefixes):
            within[fqn] = None
    return tuple(within)
