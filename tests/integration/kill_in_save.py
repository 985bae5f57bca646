"""Kills a rank inside a save, again and again, and resumes; prints a line for each kill.

    python kill_in_save.py FOLDER COUNT PHASE-MODE ...      # such as 10 data-async rename-disabled

Two processes save steps 1 and 2, keeping two; one of them kills itself (SIGKILL) at a point within
the save of step 3; the other then has a second to find out, or is ended. Two others then begin, as
torchrun would have it. A process is a fork of this one, which has no threads.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_lite import manifest
from titan_lite.checkpoint.manager import Checkpointer, CheckpointError
from titan_lite.checkpoint.state import RunState
from titan_lite.checkpoint.tensor_files import StepPlanner, StepWriter
from titan_lite.config import Checkpoint

# Of step 3's save: which rank dies, at which call of what, before or after it; and which step is
# then to be loaded.
POINTS = {
    "data": [
        *[
            (rank, StepPlanner, "resolve_data", call, "before", {2})
            for rank in (0, 1)
            for call in (1, 2, 4)
        ],
        *[(rank, StepPlanner, "resolve_data", 4, "after", {2}) for rank in (0, 1)],
        *[(0, FileSystemWriter, "finish", 1, when, {2}) for when in ("before", "after")],
    ],
    "manifest": [
        (0, os, "fsync", 1, "before", {2}),
        *[(1, os, "fsync", 1, when, {2}) for when in ("before", "after")],
        *[(0, manifest, "digest", call, "before", {2}) for call in (1, 2)],
        *[(0, manifest, "write_text", 1, when, {2}) for when in ("before", "after")],
        *[(0, manifest, "write", 1, when, {2}) for when in ("before", "after")],
        (0, manifest, "check_step", 1, "before", {2}),
    ],
    "rename": [  # DCP's own, of .metadata, is the first
        (0, Path, "rename", 2, "before", {2}),
        (0, Path, "rename", 2, "after", {3}),
        (0, manifest, "sync", 3, "before", {2}),
        (0, manifest, "sync", 3, "after", {2}),
        (0, manifest, "sync", 4, "before", {3}),
        (0, manifest, "sync", 4, "after", {3}),
        (0, Checkpointer, "_commit", 1, "after", {3}),
        (0, Checkpointer, "_retain", 1, "before", {3}),
        *[(1, StepWriter, "write_data", 1, when, {2}) for when in ("before", "after")],
    ],
    "retention": [
        *[(0, Path, "rename", 3, when, {3}) for when in ("before", "after")],
        *[(0, manifest, "sync", 5, when, {3}) for when in ("before", "after")],
        *[(0, shutil, "rmtree", 1, when, {3}) for when in ("before", "after")],
        *[(0, os, "unlink", call, "before", {3}) for call in (1, 2, 5)],
        (0, os, "rmdir", 1, "before", {3}),
    ],
}


def kill_at(owner, name, call, when):
    """From now on, the call-th call of owner.name ends this process, before it does anything or
    when it is done.
    """
    function, calls = getattr(owner, name), []

    def deadly(*args, **named):
        calls.append(None)
        if len(calls) == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **named)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def tensors(step):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(6, 4)
    return {f"layers.{n}": distribute_tensor(whole * step + n, mesh, [Shard(0)]) for n in range(4)}


def fork_ranks(function, *args):
    """Two processes of one group; returns their ids."""
    store = Path(sys.argv[1]) / f"store-{time.time_ns()}"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2
                )
                function(rank, *args)
                dist.destroy_process_group()
                os._exit(0)
            except CheckpointError:
                os._exit(3)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
        children.append(child)
    return children


def saves(rank, folder, mode, point):
    steps_of = Checkpointer(Checkpoint(enable=True, async_mode=mode, keep_latest_k=2), folder)
    if rank == 0:
        steps_of.lock()
    assert steps_of.verified_step() is None
    for step in (1, 2, 3):
        steps_of.wait()
        if step == 3 and rank == point[0]:
            kill_at(*point[1:5])
        steps_of.save(step, tensors(step), RunState())
    steps_of.wait()


def resumes(rank, folder, mode, point):
    steps_of = Checkpointer(Checkpoint(enable=True, async_mode=mode, keep_latest_k=2), folder)
    if rank == 0:
        steps_of.lock()
    step = steps_of.verified_step()
    assert step in point[5], f"step {step} after {point}"
    found, expected = tensors(0), tensors(step)
    steps_of.load(step, found)
    assert all(torch.equal(found[name].to_local(), expected[name].to_local()) for name in expected)
    assert steps_of.read_state(step).step == step
    for later in range(step + 1, 5):
        steps_of.save(later, tensors(later), RunState())
    steps_of.wait()
    names = sorted(path.name for path in steps_of.folder.iterdir())
    assert names == ["lock", "step-3", "step-4"], names


def exit_codes(children, seconds):
    """Return the exit codes of the processes, by rank; end those that have not ended in time, or a
    second after another one that failed, by a signal that is not that of `kill_at`.
    """
    codes, until = {}, time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child] != 0:
                        until = min(until, time.monotonic() + 1)
                elif time.monotonic() > until:
                    os.kill(child, signal.SIGTERM)
        time.sleep(0.01)
    return [codes[child] for child in children]


def main(folder, count, *cases):
    for phase, mode in (case.split("-") for case in cases):
        for number, point in enumerate(POINTS[phase][: int(count)]):
            place = Path(folder) / f"{phase}-{mode}-{number}"
            died = exit_codes(fork_ranks(saves, place, mode, point), 60)
            resumed = exit_codes(fork_ranks(resumes, place, mode, point), 60)
            well = died[point[0]] == -signal.SIGKILL and resumed == [0, 0]
            print(
                f"{'ok' if well else 'WRONG'}: {phase} {mode} {point}: {died}, then {resumed}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
