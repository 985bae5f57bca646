"""Attention operators that F.scaled_dot_product_attention lacks, and the choice of the attention
kernel.

    use_kernel("FA3")                                                   # once, for the whole process
    out = attend_within_documents(q, k, v, documents_of(doc_starts, positions, doc_stats))     # on GPUs
    out = attend_in_two_parts(q, k, v)                                  # q: the last t of k's S positions

Both are custom operators. The first takes sizes that its kernel needs on the host as a tensor of
fixed shape, so that graphs have static shapes. torch.nn.attention.varlen.varlen_attn calls the same
kernel, but takes an entry for each document, and these sizes as numbers: a graph then has shapes
that its data decide, which neither the passes nor the planner can price. The second operator passes
a merged log-sum-exp to its kernel's backward.
"""

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from titan_lite.config import ConfigError

aten = torch.ops.aten
PACKAGES = {
    "FA3": "flash_attn_interface",
    "FA4": "flash_attn",
}  # packages of newer kernels, by torch's names
CAPABILITIES = {"FA3": (9,), "FA4": (9, 10)}  # major compute capabilities that torch runs them on


class Documents(NamedTuple):
    """The documents of B sequences of T tokens, for `attend_within_documents`."""

    # (B T + 1,) int32: 0, the end of each document in the concatenated sequences, then B T as
    # padding
    ends: Tensor
    doc_stats: (
        Tensor  # (B, 2) int64 on the host: documents of each sequence, tokens of its longest one
    )


def documents_of(doc_starts: Tensor, positions: Tensor, doc_stats: Tensor) -> Documents:
    """Return the Documents of `doc_starts` (B, T), where each token's document begins, and `positions`
    (T,). Shapes are static.
    """
    tokens = doc_starts.numel()
    places = torch.arange(tokens, dtype=torch.int32, device=doc_starts.device)
    starts = torch.where((doc_starts == positions).flatten(), places, tokens).sort().values
    return Documents(torch.cat((starts, starts.new_full((1,), tokens))), doc_stats)


def fits_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if FlashAttention and cuDNN support the dtype and the head dimension."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256


def masks_by_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, cp: int) -> bool:
    """Return True if `attend_within_documents` works: on NVIDIA GPUs from the A100 on, without
    context parallelism.
    """
    if (
        device.type != "cuda"
        or torch.version.hip
        or not torch.backends.cuda.is_flash_attention_available()
    ):
        return False
    return (
        cp == 1
        and fits_flash(dtype, head_dim)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def check_kernel(kernel: str) -> None:
    """Raise ConfigError if training.attention_kernel is not available here."""
    if kernel == "auto":
        return
    wrong = f'training.attention_kernel = "{kernel}"'
    if not torch.cuda.is_available() or torch.version.hip:
        raise ConfigError(f'{wrong}: there is no NVIDIA GPU here; use "auto"')
    if kernel == "cudnn" and not torch.backends.cudnn.is_available():
        raise ConfigError(f'{wrong}: this torch has no cuDNN; use "auto" or "FA2"')
    if kernel not in PACKAGES:
        return
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if major not in CAPABILITIES[kernel]:
        wanted = " or ".join(f"{each}.x" for each in CAPABILITIES[kernel])
        raise ConfigError(
            f"{wrong} needs a GPU of compute capability {wanted}, and {name} has {major}.{minor};"
            ' use "auto" or "FA2"'
        )
    if importlib.util.find_spec(PACKAGES[kernel]) is None:
        raise ConfigError(
            f'{wrong} needs the package {PACKAGES[kernel]}, which is not installed here; use "auto"'
            ' or "FA2"'
        )


def use_kernel(kernel: str) -> None:
    """Set the kernel of all attention in this process, after `check_kernel`; "auto": torch's
    choice. Raises ConfigError.

    torch registers newer FlashAttention under the operators of FlashAttention 2, so that calls of
    these by name use it. From the H100 on, torch prefers cuDNN, so cuDNN is disabled for
    FlashAttention.
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
        torch._C._set_sdp_priority_order([int(each) for each in order])  # type: ignore[call-overload]
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if kernel in PACKAGES:
        try:
            activate_flash_attention_impl(kernel)
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(
                f'training.attention_kernel = "{kernel}" cannot be loaded ({why}); use "auto" or'
                ' "FA2"'
            ) from None


# Within documents


def attend_within_documents(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Attend causally within documents: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D)."""
    return _within_documents(q, k, v, *documents)[0]


@torch.library.custom_op(
    "titan_lite::flash_attention_within_documents", mutates_args=(), device_types="cuda"
)
def _within_documents(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, doc_stats: Tensor
) -> tuple[Tensor, Tensor]:
    cut, longest = _cut(ends, doc_stats)
    packed = (each.flatten(0, 1).contiguous() for each in (query, key, value))
    out, lse, *_ = aten._flash_attention_forward(
        *packed, cut, cut, longest, longest, 0.0, True, False
    )
    return out.view(query.shape), lse


@torch.library.custom_op(
    "titan_lite::flash_attention_within_documents_backward", mutates_args=(), device_types="cuda"
)
def _within_documents_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    doc_stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    cut, longest = _cut(ends, doc_stats)
    packed = (each.flatten(0, 1).contiguous() for each in (grad, query, key, value, out))
    random = (
        torch.zeros(2, dtype=torch.uint64, device=query.device),
        torch.empty(0, device=query.device),
    )  # no dropout
    dq, dk, dv = aten._flash_attention_backward(
        *packed, lse, cut, cut, longest, longest, 0.0, True, *random
    )
    return (
        dq.contiguous().view(query.shape),
        dk.contiguous().view(key.shape),
        dv.contiguous().view(value.shape),
    )


def _cut(ends: Tensor, doc_stats: Tensor) -> tuple[Tensor, int]:
    """Return (0 and the end of each document, tokens of the longest one) without waiting for the
    device.
    """
    documents, longest = int(doc_stats[:, 0].sum()), int(doc_stats[:, 1].max())
    return ends[: documents + 1], longest


@_within_documents.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, doc_stats: Tensor
) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((query.shape[2], query.shape[0] * query.shape[1]), dtype=torch.float32)
    return query.new_empty(query.shape), lse


