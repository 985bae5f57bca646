"""Grids of values, and the ranking of plans; plans by hand."""

import dataclasses
import re

import pytest

from titan_lite.config import (
    ActivationCheckpoint,
    Compile,
    Config,
    ConfigError,
    Parallelism,
    Training,
)
from titan_lite.config.families import LLAMA3
from titan_lite.cost.machine import GIB
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.layout import resolve_degrees
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.features.float8.keys import Float8Keys
from titan_lite.tools.plan import changes
from titan_lite.tools.plan.changes import grid, ranked, table
from titan_lite.tools.plan.command import Subject, sweep_lines
from titan_lite.tools.plan.memory import Memory
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.published import Evidence, PublishedRun, RunKind
from titan_lite.tools.plan.simulate import StepTimes
from titan_lite.tools.plan.summary import Budget, describe, what_binds
from titan_lite.tools.plan.timetable import Timetable
from titan_lite.tools.plan.trace import PlannedLayout

H100 = load_machine("H100")
KIND = RunKind("8B", 8.0, 8.0, "H100", 500.0, "bfloat16", "inductor")


def published_run(speed=1.0, *, memory=1.0, unknown="", **kind):
    """A run of KIND, but for what `kind` says. speed, memory: planned by published."""
    return PublishedRun(
        f"{speed} {kind}",
        "known",
        dataclasses.replace(KIND, **kind),
        published=1000.0,
        planned=1000.0 * speed,
        published_gib=60.0,
        planned_gib=60.0 * memory,
        unknown=unknown,
    )


# Plans were 20% too fast, and runs took 3% more memory.
EVIDENCE = Evidence(KIND, [published_run(1.2)] * 3, (), [published_run(memory=1 / 1.03)] * 3)


def layout(ranks=16, gathers_once=False, compile=True, **parallelism):
    config = Config(
        training=Training(local_batch_size=2, seq_len=8192),
        parallelism=Parallelism(**parallelism),
        activation_checkpoint=ActivationCheckpoint(mode="selective"),
        compile=Compile(enable=compile),
    )
    degrees = resolve_degrees(config.parallelism, ranks)
    plan = PipelineSchedule(
        (("tok_embeddings",),) * degrees["pp"],
        tuple(range(degrees["pp"])),
        2 if degrees["pp"] > 1 else 1,
    )
    return PlannedLayout(
        config=config,
        model=dataclasses.replace(LLAMA3.flavors["8B"], max_seq_len=8192),
        degrees=degrees,
        pipeline=plan,
        local_batch_size=2,
        accumulation=1,
        gathers_once=gathers_once,
    )


def planned(seconds=1.0, memory=70.0, **parts):
    parts = parts or {"compute": seconds, "optimizer": 0.0}
    step = StepTimes(seconds, parts, {"tp": 8e9}, {"tp": 0.0}, 1e14, 1e13, Timetable({0: ()}))
    found = Memory(
        0, "forward", {"activations": memory * GIB}, reserved=memory * GIB, outside=2 * GIB
    )
    return Plan(layout(), H100, step, found, EVIDENCE, {("output",): (2, 4)})


def test_a_grid_is_every_combination():
    assert grid(["training.local_batch_size=1, 2", "activation_checkpoint.mode=none"]) == [
        {"training.local_batch_size": "1", "activation_checkpoint.mode": "none"},
        {"training.local_batch_size": "2", "activation_checkpoint.mode": "none"},
    ]
    assert grid([]) == []


@pytest.mark.parametrize(
    "sweep",
    ["training.local_batch=1,2", "training.local_batch_size", "training.local_batch_size=,", "=1"],
)
def test_a_grid_that_is_none(sweep):
    with pytest.raises(ConfigError, match="--sweep"):
        grid([sweep])


def test_those_that_fit_come_first_and_the_fastest_of_them():
    rows = [
        ({"a": "slow"}, planned(2.0)),
        ({"a": "fast"}, planned(1.0)),
        ({"a": "large"}, planned(0.5, memory=90.0)),
    ]
    lines = table(ranked([({"a": "wrong"}, "is wrong"), *rows]))
    assert [line.split("a=")[1].split(";")[0] for line in lines[1:]] == [
        "fast",
        "slow",
        "large",
        "wrong",
    ]
    assert lines[-1].endswith("is wrong")


