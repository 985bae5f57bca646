"""Activation checkpointing: which activations of a block are kept for backward, and which are computed again.

    apply_activation_checkpoint(model.layers.values(), mode="selective")

Each block's class is swapped for one whose forward runs under torch's non-reentrant checkpoint; names do not change.
Recomputing a block reads its weights again, so under SimpleFSDP they are gathered again as well.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
# What is expensive to compute again. All attention kernels that F.scaled_dot_product_attention may choose.
EXPENSIVE = frozenset(
    {
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def apply_activation_checkpoint(blocks: Iterable[nn.Module], mode: str) -> None:
    """mode: "none", "selective" (keep EXPENSIVE operators' results) or "full" (keep the block's input only)."""
    if mode == "none":
        return
    for block in blocks:
        cls: Any = type(block)
        block.__class__ = _checkpointed_class(cls, mode)


@functools.cache
def _checkpointed_class(cls: Any, mode: str) -> Any:
    def forward(self: nn.Module, *args: Any) -> Any:
        selective: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
        # no dropout anywhere, so there is no random state to put back
        return checkpoint(functools.partial(cls.forward, self), *args, use_reentrant=False, preserve_rng_state=False, **selective)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
