"""Outputs of a run: the line, metrics.jsonl and its reader, TensorBoard; with and without a
terminal.
"""

import json
import logging
import math
import sys
import types

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_lite.config import ConfigError, DataSource, Metrics
from titan_lite.config.errors import MachineError
from titan_lite.metrics.writer import MetricsWriter, peak_memory_gib, read_metrics

PLAIN = Metrics(enable_tensorboard=False)
RECIPE = {
    "training.steps": 100,
    "optimizer.lr": 3e-4,
    "parallelism.fsdp_keep_gathered": ("norm", "output"),
    "job.description": "<b>&",
    "data.sources": (DataSource(path="a.jsonl"),),
}
VALUES = {
    "loss": 6.93147,
    "grad_norm": 1.23456,
    "lr": 3e-4,
    "tps": 12345.6,
    "tflops": 1.5,
    "mfu": 41.25,
    "memory_gib": 1.5,
    "data_wait": 0.25,
    "step_time": 0.5,
    "tokens_seen": 4096,
}


@pytest.fixture
def run(tmp_path):
    """run({step: values}, steps_done=...): one process's life."""

    def run(logged, config=PLAIN, *, writes=True, steps_done=0):
        metrics = MetricsWriter(config, tmp_path, RECIPE, writes=writes, steps_done=steps_done)
        for step, values in logged.items():
            metrics.log(step, values)
        metrics.close()
        return tmp_path

    return run


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="titan_lite")
    return caplog


