"""Steps on disk: whole or absent, told apart to the bit, and no code is run from them. A world of one; of two at the end."""

import json
import logging
import os
import pickle
import re
import threading
from collections import namedtuple
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_lite import manifest
from titan_lite.checkpoint import saving as checkpoint
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.saving import Checkpointer, CheckpointError
from titan_lite.config import Checkpoint, ConfigError
from titan_lite.logging import logger
from titan_lite.manifest import Damaged
from titan_lite.ranks import reduce_numbers

ROOT = Path(__file__).parents[3]
MODES = ("disabled", "async", "async_with_pinned_mem")
FILES = (".metadata", "__0_0.distcp", "manifest.json", "state.json")


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
        "model.w": weight,
        "model.half": weight.t().bfloat16()[1:],  # not contiguous
        "optimizer.w.exp_avg": weight * 2,
        "optimizer.w.step": torch.tensor(float(step)),
    }


def save(folder, *steps, **settings):
    steps_of = of(folder, **settings)
    for step in steps:
        steps_of.save(step, tensors(step), {"step": step})
    steps_of.wait()
    return steps_of


def loaded(steps_of, step):
    found = {name: torch.full_like(tensor, -1) for name, tensor in tensors(0).items()}
    steps_of.load(step, found)
    return found


def assert_step(steps_of, step):
    found = loaded(steps_of, step)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(step).items())
    assert steps_of.read_state(step)["step"] == step


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
def test_writing_hashing_and_loading_are_progress(mode, tmp_path):
    beats = []
    steps_of = Checkpointer(
        Checkpoint(enable=True, async_mode=mode), tmp_path, lambda: beats.append(phase)
    )
    phase = "save"
    steps_of.save(1, tensors(1), {"step": 1})
    steps_of.wait()
    phase = "verify"
    assert steps_of.verified_step() == 1
    phase = "load"
    loaded(steps_of, 1)
    assert beats.count("save") > len(tensors(1))  # each tensor, and the file's hash
    assert beats.count("verify") >= len(FILES) - 1
    assert beats.count("load") >= len(tensors(1))


