"""Context parallelism without ranks: who has which tokens, their order after a gather, and
attention to the past.
"""

import pytest
import torch
import torch.nn.functional as F

from titan_lite.collectives import Axis
from titan_lite.config.families import ModelConfig
from titan_lite.distributed import context_parallel
from titan_lite.distributed.context_parallel import (
    ContextParallelAttention,
    causal_attention,
    in_position_order,
    own_positions,
)
from titan_lite.models.transformer import Transformer


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_token_has_one_rank_and_all_ranks_the_same_work(degree):
    owned = [own_positions(32, rank, degree) for rank in range(degree)]
    assert sorted(position for positions in owned for position in positions) == list(range(32))
    assert len({sum(positions) for positions in owned}) == 1  # as many tokens looked back at


def test_the_first_and_the_last_chunk_are_on_the_first_rank():
    assert own_positions(8, 0, 2) == [0, 1, 6, 7]
    assert own_positions(8, 1, 2) == [2, 3, 4, 5]


@pytest.mark.parametrize("degree", [2, 4])
def test_what_ranks_give_is_put_in_order(degree):
    by_rank = torch.tensor(
        [position for rank in range(degree) for position in own_positions(16, rank, degree)]
    )
    gathered = by_rank.view(1, 16, 1, 1).expand(3, 16, 2, 5)
    assert torch.equal(
        in_position_order(gathered, degree), torch.arange(16).view(1, 16, 1, 1).expand(3, 16, 2, 5)
    )


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_the_last_queries_attend_as_in_the_whole(queries):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 16, 4, 8, generator=generator)
    k, v = (torch.randn(2, 16, 2, 8, generator=generator) for _ in range(2))
    whole = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    found = causal_attention(q[:, -queries:], k, v)
    torch.testing.assert_close(found, whole.transpose(1, 2)[:, -queries:])


@pytest.mark.parametrize("heads_of_values", [1, 2, 4])
def test_keys_and_values_may_have_different_heads(heads_of_values, monkeypatch):
    """As in an `attend` of one's own: both are gathered in one tensor, and come apart by heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 16, heads, 8, generator=generator) for heads in (4, 2, heads_of_values)
    )
    own = [own_positions(16, rank, 2) for rank in range(2)]
    gathered = torch.cat([torch.cat((k, v), dim=2)[:, positions] for positions in own], dim=1)
    monkeypatch.setattr(context_parallel, "gather_tokens", lambda tensor, axis: gathered)
    seen = []

    def watching(q, k, v, mask):
        seen.append((k, v))
        return q

    for rank, positions in enumerate(own):
        attend = ContextParallelAttention(Axis("", 2, rank), watching)
        attend(q[:, positions], k[:, positions], v[:, positions], None)
        for keys, values in seen:
            assert torch.equal(keys, k[:, : keys.shape[1]])
            assert torch.equal(values, v[:, : values.shape[1]])
        ends = [(rank + 1) * 4, 16 - 4 * rank]
        assert [keys.shape[1] for keys, _ in seen] == ends
        seen.clear()


def test_rope_is_by_position_and_not_by_place():
    config = ModelConfig(
        dim=16, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=8, vocab_size=11, max_seq_len=12
    )
    whole, part = Transformer(config), Transformer(config, positions=[9, 2, 5])
    part.init_weights(0)
    assert torch.equal(part.rope_cos, whole.rope_cos[[9, 2, 5]])
    assert torch.equal(part.rope_sin, whole.rope_sin[[9, 2, 5]])


@pytest.mark.gpu
def test_flash_attention_on_a_gpu_ends_its_mask_at_the_lower_right():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 48, 8, 64, generator=generator)
    k, v = (torch.randn(2, 128, 2, 64, generator=generator) for _ in range(2))
    leaves = [
        [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", None))
    ]
    found, expected = (causal_attention(*inputs) for inputs in leaves)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    for out in (found, expected):
        out.square().sum().backward()
    for one, other in zip(*leaves, strict=True):
        assert (one.grad.cpu() - other.grad).norm() < 0.02 * other.grad.norm()
