"""Attend within documents or in two parts, and choose the attention kernel of the process.

    use_kernel("FA3")                                     # once, for the process
    documents = documents_of(doc_starts, positions, doc_stats)
    out = attend_within_documents(q, k, v, documents)     # on GPUs
    out = attend_in_two_parts(q, k, v)                    # q: the last t of k's S positions

Both are custom operators, which F.scaled_dot_product_attention lacks. The first takes sizes that
its kernel needs on the host as a tensor of fixed shape, so that graphs have static shapes.
torch.nn.attention.varlen.varlen_attn calls the same kernel, but takes an entry for each document,
and these sizes as numbers: a graph then has shapes that its data decide, which neither the passes
nor the planner can price. The second passes a merged log-sum-exp to its kernel's backward.
"""

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from titan_lite.config import ConfigError

aten = torch.ops.aten

# --- The kernel -----------------------------------------------------------------------------------

# Newer versions of FlashAttention, by torch's names: the package each is in, and the major compute
# capabilities that torch runs it on.
KERNEL_PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}
KERNEL_CAPABILITIES = {"FA3": (9,), "FA4": (9, 10)}

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
    """Raise ConfigError if training.attention_kernel is not available here."""
    if kernel == "auto":
        return
    wrong = f'training.attention_kernel = "{kernel}"'
    if not torch.cuda.is_available() or torch.version.hip:
        raise ConfigError(f'{wrong}: there is no NVIDIA GPU here; use "auto"')
    if kernel == "cudnn" and not torch.backends.cudnn.is_available():
        raise ConfigError(f'{wrong}: this torch has no cuDNN; use "auto" or "FA2"')
    if kernel not in KERNEL_PACKAGES:
        return
    major, minor = torch.cuda.get_device_capability()
    if major not in KERNEL_CAPABILITIES[kernel]:
        supported = " or ".join(f"{version}.x" for version in KERNEL_CAPABILITIES[kernel])
        raise ConfigError(
            f"{wrong} needs a GPU of compute capability {supported}, and"
            f' {torch.cuda.get_device_name()} has {major}.{minor}; use "auto" or "FA2"'
        )
    package = KERNEL_PACKAGES[kernel]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f'{wrong} needs the package {package}, which is not installed here; use "auto" or "FA2"'
        )


def use_kernel(kernel: str) -> None:
    """Set the kernel of attention in this process, after `check_kernel`; "auto": torch's choice.

    torch registers newer FlashAttention under the operators of FlashAttention 2, so that calls of
    these by name use it. From the H100 on, torch prefers cuDNN, so cuDNN is disabled for
    FlashAttention. Raises ConfigError for a kernel that cannot be loaded.
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
    if kernel in KERNEL_PACKAGES:
        try:
            activate_flash_attention_impl(kernel)
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(
                f'training.attention_kernel = "{kernel}" cannot be loaded ({why}); use "auto" or'
                ' "FA2"'
            ) from None


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


# --- From the last positions to all, in two parts -------------------------------------------------


def attend_in_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally from the last t of S positions to all of them.

    q (B, t, H, D), k and v (B, S, K, D) -> (B, t, H, D).

    For a kernel with a causal mask aligned to the upper left, such as cuDNN's. Queries attend to
    the first S - t keys without a mask and to the last t with one; their log-sum-exps weight the
    two outputs. Backward calls the kernel's backward for each part with the merged output and
    log-sum-exp, which normalize a part's scores over all keys.
    """
    out, _ = _in_two_parts(q, k, v)
    return out


@torch.library.custom_op("titan_lite::flash_attention_in_two_parts", mutates_args=())
def _in_two_parts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    past = key.shape[1] - query.shape[1]
    q, k, v = _heads_first(query, key, value)
    out, lse = _attend(q, k[:, :, past:], v[:, :, past:], causal=True)
    if past:
        past_out, past_lse = _attend(q, k[:, :, :past], v[:, :, :past], causal=False)
        merged_lse = torch.logaddexp(lse, past_lse)
        own_weight = (lse - merged_lse).exp()[..., None]
        past_weight = (past_lse - merged_lse).exp()[..., None]
        out = (out * own_weight + past_out * past_weight).to(out.dtype)
        lse = merged_lse
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@_in_two_parts.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty((batch, heads, tokens), dtype=lse_dtype)
    return query.new_empty(query.shape), lse


@torch.library.custom_op("titan_lite::flash_attention_in_two_parts_backward", mutates_args=())
def _in_two_parts_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    past = key.shape[1] - query.shape[1]
    grad, q, k, v, out = _heads_first(grad.contiguous(), query, key, value, out)
    dq, dk, dv = _attend_backward(grad, q, k[:, :, past:], v[:, :, past:], out, lse, causal=True)
    if past:
        past_dq, past_dk, past_dv = _attend_backward(
            grad, q, k[:, :, :past], v[:, :, :past], out, lse, causal=False
        )
        dq = dq + past_dq
        dk = torch.cat((past_dk, dk), dim=2)
        dv = torch.cat((past_dv, dv), dim=2)
    return (
        dq.transpose(1, 2).contiguous(),
        dk.transpose(1, 2).contiguous(),
        dv.transpose(1, 2).contiguous(),
    )


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return each (B, T, H, D) as (B, H, T, D)."""
    return [tensor.transpose(1, 2) for tensor in tensors]


# By device type: dimensions of the log-sum-exp that its kernel returns, (B, H, t) or (B, H, t, 1).
# cuDNN's depend on torch's version, and its backward wants what its forward returned.
_lse_dims: dict[str, int] = {}


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, t, D) and the log-sum-exp (B, H, t) of a kernel."""
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal
        )
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    _lse_dims[q.device.type] = lse.dim()
    return out, lse.reshape(q.shape[:3])


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    missing_dims = _lse_dims[q.device.type] - lse.dim()
    lse = lse.reshape(*lse.shape, *[1] * missing_dims)
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, dropout_p=0.0, is_causal=causal
        )
    no_dropout = torch.zeros(1, dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        philox_seed=no_dropout,
        philox_offset=no_dropout,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=causal,
    )


# --- Gradients of both ----------------------------------------------------------------------------


def _register_gradient(forward: Any, backward: Any) -> None:  # noqa: ANN401 torch's
    """Make `backward` the gradient of `forward`.

    forward: (query, key, value, *others) -> (out, lse). backward: (grad, query, key, value, out,
    lse, *others) -> gradients of query, key and value.
    """

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 torch's
        query, key, value, *others = inputs
        ctx.save_for_backward(query, key, value, *output, *others)

    def differentiate(ctx: Any, grad: Tensor, _lse_grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 torch's
        saved = ctx.saved_tensors  # once: reading them runs the recomputation of checkpointing
        no_gradients = [None] * len(saved[5:])  # of the other inputs
        return (*backward(grad, *saved), *no_gradients)

    def fake_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)

    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)


_register_gradient(_within_documents, _within_documents_backward)
_register_gradient(_in_two_parts, _in_two_parts_backward)

OPERATORS = (
    torch.ops.titan_lite.flash_attention_within_documents.default,
    torch.ops.titan_lite.flash_attention_in_two_parts.default,
)
