"""What a plan says of published runs, and the files that have them."""

import dataclasses
import sys
from functools import partial
from unittest.mock import patch

import pytest
import torch
from test_changes import KIND, planned
from test_changes import published_run as run
from tiny import ROOT
from torch.fx.experimental.proxy_tensor import make_fx

from titan_lite.config import load_config
from titan_lite.cost.machine import Machine
from titan_lite.cost.profiles import PROFILES, machine_from
from titan_lite.graph import is_fused_away
from titan_lite.models.loss import VocabularyShard, cross_entropy
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.published import (
    COVERED,
    LEAST_ERROR,
    Evidence,
    evidence_among,
    evidence_for,
    published_runs,
)
from titan_lite.tools.plan.summary import describe
from titan_lite.tools.plan.tape import ScheduledGraph, last_uses

sys.path.append(str(ROOT / "scripts"))
import compare_published
import write_docs

LIMITED = machine_from({"like": "H100", "power": 500}, "mine.toml")
EAGER = "--compile.no-enable"
FLOAT8 = "--float8.enable"


# The files


def test_every_run_of_the_settings_has_its_plan():
    figures = {
        each.name: (each.role, each.gib, each.unknown, each.tokens_per_second)
        for each in compare_published.read_runs()
        if not each.tflops
    }
    assert len(figures) > 50
    names = [each.name for each in compare_published.read_runs()]
    assert len(names) == len({*names})
    found = {each.name: each for each in published_runs()}
    for name, (role, gib, unknown, speed) in figures.items():
        kept = found[name]
        assert (kept.role, kept.unknown) == (role, unknown)
        assert (kept.published_gib, kept.published) == pytest.approx((gib, speed), rel=1e-4)


def test_the_loss_of_2024_is_not_fused_and_keeps_its_result():
    """The compiler did not see it: backward's exponentials do not take the result's place."""

    def exponentials(hidden, weight):
        logits = hidden @ weight
        result = logits - logits.logsumexp(-1, keepdim=True)
        return result.exp() + 1

    traced = make_fx(exponentials, tracing_mode="fake")(torch.ones(64, 8), torch.ones(8, 512))
    scheduled = ScheduledGraph(traced.graph, True, False, True)
    (matmul, result, exponential) = (
        node
        for node in traced.graph.nodes
        if node.target
        in (torch.ops.aten.mm.default, torch.ops.aten.sub.Tensor, torch.ops.aten.exp.default)
    )
    assert is_fused_away(exponential)
    logits = torch.Size((64, 512))
    assert not compare_published.is_never_stored(exponential, logits)
    never_stored = partial(compare_published.is_never_stored, logits=logits)
    with patch("titan_lite.tools.plan.tape.is_fused_away", never_stored):
        plain = last_uses(scheduled)
        uses = compare_published.uses_with_loss_parallel(scheduled, logits)
    assert uses[result] > plain[result]
    assert uses[matmul] == plain[matmul]


def test_without_tensor_parallelism_the_loss_of_2024_is_the_usual_one():
    logits, labels = torch.randn(2, 3, 8), torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = compare_published.loss_parallel(logits, labels, VocabularyShard(8))
    assert torch.equal(found, cross_entropy(logits, labels))


def test_what_is_written_is_read(monkeypatch, tmp_path):
    file = tmp_path / "published.csv"
    monkeypatch.setattr("titan_lite.tools.plan.published.FILE", file)
    monkeypatch.setattr(compare_published, "FILE", file)
    runs = [run(0.9, unknown='with "quotes", and a comma'), run(1.1, billions=30.5, model="30B")]
    compare_published.write_runs(runs)
    published_runs.cache_clear()
    try:
        assert published_runs() == runs
    finally:
        published_runs.cache_clear()


def test_ranges_hold_most_of_the_runs_that_they_have_not_seen():
    runs = [each for each in published_runs() if each.published and each.role != "blind"]
    ranges = [write_docs.left_out_range(each, runs) for each in runs]
    held = sum(
        slow <= each.published <= fast for each, (slow, fast) in zip(runs, ranges, strict=True)
    )
    assert held >= COVERED * len(runs)


# Which runs are evidence


