"""Find replicas of parameters and optimizer state that are not bitwise equal, and values that are
not finite.

    compare_replicas(tensors)                # a collective; None if nothing is wrong
    CompareReplicas(freq)                  # the hook; raises TrainingError on all ranks

Replicas stay equal by construction: ranks start from the same bits, a collective gives all ranks of
its group the same sum, and the update is the same function of both. After a faulty device, a
flipped bit or a wrong collective, the run would train a mixture of different replicas, and a
checkpoint would take each tensor from one rank or another.

Every rank computes a checksum of its shard of every tensor on the device. One all-reduce for each
mesh axis with replicas gives the minimum and the maximum over ranks that should agree, 16 bytes per
tensor; then one flag is copied to the host. Ranks exchange more only if something is wrong.
"""

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_lite.checksum import examine
from titan_lite.distributed.process_group import all_gather_objects
from titan_lite.hooks import Hook
from titan_lite.resilience import TrainingError
from titan_lite.text import first_lines, first_names, name_ranks

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer

MAX_FINDINGS = 1000  # tensors in the findings of one rank
MAX_CLAUSES = 4  # of a message
MAX_HOSTS = 4  # named of several ranks


class TensorShard(NamedTuple):
    """A tensor, and the part of it that a rank has: the same for all of its replicas."""

    name: str
    # mesh coordinates along the axes that shard the tensor, -1 along the others; (): a plain tensor
    coordinates: tuple[int, ...]


class Findings(NamedTuple):
    """The findings of one rank."""

    host: str
    differing: dict[TensorShard, int]  # checksums of shards that differ between ranks
    not_finite: list[str]  # names of tensors


class CompareReplicas(Hook):
    """Compare the replicas: at the start, every `freq` steps (0: never), and before a
    save.
    """

    def __init__(self, freq: int):
        self.freq = freq

    def on_train_start(self, trainer: "Trainer") -> None:
        self.describe_saved = trainer.checkpointer.describe_newest
        self.tensors = trainer.tensors  # those of a checkpoint
        if not trainer.is_finished:
            self.check(trainer.step)

    def on_step_end(self, step: int) -> None:
        if self.freq and step % self.freq == 0:
            self.check(step)

    def on_save(self, step: int) -> None:
        if self.freq == 0 or step % self.freq != 0:  # else `on_step_end` has compared them
            self.check(step)

    def check(self, step: int) -> None:
        """Compare all replicas. Raises the same TrainingError on all ranks."""
        findings = compare_replicas(self.tensors())
        if findings is not None:
            raise TrainingError(
                f"step {step}: {describe(findings)}; so nothing was saved at this step;"
                f" {self.describe_saved()}",
                everywhere=True,
            )


def compare_replicas(tensors: Mapping[str, Tensor]) -> list[Findings] | None:
    """Return the findings of all ranks, by rank, or None if nothing is wrong. A collective.

    tensors: {"FQN": DTensor, "optimizer.state.FQN.step": a plain tensor, equal on all ranks, ...}.
    """
    # by tensor: int64; whether all elements are finite
    checksums, finite = map(torch.stack, zip(*map(examine, tensors.values()), strict=True))
    differing = torch.zeros_like(finite)  # by tensor
    for mesh, axis, copied in _copies(tensors.values()):
        indices = torch.tensor(copied, device=checksums.device)
        own = checksums[indices]
        extremes = torch.cat((own, ~own))  # max(~x) is ~min(x), without overflow
        dist.all_reduce(extremes, dist.ReduceOp.MAX, mesh.get_group(axis))
        largest, inverted_smallest = extremes.chunk(2)
        differing[indices] |= largest != ~inverted_smallest

    is_wrong = (differing | ~finite).any().int()
    dist.all_reduce(is_wrong, dist.ReduceOp.MAX)
    if not is_wrong:
        return None
    return all_gather_objects(_own_findings(tensors, checksums, differing, finite))


