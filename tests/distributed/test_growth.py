"""What one rank sends and receives in a resume and the comparisons of a run, at several numbers of
ranks.

Every rank has a shard of the same size, so that what is its own stays the same. Collectives are
counted in torch.distributed, as are those within torch's functions for objects.
"""

import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titan_lite.checkpoint.manager import Checkpointer
from titan_lite.checkpoint.state import RunState
from titan_lite.config import Checkpoint, Data
from titan_lite.data.bad_documents import BadDocument, BadDocumentsLog, SkippedDocuments
from titan_lite.distributed.stage_ranks import PipelineStageRanks
from titan_lite.features.replica_check.comparison import compare_replicas
from titan_lite.features.watchdog.stragglers import NameStragglers
from titan_lite.resilience.stop_signal import StopSignal

COLLECTIVES = """
    all_reduce broadcast gather scatter reduce all_gather all_gather_into_tensor reduce_scatter
    reduce_scatter_tensor all_to_all all_to_all_single send recv isend irecv barrier
"""
COUNTED = COLLECTIVES.split()


def nbytes(value):
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def counting(counts):
    """Within it, collectives add (calls, bytes of their tensors) to `counts` by name."""

    def counted(name, function):
        def call(*args, **named):
            counts[name, "calls"] += 1
            counts[name, "bytes"] += nbytes([*args, *named.values()])
            return function(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COUNTED:
            wrapped = counted(name, getattr(dist, name))
            for module in (dist, distributed_c10d):
                patch.setattr(module, name, wrapped)
        yield


def sockets():
    files = Path("/proc/self/fd")
    return sum(
        os.readlink(files / name).startswith("socket")
        for name in os.listdir(files)
        if (files / name).is_symlink()
    )


def a_run(folder):
    """Returns what each part of a run has exchanged, and whether it did what it should."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = {
        name: distribute_tensor(torch.ones(4 * ranks, 8), mesh, [Shard(0)]) for name in "abc"
    }
    tensors |= {
        f"norm.{name}": distribute_tensor(torch.ones(8), mesh, [Replicate()]) for name in "ab"
    }
    tensors |= {f"optimizer.state.{name}.step": torch.tensor(1.0) for name in "abc"}
    parts = {
        name: Counter()
        for name in ("resume", "copies", "schedule", "stragglers", "stop", "bad documents")
    }
    before = sockets()
    saves = Checkpointer(Checkpoint(enable=True), folder)
    position = {"windows_taken": ranks, "streams": ranks, "positions": {str(rank): [[rank, 17]]}}
    saves.save(
        1, tensors, RunState(parts={"loader": position})
    )  # in which DCP sends all places to all
    for tensor in tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    with counting(parts["resume"]):
        step = saves.verified_step()
        saves.load(step, tensors)
    opened = sockets() - before

    positions = saves.read_state(1).parts["loader"]["positions"]
    assert positions == {str(stream): [[stream, 17]] for stream in range(ranks)}
    assert all(
        torch.equal(tensor.full_tensor(), torch.ones(tensor.shape))
        for tensor in tensors.values()
        if hasattr(tensor, "mesh")
    )
    with counting(parts["copies"]):
        assert compare_replicas(tensors) is None
    with counting(parts["schedule"]):
        stage = PipelineStageRanks([*range(ranks)], None)
        assert stage.all_equal("a schedule")
        assert not stage.all_equal(f"that of rank {rank}")
        assert stage.broadcast(f"choice of rank {rank}") == "choice of rank 0"
    with counting(parts["stragglers"]):
        hook = NameStragglers(freq=1, last_step=1)
        hook.on_step_start(1)
        hook.on_batches(1)
        hook.on_step_end(1)
    with counting(parts["stop"]):
        StopSignal(torch.device("cpu"), lambda: "step 1").update(1)
    documents = BadDocumentsLog(
        Data(on_bad_document="skip", min_document_tokens=5), folder, counts=True
    )
    with counting(parts["bad documents"]):
        counted = documents.gather(
            [SkippedDocuments([BadDocument("a.jsonl", f"line {rank}", "empty")], short=2)]
        )
    assert counted == {"bad_documents": ranks, "short_documents": 2 * ranks}
    return parts, opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{number of ranks: [(exchanged by part, sockets opened) of each rank]}."""
    return {
        ranks: run_ranks(ranks, a_run, tmp_path_factory.mktemp(f"ranks_{ranks}"))
        for ranks in (2, 8)
    }


def test_what_a_rank_exchanges_does_not_grow_with_ranks(runs):
    for part, few in runs[2][1][0].items():
        assert few, part
        for ranks in (8,):
            for rank, (parts, _) in enumerate(runs[ranks]):
                many = parts[part]
                assert {key: many[key] for key in few if key[1] == "calls"} == {
                    key: few[key] for key in few if key[1] == "calls"
                }
                grown = {key for key in many | few if many[key] > few[key]}
                # The first rank counts for all what is skipped, so it alone receives that from all.
                assert grown <= ({("gather", "bytes")} if rank == 0 else set()), (
                    part,
                    ranks,
                    rank,
                    many,
                    few,
                )
    assert not {
        name
        for parts, _ in runs[8]
        for counts in parts.values()
        for name, _ in counts
        if name.startswith("all_gather")
    }


def test_a_rank_opens_no_connection_to_every_other_one(runs):
    assert max(opened for _, opened in runs[8][1:]) < 8