@pytest.mark.parametrize(
    ("others", "count", "differ_in"),
    [
        ([], 3, ()),
        ([{"power": 700.0}] * 3, 3, ()),  # the narrowest class that has three
        ([{"billions": 13.0, "active_billions": 13.0}], 4, ()),  # of about the same size
        ([{"billions": 70.0, "active_billions": 70.0}], 3, ()),
    ],
)
def test_the_narrowest_class_with_three_runs_is_the_evidence(others, count, differ_in):
    runs = [run(0.9), run(1.0), run(1.2), *(run(2.0, **other) for other in others)]
    evidence = evidence_among(runs, KIND)
    assert (len(evidence.runs), tuple(evidence.differ_in)) == (count, differ_in)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"power": 700.0}, "power"),
        ({"billions": 70.0, "active_billions": 70.0}, "size"),
        ({"mode": "eager"}, "mode"),
        ({"precision": "float8"}, "precision"),
        ({"device": "H200"}, "device"),
        ({"billions": 30.0, "active_billions": 3.0, "device": "H200"}, "moe"),
    ],
)
def test_with_fewer_it_is_the_next_wider_class(other, differs):
    evidence = evidence_among([run(1.0), run(1.0), run(1.3, **other)], KIND)
    assert len(evidence.runs) == 3
    assert evidence.differ_in[-1] == differs
    assert evidence.error == pytest.approx(1.3)
    assert not evidence.is_known


def test_four_of_five_further_runs_are_within_the_error():
    runs = [run(speed) for speed in (1.0, 0.99, 1.02, 1.04, 1.05, 0.93, 1.2, 1.5, 1.0)]
    # the eighth of nine: 0.8 x 10
    assert evidence_among(runs, KIND).error == pytest.approx(1.2)


def test_without_runs_of_a_device_each_other_one_counts_once():
    """Plans of a device are off together."""
    runs = [
        *(run(1.0, device="H200") for _ in range(9)),
        *(run(speed, device="A100") for speed in (1.2, 1.1, 1.5)),
    ]
    evidence = evidence_among(runs, KIND)
    assert len(evidence.runs) == 12
    assert evidence.error == pytest.approx(1.2)


def test_memory_is_of_runs_of_which_all_is_known():
    runs = [run(memory=0.9), run(memory=0.95), run(memory=1.1), run(memory=0.5, unknown="stages")]
    evidence = evidence_among(runs, KIND)
    assert len(evidence.runs) == 4
    assert evidence.memory_error == pytest.approx(1 / 0.9 - 1)
    assert evidence_among([run(memory=1.1)] * 3, KIND).memory_error == 0.0


def test_a_range_is_as_wide_as_the_errors_demand():
    plan = planned(2.0)
    assert (plan.slow.seconds, plan.fast.seconds) == pytest.approx((2.4, 2.0 / 1.2))
    unsure = dataclasses.replace(plan, evidence=Evidence(KIND, [run(1.3)] * 3, ()))
    assert unsure.slow.seconds == pytest.approx(2.6)
    assert unsure.fast.seconds == pytest.approx(2.0 / 1.3)
    assert unsure.nominal.seconds == 2.0
    for each, is_guess in ((unsure, True), (plan, False)):
        assert any("(a guess)" in line for line in describe(each)) == is_guess


def test_no_range_is_narrower_than_published_speeds_of_one_recipe_differ():
    speeds: dict[tuple[str, float], list[float]] = {}
    for each in published_runs():
        speeds.setdefault((each.kind.limited, each.planned), []).append(each.published)
    most = max(max(of_one) / min(of_one) for of_one in speeds.values())
    assert pytest.approx(most, abs=0.005) == LEAST_ERROR
    assert evidence_among([run(1.0)] * 3, KIND).error == LEAST_ERROR
    assert Evidence(KIND, (), ()).error == LEAST_ERROR  # on a CPU


# In words


def words(flavor: str, machine: Machine, *options: str) -> str:
    keys = [f"--model.flavor={flavor}", *options]
    config = load_config(ROOT / "train_configs/llama3_8b.toml", keys)
    return evidence_for(lay_out(config, 8), machine).in_words()


@pytest.mark.parametrize(
    ("flavor", "machine", "options", "expected"),
    [
        ("8B", LIMITED, (), "plans of 6 published runs (8B, inductor, bfloat16, H100 at 500 W) we"),
        ("8B", LIMITED, (EAGER,), "plans of 4 published runs (8B, eager, bfloat16, H100 at 500 W)"),
        ("405B", LIMITED, (FLOAT8,), "(405B, inductor, float8, H100 at 500 W) were 0.98 to 1.12"),
        ("405B", PROFILES["H100"], (), "plans of 3 published runs (405B, inductor, bfloat16, H100"),
        (
            "8B",
            PROFILES["H100"],
            (),
            "fewer than three published runs are like this one (8B, inductor, bfloat16, H100 at 700 W);"
            " of others, plans of 6 published runs (8B, inductor, bfloat16, H100) were 0.99 to 1.02 times as fast",
        ),
    ],
)
def test_a_plan_says_which_runs_are_its_evidence(flavor, machine, options, expected):
    assert expected in words(flavor, machine, *options)


def test_a_plan_on_cpus_has_no_evidence():
    cpu = dataclasses.replace(PROFILES["H100"], name="CPU of this machine")
    assert words("8B", cpu) == "no published run on a CPU to compare with"
