"""Llama 3: sizes and names, attention, initial weights, and the count of operations. test_huggingface.py
compares its logits and gradients with those of transformers.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_lite.config.families import LLAMA3, ModelConfig, RopeScaling
from titan_lite.models.llama3 import Attention
from titan_lite.models.shapes import flops_per_token
from titan_lite.models.transformer import Transformer

TINY = ModelConfig(
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=96,
    vocab_size=160,
    rope_theta=10_000.0,
    max_seq_len=128,
)


def build(config, seed=0):
    model = Transformer(config)
    model.init_weights(seed)
    return model


def random_tokens(config, rows=2, length=16, seed=0):
    return torch.randint(
        config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


# Sizes and names


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("debug", 5_770_496),
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_a_flavor_has_the_published_number_of_parameters(flavor, parameters):
    with torch.device("meta"):
        model = Transformer(LLAMA3.flavors[flavor])
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_flavors_differ_from_the_published_models_in_nothing_that_counting_misses():
    for name, factor in {"1B": 32.0, "3B": 32.0, "8B": 8.0, "70B": 8.0, "405B": 8.0}.items():
        config = LLAMA3.flavors[name]
        assert config.rope_scaling == RopeScaling(
            factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
        )
        assert (config.rope_theta, config.norm_eps, config.max_seq_len) == (
            500_000.0,
            1e-5,
            131_072,
        )
        heads = {"1B": (32, 8), "3B": (24, 8), "8B": (32, 8), "70B": (64, 8), "405B": (128, 8)}[
            name
        ]
        assert (config.n_heads, config.n_kv_heads) == heads


# Attention


def test_groups_of_heads_are_copied_where_no_gpu_kernel_takes_them(monkeypatch):
    grouped = []
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, *_, enable_gqa, **__: grouped.append(enable_gqa) or q,
    )
    for device, dtype in [
        ("cpu", torch.float32),
        ("cuda", torch.bfloat16),
        ("cuda", torch.float32),
    ]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, k = (
                torch.empty(1, 8, heads, TINY.head_dim, device=device, dtype=dtype)
                for heads in (4, 2)
            )
            Attention(TINY).attend(q, k, k, None)
    assert grouped == [True, True, False]


# Initial weights


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_standard_deviations_by_name_and_depth(tied):
    config = ModelConfig(
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=256,
        vocab_size=512,
        tied_embeddings=tied,
        max_seq_len=8,
    )
    truncated_at_3 = (
        0.98658  # of the standard deviation that a normal keeps when cut at three of them
    )
    table = {"output.weight": truncated_at_3 * 128**-0.5 / 4, "tok_embeddings.weight": 1.0}
    if tied:
        table = {"tok_embeddings.weight": truncated_at_3 * 128**-0.5}
    for i, residual in enumerate(
        (0.0141421, 0.01, 0.0081650, 0.0070711)
    ):  # 0.02 / sqrt(2), sqrt(4), sqrt(6), sqrt(8)
        table |= {f"layers.{i}.attention.{name}.weight": 0.02 for name in ("wq", "wk", "wv")}
        table |= {
            f"layers.{i}.feed_forward.w1.weight": 0.02,
            f"layers.{i}.attention.wo.weight": residual,
        }
        table |= {f"layers.{i}.feed_forward.{name}.weight": residual for name in ("w2", "w3")}
    seen = set()
    for name, parameter in build(config).named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
            continue
        assert parameter.std().item() == pytest.approx(table[name], rel=0.03), name
        assert abs(parameter.mean().item()) < 5 * table[name] / math.sqrt(parameter.numel()), name
        if name == "output.weight" or (tied and name == "tok_embeddings.weight"):
            assert parameter.abs().max() <= 3 * table[name] / truncated_at_3 * 1.0001
        seen.add(name)
    assert seen == table.keys()


def test_numbers_depend_on_seed_and_name_alone():
    def weights(config, seed):
        torch.manual_seed(len(calls))  # the global generator has no say
        calls.append(seed)
        return {
            name: parameter.detach()
            for name, parameter in build(config, seed).named_parameters()
            if "norm" not in name
        }

    calls = []
    first, again, other = (weights(TINY, seed) for seed in (7, 7, 8))
    deeper = weights(dataclasses.replace(TINY, n_layers=5, tied_embeddings=True), 7)
    for name, weight in first.items():
        assert torch.equal(weight, again[name]), name
        assert not torch.equal(weight, other[name]), name
        if name.startswith("layers"):
            assert torch.equal(weight, deeper[name]), name
    same_shape = [
        weight for weight in first.values() if weight.shape == (32, 64)
    ]  # wk and wv of every layer
    assert len(same_shape) == 6
    assert len({tuple(weight[0].tolist()) for weight in same_shape}) == 6


# Offsets and lengths in rows of the embedding, which is drawn in three blocks of 16,384 rows.
SHARDS = {
    "first rows": (0, 10_000),
    "within a block": (17_000, 20),
    "over two borders": (16_000, 20_000),
    "from a border": (32_768, 3_000),
    "last rows": (39_999, 1),
    "no rows": (20_000, 0),
    "no rows, past the end": (40_000, 0),
}


def test_a_rank_draws_its_slice_of_the_whole():
    config = dataclasses.replace(TINY, vocab_size=40_000, n_layers=1)
    whole = build(config)
    sharded = Transformer(config)
    for label, (first, rows) in SHARDS.items():
        asked = []

        def shard_of(parameter, first=first, rows=rows, asked=asked):
            """Some rows of the vocabulary, the second half of rows or columns elsewhere: as tensor
            parallelism would.
            """
            name = next(name for name, p in sharded.named_parameters() if p is parameter)
            asked.append(name)
            parameter.fill_(math.nan)
            if parameter.shape[0] == config.vocab_size:
                return parameter[first : first + rows], (first, 0)
            if name.endswith(("wo.weight", "w2.weight")):
                return parameter[:, parameter.shape[1] // 2 :], (0, parameter.shape[1] // 2)
            start = parameter.shape[0] // 2
            return parameter[start:], (start, *[0] * (parameter.dim() - 1))

        sharded.init_weights(0, shard_of)
        assert asked == [name for name, _ in sharded.named_parameters()]
        for (name, expected), actual in zip(
            whole.named_parameters(), sharded.parameters(), strict=True
        ):
            filled = ~actual.isnan()
            assert torch.equal(actual[filled], expected[filled]), (label, name)
            share = rows / config.vocab_size if actual.shape[0] == config.vocab_size else 0.5
            assert filled.sum() == share * actual.numel(), (label, name)  # nothing else was written


def test_rows_are_drawn_in_blocks_that_are_all_different_and_never_the_whole(monkeypatch):
    model = Transformer(dataclasses.replace(TINY, vocab_size=40_000, n_layers=1))
    drawn, normal = [], torch.nn.init.normal_
    monkeypatch.setattr(
        torch.nn.init,
        "normal_",
        lambda tensor, *args: drawn.append(tensor.numel()) or normal(tensor, *args),
    )
    model.init_weights(0)
    table = model.tok_embeddings.weight
    assert drawn == [2**20, 2**20, (40_000 - 2 * 16_384) * 64]
    assert len({tuple(table[start, :8].tolist()) for start in (0, 16_384, 32_768)}) == 3


def test_with_begins_a_document_is_what_it_is_alone():
    model, tokens = build(TINY), random_tokens(TINY)
    cut = tokens.shape[1] // 3
    begins = torch.where(torch.arange(tokens.shape[1]) < cut, 0, cut).expand_as(tokens)
    logits = model(tokens, begins)
    torch.testing.assert_close(logits[:, :cut], model(tokens[:, :cut]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        logits[:, cut:], model(tokens[:, cut:]), rtol=1e-4, atol=1e-5
    )  # rotation is relative
    assert (logits - model(tokens))[:, cut:].abs().max() > 1e-3
    torch.testing.assert_close(
        model(tokens, torch.zeros_like(tokens)), model(tokens), rtol=1e-4, atol=1e-5
    )


def test_bfloat16_follows_float32_with_rotary_tables_in_float32():
    tokens = random_tokens(TINY)
    reference = build(TINY)
    model = Transformer(TINY).to(torch.bfloat16)
    model.init_weights(0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.rope_cos.dtype == model.rope_sin.dtype == torch.float32
    logits, expected = model(tokens), reference(tokens)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.05 * expected.std().item())
    for output in (logits, expected):
        F.cross_entropy(output.flatten(0, 1).float(), tokens.flatten()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (
            F.cosine_similarity(ours.grad.float().flatten(), theirs.grad.flatten(), dim=0) > 0.99
        ), name


# Operations


def test_flops_per_token_are_those_that_torch_counts():
    """In forward and backward of the plain attention, which computes the half that the mask hides
    as well.
    """
    config, rows, length = dataclasses.replace(TINY, n_kv_heads=1), 2, 32
    tokens = random_tokens(config, rows, length)
    model = build(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = {
        operator.__name__: count for operator, count in counter.get_flop_counts()["Global"].items()
    }
    assert counts.keys() == {"mm", "bmm"}
    matmuls, attention = counts["mm"], counts["bmm"]
    of_a_token = flops_per_token(model.config, length)
    assert of_a_token * rows * length == matmuls + attention / 2
    with_hidden_half = flops_per_token(model.config, length, full_attention=True)
    assert with_hidden_half * rows * length == matmuls + attention


def test_any_length_up_to_the_longest():
    model = build(TINY)
    for length in (1, 2, TINY.max_seq_len):
        assert model(random_tokens(TINY, rows=1, length=length)).shape == (
            1,
            length,
            TINY.vocab_size,
        )
    with pytest.raises(RuntimeError):
        model(random_tokens(TINY, rows=1, length=TINY.max_seq_len + 1))
