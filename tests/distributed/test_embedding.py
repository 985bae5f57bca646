"""An embedding sharded by columns: loss and every gradient of one process, the collectives that it takes, and its checkpoints."""

from collections import Counter

import pytest
import torch
from parity import (
    assert_same,
    batch,
    build,
    gradients,
    make_mesh,
    my_microbatches,
    one_process,
    step,
)
from ranks import run_ranks
from test_buckets import CONFIG
from tiny import DEBUG, NO_VALIDATION, SMALL, every, steps

from titan_lite.config.recipe import load_config
from titan_lite.distributed.accumulation import gathered_for_step
from titan_lite.distributed.gather import local
from titan_lite.distributed.simple_fsdp import as_shard_of
from titan_lite.optimizer.rounding import row_numbers
from titan_lite.trainer import Trainer

LAYOUTS = {"FSDP": (1, 2), "FSDP of four": (1, 4), "HSDP": (2, 2), "FSDP x TP": (1, 2, 2)}
AHEAD = {"all_gather": 1, "all_to_all": 1}


def compare(layout):
    mesh = make_mesh(*LAYOUTS[layout])
    tokens, labels = batch(CONFIG.vocab_size)
    count, mine = (labels != -100).sum(), my_microbatches(mesh, tokens, labels)
    loss, oracle = one_process(CONFIG, tokens, labels)
    receipts, found = [], {}
    ways = {
        "eager": {},
        "aot_eager": dict(compiled="aot_eager", bucketing="block", receipts=receipts),
    }
    for way, options in ways.items():
        found[way] = step(build(CONFIG, mesh, by_columns=True, **options), mesh, mine, count)
        assert found[way][0] == pytest.approx(loss, rel=1e-6)
        assert_same(found[way][1], oracle)
    assert found["eager"][0] == found["aot_eager"][0]
    for fqn, gradient in found["eager"][1].items():
        assert torch.equal(gradient, found["aot_eager"][1][fqn]), fqn

    kinds = [
        Counter(each.kind for each in receipt.after if each.fqns == ("tok_embeddings.weight",))
        for receipt in receipts
    ]
    copies = {"all_reduce": 1} if layout == "HSDP" else {}
    assert kinds == [
        AHEAD,
        {"all_to_all": 1, **copies},
    ]  # of forward and backward: no table travels, and ids once

    model = build(CONFIG, mesh, by_columns=True)
    with gathered_for_step(model):
        total, _ = step(
            model, mesh, my_microbatches(mesh, tokens, labels, count=2), count, gradient=False
        )
    assert total == pytest.approx(loss, rel=1e-6)
    assert_same(gradients(model), oracle)

    narrow = step(build(CONFIG, mesh, by_columns=True, param=torch.bfloat16), mesh, mine, count)[1]
    for fqn, gradient in oracle.items():
        assert (narrow[fqn] - gradient).norm() < 5e-2 * gradient.norm(), fqn
    with torch.no_grad():
        assert torch.equal(
            model(tokens[:1, :8]), build(CONFIG, mesh)(tokens[:1, :8])
        )  # the same weights, another shape

    columns = model.tok_embeddings._parameters["weight"]
    assert local(columns).shape[1] == CONFIG.dim // LAYOUTS[layout][1]
    numbers = (row_numbers(columns)[:, None] + torch.arange(local(columns).shape[1])).int()
    every_number = torch.arange(columns.numel(), dtype=torch.int32).view(columns.shape)
    assert torch.equal(as_shard_of(columns, numbers).full_tensor(), every_number)


SLOW = ("FSDP of four", "HSDP")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in LAYOUTS],
)
def test_columns_are_the_run_of_one_process(layout):
    run_ranks(2 if layout == "FSDP" else 4, compare, layout)


def train(folder, sharding, steps_done):
    """State when a run begins and when it ends, whole, by name; and the size of this rank's part of the table."""
    keys = [
        *SMALL,
        *steps(steps_done, schedule=4),
        *every(1),
        *NO_VALIDATION,
        "--lr_scheduler.warmup_steps=1",
        f"--job.dump_folder={folder}",
    ]
    trainer = Trainer(
        load_config(DEBUG, [*keys, f"--parallelism.embedding_sharding={sharding}"])[0]
    )

    def state():
        tensors = trainer.state_tensors().items()
        return {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
            for name, tensor in tensors
        }

    begun = state()
    trainer.train()
    return begun, state(), tuple(local(trainer.parameters["tok_embeddings.weight"]).shape)


def test_a_checkpoint_is_the_same_for_rows_and_columns(tmp_path):
    (start, rows, shape), *_ = run_ranks(2, train, tmp_path, "rows", 1, init=False)
    (again, columns, other), *_ = run_ranks(2, train, tmp_path, "columns", 2, init=False)
    back, *_ = run_ranks(2, train, tmp_path, "rows", 3, init=False)
    assert shape == (other[0] / 2, 2 * other[1])
    for before, after in ((rows, again), (columns, back[0])):
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not torch.equal(rows["tok_embeddings.weight"], columns["tok_embeddings.weight"])
    fresh, *_ = run_ranks(2, train, tmp_path / "new", "columns", 1, init=False)
    assert all(torch.equal(tensor, fresh[0][name]) for name, tensor in start.items())
