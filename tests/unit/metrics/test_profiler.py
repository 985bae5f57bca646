"""Traces and memory snapshots: written at their steps, readable, and nowhere else."""

import json
import os
import re

import pytest
import torch

from titan_lite.config import Profiling
from titan_lite.metrics.profiler import build_profiler, set_flight_recorder

TRACES = Profiling(enable_profiling=True, profile_freq=3)
SNAPSHOTS = Profiling(enable_memory_snapshot=True, profile_freq=3)


def train(config, folder, steps, *, steps_done=0, rank=0, fails_in=None, stopped_after=None):
    ahead = range(steps_done + 1, steps + 1)
    with build_profiler(config, folder, rank, ahead) as profiler:
        for step in ahead[:stopped_after]:
            with torch.profiler.record_function(f"work of step {step}"):
                torch.ones(8).sum()
            if step == fails_in:
                raise torch.OutOfMemoryError(f"in step {step}")
            profiler.step()


def traced(folder):
    """{folder of a trace: the steps it shows}"""
    result = {}
    for path in sorted(folder.rglob("*.json")):
        names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
        assert path.name == "rank-2.json"
        result[str(path.parent.relative_to(folder))] = sorted(
            int(match[1]) for name in names if (match := re.fullmatch(r"work of step (\d+)", name))
        )
    return result


def test_a_run_that_is_stopped_before_the_step_to_trace_writes_nothing(tmp_path):
    train(TRACES, tmp_path, 7, rank=2, stopped_after=2)
    assert traced(tmp_path) == {}


@pytest.mark.parametrize(
    ("freq", "steps_done", "steps", "expected"),
    [
        (10, 0, 3, [3]),
        (10, 5, 12, [10]),
        (2, 0, 5, [2, 4]),
        (2, 4, 5, [5]),
        (3, 1, 7, [3, 6]),
    ],
)
def test_every_so_many_steps_one_is_traced_or_else_the_last(
    freq, steps_done, steps, expected, tmp_path
):
    options = Profiling(enable_profiling=True, profile_freq=freq)
    train(options, tmp_path, steps, steps_done=steps_done, rank=2)
    assert traced(tmp_path) == {f"profile_traces/trace-step-{n}": [n] for n in expected}


def test_turned_off_it_writes_nothing(tmp_path):
    train(Profiling(profile_freq=3), tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cuda_memory(monkeypatch):
    """CUDA's recorder of memory, replaced; returns the calls of it."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **kwargs: calls.append("record")
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    return calls


def test_a_memory_snapshot_every_so_many_steps_of_the_run(tmp_path, cuda_memory):
    train(SNAPSHOTS, tmp_path, 7, steps_done=2, rank=1)
    folder = tmp_path / "memory_snapshots"
    assert cuda_memory == [
        "record",
        *(str(folder / f"memory-step-{step}" / "rank-1.pickle") for step in (3, 6)),
    ]
    assert (folder / "memory-step-6").is_dir()


def test_a_memory_snapshot_when_memory_is_out(tmp_path, cuda_memory):
    with pytest.raises(torch.OutOfMemoryError, match="in step 2"):
        train(SNAPSHOTS, tmp_path, 7, fails_in=2)
    assert len(cuda_memory) == 2
    assert cuda_memory[1].startswith(str(tmp_path / "memory_snapshots"))


def test_running_out_of_memory_is_passed_on_without_a_snapshot_nobody_asked_for(
    tmp_path, cuda_memory
):
    with pytest.raises(torch.OutOfMemoryError, match="in step 2"):
        train(Profiling(profile_freq=3), tmp_path, 7, fails_in=2)
    assert cuda_memory == []


@pytest.mark.parametrize("size", [2000, 0])
def test_flight_recorder(size, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    set_flight_recorder(size, tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == str(size)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == ("1" if size else "0")
    assert (tmp_path / "flight_recorder").is_dir() == bool(size)
    if size:  # the rank is appended
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder/rank-"
