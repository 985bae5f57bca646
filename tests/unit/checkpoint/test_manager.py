"""Steps on disk: whole or absent, told apart to the bit, and read by DCP's own programs.

A world of one; of two at the end.
"""

import errno
import io
import logging
import os
import pickle
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import flip
from ranks import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_lite import manifest, progress
from titan_lite.checkpoint import manager as checkpoint
from titan_lite.checkpoint.host_copies import HostCopies
from titan_lite.checkpoint.manager import Checkpointer, CheckpointError
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState
from titan_lite.checkpoint.tensor_files import StepPlanner, StepWriter, read_metadata
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.logging import logger
from titan_lite.manifest import CorruptFileError

pytestmark = pytest.mark.usefixtures("world_of_one")

MODES = ("disabled", "async", "async_with_pinned_mem")
FILES = (".metadata", "__0_0.distcp", "manifest.json", "state.json")


@pytest.fixture
def log():
    """The lines of the run's log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def of(folder, **settings):
    return Checkpointer(Checkpoint(enable=True, **settings), folder)


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(8, 6, generator=generator)
    return {
        "w": weight,
        "half": weight.t().bfloat16()[1:],  # not contiguous
        "optimizer.state.w.exp_avg": weight * 2,
        "optimizer.state.w.step": torch.tensor(float(step)),
    }


def save(folder, *steps, **settings):
    steps_of = of(folder, **settings)
    for step in steps:
        steps_of.save(step, tensors(step), RunState())
    steps_of.wait()
    return steps_of


def loaded(steps_of, step):
    found = {name: torch.full_like(tensor, -1) for name, tensor in tensors(0).items()}
    steps_of.load(step, found)
    return found


def assert_step(steps_of, step):
    found = loaded(steps_of, step)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(step).items())
    assert steps_of.read_state(step).step == step


def names(folder):
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


# Saving


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_loaded_as_it_was_saved(mode, tmp_path, log):
    steps_of = save(tmp_path, 1, 2, async_mode=mode)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert sorted(path.name for path in (tmp_path / "checkpoint/step-2").iterdir()) == sorted(FILES)
    assert steps_of.verified_step() == 2
    for step in (1, 2):
        assert_step(steps_of, step)
    assert f"checkpoint written to {tmp_path}/checkpoint/step-2" in log
    assert any("nothing is pinned" in line for line in log) == (mode == "async_with_pinned_mem")


@pytest.mark.parametrize("mode", MODES)
def test_writing_hashing_and_loading_are_progress(mode, tmp_path, monkeypatch):
    beats = []
    monkeypatch.setattr(progress, "beat", lambda: beats.append(phase))
    steps_of = Checkpointer(Checkpoint(enable=True, async_mode=mode), tmp_path)
    phase = "save"
    steps_of.save(1, tensors(1), RunState())
    steps_of.wait()
    phase = "verify"
    assert steps_of.verified_step() == 1
    phase = "load"
    loaded(steps_of, 1)
    assert beats.count("save") > len(tensors(1))  # each tensor, and the file's hash
    assert beats.count("verify") >= len(FILES) - 1
    assert beats.count("load") >= len(tensors(1))


@pytest.mark.parametrize("mode", MODES[1:])
def test_what_the_optimizer_does_meanwhile_is_not_in_a_step(mode, tmp_path, monkeypatch):
    begin, write = threading.Event(), StepWriter.write_data
    monkeypatch.setattr(StepWriter, "write_data", lambda *args: begin.wait(300) and write(*args))
    steps_of, live = of(tmp_path, async_mode=mode), tensors(1)
    steps_of.save(1, live, RunState())
    for tensor in live.values():
        tensor.zero_()
    steps_of.poll()
    assert steps_of.background_save is not None
    begin.set()
    steps_of.wait()
    assert steps_of.background_save is None
    assert_step(steps_of, 1)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_save_asked_for_while_one_runs_waits_for_it_and_takes_its_memory(
    mode, tmp_path, monkeypatch
):
    begin, write = threading.Event(), StepWriter.write_data
    monkeypatch.setattr(StepWriter, "write_data", lambda *args: begin.wait(300) and write(*args))
    steps_of, live = of(tmp_path, async_mode=mode), tensors(1)
    steps_of.save(1, live, RunState())
    memory = {name: copy.data_ptr() for name, copy in steps_of.host_copies.copies.items()}
    for name, tensor in tensors(2).items():
        live[name].copy_(tensor)
    timer = threading.Timer(0.2, begin.set)
    timer.start()
    steps_of.save(2, live, RunState())
    assert begin.is_set()
    for tensor in live.values():
        tensor.zero_()
    steps_of.wait()
    kept = {name: copy.data_ptr() for name, copy in steps_of.host_copies.copies.items()}
    assert kept == memory
    for step in (1, 2):
        assert_step(steps_of, step)


@pytest.mark.parametrize("mode", MODES)
def test_the_model_alone_where_the_last_step_is_asked_for_so(mode, tmp_path):
    steps_of = of(tmp_path, async_mode=mode, last_save_model_only=True)
    steps_of.save(1, tensors(1), RunState())
    steps_of.save(2, tensors(2), RunState(), last=True)
    steps_of.wait()
    assert_step(steps_of, 1)
    model = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors(2).items()
        if not name.startswith("optimizer.")
    }
    steps_of.load(2, model)
    assert torch.equal(model["w"], tensors(2)["w"])
    with pytest.raises(
        ConfigError,
        match=r"step-2 cannot be loaded: Missing key in checkpoint state_dict: optimizer",
    ):
        loaded(steps_of, 2)


def test_a_step_that_is_there_is_not_overwritten(tmp_path):
    steps_of = save(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoint").rglob("*")}
    with pytest.raises(
        CheckpointError,
        match=r"step 1 was not saved in .*step-1 exists, and no checkpoint is overwritten",
    ):
        steps_of.save(1, tensors(3), RunState())
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoint").rglob("*")
    } == before
    assert_step(steps_of, 1)


@pytest.mark.parametrize("mode", MODES[:2])
def test_nothing_is_written_where_there_is_no_room(mode, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    save(tmp_path, 1, async_mode=mode)
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors(2).values())
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(size - 1))
    monkeypatch.setattr(StepWriter, "write_data", lambda *args: pytest.fail("it was begun"))
    with pytest.raises(
        CheckpointError, match=r"step 2 was not saved.*it needs 0.000 GiB, and 0.000 GiB are free"
    ):
        save(tmp_path, 2, async_mode=mode)
    assert names(tmp_path) == ["step-1"]
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(size))
    assert save(tmp_path, 2, async_mode=mode).steps() == [1, 2]


PHASES = {
    "data": (StepPlanner, "resolve_data"),
    "hashes": (manifest, "digest"),
    "manifest": (manifest, "write"),
    "folder": (manifest, "sync"),
    "rename": (Path, "rename"),
}


def save_and_poll(steps_of):
    steps_of.save(2, tensors(2), RunState())
    while not steps_of.background_save.done():
        time.sleep(0.01)
    steps_of.poll()  # at the next step's end


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", MODES[:2])
def test_a_save_that_fails_leaves_the_one_before_and_by_recipe_stops_or_goes_on(
    phase, mode, tmp_path, monkeypatch, log
):
    def broken(*args, **named):
        raise OSError(28, "No space left on device")

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(*PHASES[phase], broken)
        steps_of = of(tmp_path, async_mode=mode)
        with pytest.raises(
            CheckpointError,
            match=r"step 2 was not saved in .*rank 0: OSError: \[Errno 28\] No space left",
        ):
            save_and_poll(steps_of)
        steps_of.wait()  # told once
        assert names(tmp_path) == ["step-1"]
        goes_on = of(tmp_path, async_mode=mode, on_failure="continue")
        goes_on.save(2, tensors(2), RunState())
        goes_on.wait()
        assert any(
            line.startswith("NOTHING WAS SAVED: step 2") and line.endswith('"continue")')
            for line in log
        )
        assert (goes_on.last_attempted, goes_on.newest_saved) == (2, 0)
    assert_step(steps_of, 1)
    steps_of = save(tmp_path, 3)
    assert steps_of.verified_step() == steps_of.newest_saved == 3


@pytest.mark.parametrize("then", ["next save", "end of the run"])
def test_a_failure_in_the_background_is_not_lost(then, tmp_path, monkeypatch):
    monkeypatch.setattr(StepWriter, "write_data", lambda *args: 1 / 0)
    steps_of = of(tmp_path, async_mode="async")
    steps_of.save(1, tensors(1), RunState())
    with pytest.raises(CheckpointError, match=r"step 1 was not saved.*ZeroDivisionError"):
        steps_of.wait() if then == "end of the run" else steps_of.save(2, tensors(2), RunState())


def test_a_file_that_rank_0_does_not_see_is_told(tmp_path, monkeypatch):
    write = manifest.write
    monkeypatch.setattr(
        manifest,
        "write",
        lambda folder, *args: ((folder / "__0_0.distcp").unlink(), write(folder, *args)),
    )
    with pytest.raises(
        CheckpointError,
        match=r"rank 0: __0_0.distcp is missing, seen from rank 0; use a .* on a file",
    ):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_old_steps_go_whole_and_invalid_ones_do_not_count(tmp_path, monkeypatch, log):
    save(tmp_path, 1, 2, 3, keep_latest_k=2)
    assert names(tmp_path) == ["step-2", "step-3"]
    (tmp_path / "checkpoint/step-3/state.json").unlink()
    save(tmp_path, 4, keep_latest_k=2)
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint.shutil,
            "rmtree",
            lambda path, **named: (_ for _ in ()).throw(OSError(5, "Input/output error")),
        )
        save(tmp_path, 5, keep_latest_k=2)
        assert names(tmp_path) == ["deleting-step-2", "step-3", "step-4", "step-5"]
        save(tmp_path, 6, keep_latest_k=0)
    assert "an old checkpoint was not deleted: [Errno 5] Input/output error" in log
    assert any(
        "deleting-step-2, left by a killed run, was not removed: [Errno 5]" in line for line in log
    )
    save(tmp_path, 7, keep_latest_k=0)
    assert names(tmp_path) == ["step-3", "step-4", "step-5", "step-6", "step-7"]
    assert of(tmp_path).verified_step() == 7


def test_leftovers_of_a_run_that_was_killed_are_removed_at_start_and_at_a_save(tmp_path, log):
    steps_of = save(tmp_path, 1)
    of_user = {"unfinished-step-by-step-notes", "deleting-step-3.old", "my-unfinished-step-7"}
    for name in of_user:
        (tmp_path / "checkpoint" / name).mkdir()
    for begin in (steps_of.lock, lambda: save(tmp_path, 2)):
        for name in ("unfinished-step-7", "deleting-step-3"):
            (tmp_path / "checkpoint" / name / "inner").mkdir(parents=True)
        begin()
        assert not {"unfinished-step-7", "deleting-step-3"} & set(names(tmp_path))
        assert of_user < set(names(tmp_path))
    assert sum("unfinished-step-7, left by a killed run" in line for line in log) == 2


# What is loaded, and what is not


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_named_and_the_one_before_is_taken(damage, name, tmp_path, log):
    steps_of = save(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "checkpoint/step-2" / name)
    assert steps_of.verified_step() == 1
    (line,) = [line for line in log if line.startswith("step-2 is not loaded: ")]
    assert name in line
    assert names(tmp_path) == ["invalid-step-2", "step-1"]
    assert_step(save(tmp_path, 2), 2)  # as the run comes to it again
    DAMAGES[damage](tmp_path / "checkpoint/step-2" / name)
    with pytest.raises(ConfigError, match=f"load_step = 2: the checkpoint is damaged: .*{name}"):
        of(tmp_path, load_step=2).verified_step()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_fails_sets_no_step_aside(number, name, tmp_path, monkeypatch):
    """The newest step is whole: a start after the failure goes on from it."""
    steps_of = save(tmp_path, 1, 2)
    opened = io.open

    def fail(path, *arguments, **more):
        if isinstance(path, str | Path) and Path(path).match(f"step-2/{name}"):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", fail)
        patch.setattr("builtins.open", fail)
        with pytest.raises(MachineError) as error:
            steps_of.verified_step()
    assert f"{tmp_path}/checkpoint/step-2/{name} cannot be read: " in str(error.value)
    assert os.strerror(number) in str(error.value)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert steps_of.verified_step() == 2


def test_a_tensor_is_loaded_in_the_dtype_that_it_has_now(tmp_path):
    """As moments are, of which a resumed run may change optimizer.state_dtype."""
    steps_of = save(tmp_path, 1)
    dtypes = {"half": torch.float32, "optimizer.state.w.exp_avg": torch.bfloat16}
    found = {name: torch.zeros_like(tensors(0)[name], dtype=each) for name, each in dtypes.items()}
    steps_of.load(1, found)
    for name, dtype in dtypes.items():
        assert torch.equal(found[name], tensors(1)[name].to(dtype))


def test_a_disk_that_fails_while_a_step_is_loaded_is_no_damage(tmp_path, monkeypatch):
    steps_of = save(tmp_path, 1)
    opened = Path.open

    def fail(path, *arguments, **more):
        if path.suffix == ".distcp":
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(MachineError, match=r"step-1/__0_0\.distcp cannot be read: .*Stale file"):
        loaded(steps_of, 1)


def test_a_foreign_file_costs_no_step(tmp_path):
    steps_of = save(tmp_path, 1, 2)
    step = tmp_path / "checkpoint/step-2"
    (step / ".nfs0000000002").write_bytes(b"x")
    (step / "exported").mkdir()
    assert steps_of.step_to_load() == 2
    assert steps_of.verified_step() == 2
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_step_under_another_steps_name_is_named(tmp_path):
    steps_of = save(tmp_path, 1)
    (tmp_path / "checkpoint/step-1").rename(tmp_path / "checkpoint/step-2")
    assert steps_of.fault(2) == "manifest.json is of step 1"


def test_a_folder_that_cannot_be_read_is_not_taken_for_one_without_steps(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(ConfigError, match=r"checkpoint cannot be read: Not a directory"):
        of(tmp_path).step_to_load()


def test_the_command_that_named_a_step_goes_on_from_a_newer_one_of_its_own(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    with pytest.raises(ConfigError, match="has newer checkpoints, up to 2"):
        of(tmp_path, load_step=1).step_to_load()
    steps_of = of(tmp_path)
    steps_of.save(3, tensors(3), RunState(RunIdentity(recipe={"checkpoint": {"load_step": 1}})))
    assert of(tmp_path, load_step=1).step_to_load() == 3


def test_which_step_is_loaded(tmp_path):
    assert of(tmp_path).step_to_load() is None
    assert Checkpointer(Checkpoint(), tmp_path).step_to_load() is None
    with pytest.raises(
        ConfigError,
        match=r"must_resume = true: there is no checkpoint in .*checkpoint; use false to start a new run",
    ):
        of(tmp_path, must_resume=True).step_to_load()
    with pytest.raises(
        ConfigError,
        match=r"load_step = 4: there is no such checkpoint in .*checkpoint; it has none; use -1",
    ):
        of(tmp_path, load_step=4).verified_step()
    save(tmp_path, 2, 10)
    assert of(tmp_path, must_resume=True).step_to_load() == 10  # and not 2, which sorts after it
    assert of(tmp_path, load_step=10).verified_step() == 10
    with pytest.raises(
        ConfigError,
        match=r"load_step = 4: there is no such checkpoint in .*; it has 2, 10; use -1 for the newest",
    ):
        of(tmp_path, load_step=4).step_to_load()
    with pytest.raises(
        ConfigError,
        match=r"load_step = 2: .* has newer checkpoints, up to 10, which this run would save",
    ):
        of(tmp_path, load_step=2).step_to_load()
    (tmp_path / "checkpoint/step-10/manifest.json").unlink()
    with pytest.raises(
        ConfigError,
        match=r"load_step = 10: the checkpoint is damaged: manifest.json is missing; it has 2; use -1",
    ):
        of(tmp_path, load_step=10).step_to_load()
    assert of(tmp_path, load_step=2).step_to_load() == 2
    flip(tmp_path / "checkpoint/step-2/__0_0.distcp")
    for must_resume in (True, False):  # never a new run in silence
        with pytest.raises(
            ConfigError,
            match=r"all checkpoints in .* are damaged \(step-2: __0_0.*step-10: manifest.*move them away",
        ):
            of(tmp_path, must_resume=must_resume).verified_step()


class Payload:
    def __reduce__(self):
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no pickle", "cannot be read: UnpicklingError"),
        (b"", "cannot be read: EOFError"),
        (pickle.dumps({"a": 1}), "cannot be read: it is a dict"),
        (pickle.dumps(Payload()), "asks for posix.system, which DCP does not write there"),
    ],
)
def test_metadata_that_dcp_does_not_write_are_named(content, words, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"^\.metadata {words}"):
        read_metadata(tmp_path)


# What reads a step beside this project


def test_dcp_makes_a_file_of_torch_save_of_a_step_with_the_sections_of_torchtitan(tmp_path):
    steps_of = of(tmp_path)
    settings = {  # equal ones, which are pickled once, and 1 == 1.0 == True, which are not equal
        "w.betas": (0.9, 0.95),
        "v.betas": (0.9, 0.95),
        "w.lr": 1,
        "v.lr": 1.0,
        "u.lr": 1.0,
        "w.decoupled": True,
    }
    values = {f"optimizer.param_groups.{name}": value for name, value in settings.items()}
    values["train_state.step"] = 1
    steps_of.save(1, {**tensors(1), **values}, RunState())
    assert torch.serialization.get_crc32_options()  # as others have it
    assert_step(steps_of, 1)
    dcp_to_torch_save(tmp_path / "checkpoint/step-1", tmp_path / "step.pt")
    found = torch.load(tmp_path / "step.pt", weights_only=False)
    assert sorted(found) == ["half", "optimizer", "train_state", "w"]
    assert torch.equal(found["w"], tensors(1)["w"])
    assert torch.equal(found["optimizer"]["state.w.exp_avg"], tensors(1)["w"] * 2)
    for name, value in settings.items():
        saved = found["optimizer"][f"param_groups.{name}"]
        assert repr(saved) == repr(value)
    assert found["train_state"]["step"] == 1
    assert steps_of.read_state(1).tensors == ("model", "optimizer")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("w", torch.zeros(8, 7), r"Size mismatch .*\[8, 6\].*\[8, 7\].* for w"),
        ("other", torch.zeros(1), r"Missing key in checkpoint state_dict: other\."),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, tensor, words, tmp_path):
    steps_of = save(tmp_path, 1)
    with pytest.raises(ConfigError, match=f"step-1 cannot be loaded: {words}$"):
        steps_of.load(1, {**tensors(1), name: tensor})


# Several processes


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(
        ConfigError,
        match=(
            r'checkpoint.folder = "checkpoint": .*/checkpoint: File exists; use a job.dump_folder'
        ),
    ):
        of(tmp_path).lock()


def two_ranks(folder, mode):
    """Saves of sharded tensors, one of which fails on rank 1, and a file altered; returns what was
    told and is there.
    """
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(40.0).reshape(5, 8)
    live = {
        "a": distribute_tensor(whole, mesh, [Shard(0)]),
        "b": distribute_tensor(whole, mesh, [Replicate()]),
        "optimizer.state.a.step": torch.tensor(1.0),
    }
    steps_of = of(folder, async_mode=mode)
    begun, begin = [], Checkpointer._begin
    Checkpointer._begin = lambda self, step, needed: (
        begun.append(needed),
        begin(self, step, needed),
    )
    steps_of.save(1, live, RunState())
    steps_of.wait()

    resolve = StepPlanner.resolve_data
    if rank == 1:
        StepPlanner.resolve_data = lambda *args: (_ for _ in ()).throw(
            OSError(5, "Input/output error")
        )
    told = ""
    try:
        steps_of.save(2, live, RunState())
        while steps_of.background_save is not None:
            steps_of.poll()  # one raises where all do
    except CheckpointError as error:
        told = str(error)
    StepPlanner.resolve_data = resolve
    no_memory = ""
    if mode == "async":
        update = HostCopies.update
        if rank == 1:
            HostCopies.update = lambda *args: torch.empty(2**60)
        try:
            steps_of.save(2, live, RunState())
            steps_of.wait()
        except CheckpointError as error:
            no_memory = str(error)
        HostCopies.update = update
    steps_of.save(3, live, RunState())
    live["a"].to_local().zero_()
    steps_of.wait()
    steps_of.load(3, live)
    same = torch.equal(live["a"].full_tensor(), whole)

    if rank == 1:
        flip(folder / "checkpoint/step-3/__1_0.distcp")
    dist.barrier()
    found = steps_of.verified_step()
    dist.barrier()
    return begun[:1], told, no_memory, same, found, names(folder)


@pytest.mark.parametrize("mode", ["async", pytest.param("disabled", marks=pytest.mark.release)])
def test_ranks_agree_on_what_failed_and_on_what_is_whole(mode, tmp_path):
    for rank, result in enumerate(run_ranks(2, two_ranks, tmp_path, mode)):
        needed, told, no_memory, same, found, there = result
        assert needed == [[160 + 160 + 4], []][rank]
        assert "step 2 was not saved" in told
        assert "rank 1: OSError: [Errno 5] Input/output error" in told
        assert "rank 0" not in told
        if mode == "async":
            assert "step 2 was not saved" in no_memory
            assert "rank 1: RuntimeError" in no_memory
            assert "rank 0" not in no_memory
        assert same
        assert found == 1
        assert there == ["invalid-step-3", "step-1"]
    assert of(tmp_path).read_state(1).tensors == ("model", "optimizer")


def ranks_with_folders(folders):
    rank = dist.get_rank()
    checkpoint.SECONDS_TO_APPEAR = 0.5
    steps_of = of(folders[rank])
    steps_of.lock_on_first()
    told = ""
    try:
        steps_of.check_shared()
    except ConfigError as error:
        told = str(error)
    dist.barrier()
    return told, sorted(path.name for path in folders[rank].rglob("*") if path.is_file())


def test_a_folder_that_the_nodes_do_not_share_is_refused_before_anything_is_trained(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "checkpoint").mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    results = run_ranks(2, ranks_with_folders, [here, there])
    for told, _ in results:
        folder = there / "checkpoint"
        assert told.startswith(f'checkpoint.folder = "checkpoint": {folder} of rank 1 on ')
        assert "is not that of rank 0; use a job.dump_folder on a file system that all" in told
    assert [files for _, files in results] == [["lock", "lock"], []]
    shared = run_ranks(2, ranks_with_folders, [here, tmp_path / "link"])
    assert shared == [("", ["lock", "lock"])] * 2


@pytest.mark.parametrize(
    ("newest", "tried", "enable", "words"),
    [
        (5, 5, True, "saving, then "),
        (7, 7, True, ""),
        (5, 7, True, "the newest checkpoint is step-5; "),
        (5, 5, False, "checkpoint.enable = false, so nothing is saved; "),
    ],
)
def test_a_run_that_stops_says_what_becomes_of_its_step(newest, tried, enable, words, tmp_path):
    checkpointer = checkpoint.Checkpointer(Checkpoint(enable=enable), tmp_path)
    checkpointer.newest_saved, checkpointer.last_attempted = newest, tried
    assert checkpointer.before_exit(7) == words


def test_nothing_is_saved_in_a_folder_that_was_removed_or_is_another_runs(tmp_path):
    steps_of = of(tmp_path)
    steps_of.lock()
    steps_of.folder_lock.path.unlink()
    (tmp_path / "checkpoint/other").touch()
    (tmp_path / "checkpoint/other").rename(steps_of.folder_lock.path)
    with pytest.raises(CheckpointError, match="the folder or its lock was removed during the run"):
        steps_of.save(1, tensors(1), RunState())
    assert names(tmp_path) == ["lock"]


def test_a_copy_removes_its_own_leftovers_alone_while_another_may_write(tmp_path):
    folder = tmp_path / "checkpoint"
    names = ("unfinished-step-3", "unfinished-step-3-copy-1", "unfinished-step-4-copy-2")
    for name in names:
        (folder / name).mkdir(parents=True)
    second = Checkpointer(Checkpoint(enable=True), tmp_path, run="run", own_suffix="-copy-1")
    second._remove_leftovers(of_all_groups=False)
    assert sorted(path.name for path in folder.iterdir()) == [names[0], names[2]]
    first = Checkpointer(Checkpoint(enable=True), tmp_path, run="run")
    first.lock()  # it comes first, so no other copy is there
    assert [path.name for path in folder.iterdir()] == ["lock"]


def of_copy(folder, number, **keys):
    suffix = f"-copy-{number}" if number else ""
    return Checkpointer(Checkpoint(enable=True, **keys), folder, run="run", own_suffix=suffix)


def test_a_damaged_step_newer_than_the_living_is_set_aside_by_the_first_group(tmp_path, log):
    first, second = of_copy(tmp_path, 0), of_copy(tmp_path, 1)
    first.save(2, tensors(2), RunState())
    for step in (1, 3):  # without a manifest
        (first.path_of(step)).mkdir()
    second.is_alone = False
    assert second.newest() == 2
    assert second.verified_step() == 2
    assert second.path_of(3).is_dir()
    first.set_aside_after(2)
    assert names(tmp_path) == ["invalid-step-3", "step-1", "step-2"]
    (line,) = [line for line in log if "; set aside as invalid-step-3" in line]
    assert line.startswith("step-3 is not loaded: ")


def test_a_step_that_another_copy_has_saved_meanwhile_is_saved(tmp_path, log):
    first, second = of_copy(tmp_path, 0), of_copy(tmp_path, 1)
    first.save(2, tensors(2), RunState())
    second.save(2, tensors(2), RunState())
    assert second.newest_saved == 2
    assert "NOTHING WAS SAVED" not in "".join(log)
    assert names(tmp_path) == ["saving", "step-2"]


def test_a_step_that_another_copy_has_saved_damaged_is_not_saved(tmp_path):
    first, second = of_copy(tmp_path, 0), of_copy(tmp_path, 1)
    first.path_of(2).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="exists, and no checkpoint is overwritten"):
        second.save(2, tensors(2), RunState())
    assert not second.save_lock.is_held_by_another()


def test_others_know_of_a_save_while_it_runs(tmp_path, monkeypatch):
    first, second = of_copy(tmp_path, 0), of_copy(tmp_path, 1)
    first.folder.mkdir()
    seen = []
    publish = manifest.publish

    def look(*paths):
        second.save_lock.acquire()  # which changes nothing
        locks = (first.save_lock, second.save_lock)
        seen.extend(lock.is_held_by_another() for lock in locks)
        publish(*paths)

    monkeypatch.setattr(manifest, "publish", look)
    first.save(2, tensors(2), RunState())
    assert seen == [False, True]
    assert not second.save_lock.is_held_by_another()
