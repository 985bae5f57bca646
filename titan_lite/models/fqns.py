"""Map the names of parameters to transformer blocks and modules, for eager mode and for graphs.

block_of("layers.3.attention.wq.weight")            # "layers.3", its bucket
parameters_within(model, ["layers.3", "output"])    # FQNs of the parameters of these modules
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # titan_lite/models/shapes.py needs no torch
    from torch import nn


def block_of(fqn: str, last: str = "norm") -> str:
    """Return the bucket of a parameter: "layers.3.attention.wq.weight" -> "layers.3",
    "output.weight" -> "output".

    "norm.weight" is in `last`, the result of last_block. Embedding and output are large, and alone
    in a bucket are not copied.
    """
    parts = fqn.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2])
    return last if parts[0] == "norm" else parts[0]


def is_in_block(fqn: str) -> bool:
    """Return True for a parameter of a transformer block."""
    return fqn.startswith("layers.")


def is_router(fqn: str) -> bool:
    """Return True for a parameter or buffer of a router of experts (models/experts.py)."""
    return ".router." in fqn


def is_matrix(fqn: str) -> bool:
    """Return True for the weights within blocks, norms and routers of experts excepted."""
    return is_in_block(fqn) and "norm" not in fqn and not is_router(fqn)


def is_of_experts(shape: Sequence[int]) -> bool:
    """Return True for the shape of matrices of experts, (E, rows, columns): no other parameter has
    three dimensions.
    """
    return len(shape) == 3


def last_block(fqns: Iterable[str]) -> str:
    """Return the transformer block that shares a bucket with the last norm, or "norm" without
    blocks.
    """
    numbers = [int(fqn.split(".")[1]) for fqn in fqns if fqn.startswith("layers.")]
    return f"layers.{max(numbers)}" if numbers else "norm"


def lies_within(fqn: str, prefixes: Iterable[str]) -> bool:
    """Return True if a prefix names the parameter or a module around it: "layers.3" matches
    "layers.3.w", not "layers.31.w".
    """
    return any(f"{fqn}.".startswith(f"{prefix}.") for prefix in prefixes)


def is_filtered(fqn: str, filter_fqns: Iterable[str]) -> bool:
    """Return True if a name is a part of `fqn`: "attention.wk" of "layers.3.attention.wk"."""
    return any(f".{name}." in f".{fqn}." for name in filter_fqns)


def parameters_within(model: "nn.Module", prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return the FQNs of parameters within `prefixes`.

    Tied weights match by any of their names; their FQN is the first.
    """
    prefixes = tuple(prefixes)
    first_name: dict[nn.Parameter, str] = {}
    within: dict[str, None] = {}  # an ordered set
    for name, parameter in model.named_parameters(remove_duplicate=False):
        fqn = first_name.setdefault(parameter, name)
        if lies_within(name, prefixes):
            within[fqn] = None
    return tuple(within)
