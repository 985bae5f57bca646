"""The keys of asynchronous tensor parallelism and of chunks of tokens. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from titan_lite.config.section import Section


class AsyncTensorParallelKeys(Section):
    table: ClassVar[str] = "parallelism"

    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's collectives with their matmuls. Needs Inductor, and GPUs that
    write to each other's memory."""


class TokenChunksKeys(Section):
    table: ClassVar[str] = "compile"

    tensor_parallel_chunks: int = Field(1, ge=1)
    """Chunks of tokens in tensor parallelism, of which one travels while another is computed; not
    where the cost model finds it slower; 1: off."""


KEYS = (AsyncTensorParallelKeys, TokenChunksKeys)
TENSORS: dict[str, str] = {}
