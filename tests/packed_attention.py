"""FlashAttention of packed documents, which torch has on GPUs alone, as a loop over documents on a
CPU; under its own name.

with packed_attention(): ...        # the body of our operator runs too, and is given what a GPU's kernel is given
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_lite.models import attention

aten = torch.ops.aten


@contextmanager
def packed_attention() -> Iterator[None]:
    with (
        torch.library._scoped_library("aten", "IMPL") as kernels,
        torch.library._scoped_library("titan_lite", "FRAGMENT") as own,
    ):
        kernels.impl("_flash_attention_forward", _forward, "CPU")
        kernels.impl("_flash_attention_backward", _backward, "CPU")
        own.impl("flash_attention_within_documents", attention._within_documents._init_fn, "CPU")
        own.impl(
            "flash_attention_within_documents_backward",
            attention._within_documents_backward._init_fn,
            "CPU",
        )
        yield


def _forward(q: Tensor, k: Tensor, v: Tensor, cut: Tensor, *given: Any) -> tuple[Tensor, ...]:
    _check(q, cut, *given)
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for begin, end in cut.unfold(0, 2, 1).tolist():
        parts = (x[None, begin:end].transpose(1, 2) for x in (q, k, v))
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
        out[begin:end], lse[:, begin:end] = part[0].transpose(0, 1), sums[0]
    return out, lse, torch.empty(0), torch.empty(0), torch.empty(0)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cut: Tensor,
    *given: Any,
) -> tuple[Tensor, ...]:
    _check(q, cut, *given[:5], False)
    found = tuple(torch.empty_like(x) for x in (q, k, v))
    for begin, end in cut.unfold(0, 2, 1).tolist():
        parts = (x[None, begin:end].transpose(1, 2) for x in (grad, q, k, v, out))
        sums = lse[None, :, begin:end].contiguous()
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, sums, 0.0, True
        )
        for whole, part in zip(found, backward, strict=True):
            whole[begin:end] = part[0].transpose(0, 1)
    return found


def _check(
    q: Tensor,
    cut: Tensor,
    keys: Tensor,
    longest: int,
    also: int,
    dropout: float,
    causal: bool,
    debug: bool,
) -> None:
    """As the kernel wants it: every token in a document, none of them empty, the longest known."""
    lengths = cut.diff()
    assert q.is_contiguous()
    assert cut.dtype == torch.int32
    assert torch.equal(cut, keys)
    assert (cut[0], cut[-1], lengths.max()) == (0, len(q), longest)
    assert lengths.min() > 0
    assert (also, dropout, causal, debug) == (longest, 0.0, True, False)
