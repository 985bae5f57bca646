"""Attend within documents, and choose the attention kernel of the process.

    use_kernel("FA3")                                     # once, for the process
    documents = documents_of(doc_starts, positions, doc_stats)
    out = attend_within_documents(q, k, v, documents)     # on GPUs

It is a custom operator, which F.scaled_dot_product_attention lacks. It takes sizes that its kernel
needs on the host as a tensor of fixed shape, so that graphs have static shapes.
torch.nn.attention.varlen.varlen_attn calls the same kernel, but takes an entry for each document,
and these sizes as numbers: a graph then has shapes that its data decide, which neither the passes
nor the planner can price.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from titan_lite.config import ConfigError

aten = torch.ops.aten

# --- The kernel -----------------------------------------------------------------------------------

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD_DIM = 256
FLASH_HEAD_DIM_MULTIPLE = 8


def fits_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if FlashAttention and cuDNN support the dtype and the head dimension."""
    return (
        dtype in FLASH_DTYPES
        and head_dim % FLASH_HEAD_DIM_MULTIPLE == 0
        and head_dim <= FLASH_MAX_HEAD_DIM
    )


def masks_by_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, cp: int) -> bool:
    """Return True if `attend_within_documents` works: on NVIDIA GPUs from the A100 on.

    cp: degree of context parallelism, which has to be 1.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    if cp > 1 or not fits_flash(dtype, head_dim):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def doc_starts(tokens: Tensor, bos_id: int, eos_id: int) -> Tensor:
    """Return for each token (B, T) the position where its document begins, int64.

    It is 0 for a document that began in an earlier sequence. If one token is both BOS and EOS, as
    GPT-2's, it begins a document after another one, and ends a document after text.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    begins = tokens == bos_id
    if bos_id == eos_id:
        begins[:, 1:] = begins[:, 1:] & begins[:, :-1]
    return torch.where(begins, positions, 0).cummax(dim=1).values


def doc_stats(tokens: Tensor, bos_id: int, eos_id: int) -> Tensor:
    """Return for each sequence of tokens (B, T) the documents in it and the length of the longest.

    (B, 2) int64. Documents that are cut at the ends of the sequence count, too.
    """
    starts = doc_starts(tokens, bos_id, eos_id)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    documents = (starts == positions).sum(dim=1)
    longest = (positions - starts).amax(dim=1) + 1
    return torch.stack((documents, longest), dim=1)


def check_kernel(kernel: str) -> None:
    """Raise ConfigError if training.attention_kernel is not for this machine."""
    if kernel != "auto" and (not torch.cuda.is_available() or torch.version.hip):
        raise ConfigError(
            f'training.attention_kernel = "{kernel}": there is no NVIDIA GPU here; use "auto"'
        )


def use_kernel(kernel: str) -> None:
    """Set the kernel of attention in this process, after `check_kernel`; "auto": torch's choice.

    torch registers newer FlashAttention under the operators of FlashAttention 2, so that calls of
    these by name use it. From the H100 on, torch prefers cuDNN, so cuDNN is disabled for
    FlashAttention. Raises what torch does if the package of FA3 or FA4 is missing or broken.
    """
    if kernel == "auto":
        return
    if kernel == "cudnn":
        order = (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        )
        numbers = [int(backend) for backend in order]  # type: ignore[call-overload]
        torch._C._set_sdp_priority_order(numbers)
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if kernel in ("FA3", "FA4"):
        activate_flash_attention_impl(kernel)


# --- Within documents -----------------------------------------------------------------------------


class Documents(NamedTuple):
    """The documents of B sequences of T tokens, for `attend_within_documents`."""

    # (B T + 1,) int32: 0, the end of each document in the concatenated sequences, B T as padding
    ends: Tensor
    # (B, 2) int64 on the host: documents of each sequence, tokens of its longest one
    doc_stats: Tensor


def documents_of(doc_starts: Tensor, positions: Tensor, doc_stats: Tensor) -> Documents:
    """Return the Documents of tokens whose documents begin at the positions `doc_starts` (B, T).

    positions: (T,), of the tokens. Shapes are static.
    """
    tokens = doc_starts.numel()
    index = torch.arange(tokens, dtype=torch.int32, device=doc_starts.device)
    is_first = (doc_starts == positions).flatten()
    starts = torch.where(is_first, index, tokens).sort().values
    return Documents(torch.cat((starts, starts.new_full((1,), tokens))), doc_stats)


def attend_within_documents(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Attend causally within documents: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D)."""
    out, _ = _within_documents(q, k, v, documents.ends, documents.doc_stats)
    return out


@torch.library.custom_op(
    "titan_lite::flash_attention_within_documents", mutates_args=(), device_types="cuda"
)
def _within_documents(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, doc_stats: Tensor
) -> tuple[Tensor, Tensor]:
    cu_seqlens, longest = _documents_for_kernel(ends, doc_stats)
    out, lse, *_ = aten._flash_attention_forward(
        *_packed(query, key, value),
        cum_seq_q=cu_seqlens,
        cum_seq_k=cu_seqlens,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
    )
    return out.view(query.shape), lse


@_within_documents.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, doc_stats: Tensor
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    lse = query.new_empty((heads, batch * tokens), dtype=torch.float32)
    return query.new_empty(query.shape), lse


@torch.library.custom_op(
    "titan_lite::flash_attention_within_documents_backward", mutates_args=(), device_types="cuda"
)
def _within_documents_backward(  # noqa: PLR0913 - what its forward takes and returns
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    doc_stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    cu_seqlens, longest = _documents_for_kernel(ends, doc_stats)
    dq, dk, dv = aten._flash_attention_backward(
        *_packed(grad, query, key, value, out),
        lse,
        cum_seq_q=cu_seqlens,
        cum_seq_k=cu_seqlens,
        max_q=longest,
        max_k=longest,
        dropout_p=0.0,
        is_causal=True,
        # the random state of dropout, of which there is none
        rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),
        unused=torch.empty(0, device=query.device),
    )
    return (
        dq.contiguous().view(query.shape),
        dk.contiguous().view(key.shape),
        dv.contiguous().view(value.shape),
    )


def _documents_for_kernel(ends: Tensor, doc_stats: Tensor) -> tuple[Tensor, int]:
    """Return (0 and the end of each document, tokens of the longest one).

    Does not wait for the device: `doc_stats` is on the host.
    """
    documents = int(doc_stats[:, 0].sum())
    longest = int(doc_stats[:, 1].max())
    return ends[: documents + 1], longest


def _packed(*tensors: Tensor) -> list[Tensor]:
    """Return each (B, T, H, D) as (B T, H, D)."""
    return [tensor.flatten(0, 1).contiguous() for tensor in tensors]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 torch's
    query, key, value, *others = inputs
    ctx.save_for_backward(query, key, value, *output, *others)


def _differentiate(ctx: Any, grad: Tensor, _lse_grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 torch's
    # saved_tensors is read once: reading it runs the recomputation of checkpointing
    return (*_within_documents_backward(grad, *ctx.saved_tensors), None, None)


@_within_documents_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_within_documents.register_autograd(_differentiate, setup_context=_save)

OPERATOR = torch.ops.titan_lite.flash_attention_within_documents.default
