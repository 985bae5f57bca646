"""Parameters, gradients and optimizer state in host memory: the same bits, and what stays on the device."""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from parity import batch, build, make_mesh, my_microbatches, step
from ranks import run_ranks
from tiny import HEADS

from titan_lite.config import Float8, Optimizer
from titan_lite.distributed.accumulation import gathered_for_step
from titan_lite.distributed.offload import offload_gradients
from titan_lite.distributed.simple_fsdp import refresh_scales
from titan_lite.optimizer import offload
from titan_lite.optimizer.build import build_optimizer, optimizer_state
from titan_lite.optimizer.clipping import clip_grad_norm_
from titan_lite.optimizer.offload import local


def trained(mesh, config, where, *, once=False, state="float32", steps=3, **options):
    """(losses and norms, all state) after steps of two microbatches each, the second step skipped."""
    model = build(config, mesh, offload=where, **options)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(Optimizer(state_dtype=state, lr=1e-2), named, seed=1, offload=where)
    offload_gradients([model], optimizer.host and optimizer.host.put)
    tokens, labels = batch(config.vocab_size, config.max_seq_len)
    pieces, numbers = my_microbatches(mesh, tokens, labels, 2), []
    for number in range(steps):
        with gathered_for_step(model) if once else nullcontext():
            loss, _ = step(model, mesh, pieces, (labels != -100).sum(), gradient=False)
        norm = clip_grad_norm_(named.values(), 0.5, optimizer.host)
        optimizer.step(torch.tensor(float(number == 1)))
        refresh_scales([model])
        optimizer.zero_grad()
        numbers += [loss, norm.item()]
    state = {**named, **optimizer_state(optimizer, named)}
    return numbers, {name: local(tensor) for name, tensor in state.items()}


# Pieces of rows are whole vectors of a CPU, whose kernel rounds the rest in another way; 61 rows are no multiple of the ranks.
SHAPE = replace(HEADS, hidden_dim=64)

WAYS = {
    "resharded": (SHAPE, {}),
    "kept": (SHAPE, dict(reshard=False, param=torch.bfloat16)),
    "tied": (replace(SHAPE, tied_embeddings=True), {}),
    "checkpointed": (SHAPE, dict(checkpointing="selective")),
    "step": (SHAPE, dict(once=True, param=torch.bfloat16)),
    "bfloat16": (SHAPE, dict(dtype="bfloat16", state="bfloat16", param=torch.bfloat16)),
    "compiled": (SHAPE, dict(compiled="aot_eager")),
    "in blocks": (SHAPE, dict(compiled="aot_eager", bucketing="block", param=torch.bfloat16)),
    "compiled step": (SHAPE, dict(compiled="aot_eager", once=True)),
    "float8": (SHAPE, dict(float8=Float8(enable=True, all_gather=True), param=torch.bfloat16)),
}


def differences(degrees, ways):
    mesh, found = make_mesh(*degrees), {}
    for way in ways:
        config, options = WAYS[way]
        with mock.patch.object(offload, "BUCKET", 96):
            here, away = (trained(mesh, config, where, **options) for where in ("none", "all"))
        same = here[1].keys() == away[1].keys() and all(
            torch.equal(tensor, away[1][name]) for name, tensor in here[1].items()
        )
        found[way] = here[0], away[0], same
    return found


@pytest.mark.parametrize(
    "degrees", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow), (1, 1, 2)]
)
def test_what_is_in_host_memory_changes_no_bit(degrees):
    ways = [way for way in WAYS if degrees == (1, 2) or way in ("resharded", "in blocks")]
    for found in run_ranks(2, differences, degrees, ways):
        for way, (here, away, same) in found.items():
            assert here == away, way
            assert same, way
