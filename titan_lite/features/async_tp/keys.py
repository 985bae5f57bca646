"""The keys of asynchronous tensor parallelism and of chunks of tokens. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from titan_lite.config.section import Section


class AsyncTensorParallelKeys(Section):
    table: ClassVar[str] = "parallelism"

    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's collectives with the matmuls beside them. Needs Inductor
    and GPUs, whose ranks write to each other's memory."""


class TokenChunksKeys(Section):
    table: ClassVar[str] = "compile"

    tensor_parallel_chunks: int = Field(1, ge=1)
    """Chunks of tokens that a collective of tensor parallelism and its matmul are cut into,
    so that one travels while another is computed; where the cost model of machine finds it slower,
    nothing is cut; 1: never."""


KEYS = (AsyncTensorParallelKeys, TokenChunksKeys)
TENSORS: dict[str, str] = {}
