"""Shard an embedding by columns: ids and looked-up rows travel, instead of the table.

    rows     all-gather the table (V, C); look up own tokens             backward: reduce-scatter its gradient (V, C)
    columns  all-gather ids; look up own columns; all-to-all             backward: all-to-all; add up own columns

SimpleFSDP (arXiv 2411.00284) gathers the table before the first operation and reduces its gradient after the last, so that
nothing hides them. A rank needs only the rows of its tokens. With n ranks of B x T tokens each:

    ids (B, T) -> all-gather (n B, T) -> own columns (n B, T, C / n) -> all-to-all -> own tokens (B, T, C)

Shapes depend on n alone, so they are static in a graph. Tensor parallelism has shards of the vocabulary beside that: a rank looks
up its own tokens of it, and the sum over these ranks leaves each some tokens (B, t, C) before the all-to-all. Gradients of rows
travel in their own dtype, or in a narrower reduce_dtype, and are added up in float32.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate

from titan_lite.compiler.collectives import collectives, tracing
from titan_lite.distributed.gather import started_last
from titan_lite.distributed.tensor_parallel import own_tokens, scatter_tokens


@dataclass(frozen=True)
class Exchange:
    """The collectives of one table's rows. Plain values, so that tracing sees constants."""

    fqn: str
    group: str
    degree: int
    param_dtype: torch.dtype  # of looked-up rows and their gradients
    reduce_dtype: torch.dtype  # in which gradients travel, if it is narrower

    def gather(self, tokens: Tensor) -> Tensor:
        """All-gather token ids: (B, T) -> (n B, T), int32."""
        self._note()
        ids = collectives.all_gather_into_tensor(tokens.int().contiguous(), self.degree, self.group)
        return collectives.wait_tensor(ids)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Exchange parts (n, ...), one for each rank, for those of all ranks."""
        self._note()
        each = [1] * self.degree
        return collectives.wait_tensor(collectives.all_to_all_single(parts, each, each, self.group))

    def _note(self) -> None:
        if not tracing():
            started_last.append((time.time_ns(), self.group, self.fqn))


def look_up_by_columns(module: nn.Module, exchange: Exchange) -> None:
    """Make an embedding look up tokens in its own columns, `module.weight` (v, C / n), in place: (B, T) -> (B, t, C)."""
    module.__dict__["_exchange"] = exchange
    cls: Any = type(module)
    module.__class__ = _by_columns(cls, "_tp" in module.__dict__)


@functools.cache  # as in simple_fsdp.py
def _by_columns(cls: Any, split: bool) -> Any:
    """Return a subclass that looks up by columns. split: tensor parallelism has split the vocabulary."""

    def forward(self: nn.Module, tokens: Tensor) -> Tensor:
        exchange: Exchange = self._exchange  # type: ignore[assignment]
        named = {"fqn": exchange.fqn, "moves": "tokens"}  # for graph passes
        with annotate(named):
            ids = exchange.gather(tokens)
        weight: Tensor = self.weight  # type: ignore[assignment]
        if split:
            ids, inside = own_tokens(ids, weight.shape[0], self.num_embeddings, self._tp)  # type: ignore[arg-type]
            rows = F.embedding(ids, weight).to(exchange.param_dtype) * inside.unsqueeze(-1)
            rows = scatter_tokens(rows, self._tp)  # type: ignore[arg-type]
        else:
            rows = F.embedding(ids, weight).to(exchange.param_dtype)
        with annotate(named):
            return _Exchange.apply(rows, exchange)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


class _Exchange(torch.autograd.Function):
    """Own columns of all ranks' tokens (n B, t, C / n) -> all columns of own tokens (B, t, C). Backward is the reverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        parts = exchange.all_to_all(rows.unflatten(0, (exchange.degree, -1)))
        return parts.permute(1, 2, 0, 3).flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        parts = gradient.unflatten(2, (exchange.degree, -1)).permute(2, 0, 1, 3)
        narrow = min(exchange.param_dtype, exchange.reduce_dtype, key=lambda dtype: dtype.itemsize)
        return exchange.all_to_all(parts.to(narrow).contiguous()).flatten(0, 1).to(
            gradient.dtype
        ), None