def test_what_all_changes_have_in_common_is_told_once():
    rows = [({"a": "1", "b": "2"}, planned(1.0)), ({"a": "1", "b": "3", "c": "4"}, planned(2.0))]
    first, _, *lines = table(rows)
    assert first == "all: a=1"
    assert [line.split("yes")[1].split(";")[0].strip() for line in lines] == ["b=2", "b=3, c=4"]
    _, line = table(rows[:1])
    assert "  a=1, b=2; " in line


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned(memory=90.0), "memory: activations, 90.0 GiB"),
        (planned(1.0, compute=0.7, bubble=0.3), "other pipeline ranks: 30%"),
        (planned(1.0, compute=0.7, **{"exposed.tp": 0.3}), "tensor parallelism: 30%"),
        (planned(1.0, compute=0.95, bubble=0.05), "computation"),
    ],
)
def test_what_binds(plan, words):
    assert words in what_binds(plan)


def test_a_collective_that_leaves_its_node_is_told():
    plan = planned(1.0, compute=0.7, **{"exposed.tp": 0.3})
    step = dataclasses.replace(plan.nominal, across={"tp": 1e9})
    assert "tensor parallelism, between nodes" in what_binds(
        dataclasses.replace(plan, nominal=step)
    )


def test_a_plan_that_does_not_fit_says_what_to_plan_next():
    (line,) = (each for each in describe(planned(memory=90.0)) if each.startswith("to fit: "))
    assert "--search" in line
    assert grid(re.findall(r"--sweep (\S+)", line)) == [
        {"activation_checkpoint.mode": mode} for mode in ("selective", "full")
    ]
    assert not any(each.startswith("to fit") for each in describe(planned()))


@pytest.mark.parametrize(("stages", "said"), [(1, False), (2, True)])
def test_names_of_single_blocks_are_those_of_a_stage_and_a_plan_says_so(stages, said):
    mine = layout(pipeline_parallel_degree=stages)
    float8 = Float8Keys(enable=True, filter_fqns=("layers.1",))
    mine = dataclasses.replace(mine, config=mine.config.replace(float8=float8))
    text = "\n".join(describe(dataclasses.replace(planned(), layout=mine)))
    assert ("; keys that name blocks count them from each stage's first" in text) is said


def test_one_screen_says_ranges_memory_and_whether_it_fits():
    lines = describe(planned(memory=90.0), Budget(tokens=1e12))
    assert len(lines) < 50
    text = "\n".join(lines)
    tokens = 2 * 8192
    assert f"{tokens / 1.2:,.0f} to {tokens * 1.2:,.0f}" in text
    assert "does not fit: 12.0 too many" in text
    assert "1e+12 tokens: 36.8 to 53 days, 14,129 to 20,345 GPU-hours" in text
    assert (
        "\n  plans of 3 published runs (8B, inductor, bfloat16, H100 at 500 W) were 1.20 to" in text
    )


def test_a_budget_has_a_price_and_the_time_that_failures_cost():
    text = "\n".join(describe(planned(), Budget(tokens=1e12, price=2.5, goodput=0.8)))
    hours = "14,129 to 20,345 GPU-hours, 35,321 to 50,863 at 2.5 a GPU-hour"
    assert f"1e+12 tokens: 36.8 to 53 days, {hours}, without stops" in text
    hours = "17,661 to 25,431 GPU-hours, 44,152 to 63,578 at 2.5 a GPU-hour"
    assert f"80.0% of the time counts (checkpoint.interval = 500): 46 to 66.2 days, {hours}" in text


def test_the_line_of_progress_has_the_best_also_after_ctrl_c(monkeypatch, capsys):
    def plans(layouts, machine, full):
        yield planned(2.0)
        yield planned(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(changes, "make_plans", plans)
    monkeypatch.setattr(Subject, "lay_out", lambda *_: layout())
    subject = Subject("debug_model", [], layout().config, 16, H100)
    with pytest.raises(KeyboardInterrupt):
        sweep_lines(subject, ["training.steps=1,2,3,4"], full=False)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "planned: " in last
    assert " 2/4 " in last
    assert "tokens/s per GPU: training.steps=2" in last


def test_a_plan_that_nearly_fills_the_device_is_tight():
    """Published runs of its kind needed 3% more than planned."""
    nearly, roomy = planned(0.5, memory=77.7), planned(1.0, memory=75.0)
    assert (nearly.fits, nearly.is_tight, roomy.is_tight) == (True, True, False)
    assert any("tight, 0.3 free: published runs" in line for line in describe(nearly))
    assert any(line.endswith("fits, 3.0 free") for line in describe(roomy))
    rows = ranked([({"a": "1"}, nearly), ({"a": "2"}, roomy)])
    assert [plan for _, plan in rows] == [roomy, nearly]
    assert [line.split()[7] for line in table(rows)[1:]] == ["yes", "tight"]
