"""Weights kept gathered from forward to backward, module by module: what backward gathers again,
and not one other number.
"""

import gc
import weakref
from unittest import mock

import pytest
import torch
from parity import assert_same, batch, build, counted, gradients, make_mesh, my_microbatches
from ranks import run_ranks
from tiny import HEADS, TIED, UNTIED

from titan_lite.config.families import ModelConfig
from titan_lite.distributed.prefetch import PrefetchGatherer
from titan_lite.features.float8.keys import Float8Keys

EAGER, APART = dict(), dict(compiled="aot_eager")
BUCKETS = dict(compiled="aot_eager", bucketing="block")
INDUCTOR = dict(compiled="inductor", bucketing="block")
FULL, SELECTIVE = dict(checkpointing="full"), dict(checkpointing="selective")
# kept -> gathers in backward, one a parameter: nine a layer, norm and output, and not the
# embedding, which backward does not need
AGAIN = {(): 20, ("norm", "output"): 18, ("layers.1", "norm"): 10, ("layers", "norm", "output"): 0}
AGAIN_TIED = {(): 20, ("output",): 19, ("tok_embeddings",): 19, ("norm", "output"): 18}
# in buckets: one a layer, the last with the norm, and the output's; a bucket is gathered for any of
# its weights
AGAIN_IN_BUCKETS = dict(zip(AGAIN, (3, 2, 2, 0), strict=True))
AGAIN_IN_EAGER_MODE = {
    **AGAIN_IN_BUCKETS,
    ("tok_embeddings",): 3,
    ("layers.0.attention", "layers.1.ffn_norm.weight"): 3,
}
TIED_IN_BUCKETS = {(): 3, ("output",): 2, ("tok_embeddings",): 2, ("norm", "output"): 2}
BUDGET = dict(checkpointing="memory_budget")
CASES = {  # model, options, gathers in forward, in backward by what is kept
    "eager": (UNTIED, EAGER, 4, AGAIN_IN_EAGER_MODE),
    "eager, tied": (TIED, EAGER, 4, TIED_IN_BUCKETS),
    "eager, full checkpointing": (UNTIED, FULL, 4, AGAIN_IN_BUCKETS),
    "aot_eager, tied": (TIED, APART, 20, AGAIN_TIED),  # a graph reads tied weights once
    "aot_eager, full checkpointing": (UNTIED, {**APART, **FULL}, 21, AGAIN),
    "aot_eager, buckets, full checkpointing": (UNTIED, {**BUCKETS, **FULL}, 4, AGAIN_IN_BUCKETS),
    "aot_eager, memory budget": (UNTIED, {**APART, **BUDGET}, 21, AGAIN),
    "inductor, buckets": (UNTIED, INDUCTOR, 4, AGAIN_IN_BUCKETS),
}
MARKS = {
    "eager": (),
    "eager, full checkpointing": pytest.mark.slow,
    "aot_eager, full checkpointing": pytest.mark.slow,
}


def steps(config, keeps, options):
    """{kept: (loss, this rank's gradients, gathers in forward, in backward)} of a second step,
    where prefetch knows the order.
    """
    torch.set_num_threads(1)
    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    ((input, label),) = my_microbatches(mesh, tokens, labels)
    found = {}
    for keep in keeps:
        stage = build(config, mesh, keep=keep, **options)
        stage(input, labels=label).sum().backward()
        stage.model.zero_grad()
        with counted() as forward:
            loss = stage(input, labels=label).sum() / (labels != -100).sum()
        with counted() as backward:
            loss.backward()
        found[keep] = (
            loss.detach(),
            gradients(stage, whole=False),
            forward["all_gather"],
            backward["all_gather"],
        )
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=MARKS.get(case, pytest.mark.release)) for case in CASES],
)
def test_backward_gathers_again_what_is_not_kept_and_computes_the_same(case):
    config, options, in_forward, in_backward = CASES[case]
    for found in run_ranks(2, steps, config, list(in_backward), options):
        assert {keep: counts for keep, (_, _, *counts) in found.items()} == {
            keep: [in_forward, again] for keep, again in in_backward.items()
        }
        loss, grads, *_ = found[()]
        for keep, (same_loss, same_grads, *_) in found.items():
            assert torch.equal(same_loss, loss), keep
            # another backward graph is other kernels to Inductor, which round in their own way
            assert_same(
                same_grads,
                grads,
                **dict(atol=1e-8, rtol=1e-5) if "inductor" in case else dict(atol=0, rtol=0),
            )


