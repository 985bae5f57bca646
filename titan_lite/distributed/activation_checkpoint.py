"""Activation checkpointing: which activations of a block are kept for backward, and which are computed again.

    apply_activation_checkpoint(model.layers, mode="selective", option="op")

Each block's class is swapped for one whose forward runs under torch's non-reentrant checkpoint; names do not change.
Recomputing a block reads its weights again, so under SimpleFSDP they are gathered again as well. Under torch.compile all of it is
tags on the graph, those of resharding (compiler/resharding.py) included, and one partitioner reads them.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_lite.attention import OPERATORS
from titan_lite.compiler.collectives import aten, collectives

# What is expensive to compute again, with all attention kernels that F.scaled_dot_product_attention may choose and ours; and the
# reduce-scatters of tensor parallelism, whose results are small. What it and context parallelism gather is gathered again.
EXPENSIVE = frozenset(
    {
        aten.mm.default,
        collectives.reduce_scatter_tensor.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *OPERATORS,
    }
)


def apply_activation_checkpoint(blocks: nn.ModuleDict, mode: str, option: str = "op") -> None:
    """blocks: by their number in the whole model.

    mode: "none"; "full": keep a block's input only; "selective" with option "op": keep EXPENSIVE operators' results, with
    "op/2" of matrix products a block's first, third, ...; with option "2": every second block (0, 2, ...) as in "full" and the
    others as in "none"; "memory_budget": nothing here, the partitioner's choice (compiler/stage.py).
    """
    for name, block in blocks.items():
        if recomputes(int(name), mode, option):
            cls: Any = type(block)
            contexts = {"op": _keep_expensive, "op/2": _keep_every_second}.get(option) if mode == "selective" else None
            block.__class__ = _checkpointed_class(cls, contexts)


def recomputes(block: int, mode: str, option: str) -> bool:
    """True where at least some operators of the block of that number run again in backward."""
    if mode in ("none", "memory_budget"):
        return False
    return mode == "full" or option in ("op", "op/2") or block % int(option) == 0


@functools.cache
def _checkpointed_class(cls: Any, contexts: Callable[[], Any] | None) -> Any:
    selective: dict[str, Any] = {"context_fn": contexts} if contexts else {}

    def forward(self: nn.Module, *args: Any) -> Any:
        # no dropout anywhere, so there is no random state to put back
        return checkpoint(functools.partial(cls.forward, self), *args, use_reentrant=False, preserve_rng_state=False, **selective)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _keep_expensive() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_every_second() -> Any:
    """Keep every second matrix product, as TorchTitan's selective checkpointing by operator does (arXiv 2410.06511)."""
    products = {False: 0, True: 0}  # so far, in forward and when it is run again

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _policy(context, operator)

    return create_selective_checkpoint_contexts(policy)
