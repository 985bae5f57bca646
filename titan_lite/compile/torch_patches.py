"""Replace attributes of torch for a while: each with its reason, and the versions that need it.

    with no_random_state_saved():
        min_cut_rematerialization_partition(joint, inputs)

The links are to the code that is replaced. Each context restores what it found.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch import partitioners
from torch.fx import GraphModule


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Return a context in which the attribute `name` of a module or class is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def is_compiling() -> Iterator[None]:
    """Return a context in which `torch.compiler.is_compiling()` is True.

    torch.compile has its own; tracing without it has none. All versions:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/compiler/__init__.py#L472
    """
    with replaced(torch.compiler, "_is_compiling_flag", True):
        yield


@contextmanager
def no_random_state_saved() -> Iterator[None]:
    """Return a context in which the partitioner saves no random-number state.

    It would for operators that it recomputes. Attention operators count as random because of
    dropout, which Llama does not use. All versions:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/partitioners.py#L190
    """

    def has_none(graph: GraphModule) -> bool:
        return False

    with replaced(partitioners, "has_recomputable_rng_ops", has_none):
        yield
