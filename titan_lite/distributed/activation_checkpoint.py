"""Activation checkpointing: keep some activations of a block for backward, and recompute the
others.

    apply_activation_checkpoint(model.layers, mode="selective", option="op")

Each block's class is replaced by a subclass that runs forward under torch's non-reentrant
checkpoint, and its attribute `_kept` says what is kept; FQNs do not change. Recomputing a block
reads its weights again: SimpleFSDP gathers those again that it resharded, and finds the others in
`kept_weights`. Under the compiler, checkpointing (`checkpoint_rule`) and resharding
(compile/passes/resharding.py) are tags on the graph, and one partitioner reads both.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_lite.collectives import collectives, tracing
from titan_lite.distributed.specialize import specialize
from titan_lite.models.attention import OPERATOR as ATTENTION_WITHIN_DOCUMENTS
from titan_lite.models.experts import CHOICE, GROUPED_GEMM, routers_of

aten = torch.ops.aten

# Operators with results that are expensive to recompute: matmuls, all kernels of
# F.scaled_dot_product_attention and ours, and of tensor and expert parallelism reduce-scatters and
# all-reduces, of one number (a scale of tokens). All-gathers of tokens, keys and values have large
# results: they run again.
MATMULS = frozenset({aten.mm.default, aten._scaled_mm.default, GROUPED_GEMM})
EXPENSIVE = frozenset(
    {
        *MATMULS,
        collectives.reduce_scatter_tensor.default,
        collectives.all_reduce.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        ATTENTION_WITHIN_DOCUMENTS,
    }
)


def apply_activation_checkpoint(
    blocks: nn.ModuleDict, mode: str, option: str = "op", *, compiled: bool = False
) -> None:
    """Checkpoint `blocks` in place. A block's name is its number in the model.

    mode: "none"; "full": keep a block's input only; "selective": see option; "memory_budget": see
    compile/compile.py.
    option: "op": keep results of EXPENSIVE operators; "op/2": the same, but of matmuls only
    the first, third, ... of a block; "2": every second block (0, 2, ...) as in "full", the others
    as in "none".
    compiled: the partitioner drops what backward does not need. In eager mode, results of a block's
    last matmul are not kept.

    A block draws no random numbers, which recomputation would draw again (features/own_family/).
    """
    for name, block in blocks.items():
        matmuls = sum(parameter.ndim > 1 for parameter in block.parameters())
        kept = Kept(
            expensive=mode == "selective" and option in ("op", "op/2"),
            every_second=option == "op/2",
            last_matmul=0 if compiled else matmuls,
            choices=bool(routers_of(block)),
        )
        block.__dict__["_kept"] = kept if recomputes(int(name), mode, option) else None
        specialize(block, checkpointable)


@contextmanager
def fully_checkpointed(blocks: nn.ModuleDict) -> Iterator[None]:
    """Return a context in which `blocks` keep their inputs alone, and which experts they chose."""
    before = {block: block.__dict__["_kept"] for block in blocks.values()}
    for block in blocks.values():
        block.__dict__["_kept"] = Kept(expensive=False, choices=bool(routers_of(block)))
    try:
        yield
    finally:
        for block, kept in before.items():
            block.__dict__["_kept"] = kept


def recomputes(block: int, mode: str, option: str) -> bool:
    """Return True if backward recomputes any operator of the block with this number."""
    if mode in ("none", "memory_budget"):
        return False
    return mode == "full" or option in ("op", "op/2") or block % int(option) == 0


# Of the block that runs under checkpoint, or is recomputed; backward has threads of its own.
_kept_weights: ContextVar[dict[str, Tensor] | None] = ContextVar("_kept_weights", default=None)


def kept_weights() -> dict[str, Tensor] | None:
    """Return the gathered weights, by FQN, that forward keeps for the recomputation of the block
    that runs; None outside of such blocks.

    Each microbatch has its own, which live until the block's backward is done.
    """
    return _kept_weights.get()


def _run_keeping_weights(
    kept: dict[str, Tensor], forward: Callable[..., Tensor], *args: Tensor
) -> Tensor:
    token = _kept_weights.set(kept)
    try:
        return forward(*args)
    finally:
        _kept_weights.reset(token)


@dataclass(frozen=True)
class Kept:
    """The results that a forward of a block keeps for backward, beside the block's input."""

    expensive: bool  # those of EXPENSIVE operators; False: none
    # of matmuls only the first, third, ..., as TorchTitan does (arXiv 2410.06511)
    every_second: bool = False
    # The matmul, counted from 1, at which recomputation ends: results from there on are not kept.
    # 0: no such matmul.
    last_matmul: int = 0
    choices: bool = False  # of experts, in any case: recomputation must not route again


def selective_contexts(kept: Kept) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a block's forward and of its recomputation."""
    of_forward, of_recomputation = KeepResults(kept), KeepResults(kept)

    def policy(
        context: SelectiveCheckpointContext, operator: OpOverload, *_: object, **__: object
    ) -> CheckpointPolicy:
        return of_recomputation(operator) if context.is_recompute else of_forward(operator)

    return create_selective_checkpoint_contexts(policy)


class KeepResults:
    """A policy of activation checkpointing for one forward of a block, or its recomputation: keep
    which experts were chosen, and results of EXPENSIVE operators if `kept` says so.
    """

    def __init__(self, kept: Kept):
        self.kept = kept
        self.matmuls = 0  # so far

    def __call__(self, operator: OpOverload) -> CheckpointPolicy:
        if operator is CHOICE:
            return CheckpointPolicy.MUST_SAVE
        is_matmul = operator in MATMULS
        if is_matmul:
            self.matmuls += 1
        is_skipped = self.matmuls == self.kept.last_matmul
        if self.kept.every_second and is_matmul and self.matmuls % 2 == 0:
            is_skipped = True
        if self.kept.expensive and operator in EXPENSIVE and not is_skipped:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_rule(block: nn.Module) -> KeepResults | None:
    """Return what is kept of one forward of a block; None: the block is not checkpointed."""
    kept: Kept | None = block.__dict__.get("_kept")
    return None if kept is None else KeepResults(kept)


def checkpointable(cls: type[nn.Module]) -> dict[str, object]:
    """Return the members of a block that runs under checkpoint, if `_kept` is not None."""

    def forward(self: nn.Module, *args: Tensor) -> Tensor:
        kept: Kept | None = self.__dict__["_kept"]
        if kept is None or tracing():  # the compiler asks for the rule
            return cls.forward(self, *args)
        block_forward = functools.partial(
            _run_keeping_weights, {}, functools.partial(cls.forward, self)
        )
        if not kept.expensive and not kept.choices:
            return checkpoint(block_forward, *args, use_reentrant=False, preserve_rng_state=False)
        return checkpoint(
            block_forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # a block draws no numbers
            context_fn=functools.partial(selective_contexts, kept),
        )

    return {"forward": forward}
