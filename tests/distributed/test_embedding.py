"""An embedding sharded by columns: loss and every gradient of one process, and the collectives that it takes."""

import pytest
import torch
from parity import assert_same, batch, build, make_mesh, my_microbatches, one_process, step
from ranks import run_ranks
from test_buckets import CONFIG

from titan_lite.distributed.accumulation import gathered_for_step
from titan_lite.distributed.gather import local

LAYOUTS = {"FSDP": (1, 2), "HSDP": (2, 2), "FSDP of four": (1, 4), "FSDP x TP": (1, 2, 2)}


def parts(gradients, place):
    return gradients


def compare(layout):
    mesh = make_mesh(*LAYOUTS[layout])
    tokens, labels = batch(CONFIG.vocab_size)
    count = (labels != -100).sum()
    loss, oracle = one_process(CONFIG, tokens, labels)
    found = {}
    for name, options in (("eager", {}), ("aot_eager", dict(compiled="aot_eager", bucketing="block"))):
        model = build(CONFIG, mesh, by_columns=True, **options)
        assert local(model.tok_embeddings._parameters["weight"]).shape[1] == CONFIG.dim // LAYOUTS[layout][1]
        found[name] = step(model, mesh, my_microbatches(mesh, tokens, labels), count)
        assert found[name][0] == pytest.approx(loss, rel=1e-6)
        assert_same(found[name][1], oracle)
    model = build(CONFIG, mesh, by_columns=True)
    with gathered_for_step(model):
        several, _ = step(model, mesh, my_microbatches(mesh, tokens, labels, count=2), count, gradient=False)
    from parity import gradients

    assert several == pytest.approx(loss, rel=1e-6)
    assert_same(gradients(model), oracle)
    assert found["eager"][0] == found["aot_eager"][0]
    for fqn, gradient in found["eager"][1].items():
        assert torch.equal(gradient, found["aot_eager"][1][fqn]), fqn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_are_the_run_of_one_process(layout):
    run_ranks(2 if layout == "FSDP" else 4, compare, layout)