def _copies(tensors: Iterable[Tensor]) -> Iterator[tuple[DeviceMesh, int, list[int]]]:
    """Yield (mesh, its axis, indices of the tensors that are copied along it) for each axis with
    several ranks.

    Experts may be on another mesh than other parameters. Plain tensors count to the first one.
    """
    of_mesh: dict[DeviceMesh, list[tuple[int, Tensor]]] = {}
    plain = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            of_mesh.setdefault(tensor.device_mesh, []).append((index, tensor))
        else:
            plain.append((index, tensor))
    for number, (mesh, placed) in enumerate(of_mesh.items()):
        candidates = placed if number else sorted([*placed, *plain], key=lambda pair: pair[0])
        for axis in range(mesh.ndim):
            copied = [index for index, tensor in candidates if _is_copied(tensor, axis)]
            if mesh.size(axis) > 1 and copied:
                yield mesh, axis, copied


def _own_findings(
    tensors: Mapping[str, Tensor], checksums: Tensor, differing: Tensor, finite: Tensor
) -> Findings:
    """Return the findings of this rank. checksums, differing, finite: by tensor."""
    names = list(tensors)
    differing_indices = differing.nonzero().flatten().tolist()[:MAX_FINDINGS]
    not_finite_indices = (~finite).nonzero().flatten().tolist()[:MAX_FINDINGS]
    return Findings(
        host=socket.gethostname(),
        differing={
            TensorShard(names[index], _coordinates(tensors[names[index]])): int(checksums[index])
            for index in differing_indices
        },
        not_finite=[names[index] for index in not_finite_indices],
    )


def _is_copied(tensor: Tensor, axis: int) -> bool:
    """Return True if all ranks along this mesh axis should have the same elements; a plain tensor
    is the same on all ranks.
    """
    return not isinstance(tensor, DTensor) or tensor.placements[axis].is_replicate()


def _coordinates(tensor: Tensor) -> tuple[int, ...]:
    """Return the coordinates of this rank's shard, as in TensorShard."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        -1 if _is_copied(tensor, axis) else int(coordinate)
        for axis, coordinate in enumerate(coordinates)
    )


# In words


def describe(findings: Sequence[Findings]) -> str:
    """Describe the findings of all ranks: ranks whose replicas differ, values that are not
    finite.
    """
    hosts = [of_rank.host for of_rank in findings]
    differing: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for shard, by_checksum in _ranks_by_checksum(findings).items():
        groups = sorted(by_checksum.values(), key=lambda ranks: (len(ranks), ranks))
        differing[tuple(map(tuple, groups))].append(shard.name)
    not_finite: dict[str, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(findings):
        for name in of_rank.not_finite:
            not_finite[name].append(rank)

    clauses = []
    if not_finite:
        verb = "is" if len(not_finite) == 1 else "are"
        ranks = sorted({rank for ranks in not_finite.values() for rank in ranks})
        clauses.append(
            f"{_name_tensors(not_finite)} {verb} not finite on {_name_ranks(ranks, hosts)}"
        )
    for groups_of_equal, names in differing.items():
        holders = " and ".join(_name_ranks(ranks, hosts) for ranks in groups_of_equal)
        clauses.append(f"{holders} have different copies of {_name_tensors(names)}")
    return "; ".join(first_lines(clauses, MAX_CLAUSES))


def _ranks_by_checksum(findings: Sequence[Findings]) -> dict[TensorShard, dict[int, list[int]]]:
    """Return for each shard that differs, {checksum: ranks that have it}."""
    holders: dict[TensorShard, dict[int, list[int]]] = {}
    for rank, of_rank in enumerate(findings):
        for shard, checksum in of_rank.differing.items():
            holders.setdefault(shard, {}).setdefault(checksum, []).append(rank)
    return holders


def _name_tensors(names: Iterable[str]) -> str:
    """Return ["optimizer.state.norm.weight.step", ...] as "norm.weight.step and 2 others"."""
    first, *others = dict.fromkeys(name.removeprefix("optimizer.state.") for name in names)
    if not others:
        return first
    noun = "other" if len(others) == 1 else "others"
    return f"{first} and {len(others)} {noun}"


def _name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return [0, 1, 2] as "ranks 0-2 (node-a, node-b)"."""
    names = [*dict.fromkeys(hosts[rank] for rank in ranks)]
    return f"{name_ranks(ranks)} ({first_names(names, MAX_HOSTS)})"
