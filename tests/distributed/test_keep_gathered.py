"""Weights kept gathered from forward to backward, module by module: what backward gathers again,
and not one other number.
"""

import pytest
import torch
from parity import assert_same, batch, build, counted, gradients, make_mesh, my_microbatches
from ranks import run_ranks
from tiny import TIED, UNTIED

from titan_lite.models.loss import cross_entropy_sum

EAGER, APART = dict(), dict(compiled="aot_eager")
BUCKETS = dict(compiled="aot_eager", bucketing="block")
INDUCTOR = dict(compiled="inductor", bucketing="block")
FULL, SELECTIVE = dict(checkpointing="full"), dict(checkpointing="selective")
# kept -> gathers in backward, one a parameter: nine a layer, norm and output, and not the
# embedding, which backward does not need
AGAIN = {(): 20, ("norm", "output"): 18, ("layers.1", "norm"): 10, ("layers", "norm", "output"): 0}
AGAIN_TIED = {(): 20, ("output",): 19, ("tok_embeddings",): 19, ("norm", "output"): 18}
AGAIN_RECOMPUTED = {(): 20, ("layers.1", "norm"): 19}  # what is recomputed is read again
# in buckets: one a layer, the last with the norm, and the output's; a bucket is gathered for any of
# its weights
AGAIN_IN_BUCKETS = dict(zip(AGAIN, (3, 2, 2, 0), strict=True))
AGAIN_IN_EAGER_MODE = {
    **AGAIN_IN_BUCKETS,
    ("tok_embeddings",): 3,
    ("layers.0.attention", "layers.1.ffn_norm.weight"): 3,
}
TIED_IN_BUCKETS = {(): 3, ("output",): 2, ("tok_embeddings",): 2, ("norm", "output"): 2}
RECOMPUTED_IN_BUCKETS = {(): 3, ("layers.1", "norm"): 3}
CASES = {  # model, options, gathers in forward, in backward by what is kept
    "eager": (UNTIED, EAGER, 4, AGAIN_IN_EAGER_MODE),
    "eager, tied": (TIED, EAGER, 4, TIED_IN_BUCKETS),
    "eager, full checkpointing": (UNTIED, FULL, 4, RECOMPUTED_IN_BUCKETS),
    "eager, selective checkpointing": (UNTIED, SELECTIVE, 4, RECOMPUTED_IN_BUCKETS),
    "aot_eager": (UNTIED, APART, 21, AGAIN),
    "aot_eager, tied": (TIED, APART, 20, AGAIN_TIED),  # a graph reads tied weights once
    "aot_eager, full checkpointing": (UNTIED, {**APART, **FULL}, 21, AGAIN_RECOMPUTED),
    "aot_eager, selective checkpointing": (UNTIED, {**APART, **SELECTIVE}, 21, AGAIN_RECOMPUTED),
    "aot_eager, buckets": (UNTIED, BUCKETS, 4, AGAIN_IN_BUCKETS),
    "inductor": (UNTIED, {**INDUCTOR, "bucketing": "none"}, 21, AGAIN),
    "inductor, buckets": (UNTIED, INDUCTOR, 4, AGAIN_IN_BUCKETS),
}
QUICK = ("eager",)


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
        model = build(config, mesh, keep=keep, **options)
        cross_entropy_sum(model(input), label).backward()
        model.zero_grad()
        with counted() as forward:
            loss = cross_entropy_sum(model(input), label) / (labels != -100).sum()
        with counted() as backward:
            loss.backward()
        found[keep] = (
            loss.detach(),
            gradients(model, whole=False),
            forward["all_gather"],
            backward["all_gather"],
        )
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
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
