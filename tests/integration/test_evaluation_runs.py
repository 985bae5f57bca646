"""Runs with evaluation: training is the same to the bit, and each score stands once."""

import json

import pytest
from commands import python, run
from evaluation_tasks import TASKS, write_tasks
from ranks import run_ranks
from resumed import losses, same, trained
from tiny import ROOT, steps

from titan_lite.metrics.goodput import time_spent
from titan_lite.metrics.run_files import read_metrics
from titan_lite.tools.report.page import main as report

pytest.importorskip("lm_eval")
FOUR = [*steps(4), "--training.mixed_precision_param=float32"]
SCORED = [0, 2, 4]


def options_of(folder):
    names = [f"--evaluation.tasks={','.join(TASKS)}", f"--evaluation.task_folder={folder}"]
    return [*FOUR, *names, "--evaluation.freq=2"]


def scores(folder):
    """{step: scores}, and how many lines of metrics.jsonl have scores."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if any(name.startswith("evaluation/") for name in line)]
    return {
        line["step"]: {name: line[name] for name in line if name.startswith("evaluation/")}
        for line in found
    }, len(found)


def stopped_in_step_2(folder, options):
    """A run that is asked to stop while step 2 is evaluated."""
    from titan_lite.features.evaluation.feature import TaskScores

    measure = TaskScores.measure

    def stopping(self, stops):
        trainer = stops.__self__.trainer  # of its replica group
        if trainer.step == 2:
            trainer.stop.update(1)
            stops = lambda: True
        return measure(self, stops)

    TaskScores.measure = stopping
    return trained(folder, options)


def test_training_is_the_same_with_and_without_evaluation_and_a_stop_in_one_repeats_it(tmp_path):
    options = options_of(write_tasks(tmp_path))

    def in_a_process(function, name, given):
        return run_ranks(1, function, tmp_path / name, given, init=False)[0]

    _, expected = in_a_process(trained, "without", FOUR)
    log, found = in_a_process(trained, "with", options)
    assert same(found, expected)
    of_steps = {step: values for step, values in losses(tmp_path / "with").items() if values}
    assert of_steps == losses(tmp_path / "without")
    assert "step    2  choice acc " in log
    evaluated, lines = scores(tmp_path / "with")
    assert [*evaluated] == SCORED
    assert lines == len(SCORED)
    assert evaluated[2] != evaluated[4]
    assert evaluated[4].keys() >= {
        *("evaluation/choice/acc", "evaluation/choice/acc_stderr"),
        *("evaluation/rolling/bits_per_byte", "evaluation/until/exact_match"),
    }
    of_lines = read_metrics(tmp_path / "with/metrics.jsonl")
    assert any("seconds_evaluation" in values for values in of_lines.values())
    assert time_spent(tmp_path / "with")["evaluation"] > 0

    in_a_process(stopped_in_step_2, "stopped", options)
    assert [*scores(tmp_path / "stopped")[0]] == [0]
    _, found = in_a_process(trained, "stopped", options)
    assert same(found, expected)
    assert scores(tmp_path / "stopped") == (evaluated, len(SCORED))

    report([str(tmp_path / "with")])
    page = (tmp_path / "with/report.html").read_text()
    assert '"evaluation/choice/acc_stderr"' in page


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_tool_scores_a_checkpoint_as_its_run_did_on_any_number_of_processes(tmp_path):
    folder = write_tasks(tmp_path)
    run_ranks(1, trained, tmp_path / "run", options_of(folder), init=False)
    of_run = scores(tmp_path / "run")[0][4]
    asked = ["evaluate", tmp_path / "run", "--tasks", *TASKS, "--task-folder", folder]
    asked += ["--max-length", 32]  # the run's context; the model's is longer
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"]
    for start, layout in (([], []), (torchrun, ["--tp", 2]), (torchrun, ["--pp", 2])):
        file = tmp_path / "scores.json"
        program = [*start, "titan_lite", *asked, *layout, "--output", file]
        done = run(*python("-m", *program), cwd=ROOT)
        assert done.returncode == 0, done.stdout
        assert "until/exact_match" in done.stdout
        assert json.loads(file.read_text())["values"] == pytest.approx(of_run, rel=1e-5)
