"""Matrices that are sharded over ranks, each with one owner, which computes on the whole of it.

    owners = MatrixOwners(parameters, costs, torch.bfloat16)
    for number, part in owners.updates(part_of, compute):      # part: this rank's part of compute(number, whole matrix)
        ...
    if number in owners.own:
        state = owners.kept_here(torch.zeros(5))               # for a checkpoint: no other rank has it

All ranks of a pipeline stage, along dp_replicate, dp_shard and tp, share its matrices (`share_out`,
state.py), and no rank computes what another does. In a bucket every rank owns at most one matrix.
One all-to-all carries the parts of the bucket's matrices to their owners, and another one carries
the parts of the results back. Meanwhile owners compute another bucket. An owner gets its matrix
from its own copy of the model (dp_replicate), and sends the result to all copies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_lite.dtensor import local
from titan_lite.optim.state import share_out
from titan_lite.sharding import chunk_range

Part = tuple[slice, slice]  # rows and columns of a matrix


class Travel(NamedTuple):
    """An all-to-all under way."""

    work: dist.Work
    arriving: Tensor  # flat
    sizes: list[int]  # elements from each rank
    leaving: Tensor  # kept until it has been sent


class MatrixOwners:
    """The owners of these matrices: DTensors on one mesh of (dp_replicate, dp_shard, tp), or plain
    tensors in one process.

    costs: one number a matrix, in any unit. dtype: in which matrices travel. Needs the default
    process group, and may make another one: all ranks of the mesh must call it.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Iterable[float], dtype: torch.dtype):
        self.shapes, self.dtype, self.device = (
            [matrix.shape for matrix in matrices],
            dtype,
            matrices[0].device,
        )
        self.group: dist.ProcessGroup | None = None
        self.rank, ranks = 0, 1
        self.parts: list[list[Part]] = []  # of each matrix, by rank
        self.copies: list[
            list[int]
        ] = []  # of each matrix, by rank: ranks with the same number have all parts together
        if isinstance(matrices[0], DTensor) and matrices[0].device_mesh.size() > 1:
            mesh = matrices[0].device_mesh
            self.group, ranks = _group_of(mesh), mesh.size()
            self.rank = dist.get_rank(self.group)
            found: dict = {}
            for matrix in matrices:
                assert isinstance(matrix, DTensor)
                key = matrix.shape, matrix.placements
                if key not in found:
                    found[key] = [
                        *zip(*(_part(matrix, place) for place in _places(mesh)), strict=True)
                    ]
                parts, copies = found[key]
                assert _sizes(parts[self.rank]) == tuple(local(matrix).shape), (
                    "parts are not those of simple_fsdp.py"
                )
                self.parts.append(parts)
                self.copies.append(copies)
        self.buckets = share_out(costs, ranks)
        self.own = {bucket[self.rank] for bucket in self.buckets if self.rank in bucket}
        self.here = _mesh_of_one(matrices[0]) if isinstance(matrices[0], DTensor) else None

    def kept_here(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this rank as a DTensor on a mesh of one rank: this rank has all of it,
        and no rank has a copy.
        """
        if self.here is None:
            return tensor
        return DTensor.from_local(tensor, self.here, [Shard(0)] * self.here.ndim, run_check=False)

    def updates(
        self, part_of: Callable[[int], Tensor], compute: Callable[[int, Tensor], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (number, this rank's part of the result) for every matrix, bucket by bucket.

        part_of: number -> this rank's part, in the dtype; called once a matrix. compute: number,
        whole matrix -> result of the same shape and dtype, called by its owner alone.
        """
        if self.group is None:
            for bucket in self.buckets:
                yield from (
                    (number, compute(number, part_of(number))) for number in bucket.values()
                )
            return
        going, returning = self._send(self.buckets[0], part_of), None
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            number = bucket.get(self.rank)
            whole = self._whole(number, going)
            if following is not None:
                going = self._send(following, part_of)
            result = None if number is None or whole is None else compute(number, whole)
            if returning is not None:
                yield from self._own_parts(*returning)
            returning = bucket, self._send_back(bucket, result)
        if returning is not None:
            yield from self._own_parts(*returning)

    def _sends(self, number: int, rank: int, owner: int) -> bool:
        return self.copies[number][rank] == self.copies[number][owner]

    def _send(self, bucket: dict[int, int], part_of: Callable[[int], Tensor]) -> Travel:
        """Send this rank's parts to the owners of a bucket."""
        parts, mine = (
            {owner: part_of(number) for owner, number in bucket.items()},
            bucket.get(self.rank),
        )
        leaving = {
            owner: part
            for owner, part in parts.items()
            if self._sends(bucket[owner], self.rank, owner)
        }
        sizes = [0] * len(self.parts[0])
        if mine is not None:
            of_ranks = enumerate(self.parts[mine])
            sizes = [
                self._sends(mine, rank, self.rank) * math.prod(_sizes(part))
                for rank, part in of_ranks
            ]
        return self._all_to_all(leaving, sizes)

    def _whole(self, number: int | None, travel: Travel) -> Tensor | None:
        """Return this rank's matrix, once all its parts are there; None: it owns none in this
        bucket.
        """
        travel.work.wait()
        if number is None:
            return None
        whole = torch.empty(self.shapes[number], dtype=self.dtype, device=self.device)
        for part, elements in zip(
            self.parts[number], travel.arriving.split(travel.sizes), strict=True
        ):
            if elements.numel():
                whole[part] = elements.view(_sizes(part))
        return whole

    def _send_back(self, bucket: dict[int, int], result: Tensor | None) -> Travel:
        """Send all ranks their parts of this rank's result."""
        leaving = {}
        if result is not None:
            leaving = {
                rank: result[part] for rank, part in enumerate(self.parts[bucket[self.rank]])
            }
        sizes = [0] * len(self.parts[0])
        for owner, number in bucket.items():
            sizes[owner] = math.prod(_sizes(self.parts[number][self.rank]))
        return self._all_to_all(leaving, sizes)

    def _own_parts(self, bucket: dict[int, int], travel: Travel) -> Iterator[tuple[int, Tensor]]:
        travel.work.wait()
        arrived = travel.arriving.split(travel.sizes)
        for owner, number in bucket.items():
            yield number, arrived[owner].view(_sizes(self.parts[number][self.rank]))

    def _all_to_all(self, leaving: dict[int, Tensor], sizes: list[int]) -> Travel:
        """Start to send a tensor to each rank in `leaving`, and to receive so many elements from
        every rank.
        """
        order = sorted(leaving)
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = torch.cat([empty, *(leaving[rank].reshape(-1) for rank in order)])
        arriving = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        sent = [leaving[rank].numel() if rank in leaving else 0 for rank in range(len(sizes))]
        work = dist.all_to_all_single(arriving, flat, sizes, sent, group=self.group, async_op=True)
        return Travel(work, arriving, sizes, flat)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, in its order."""
    ranks = mesh.mesh.flatten().tolist()
    assert ranks == sorted(ranks), "a process group sorts its ranks"
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return dist.new_group(
        ranks, use_local_synchronization=True
    )  # other pipeline stages make their own


def _mesh_of_one(matrix: DTensor) -> DeviceMesh:
    """Return a mesh of this rank alone, with the axes of a matrix's mesh. It never communicates."""
    mesh = matrix.device_mesh
    return DeviceMesh(
        mesh.device_type, torch.full([1] * mesh.ndim, dist.get_rank()), _init_backend=False
    )


def _places(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Return the place along every axis of each rank of a mesh, in its order."""
    return [
        tuple(place)
        for place in torch.cartesian_prod(*(torch.arange(size) for size in mesh.shape)).tolist()
    ]


def _part(matrix: DTensor, place: Sequence[int]) -> tuple[Part, int]:
    """Return the part of the rank at this place, cut along tp first and then along dp_shard
    (simple_fsdp.py), and its copy.
    """
    begins, ends, copy = [0, 0], [*matrix.shape], 0
    for axis in reversed(range(matrix.device_mesh.ndim)):
        placement, degree = matrix.placements[axis], matrix.device_mesh.size(axis)
        if placement.is_replicate():
            copy = copy * degree + place[axis]
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        chunk = chunk_range(ends[dim] - begins[dim], degree, place[axis])
        ends[dim] = begins[dim] + chunk.stop
        begins[dim] += chunk.start
    return (slice(begins[0], ends[0]), slice(begins[1], ends[1])), copy


def _sizes(part: Part) -> tuple[int, int]:
    rows, columns = part
    return rows.stop - rows.start, columns.stop - columns.start