# fsdp_reshard_after_forward = "never" with recomputation: several microbatches between their
# forward and their backward, as in a pipeline

OF_FLOAT8 = ModelConfig(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=64, vocab_size=61, max_seq_len=16
)
FLOAT8 = dict(float8=Float8Keys(enable=True, all_gather=True), param=torch.bfloat16)
NEVER = {  # model, ranks along (dp_replicate, dp_shard, tp), options
    "full": (UNTIED, (1, 2), FULL),
    "selective": (UNTIED, (1, 2), SELECTIVE),
    "float8": (OF_FLOAT8, (1, 2), {**SELECTIVE, **FLOAT8}),
    "tensor parallel": (HEADS, (1, 2, 2), FULL),
    "aot_eager, full": (UNTIED, (1, 2), {**APART, **FULL}),
    "aot_eager, float8": (OF_FLOAT8, (1, 2), {**BUCKETS, **SELECTIVE, **FLOAT8}),
    "aot_eager, tensor parallel": (HEADS, (1, 2, 2), {**BUCKETS, **SELECTIVE}),
}
MARKS_OF_NEVER = {
    "selective": (),
    "full": pytest.mark.slow,
    "aot_eager, full": pytest.mark.slow,
}


def two_microbatches(config, degrees, options):
    """(gradients with resharding, without it, counts of gathers in the backwards without it, and
    how many of the kept weights live after each backward).
    """
    torch.set_num_threads(1)
    gc.disable()  # what is kept is freed by its last use
    mesh = make_mesh(*degrees)
    tokens, labels = batch(config.vocab_size)
    pieces = my_microbatches(mesh, tokens, labels, count=2)

    apart = build(config, mesh, **options)
    for input, label in pieces:
        (apart(input, labels=label).sum() / 100).backward()

    kept = []
    gather = PrefetchGatherer.gather

    def noted(*args):
        weight = gather(*args)
        kept.append(weakref.ref(weight))
        return weight

    stage = build(config, mesh, reshard=False, **options)
    stage(pieces[0][0], labels=pieces[0][1]).sum().backward()  # compiles, and learns the order
    stage.model.zero_grad()
    with mock.patch.object(PrefetchGatherer, "gather", noted):
        losses = [stage(input, labels=label).sum() / 100 for input, label in pieces]
    with counted() as backward:
        alive = []
        while losses:
            losses.pop(0).backward()
            alive.append(sum(weight() is not None for weight in kept))
    again = backward["all_gather"]
    return gradients(apart, whole=False), gradients(stage, whole=False), again, alive


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=MARKS_OF_NEVER.get(case, pytest.mark.release)) for case in NEVER],
)
def test_recomputation_uses_the_weights_that_its_own_microbatch_kept(case):
    config, degrees, options = NEVER[case]
    ranks = degrees[0] * degrees[1] * (degrees[2] if degrees[2:] else 1)
    activations = 0 if len(degrees) == 2 else None  # of which tensor parallelism gathers some
    for resharded, kept, again, alive in run_ranks(
        ranks, two_microbatches, config, degrees, options
    ):
        assert_same(kept, resharded, atol=0, rtol=0)
        assert again == activations or activations is None
        if "aot_eager" not in case:
            assert alive[0] > alive[1] == 0