def entries(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# The line


def test_the_line_names_what_there_is(run, said):
    run({3: VALUES, 1000: {"validation_loss": 2.5}})
    assert said.messages == [
        (
            "step    3  loss 6.9315  grad norm 1.235  lr 3.00e-04  tps 12,346  tflops 1.50  mfu"
            " 41.2%  memory 1.50 GiB  data wait 0.2%"
        ),
        "step 1000  validation loss 2.5000",
    ]


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"),
    [(True, "", True), (True, "1", False), (False, "", False)],
)
def test_colours_only_on_a_terminal(terminal, no_color, coloured, run, said, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    run({1: VALUES})
    (line,) = said.messages
    assert ("\033[32mloss 6.9315\033[0m" in line) is coloured
    assert line.count("\033[0m") == (4 if coloured else 0)


# metrics.jsonl


def test_the_file_has_one_object_a_line_with_the_values_under_their_names(run):
    folder = run({10: VALUES, 20: {"validation_loss": 2.5}})
    first, second = entries(folder)
    assert first.keys() == VALUES.keys() | {"step", "time"}
    assert {name: first[name] for name in VALUES} == VALUES
    assert (first["step"], second["step"]) == (10, 20)
    assert second.keys() == {"step", "validation_loss", "time"}
    assert 0 <= first["time"] <= second["time"]


def test_a_line_is_on_disk_when_it_is_logged(tmp_path):
    metrics = MetricsWriter(PLAIN, tmp_path, RECIPE, writes=True, steps_done=0)
    metrics.log(1, {"loss": 2.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["loss"] == 2.0
    metrics.close()


def test_a_number_that_json_does_not_know_is_null(run):
    folder = run({1: {"loss": math.nan, "lr": 0.5}})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    entry = json.loads((folder / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (entry["loss"], entry["lr"]) == (None, 0.5)


def test_a_rank_that_does_not_write_leaves_no_file(run, said):
    folder = run({1: VALUES}, Metrics(enable_tensorboard=True), writes=False)
    assert list(folder.iterdir()) == []
    assert len(said.messages) == 1  # its logger decides whether it is shown


# Its reader


def test_a_resumed_run_goes_on_in_the_same_file_and_what_it_repeats_counts(run):
    run({step: {"loss": float(step), "tps": 1.0} for step in (10, 20, 30, 40)})
    folder = run({30: {"loss": 3.5}, 50: {"loss": 5.5}}, steps_done=20)
    assert entries(folder)[4] == {"resumed_from": 20}
    found = read_metrics(folder / "metrics.jsonl")
    assert {step: values["loss"] for step, values in found.items()} == {
        10: 10.0,
        20: 20.0,
        30: 3.5,
        50: 5.5,
    }
    assert "tps" in found[20]
    assert "tps" not in found[30]  # nothing of the run that was not gone on from


@pytest.mark.parametrize("line", [b"\xff\xfe", b"5", b'{"step"'])
def test_a_line_that_is_no_entry_is_left_out(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + line + b'\n{"step": 2, "loss": 1.0}\n' + line)
    assert list(read_metrics(path)) == [1, 2]
    MetricsWriter(PLAIN, tmp_path, {}, writes=True, steps_done=2).close()
    assert list(read_metrics(path)) == [1, 2]
    assert path.read_bytes().endswith(b'\n{"resumed_from": 2}\n')


def test_a_full_disk_costs_figures_and_not_the_run(tmp_path, said):
    metrics = MetricsWriter(PLAIN, tmp_path, {}, writes=True, steps_done=0)
    metrics.file.close()
    metrics.file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    for step in (1, 2):
        metrics.log(step, VALUES)
    metrics.close()
    assert said.text.count("METRICS ARE LOST, the run goes on") == 1


def test_a_run_from_the_beginning_in_the_folder_of_another_replaces_it(run):
    run({step: {"loss": float(step), "tps": 1.0} for step in (10, 20)})
    folder = run({10: {"loss": 0.5}})
    found = read_metrics(folder / "metrics.jsonl")
    assert found.keys() == {10}
    assert "tps" not in found[10]


# TensorBoard


def fill_disk_of(tensorboard):
    """Every later write of TensorBoard's thread fails."""
    writer = tensorboard.file_writer.event_writer._async_writer
    writer._writer._writer = open("/dev/full", "wb")  # noqa: SIM115


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("step", [0, 1])
def test_a_full_disk_costs_figures_of_tensorboard_and_not_the_run(step, tmp_path, said):
    """At the start, and when it fills later: metrics.jsonl, on another disk, has everything."""
    finished = []
    if step == 0:
        (tmp_path / "tb").write_text("no folder")
    metrics = MetricsWriter(Metrics(), tmp_path, {}, writes=True, steps_done=0)
    if step:
        fill_disk_of(metrics.tensorboard)
    metrics.wandb = types.SimpleNamespace(
        log=finished.append, finish=lambda: finished.append("end")
    )
    for number in (1, 2):
        metrics.log(number, VALUES)
    metrics.close()
    assert said.text.count("METRICS ARE LOST, the run goes on") == 1
    assert metrics.tensorboard is None
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [1, 2]
    assert finished[-1] == "end"
    assert metrics.file.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_at_the_end_leaves_the_other_files_closed(tmp_path, said):
    metrics = MetricsWriter(Metrics(), tmp_path, {}, writes=True, steps_done=0)
    fill_disk_of(metrics.tensorboard)
    metrics.tensorboard.add_scalar("pending", 1.0, 1)
    metrics.close()
    assert said.text.count("METRICS ARE LOST") == 1
    assert metrics.file.closed


def scalars(folder):
    accumulator = EventAccumulator(str(folder / "tb"))
    accumulator.Reload()
    return {
        name: {event.step: event.value for event in accumulator.Scalars(name)}
        for name in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_the_same_names_and_values(run):
    folder = run({10: VALUES, 20: {"loss": 2.5}}, Metrics())
    found = scalars(folder)
    assert found.keys() == VALUES.keys()
    assert found["loss"] == pytest.approx({10: VALUES["loss"], 20: 2.5})
    assert found["tokens_seen"] == {10: 4096}


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(run):
    folder = run({10: {"loss": 1.0}, 20: {"loss": 2.0}, 30: {"loss": 3.0}}, Metrics())
    (events,) = (folder / "tb").iterdir()
    events.rename(
        events.with_name("events.out.tfevents.0")
    )  # earlier by name, whatever the clock says
    run({30: {"loss": 3.5}}, Metrics(), steps_done=10)
    assert scalars(folder)["loss"] == {10: 1.0, 30: 3.5}


def test_tensorboard_has_the_recipe_as_text(run):
    folder = run({10: VALUES}, Metrics())
    accumulator = EventAccumulator(str(folder / "tb"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("recipe/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert '    parallelism.fsdp_keep_gathered = ["norm", "output"]' in text.splitlines()
    assert "    optimizer.lr = 0.0003" in text.splitlines()
    assert '    data.sources = [{"dataset": "stdlib", "path": "a.jsonl",' in text
    assert [path.is_file() for path in (folder / "tb").iterdir()] == [
        True
    ]  # one run, and none beside it


# Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """A module like wandb, which keeps what it is told."""
    module = types.ModuleType("wandb")
    module.calls, module.logged, module.finished = [], [], 0

    class Run:
        id = property(lambda run: module.id)

        def define_metric(self, name, step_metric):
            module.axis = (name, step_metric)

        def log(self, values):
            module.logged.append(values)

        def finish(self):
            module.finished += 1

    def init(**arguments):
        module.calls.append(arguments)
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_has_the_same_names_and_a_resumed_run_is_the_same_one(
    run, wandb, tmp_path
):
    config = Metrics(enable_tensorboard=False, enable_wandb=True)
    run({10: VALUES, 20: {"validation_loss": 2.5}}, config)
    run({20: {"loss": 2.0}}, config, steps_done=10)
    assert wandb.logged == [
        {"step": 10, **VALUES},
        {"step": 20, "validation_loss": 2.5},
        {"step": 20, "loss": 2.0},
    ]
    assert (wandb.axis, wandb.finished) == (("*", "step"), 2)
    first, second = wandb.calls
    assert first == second
    assert (first["name"], first["resume"]) == (tmp_path.name, "allow")
    assert json.loads(json.dumps(first["config"])) == first["config"]
    assert (first["config"]["optimizer.lr"], first["config"]["data.sources"][0]["path"]) == (
        3e-4,
        "a.jsonl",
    )
    assert len(first["id"]) == 32


@pytest.mark.parametrize(
    ("name", "kind"),
    [("CommError", MachineError), ("TimeoutError", MachineError), ("UsageError", ConfigError)],
)
def test_weights_and_biases_that_cannot_be_used_is_one_line(name, kind, wandb, run, monkeypatch):
    """A server that is away is no mistake of the recipe; a missing account is."""

    def fail(**_):
        raise type(name, (Exception,), {})("Run initialization has failed")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(kind) as error:
        run({10: VALUES}, Metrics(enable_tensorboard=False, enable_wandb=True))
    (line,) = str(error.value).splitlines()
    assert f"({name}: Run initialization has failed); use WANDB_MODE=offline" in line


def test_weights_and_biases_only_where_asked_for_and_on_one_rank(run, wandb):
    run({10: VALUES})
    run({10: VALUES}, Metrics(enable_tensorboard=False, enable_wandb=True), writes=False)
    assert wandb.calls == []


# Memory


def test_peak_memory_of_this_process_is_in_gib():
    before = peak_memory_gib(torch.device("cpu"))
    held = torch.ones(2**28 // 4)  # 256 MiB
    after = peak_memory_gib(torch.device("cpu"))
    assert held.sum() == 2**26
    assert 0.02 < before <= after < 64
    assert after >= 0.25


def test_lines_that_another_group_was_to_write_are_written_once(tmp_path):
    """Of a step that has a line of training and one of validation, the first group wrote one; the
    beginning of the other one is there.
    """
    first = MetricsWriter(PLAIN, tmp_path, RECIPE, writes=True, steps_done=0)
    other = MetricsWriter(PLAIN, tmp_path, RECIPE, writes=False, steps_done=0)
    for writer in (first, other):
        for step in (1, 2):
            writer.log(step, {**VALUES, "loss": float(step)})
    first.close()
    other.lines[0]["seconds_waiting"] = 1.0  # which the first group has not
    other.write(2, {"seconds_saving": 1.0})  # of this group alone
    other.log(2, {"validation_loss": math.nan})
    with open(other.path, "a") as file:
        file.write('{"step": 2, "valid')
    assert [line["step"] for line in other.lines] == [2, 2]

    next_one = MetricsWriter(PLAIN, tmp_path, RECIPE, writes=True, steps_done=2)
    next_one.lines = other.lines
    assert next_one.write_missing() == [2]
    assert next_one.missing() == []
    assert next_one.write_missing() == []
    next_one.close()
    metrics = read_metrics(next_one.path)
    assert metrics[2]["validation_loss"] is None
    assert [metrics[step]["loss"] for step in metrics] == [1.0, 2.0]
    assert next_one.path.read_text().count('"loss"') == 2
