"""Our own attention operators are attention, with their gradients; kernels that cannot be had are
refused.
"""

import dataclasses
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from packed_attention import packed_attention
from tiny import DEBUG
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.config import ConfigError, load_config
from titan_lite.config.families import ModelConfig
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.context_parallel import causal_attention
from titan_lite.distributed.layout import Layout
from titan_lite.models.attention import (
    check_kernel,
    doc_starts,
    doc_stats,
    documents_of,
    masks_by_kernel,
    use_kernel,
)
from titan_lite.models.transformer import Transformer, attend, attention_mask
from titan_lite.rules.machine import mistakes_here

BOS, EOS, ROWS, TOKENS = 1, 2, 3, 24
CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64, max_seq_len=TOKENS
)
ours = torch.ops.titan_lite


def random_heads(batch, queries, keys, dtype=torch.float64, heads=4, dim=8, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    sizes = (queries, heads), (keys, heads // 2), (keys, heads // 2)
    numbers = [
        torch.randn(batch, tokens, count, dim, generator=generator, dtype=torch.float64)
        for tokens, count in sizes
    ]
    return [each.to(device, dtype).requires_grad_() for each in numbers]


def with_mask(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(
        1, 2
    )


def gradients(out, inputs):
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return torch.autograd.grad((out * upstream.to(out)).sum(), inputs)


def rows_of_documents():
    """Documents of 1 token, of all, cut at both ends."""
    tokens = torch.full((ROWS, TOKENS), 5)
    for row, places in enumerate(((0, 1, 2, 9), (), (7, 23))):
        tokens[row, list(places)] = BOS
    return tokens


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_what_context_parallelism_calls_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with FakeTensorMode(), Calls() as calls:
        q, k = (
            torch.empty(2, tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
            for tokens, heads in ((8, 4), (32, 2))
        )
        causal_attention(q, k, k)
    assert [name for name in calls.names if "attention" in name] == [
        "aten._scaled_dot_product_flash_attention.default"
    ]
    assert not any("repeat" in name or "ones" in name for name in calls.names)


# Within documents


def test_a_document_begins_where_its_first_token_is():
    tokens = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 5], [5] * 7])
    assert doc_starts(tokens, bos_id=9, eos_id=8).tolist() == [
        [0, 1, 1, 1, 4, 5, 5],
        [0] * 7,
        [0] * 7,
    ]
    assert doc_stats(tokens, bos_id=9, eos_id=8).tolist() == [[4, 3], [1, 7], [1, 7]]


def test_a_token_that_is_bos_and_eos_begins_a_document_after_another_one():
    """[9 5 5 5 9] [9 5 ...]; cut within the second document; [... 5 9] [9 5 9] [9 ...]; cut between
    the end of one and the beginning of the next.
    """
    tokens = torch.tensor([[9, 5, 5, 5, 9, 9, 5], [5, 5, 9, 9, 5, 9, 9], [9, 9, 5, 5, 5, 5, 9]])
    expected = [[0, 0, 0, 0, 0, 5, 5], [0, 0, 0, 3, 3, 3, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert doc_starts(tokens, bos_id=9, eos_id=9).tolist() == expected
    assert doc_stats(tokens, bos_id=9, eos_id=9).tolist() == [[2, 5], [3, 3], [2, 6]]


def test_where_documents_end():
    tokens = rows_of_documents()
    begins, counts = doc_starts(tokens, BOS, EOS), doc_stats(tokens, BOS, EOS)
    assert counts.tolist() == [[4, 15], [1, 24], [3, 16]]
    ends, _ = documents_of(begins, torch.arange(TOKENS), counts)
    expected = [0, 1, 2, 9, 24, 48, 55, 71, 72]
    assert ends.tolist() == expected + [72] * (73 - len(expected))
    assert ends.dtype == torch.int32


@pytest.fixture
def packed_kernel():
    with packed_attention():
        yield


def told(by_kernel):
    tokens = rows_of_documents()
    documents = {"doc_starts": doc_starts(tokens, BOS, EOS)}
    return documents | ({"doc_stats": doc_stats(tokens, BOS, EOS)} if by_kernel else {})


def trained(by_kernel, mode="none", compiled=False):
    """(logits, gradients by name, calls in forward, calls in backward)"""
    model = Transformer(CONFIG)
    model.init_weights(0)
    apply_activation_checkpoint(model.layers, mode)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    forward, backward = Calls(), Calls()
    with nullcontext() if compiled else forward:
        logits = model(rows_of_documents(), **told(by_kernel))
    with nullcontext() if compiled else backward:
        logits.square().mean().backward()
    return (
        logits,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        forward.names,
        backward.names,
    )


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_model_with_the_kernel_is_that_with_a_mask(packed_kernel, mode):
    (found, ours, forward, backward), (expected, theirs, *_) = trained(True, mode), trained(False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() < 1e-5 * theirs[name].norm(), name
    operator = "titan_lite.flash_attention_within_documents"
    assert forward.count(f"{operator}.default") == CONFIG.n_layers
    assert backward.count(f"{operator}.default") == (CONFIG.n_layers if mode == "full" else 0)
    assert backward.count(f"{operator}_backward.default") == CONFIG.n_layers
    assert not any("repeat_interleave" in name or "scaled_dot" in name for name in forward)


def test_a_compiled_model_with_the_kernel_is_the_eager_one(packed_kernel):
    (found, ours, *_), (expected, theirs, *_) = trained(True, compiled=True), trained(True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert all(
        torch.allclose(grad, theirs[name], rtol=1e-4, atol=1e-7) for name, grad in ours.items()
    )


def test_batches_with_other_documents_are_one_graph(packed_kernel):
    model, graphs = Transformer(CONFIG), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=keep, fullgraph=True)
    for tokens in (
        rows_of_documents(),
        rows_of_documents().flip(0),
        torch.full((ROWS, TOKENS), BOS),
    ):
        compiled(tokens, doc_starts(tokens, BOS, EOS), doc_stats(tokens, BOS, EOS))
    assert len(graphs) == 1


def test_no_tensor_of_all_pairs_is_made(packed_kernel):
    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            for each in results if isinstance(results, tuple) else (results,):
                self.largest = max(
                    self.largest, each.numel() if isinstance(each, torch.Tensor) else 0
                )
            return results

    tokens = torch.full((1, 512), 5)
    model = Transformer(dataclasses.replace(CONFIG, max_seq_len=512))
    found = []
    for documents in (
        {"doc_starts": doc_starts(tokens, BOS, EOS), "doc_stats": doc_stats(tokens, BOS, EOS)},
        {"doc_starts": tokens * 0},
    ):
        with Largest() as mode:
            model(tokens, **documents)
        found.append(mode.largest)
    assert found[0] < 512 * 512 <= found[1]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "cp", "takes"),
    [
        ("bfloat16", 128, 1, True),
        ("bfloat16", 128, 2, False),
        ("float32", 128, 1, False),
        ("bfloat16", 12, 1, False),
    ],
)
def test_a_mask_stays_where_the_kernel_does_not_serve(dtype, head_dim, cp, takes, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert masks_by_kernel(torch.device("cuda"), getattr(torch, dtype), head_dim, cp) is takes
    assert not masks_by_kernel(torch.device("cpu"), getattr(torch, dtype), head_dim, cp)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not masks_by_kernel(torch.device("cuda"), getattr(torch, dtype), head_dim, cp)


# Which kernel


def test_a_kernel_of_nvidia_gpus_is_refused_without_one():
    check_kernel("auto")
    for kernel in ("cudnn", "FA2", "FA3"):
        with pytest.raises(
            ConfigError,
            match=(
                rf'^training.attention_kernel = "{kernel}": there is no NVIDIA GPU here; use'
                r' "auto"$'
            ),
        ):
            check_kernel(kernel)


def test_a_kernel_that_sums_in_any_order_is_refused_where_a_run_is_to_be_repeated():
    config = load_config(DEBUG, ["--training.attention_kernel=cudnn", "--debug.deterministic"])
    mistakes = mistakes_here(config, Layout.from_config(config, 1))
    told = "\n".join(mistake.message(config) for mistake in mistakes)
    assert 'attention_kernel = "cudnn" sums gradients in any order' in told


@pytest.fixture
def as_before():
    from torch.nn.attention import restore_flash_attention_impl

    order = torch._C._get_sdp_priority_order()
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch._C._set_sdp_priority_order(order)
    restore_flash_attention_impl(_raise_warn=False)


def test_cudnn_comes_first_or_not_at_all(as_before):
    cudnn = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    use_kernel("cudnn")
    assert torch._C._get_sdp_priority_order()[0] == int(cudnn.value)
    use_kernel("FA2")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_newer_flash_attention_takes_the_place_of_the_operators_that_are_called(
    as_before, monkeypatch
):
    names = ("_flash_attention_forward", "_flash_attention_backward")
    names += ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")

    def kernels():
        dumps = (torch._C._dispatch_dump(f"aten::{name}") for name in names)
        return [[line for line in dump.splitlines() if line.startswith("CUDA")] for dump in dumps]

    before = kernels()
    package = "flash_attn_interface"
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        for name in ("fwd", "bwd"):
            library.define(f"{name}(Tensor q) -> Tensor")
        use_kernel("FA3")
        assert all(one and one != other for one, other in zip(kernels(), before, strict=True))


# On a GPU


def near(found, expected, inputs, others):
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=2e-2, rtol=2e-2)
    for one, other in zip(gradients(found, inputs), gradients(expected, others), strict=True):
        assert (one.cpu() - other).norm() < 0.02 * other.norm()


@pytest.mark.gpu
def test_attention_within_documents_is_that_with_a_mask_on_a_gpu():
    shapes = dict(heads=8, dim=128)
    inputs = random_heads(ROWS, TOKENS, TOKENS, torch.bfloat16, device="cuda", **shapes)
    others = random_heads(ROWS, TOKENS, TOKENS, **shapes)
    tokens, positions = rows_of_documents(), torch.arange(TOKENS)
    begins = doc_starts(tokens, BOS, EOS)
    documents = documents_of(begins.cuda(), positions.cuda(), doc_stats(tokens, BOS, EOS))
    found = attend(*inputs, documents)
    near(found, with_mask(*others, attention_mask(begins, positions, TOKENS)), inputs, others)
