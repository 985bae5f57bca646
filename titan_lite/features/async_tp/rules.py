"""Rules of asynchronous tensor parallelism and of chunks of tokens."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.errors import alternatives
from titan_lite.distributed.layout import Layout
from titan_lite.feature import low_precision
from titan_lite.features.async_tp.keys import AsyncTensorParallelKeys, TokenChunksKeys
from titan_lite.rules.mistakes import (
    Mistake,
    nearest_divisors,
    rule_of_keys,
    rule_of_layout,
    rule_of_machine,
)

KEY = "parallelism.enable_async_tensor_parallel"


@rule_of_keys
def async_tensor_parallelism_is_done_by_inductor(config: Config) -> Iterator[Mistake]:
    if not AsyncTensorParallelKeys.of(config).enable_async_tensor_parallel:
        return
    if config.parallelism.tensor_parallel_degree == 1:
        yield Mistake(KEY, True, "has no collective to overlap", "tensor_parallel_degree = 2")
    if not config.compile.enable:
        why = "is done by the compiler, and the model is not compiled"
        yield Mistake(KEY, True, why, "compile.enable = true")
    elif config.compile.backend != "inductor":
        yield Mistake(KEY, True, "is done by Inductor", 'compile.backend = "inductor"')


@rule_of_layout
def matmuls_of_fewer_bits_are_not_overlapped_by_inductor(
    config: Config, layout: Layout
) -> Iterator[Mistake]:
    if not AsyncTensorParallelKeys.of(config).enable_async_tensor_parallel:
        return
    if low := low_precision(config):
        yield Mistake(
            key=KEY,
            value=True,
            why=f"is not for {low.name}: Inductor does not overlap collectives with its matmuls",
            instead="false",
        )


@rule_of_layout
def chunks_divide_the_tokens(config: Config, layout: Layout) -> Iterator[Mistake]:
    chunks = TokenChunksKeys.of(config).tensor_parallel_chunks
    tp = layout.degrees["tp"]
    tokens = layout.seq_len // layout.degrees["cp"] // tp
    if tp > 1 and config.compile.enable and tokens % chunks:
        yield Mistake(
            key="compile.tensor_parallel_chunks",
            value=chunks,
            why=(
                f"does not divide the {tokens:,} tokens of a sequence that a tensor-parallel rank"
                " has"
            ),
            instead=alternatives(nearest_divisors(tokens, chunks)),
        )


@rule_of_machine
def async_tensor_parallelism_has_gpus(config: Config, layout: Layout) -> Iterator[Mistake]:
    if not AsyncTensorParallelKeys.of(config).enable_async_tensor_parallel:
        return
    import torch

    if not torch.cuda.is_available():
        yield Mistake(
            key=KEY,
            value=True,
            why="writes to the GPU memory of other ranks, and there is no GPU here",
            instead="enable_async_tensor_parallel = false",
        )