# From the last positions to all, in two parts


def attend_in_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally from q (B, t, H, D), the last t of S positions, to k and v (B, S, K, D) ->
    (B, t, H, D).

    For a kernel with a causal mask aligned to the upper left, such as cuDNN's. Queries attend to
    the first S - t keys without a mask and to the last t with one; their log-sum-exps weight the
    two outputs. Backward calls the kernel's backward for each part with the merged output and
    log-sum-exp, which normalize a part's scores over all keys.
    """
    return _in_two_parts(q, k, v)[0]


@torch.library.custom_op("titan_lite::flash_attention_in_two_parts", mutates_args=())
def _in_two_parts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    before = key.shape[1] - query.shape[1]
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    out, lse = _attend(q, k[:, :, before:], v[:, :, before:], causal=True)
    if before:
        past, past_lse = _attend(q, k[:, :, :before], v[:, :, :before], causal=False)
        both = torch.logaddexp(lse, past_lse)
        out = (out * (lse - both).exp()[..., None] + past * (past_lse - both).exp()[..., None]).to(
            out.dtype
        )
        lse = both
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@torch.library.custom_op("titan_lite::flash_attention_in_two_parts_backward", mutates_args=())
def _in_two_parts_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    before = key.shape[1] - query.shape[1]
    grad, q, k, v, out = (
        each.transpose(1, 2) for each in (grad.contiguous(), query, key, value, out)
    )
    dq, dk, dv = _attend_backward(
        grad, q, k[:, :, before:], v[:, :, before:], out, lse, causal=True
    )
    if before:
        past = _attend_backward(grad, q, k[:, :, :before], v[:, :, :before], out, lse, causal=False)
        dq, dk, dv = dq + past[0], torch.cat((past[1], dk), dim=2), torch.cat((past[2], dv), dim=2)
    return (
        dq.transpose(1, 2).contiguous(),
        dk.transpose(1, 2).contiguous(),
        dv.transpose(1, 2).contiguous(),
    )


@_in_two_parts.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(
        (batch, heads, tokens), dtype=_accumulated(query)
    )


def _accumulated(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


# Number of dimensions of a device's log-sum-exp: (B, H, t) or (B, H, t, 1). cuDNN's depends on
# torch's version.
_lse_dims: dict[str, int] = {}


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, t, D) and the log-sum-exp (B, H, t) of a kernel."""
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    _lse_dims[q.device.type] = lse.dim()
    return out, lse.reshape(q.shape[:3])


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.reshape(*lse.shape, *[1] * (_lse_dims[q.device.type] - lse.dim()))
    if q.is_cuda:
        random = torch.zeros((2, 1), dtype=torch.int64, device=q.device)  # no dropout
        sizes = q.shape[2], k.shape[2]
        rest = None, None, None, *sizes, 0.0, causal
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, *random, *rest
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )


# Gradients of both


def _like_inputs(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])


def _differentiate(forward: Any, backward: Any) -> None:
    def gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return (*backward(grad, *saved), *[None] * (len(saved) - 5))

    backward.register_fake(_like_inputs)
    forward.register_autograd(gradients, setup_context=_save)


_differentiate(_within_documents, _within_documents_backward)
_differentiate(_in_two_parts, _in_two_parts_backward)
OPERATORS = (
    torch.ops.titan_lite.flash_attention_within_documents.default,
    torch.ops.titan_lite.flash_attention_in_two_parts.default,
)