def test_the_saving_thread_uses_its_ranks_gpu(tmp_path, monkeypatch):
    used = []
    steps_of = of(tmp_path)
    monkeypatch.setattr(steps_of, "_commit", lambda *args: used.append("written"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    steps_of._save(1, {}, {}, {})
    assert used == [3, "written"]


@pytest.mark.parametrize("mode", MODES[1:])
def test_what_the_optimizer_does_meanwhile_is_not_in_a_step(mode, tmp_path, monkeypatch):
    begin, write = threading.Event(), tensor_files.write
    monkeypatch.setattr(
        tensor_files, "write", lambda *args, **named: begin.wait(30) and write(*args, **named)
    )
    steps_of, live = of(tmp_path, async_mode=mode), tensors(1)
    steps_of.save(1, live, {"step": 1})
    for tensor in live.values():
        tensor.zero_()
    steps_of.poll()
    assert steps_of.saving is not None
    begin.set()
    steps_of.wait()
    assert steps_of.saving is None
    assert_step(steps_of, 1)


@pytest.mark.parametrize("mode", MODES)
def test_the_model_alone_where_the_last_step_is_asked_for_so(mode, tmp_path):
    steps_of = of(tmp_path, async_mode=mode, last_save_model_only=True)
    steps_of.save(1, tensors(1), {"step": 1})
    steps_of.save(2, tensors(2), {"step": 2}, last=True)
    steps_of.wait()
    assert_step(steps_of, 1)
    model = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors(2).items()
        if name.startswith("model.")
    }
    steps_of.load(2, model)
    assert torch.equal(model["model.w"], tensors(2)["model.w"])
    with pytest.raises(
        ConfigError,
        match=r"step-2 cannot be loaded: it has only the model \(checkpoint.last_save_model_only",
    ):
        loaded(steps_of, 2)


def test_a_step_that_is_there_is_not_overwritten(tmp_path):
    steps_of = save(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoint").rglob("*")}
    with pytest.raises(
        CheckpointError,
        match=r"step 1 was not saved in .*step-1 exists, and no step is overwritten",
    ):
        steps_of.save(1, tensors(3), {"step": 3})
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
    monkeypatch.setattr(tensor_files, "write", lambda *args, **named: pytest.fail("it was begun"))
    with pytest.raises(
        CheckpointError, match=r"step 2 was not saved.*it needs 0.000 GiB, and 0.000 GiB are free"
    ):
        save(tmp_path, 2, async_mode=mode)
    assert names(tmp_path) == ["step-1"]
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(size))
    assert save(tmp_path, 2, async_mode=mode).steps() == [1, 2]


PHASES = {
    "data": (tensor_files.FromHost, "resolve_data"),
    "hashes": (manifest, "digest"),
    "manifest": (manifest, "write"),
    "folder": (manifest, "sync"),
    "rename": (Path, "rename"),
}


def save_and_poll(steps_of):
    steps_of.save(2, tensors(2), {"step": 2})
    steps_of.saving.join()
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
        goes_on.save(2, tensors(2), {"step": 2})
        goes_on.wait()
        assert any(
            line.startswith("NOTHING WAS SAVED: step 2") and line.endswith('"continue")')
            for line in log
        )
        assert (goes_on.tried, goes_on.newest) == (2, 0)
    assert_step(steps_of, 1)
    steps_of = save(tmp_path, 3)
    assert steps_of.verified_step() == steps_of.newest == 3


@pytest.mark.parametrize("then", ["next save", "end of the run"])
def test_a_failure_in_the_background_is_not_lost(then, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "write", lambda *args, **named: 1 / 0)
    steps_of = of(tmp_path, async_mode="async")
    steps_of.save(1, tensors(1), {"step": 1})
    with pytest.raises(CheckpointError, match=r"step 1 was not saved.*ZeroDivisionError"):
        steps_of.wait() if then == "end of the run" else steps_of.save(2, tensors(2), {"step": 2})


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
    assert "an old step was not deleted: [Errno 5] Input/output error" in log
    assert any(
        "deleting-step-2, left by a killed run, was not removed: [Errno 5]" in line for line in log
    )
    save(tmp_path, 7, keep_latest_k=0)
    assert names(tmp_path) == ["step-3", "step-4", "step-5", "step-6", "step-7"]
    assert of(tmp_path).verified_step() == 7
    assert "step-3 could not be loaded, either: state.json is missing" in log
    assert names(tmp_path) == ["step-3", "step-4", "step-5", "step-6", "step-7"]


def test_leftovers_of_a_run_that_was_killed_are_removed_at_start_and_at_a_save(tmp_path, log):
    steps_of = save(tmp_path, 1)
    for begin in (steps_of.lock, lambda: save(tmp_path, 2)):
        for name in ("unfinished-step-7", "deleting-step-3"):
            (tmp_path / "checkpoint" / name / "inner").mkdir(parents=True)
        begin()
        assert not {"unfinished-step-7", "deleting-step-3"} & set(names(tmp_path))
    assert sum("unfinished-step-7, left by a killed run" in line for line in log) == 2


# What is loaded, and what is not


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Payload:
    """A pickle that, loaded, makes a file."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_the_payload_is_one(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


DAMAGES = {
    "flipped": lambda path, mark: flip(path),
    "truncated": lambda path, mark: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path, mark: os.truncate(path, 0),
    "missing": lambda path, mark: path.unlink(),
    "a pickle": lambda path, mark: path.write_bytes(pickle.dumps(Payload(mark))),
    "a folder": lambda path, mark: (path.unlink(), path.mkdir()),
    "a link": lambda path, mark: (
        path.rename(mark.parent / "moved"),
        path.symlink_to(mark.parent / "moved"),
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_named_and_the_one_before_is_taken(damage, name, tmp_path, log):
    steps_of = save(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "checkpoint/step-2" / name, tmp_path / "mark")
    assert steps_of.verified_step() == 1
    (line,) = [line for line in log if line.startswith("step-2 is not loaded: ")]
    assert name in line
    assert names(tmp_path) == ["invalid-step-2", "step-1"]
    assert_step(save(tmp_path, 2), 2)  # as the run comes to it again
    assert not (tmp_path / "mark").exists()
    DAMAGES[damage](tmp_path / "checkpoint/step-2" / name, tmp_path / "mark")
    with pytest.raises(ConfigError, match=f"load_step = 2: the step is damaged: {name}"):
        of(tmp_path, load_step=2).verified_step()


def test_a_foreign_file_is_named(tmp_path, log):
    steps_of = save(tmp_path, 1, 2)
    (tmp_path / "checkpoint/step-2/__1_0.distcp").write_bytes(b"x")
    assert steps_of.step_to_load() == 1
    assert steps_of.verified_step() == 1
    assert (
        "step-2 is not loaded: __1_0.distcp is foreign: manifest.json does not list it; set aside as invalid-step-2"
        in log
    )


def test_a_step_under_another_steps_name_is_named(tmp_path):
    steps_of = save(tmp_path, 1)
    (tmp_path / "checkpoint/step-1").rename(tmp_path / "checkpoint/step-2")
    assert steps_of.fault(2) == "manifest.json is of step 1"


def test_every_bit_of_a_manifest_counts(tmp_path):
    manifest.write(tmp_path, 7, {"a": {"sha256": "0" * 64, "size": 3}})
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    assert manifest.read(tmp_path, 7) == {"a": {"sha256": "0" * 64, "size": 3}}
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            manifest.read(tmp_path, 7)


def seal(folder, step):
    """A manifest for whatever is there, as one would make who wants it to be loaded."""
    files = {
        path.name: manifest.digest(path)
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    manifest.write(folder, step, files)


def test_metadata_that_would_run_code_are_named_though_the_manifest_fits(tmp_path, log):
    steps_of = save(tmp_path, 1, 2)
    step = tmp_path / "checkpoint/step-2"
    (step / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    seal(step, 2)
    assert steps_of.step_to_load() == 2
    assert steps_of.verified_step() == 1
    assert any(
        "step-2 is not loaded: .metadata asks for posix.system, which may run code" in line
        for line in log
    )
    assert not (tmp_path / "mark").exists()
    (tmp_path / "checkpoint/invalid-step-2").rename(tmp_path / "checkpoint/step-3")
    seal(tmp_path / "checkpoint/step-3", 3)
    with pytest.raises(
        ConfigError, match=r"step-3 cannot be loaded: .metadata asks for posix.system"
    ):
        steps_of.load(3, tensors(3))
    assert not (tmp_path / "mark").exists()


class Attribute:
    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_of_metadata_of_python_3_11_2_getattr_names_a_memory_format_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "checkpoint/step-1/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
    path.write_bytes(pickle.dumps(metadata))
    assert (
        tensor_files.read_metadata(path.parent, FILES).planner_data
        == _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    )
    for of, name in ((torch.Size, "count"), (_MEM_FORMAT_ENCODING, "mro")):
        metadata.planner_data = Attribute(of, name)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(
            Damaged, match=r"asks for builtins.getattr of|cannot be read: KeyError: 'mro'"
        ):
            tensor_files.read_metadata(path.parent, FILES)


CLASSES = (*tensor_files._CLASSES, _MEM_FORMAT_ENCODING, torch.Size, PosixPath)


def test_metadata_that_would_change_a_class_change_none(tmp_path):
    """A pickle may set attributes of what it is given: here `rename` of a path, which a save ends with."""
    save(tmp_path, 1)
    step = tmp_path / "checkpoint/step-1"
    before = {kind: dict(vars(kind)) for kind in CLASSES}
    for kind in (*CLASSES, getattr):
        name = f"c{kind.__module__}\n{kind.__qualname__}\n".encode()
        path = b"cpathlib\nPosixPath\n"
        (step / ".metadata").write_bytes(
            b"\x80\x02" + name + b"N}X\x06\0\0\0rename" + path + b"s\x86b."
        )
        with pytest.raises(Damaged):
            tensor_files.read_metadata(step, FILES)
    assert before == {kind: dict(vars(kind)) for kind in CLASSES}


@pytest.mark.parametrize(
    "entry",
    [
        ["a\0b", {"sha256": "", "size": 1}],
        ["\ud800", {"sha256": "", "size": 1}],
        ["a", {}],
        ["a", 5],
    ],
)
def test_a_manifest_that_lists_no_files_is_named(entry, tmp_path):
    steps_of = save(tmp_path, 1)
    manifest.write(tmp_path / "checkpoint/step-1", 1, dict([entry]))
    assert re.match(r"manifest.json: files(\.a.* =| has '.*':) .*expected .*$", steps_of.fault(1))


def test_a_folder_that_cannot_be_read_is_not_taken_for_one_without_steps(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(ConfigError, match=r"checkpoint cannot be read: Not a directory"):
        of(tmp_path).step_to_load()


def test_the_command_that_named_a_step_goes_on_from_a_newer_one_of_its_own(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    with pytest.raises(ConfigError, match="has newer steps, up to 2"):
        of(tmp_path, load_step=1).step_to_load()
    steps_of = of(tmp_path)
    steps_of.save(3, tensors(3), {"step": 3, "recipe": {"checkpoint": {"load_step": 1}}})
    assert of(tmp_path, load_step=1).step_to_load() == 3


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_that_would_run_code_are_named_though_everything_fits(zipped, tmp_path):
    steps_of = save(tmp_path, 1)
    step = tmp_path / "checkpoint/step-1"
    torch.save(
        Payload(tmp_path / "mark"), step / "__0_0.distcp", _use_new_zipfile_serialization=zipped
    )
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (step / "__0_0.distcp").stat().st_size
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(step, 1)
    assert steps_of.verified_step() == 1
    with pytest.raises(
        ConfigError,
        match=r"step-1 cannot be loaded: rank 0: __0_0.distcp asks for (posix|os).system",
    ):
        loaded(steps_of, 1)
    assert not (tmp_path / "mark").exists()


def entry_that_is_no_tensor(metadata):
    metadata.state_dict_metadata["model.w"] = BytesStorageMetadata()


def file_elsewhere(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../step-1/__0_0.distcp"


def transformed(metadata):
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def chunks_missing(metadata):
    metadata.state_dict_metadata["model.w"].chunks.clear()


def chunk_too_small(metadata):
    metadata.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([1, 1])


def complex_numbers(metadata):
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.complex128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (chunks_missing, r".*the parts of model.w do not cover it"),
        (chunk_too_small, r".*the parts of model.w do not cover it"),
        (complex_numbers, r"asks for torch.complex128"),
        (
            entry_that_is_no_tensor,
            r"asks for torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        ),
        (file_elsewhere, r"has a tensor in \.\./step-1/__0_0\.distcp, which is not of this step"),
        (transformed, r"has a tensor in __0_0\.distcp, which is not of this step"),
    ],
)
def test_metadata_of_anything_but_tensors_in_this_folder_are_named(change, words, tmp_path):
    save(tmp_path, 1)
    step = tmp_path / "checkpoint/step-1"
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match=r"^\.metadata:? ?" + words):
        tensor_files.read_metadata(step, FILES)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04.", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(torch.float32)],
)
def test_bytes_that_are_no_metadata_are_named(content, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(Damaged, match=r"^\.metadata cannot be read: "):
        tensor_files.read_metadata(tmp_path, FILES)


def test_which_step_is_loaded(tmp_path):
    assert of(tmp_path).step_to_load() is None
    assert Checkpointer(Checkpoint(), tmp_path).step_to_load() is None
    with pytest.raises(
        ConfigError,
        match=r"must_resume = true: there is no step in .*checkpoint; use false to start a new run",
    ):
        of(tmp_path, must_resume=True).step_to_load()
    with pytest.raises(
        ConfigError,
        match=r"load_step = 4: there is no such step in .*checkpoint; it has none; use -1",
    ):
        of(tmp_path, load_step=4).verified_step()
    save(tmp_path, 2, 10)
    assert of(tmp_path, must_resume=True).step_to_load() == 10  # and not 2, which sorts after it
    assert of(tmp_path, load_step=10).verified_step() == 10
    with pytest.raises(
        ConfigError,
        match=r"load_step = 4: there is no such step in .*; it has 2, 10; use -1 for the newest",
    ):
        of(tmp_path, load_step=4).step_to_load()
    with pytest.raises(
        ConfigError, match=r"load_step = 2: .* has newer steps, up to 10, which this run would save"
    ):
        of(tmp_path, load_step=2).step_to_load()
    (tmp_path / "checkpoint/step-10/manifest.json").unlink()
    with pytest.raises(
        ConfigError,
        match=r"load_step = 10: the step is damaged: manifest.json is missing; it has 2; use -1",
    ):
        of(tmp_path, load_step=10).step_to_load()
    assert of(tmp_path, load_step=2).step_to_load() == 2
    flip(tmp_path / "checkpoint/step-2/__0_0.distcp")
    for must_resume in (True, False):  # never a new run in silence
        with pytest.raises(
            ConfigError,
            match=r"all steps in .* are damaged \(step-2: __0_0.*step-10: manifest.*move them away",
        ):
            of(tmp_path, must_resume=must_resume).verified_step()


def test_a_state_that_is_no_json_object_is_named(tmp_path):
    steps_of = save(tmp_path, 1)
    for content in ("{", "[]", "[" * 100_000):
        (tmp_path / "checkpoint/step-1/state.json").write_text(content)
        with pytest.raises(ConfigError, match=r"step-1/state\.json"):
            steps_of.read_state(1)
    seal(tmp_path / "checkpoint/step-1", 1)
    assert "state.json" in steps_of.fault(1, share=True)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.w", torch.zeros(8, 7), r"model.w is \[8, 6\] in it, and \[8, 7\] in this run"),
        ("model.other", torch.zeros(1), r"it has no model.other"),
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
        match=r'checkpoint.folder = "checkpoint": .*/checkpoint: File exists; use a job.dump_folder',
    ):
        of(tmp_path).lock()


def two_ranks(folder, mode):
    """Saves of sharded tensors, one of which fails on rank 1, and a file altered; returns what was told and is there."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(40.0).reshape(5, 8)
    live = {
        "model.a": distribute_tensor(whole, mesh, [Shard(0)]),
        "model.b": distribute_tensor(whole, mesh, [Replicate()]),
        "optimizer.a.step": torch.tensor(1.0),
    }
    steps_of = of(folder, async_mode=mode)
    sizes = sum(reduce_numbers(sum(map(tensor_files.share, live.values())), total=True))
    steps_of.save(1, live, {"step": 1})
    steps_of.wait()

    resolve = tensor_files.FromHost.resolve_data
    if rank == 1:
        tensor_files.FromHost.resolve_data = lambda *args: (_ for _ in ()).throw(
            OSError(5, "Input/output error")
        )
    told = ""
    try:
        steps_of.save(2, live, {"step": 2})
        while steps_of.saving is not None:
            steps_of.poll()  # one raises where all do
    except CheckpointError as error:
        told = str(error)
    tensor_files.FromHost.resolve_data = resolve
    steps_of.save(3, live, {"step": 3})
    live["model.a"].to_local().zero_()
    steps_of.wait()
    steps_of.load(3, live)
    same = torch.equal(live["model.a"].full_tensor(), whole)

    if rank == 1:
        flip(folder / "checkpoint/step-3/__1_0.distcp")
    dist.barrier()
    found = steps_of.verified_step()
    dist.barrier()
    if rank == 1:  # another machine's disk
        steps_of.folder = folder / "elsewhere"
    elsewhere = ""
    try:
        steps_of.verified_step()
    except ConfigError as error:
        elsewhere = str(error)
    return sizes, told, same, found, names(folder), elsewhere


@pytest.mark.parametrize("mode", ["async", pytest.param("disabled", marks=pytest.mark.slow)])
def test_ranks_agree_on_what_failed_and_on_what_is_whole(mode, tmp_path):
    for sizes, told, same, found, there, elsewhere in run_ranks(2, two_ranks, tmp_path, mode):
        assert sizes == 160 + 160 + 4
        assert "step 2 was not saved" in told
        assert "rank 1: OSError: [Errno 5] Input/output error" in told
        assert "rank 0" not in told
        assert same
        assert found == 1
        assert there == ["invalid-step-3", "step-1"]
        assert "ranks see different newest steps in " in elsewhere
        assert "(rank 0: 1, rank 1: none)" in elsewhere
    state = json.loads((tmp_path / "checkpoint/step-1/state.json").read_text())
    assert state == {"step": 1, "tensors": ["model", "optimizer"]}


@pytest.mark.parametrize(
    ("newest", "tried", "enable", "words"),
    [
        (5, 5, True, "saving, then "),
        (7, 7, True, ""),
        (5, 7, True, "the newest step on disk is 5; "),
        (5, 5, False, "checkpoint.enable = false, so nothing is saved; "),
    ],
)
def test_a_run_that_stops_says_what_becomes_of_its_step(newest, tried, enable, words, tmp_path):
    checkpointer = checkpoint.Checkpointer(Checkpoint(enable=enable), tmp_path)
    checkpointer.newest, checkpointer.tried = newest, tried
    assert checkpointer.before_exit(7) == words


def test_nothing_is_saved_in_a_folder_that_was_removed_or_is_another_runs(tmp_path):
    steps_of = of(tmp_path)
    steps_of.lock()
    steps_of.locked.path.unlink()
    wrong = "step 1 was not saved in .*: rank 0: the folder or its lock was removed during the run"
    with pytest.raises(CheckpointError, match=wrong):
        steps_of.save(1, tensors(1), {"step": 1})
    steps_of.locked.path.touch()  # of another run
    with pytest.raises(CheckpointError, match=wrong):
        steps_of.save(1, tensors(1), {"step": 1})
    assert names(tmp_path) == ["lock"]
