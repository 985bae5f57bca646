"""Activation checkpointing: keep some activations of a block for backward, and recompute the
others.

    apply_activation_checkpoint(model.layers, mode="selective", option="op")

Each block's class is replaced by a subclass that runs forward under torch's non-reentrant
checkpoint; FQNs do not change. Recomputing a block reads its weights again, so SimpleFSDP gathers
them again. Under torch.compile, checkpointing and resharding (compile/passes/resharding.py) are
tags on the graph, and one partitioner reads both.
"""

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_lite.cost.collectives import aten, collectives
from titan_lite.models.attention import OPERATORS

# Operators with results that are expensive to recompute: matrix products, all kernels of
# F.scaled_dot_product_attention and ours, and of tensor parallelism reduce-scatters and
# all-reduces, of one number (scales of tokens in float8). All-gathers of tensor and context
# parallelism have large results: they run again.
PRODUCTS = frozenset({aten.mm.default, aten._scaled_mm.default})
EXPENSIVE = frozenset(
    {
        *PRODUCTS,
        collectives.reduce_scatter_tensor.default,
        collectives.all_reduce.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *OPERATORS,
    }
)


def apply_activation_checkpoint(
    blocks: nn.ModuleDict, mode: str, option: str = "op", *, compiled: bool = False
) -> None:
    """Checkpoint `blocks` in place. A block's name is its number in the model.

    mode: "none"; "full": keep a block's input only; "selective": see option; "memory_budget": see
    compile/compile.py.
    option: "op": keep results of EXPENSIVE operators; "op/2": the same, but of matrix products only
    the first, third, ... of a block; "2": every second block (0, 2, ...) as in "full", the others
    as in "none".
    compiled: the partitioner drops what backward does not need. In eager mode, results of a block's
    last product are not kept.
    """
    for name, block in blocks.items():
        if recomputes(int(name), mode, option):
            cls: Any = type(block)
            last = (
                0 if compiled else sum(isinstance(module, nn.Linear) for module in block.modules())
            )
            block.__class__ = _checkpointed_class(cls, option if mode == "selective" else "", last)


def recomputes(block: int, mode: str, option: str) -> bool:
    """Return True if backward recomputes any operator of the block with this number."""
    if mode in ("none", "memory_budget"):
        return False
    return mode == "full" or option in ("op", "op/2") or block % int(option) == 0


@functools.cache
def _checkpointed_class(cls: Any, option: str, last: int) -> Any:
    selective: dict[str, Any] = (
        {"context_fn": functools.partial(_keep_expensive, option == "op/2", last)}
        if option.startswith("op")
        else {}
    )

    def forward(self: nn.Module, *args: Any) -> Any:
        # no dropout, so no random state to restore
        return checkpoint(
            functools.partial(cls.forward, self),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            **selective,
        )

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _keep_expensive(every_second: bool, last: int) -> Any:
    """Keep results of EXPENSIVE operators before a block's product number `last`, counted from 1:
    recomputation ends there.

    every_second: of products only the first, third, ..., as TorchTitan does (arXiv 2410.06511).
    """
    products = {False: 0, True: 0}  # so far, in forward and in recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in PRODUCTS:
            products[context.is_recompute] += 1
        done = products[context.is_recompute]
        skipped = done == last or (every_second and operator in PRODUCTS and done % 2 == 0)
        return (
            CheckpointPolicy.MUST_SAVE
            if operator in EXPENSIVE and not skipped
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)
