"""Buckets change how numbers travel, and not one of them: losses and parameters over ten steps, to the bit."""

import pytest
import torch
from parity import batch, build, counted, make_mesh, my_microbatches, step
from ranks import run_ranks

from titan_lite.models.llama3 import ModelConfig

# 30 hidden units and 61 tokens: not every shard has as many rows
CONFIG = ModelConfig(dim=32, n_layers=3, n_heads=8, n_kv_heads=4, hidden_dim=30, vocab_size=61, max_seq_len=16)
LAYOUTS = {"FSDP-2": (1, 2, 1), "FSDP-4": (1, 4, 1), "HSDP-2x2": (2, 2, 1), "DDP-2": (2, 1, 1), "dp2tp2": (1, 2, 2)}
PARAMETERS, BUCKETS = 30, 5  # nine a layer and three; a bucket a layer, one for the embedding, one for norm and output


def train(mesh, **options):
    """(losses of ten steps, this rank's parameters, collectives of the last step)"""
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels)
    model = build(CONFIG, mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(10):
        optimizer.zero_grad()
        if number < 9:
            losses.append(step(model, mesh, mine, (labels != -100).sum(), gradient=False)[0])
        else:
            with counted() as counts:
                step(model, mesh, mine, (labels != -100).sum(), gradient=False)
        optimizer.step()
    return losses, [parameter.detach().to_local().clone() for parameter in model.parameters()], counts


def compare(layout, backend, checkpointing, reshard, param):
    mesh = make_mesh(*LAYOUTS[layout])
    receipts = []
    options = dict(reshard=reshard, param=param, checkpointing=checkpointing)
    found = [
        train(mesh, **options),
        train(mesh, **options, compiled=backend),
        train(mesh, **options, compiled=backend, bucketing="block", receipts=receipts),
    ]
    return found, [(receipt.graph, sum(receipt.before.values()), len(receipt.after), receipt.moved) for receipt in receipts]


CASES = [
    ("FSDP-2", "none", True, torch.float32),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("DDP-2", "selective", True, torch.bfloat16),
            ("FSDP-2", "selective", False, torch.bfloat16),
            ("HSDP-2x2", "full", True, torch.float32),
            ("FSDP-4", "selective", True, torch.float32),
            ("dp2tp2", "selective", True, torch.float32),
            ("dp2tp2", "none", False, torch.bfloat16),
        ]
    ),
]


@pytest.mark.parametrize(("layout", "checkpointing", "reshard", "param"), CASES)
def test_buckets_change_no_number(layout, checkpointing, reshard, param):
    replicate, shard, tp = LAYOUTS[layout]
    for (eager, apart, buckets), receipts in run_ranks(
        replicate * shard * tp, compare, layout, "aot_eager", checkpointing, reshard, param
    ):
        assert buckets[0] == apart[0]
        assert all(map(torch.equal, buckets[1], apart[1]))
        if param is torch.float32:
            assert buckets[0] == pytest.approx(eager[0], rel=1e-5)
        # gathered again in backward: all but the embedding, or what recomputing a block reads
        again = (PARAMETERS - 1, BUCKETS - 1) if reshard else (9 * 3, 3) if checkpointing != "none" else (0, 0)
        gathers = PARAMETERS + again[0], BUCKETS + again[1]
        for (_, _, counts), expected_gathers, reductions in ((apart, gathers[0], PARAMETERS), (buckets, gathers[1], BUCKETS)):
            expected = {"all_gather": expected_gathers, "reduce_scatter": reductions} if shard > 1 else {}
            expected |= {"all_reduce": reductions} if replicate > 1 else {}
            if tp == 1:
                assert counts == expected
        assert [graph for graph, *_ in receipts] == ["forward", "backward"]
        assert all(moved > 0 for *_, moved in receipts) or shard == 1


@pytest.mark.slow
def test_inductor_runs_the_same_buckets():
    for (_, apart, buckets), receipts in run_ranks(2, compare, "FSDP-2", "inductor", "none", True, torch.float32):
        assert buckets[0] == pytest.approx(apart[0], rel=1e-5)
        for one, other in zip(buckets[1], apart[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert apart[2] == {"all_gather": 2 * PARAMETERS - 1, "reduce_scatter": PARAMETERS}
        assert buckets[2] == {"all_gather": 2 * BUCKETS - 1, "reduce_scatter": BUCKETS}
        assert [(graph, before, after) for graph, before, after, _ in receipts] == [
            ("forward", PARAMETERS, BUCKETS),
            ("backward", 2 * PARAMETERS - 1, 2 * BUCKETS - 1),
        ]
