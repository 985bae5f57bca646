"""Runs with PowerSGD between copies: equal copies and the bytes of the paper on every layout,
resumed to the bit.
"""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from resumed import copy_at_step_2, losses, trained
from tiny import AOT_EAGER, DEBUG, NO_CHECKPOINT, steps

from titan_lite.config import load_config
from titan_lite.distributed.layout import Layout
from titan_lite.features.powersgd import compression as powersgd
from titan_lite.features.powersgd.compression import compressed_sizes
from titan_lite.tools.verify.proxy import parse_layout, proxy

TINY = ["--model.dim=64", "--model.n_layers=2", "--model.hidden_dim=90"]
RANK = 4
POWERSGD = ["--parallelism.replicate_compression=powersgd", f"--parallelism.replicate_rank={RANK}"]
POWERSGD += ["--parallelism.replicate_uncompressed_steps=1"]
DDP = ["--parallelism.data_parallel_replicate_degree=2"]


def counted_run(folder, options, count=5):
    """(log, {FQN: this rank's part of the state}, [bytes of each all-reduce of gradients between
    copies])
    """
    sent = []

    def noted(tensor, group):
        sent.append(tensor.nbytes)
        dist.all_reduce(tensor, group=group)

    with mock.patch.object(powersgd, "dist", SimpleNamespace(all_reduce=noted)):
        options = [
            *steps(count, schedule=10),
            *TINY,
            *options,
            "--training.compare_replicas_freq=1",
        ]
        log, tensors = trained(folder, options)
    return log, tensors, sent


def train(folder, *options, ranks):
    found = run_ranks(ranks, counted_run, folder, [*NO_CHECKPOINT, *options], init=False)
    return found, losses(folder)


def expected_bytes(options, ranks):
    """(bytes of what a compressed step sends as it is, of its factors), by the formula of the
    paper: r (n + m) numbers for a matrix of n x m.
    """
    config = load_config(DEBUG, [*TINY, *options, "--training.global_batch_size=8"])
    sent = compressed_sizes(config.parallelism, Layout.from_config(config, ranks)).values()
    whole = sum(4 * numbers for numbers, factors in sent if not factors)
    return whole, sum(4 * factors for _, factors in sent)


LAYOUTS = {
    "HSDP": (4, DDP),
    "HSDP x CP": (4, [*DDP, "--parallelism.context_parallel_degree=2"]),
    "HSDP x TP": (8, [*DDP, "--parallelism.tensor_parallel_degree=2"]),
    "DDP x PP": (4, [*DDP, "--parallelism.pipeline_parallel_degree=2"]),
    "HSDP, compiled": (4, [*DDP, *AOT_EAGER]),
}
SLOW = {*LAYOUTS} - {"HSDP"}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.release] * (name in SLOW)) for name in LAYOUTS]
)
def test_copies_stay_equal_for_five_steps_and_send_what_the_paper_says(layout, tmp_path):
    ranks, options = LAYOUTS[layout]
    found, compressed = train(tmp_path / "powersgd", *options, *POWERSGD, ranks=ranks)
    _, plain = train(tmp_path / "none", *options, ranks=ranks)
    assert compressed[1][0] == pytest.approx(
        plain[1][0], rel=1e-6
    )  # the first step is not compressed
    assert compressed[5][0] == pytest.approx(plain[5][0], rel=0.02)
    assert compressed[5][0] != plain[5][0]
    parts = Counter()
    stages = 2 if "PP" in layout else 1
    half = ranks // 2 // stages
    for stage in range(stages):
        for rank in range(half):
            one, other = (found[2 * half * stage + half * copy + rank][1] for copy in (0, 1))
            for name, tensor in one.items():
                kind = "error" if name.endswith(".error") else "equal"
                parts[kind] += 1
                assert torch.equal(tensor, other[name]) == (kind == "equal"), name
    assert parts["error"]
    if stages == 1:
        sent = found[0][2][-3:]
        assert (sent[0], sum(sent[1:])) == expected_bytes([*options, *POWERSGD], ranks)
        assert f"{sum(sent):,} bytes a step instead of" in found[0][0]


def test_a_run_resumes_to_the_bit(tmp_path):
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    saved = run_ranks(2, counted_run, whole, [*DDP, *POWERSGD], 4, init=False)
    copy_at_step_2(whole, copy)
    found = run_ranks(2, counted_run, copy, [*DDP, *POWERSGD], 4, init=False)
    assert "tensors begin anew" not in found[0][0]
    assert losses(copy) == {step: loss for step, loss in losses(whole).items() if step > 2}
    for (_, tensors, _), (_, expected, _) in zip(found, saved, strict=True):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert any(name.endswith(".error") and tensor.any() for name, tensor in found[0][1].items())


def test_a_recipe_is_verified_without_compression():
    config = load_config(DEBUG, [*DDP, *POWERSGD])
    assert (
        proxy(config, parse_layout("dp_replicate=2"), 2).parallelism.replicate_compression == "none"
    )
