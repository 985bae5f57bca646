"""Matrices that are sharded over ranks, each with one owner, which computes on all of it.

    owners = MatrixOwners(parameters, costs, torch.bfloat16)
    for index, part in owners.updates(local_part, compute):
        ...                     # part: this rank's part of compute(index, complete matrix)
    if index in owners.own:     # for a checkpoint: no other rank has this tensor
        state = owners.on_this_rank(torch.zeros(5))

All ranks of a pipeline stage, along dp_replicate, dp_shard and tp, share its matrices
(`share_out` in sharding.py), and no rank computes what another does. In a bucket every rank owns at
most one matrix. One all-to-all carries the parts of the bucket's matrices to their owners, and
another one carries the parts of the results back. Meanwhile owners compute another bucket:

    all-to-alls     to owners of bucket 0 | of bucket 1 | results of 0, of bucket 2 | ...
    owners                                | compute 0   | compute 1                 | ...

An owner gets its matrix from its own replica (dp_replicate), and sends the result to all replicas.
This is how Distributed Shampoo (arXiv 2309.06497, section 4) spreads its work.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_lite.dtensor import local
from titan_lite.sharding import chunk_range, share_out

Part = tuple[slice, slice]  # rows and columns of a matrix
Bucket = dict[int, int]  # {owner: index of its matrix}


@dataclass(frozen=True)
class RankParts:
    """The cuts and copies of a matrix over the ranks of its mesh."""

    parts: list[Part]  # by rank
    copies: list[int]  # by rank: ranks with the same number have all parts together


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all that has been started."""

    work: dist.Work
    received: Tensor  # flat, in the order of ranks
    sizes: list[int]  # elements from each rank
    sent: Tensor  # kept until it has been sent

    def wait(self) -> tuple[Tensor, ...]:
        """Return what each rank has sent, flat."""
        self.work.wait()
        return self.received.split(self.sizes)


class MatrixOwners:
    """The owners of these matrices: DTensors on one mesh of (dp_replicate, dp_shard, tp), or plain
    tensors in one process.

    costs: one number a matrix, in any unit. dtype: in which matrices travel. Needs the default
    process group, and may make another one: all ranks of the mesh must call it.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Iterable[float], dtype: torch.dtype):
        first = matrices[0]
        self.shapes = [matrix.shape for matrix in matrices]
        self.dtype = dtype
        self.device = first.device
        self.group: dist.ProcessGroup | None = None  # None: one process has all
        self.rank = 0
        self.ranks = 1
        self.rank_parts: list[RankParts] = []  # of each matrix
        self.own_mesh: DeviceMesh | None = None  # of this rank alone
        if isinstance(first, DTensor):
            self.own_mesh = _mesh_of_one(first.device_mesh)
            if first.device_mesh.size() > 1:
                self.group = _group_of(first.device_mesh)
                self.rank = dist.get_rank(self.group)
                self.ranks = first.device_mesh.size()
                self.rank_parts = self._rank_parts_of(matrices)
        self.buckets: list[Bucket] = share_out(costs, self.ranks)
        # indices of this rank's matrices
        self.own = {bucket[self.rank] for bucket in self.buckets if self.rank in bucket}

    def _rank_parts_of(self, matrices: Sequence[Tensor]) -> list[RankParts]:
        """Return the RankParts of each matrix; those of matrices that are cut alike are one."""
        made: dict[tuple, RankParts] = {}
        result = []
        for matrix in matrices:
            assert isinstance(matrix, DTensor)
            key = (matrix.shape, matrix.placements)
            if key not in made:
                made[key] = _rank_parts(matrix)
            assert _sizes(made[key].parts[self.rank]) == tuple(local(matrix).shape), (
                "parts are not those of simple_fsdp.py"
            )
            result.append(made[key])
        return result

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this rank as a DTensor on a mesh of one rank: this rank has all of it,
        and no rank has a copy.
        """
        if self.own_mesh is None:
            return tensor
        placements = [Shard(0)] * self.own_mesh.ndim
        return DTensor.from_local(tensor, self.own_mesh, placements, run_check=False)

    def updates(
        self, local_part: Callable[[int], Tensor], compute: Callable[[int, Tensor], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, this rank's part of the result) for every matrix, bucket by bucket.

        local_part: index -> this rank's part, in the dtype; called once a matrix. compute: index,
        complete matrix -> result of the same shape and dtype, called by its owner alone.
        """
        if self.group is None:
            for bucket in self.buckets:
                for index in bucket.values():
                    yield index, compute(index, local_part(index))
            return

        to_owners = self._send_parts(self.buckets[0], local_part)
        previous: tuple[Bucket, AllToAll] | None = None  # whose results are under way
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            own = bucket.get(self.rank)
            matrix = self._receive_matrix(own, to_owners)
            if following is not None:
                to_owners = self._send_parts(following, local_part)
            result = None
            if own is not None and matrix is not None:
                result = compute(own, matrix)
            if previous is not None:
                yield from self._receive_results(*previous)
            previous = bucket, self._send_results(bucket, result)
        if previous is not None:
            yield from self._receive_results(*previous)

    def _is_sent(self, index: int, rank: int, owner: int) -> bool:
        """Return True if a rank sends its part of a matrix to its owner: one of the same copy."""
        copies = self.rank_parts[index].copies
        return copies[rank] == copies[owner]

    def _send_parts(self, bucket: Bucket, local_part: Callable[[int], Tensor]) -> AllToAll:
        """Send this rank's parts to the owners of a bucket."""
        sent = {}
        for owner, index in bucket.items():
            part = local_part(index)  # also if it is not sent: it moves the state on
            if self._is_sent(index, self.rank, owner):
                sent[owner] = part
        received = [0] * self.ranks
        own = bucket.get(self.rank)
        if own is not None:
            for rank, rank_part in enumerate(self.rank_parts[own].parts):
                if self._is_sent(own, rank, self.rank):
                    received[rank] = math.prod(_sizes(rank_part))
        return self._all_to_all(sent, received)

    def _receive_matrix(self, index: int | None, to_owners: AllToAll) -> Tensor | None:
        """Return this rank's matrix, once all its parts are there; None: it owns none in this
        bucket.
        """
        received = to_owners.wait()
        if index is None:
            return None
        matrix = torch.empty(self.shapes[index], dtype=self.dtype, device=self.device)
        for part, elements in zip(self.rank_parts[index].parts, received, strict=True):
            if elements.numel():
                matrix[part] = elements.view(_sizes(part))
        return matrix

    def _send_results(self, bucket: Bucket, result: Tensor | None) -> AllToAll:
        """Send all ranks their parts of this rank's result."""
        sent = {}
        if result is not None:
            parts = self.rank_parts[bucket[self.rank]].parts
            sent = {rank: result[part] for rank, part in enumerate(parts)}
        received = [0] * self.ranks
        for owner, index in bucket.items():
            received[owner] = math.prod(self._own_sizes(index))
        return self._all_to_all(sent, received)

    def _receive_results(self, bucket: Bucket, results: AllToAll) -> Iterator[tuple[int, Tensor]]:
        received = results.wait()
        for owner, index in bucket.items():
            yield index, received[owner].view(self._own_sizes(index))

    def _own_sizes(self, index: int) -> tuple[int, int]:
        """Return the rows and columns of this rank's part of a matrix."""
        return _sizes(self.rank_parts[index].parts[self.rank])

    def _all_to_all(self, sent: dict[int, Tensor], received: list[int]) -> AllToAll:
        """Start to send a tensor to each rank in `sent`, and to receive so many elements from every
        rank.
        """
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = torch.cat([empty, *(sent[rank].reshape(-1) for rank in sorted(sent))])
        sizes = [sent[rank].numel() if rank in sent else 0 for rank in range(self.ranks)]
        output = torch.empty(sum(received), dtype=self.dtype, device=self.device)
        work = dist.all_to_all_single(
            output, flat, received, sizes, group=self.group, async_op=True
        )
        return AllToAll(work, output, received, flat)


class WholeMatrices:
    """Matrices of which a rank has some whole, as it has experts: it is their owner, and nothing
    travels. In the place of MatrixOwners.

    count: of parameters with such matrices. dtype: of updates.
    """

    def __init__(self, count: int, dtype: torch.dtype):
        self.count = count
        self.dtype = dtype

    def updates(
        self, local_part: Callable[[int], Tensor], compute: Callable[[int, Tensor], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, this rank's part of the result), as MatrixOwners does."""
        for index in range(self.count):
            part = local_part(index)
            yield index, compute(index, part) if part.numel() else part


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, in its order."""
    ranks = mesh.mesh.flatten().tolist()
    assert ranks == sorted(ranks), "a process group sorts its ranks"
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # other pipeline stages make their own
    return dist.new_group(ranks, use_local_synchronization=True)


def _mesh_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone, with the axes of `mesh`. It never communicates."""
    rank = torch.full([1] * mesh.ndim, dist.get_rank())
    return DeviceMesh(mesh.device_type, rank, _init_backend=False)


def _rank_parts(matrix: DTensor) -> RankParts:
    """Return the part and the copy of each rank of a matrix's mesh."""
    coordinates = itertools.product(*map(range, matrix.device_mesh.shape))
    parts = []
    copies = []
    for coordinate in coordinates:
        part, copy = _part_at(matrix, coordinate)
        parts.append(part)
        copies.append(copy)
    return RankParts(parts, copies)


def _part_at(matrix: DTensor, coordinate: Sequence[int]) -> tuple[Part, int]:
    """Return the part of the rank at this coordinate of the mesh, and its copy.

    A matrix is cut along tp first and then along dp_shard (simple_fsdp.py).
    """
    own = [range(size) for size in matrix.shape]
    copy = 0
    for axis in reversed(range(matrix.device_mesh.ndim)):
        placement = matrix.placements[axis]
        degree = matrix.device_mesh.size(axis)
        if placement.is_replicate():
            copy = copy * degree + coordinate[axis]
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        chunk = chunk_range(len(own[dim]), degree, coordinate[axis])
        own[dim] = own[dim][chunk.start : chunk.stop]
    rows, columns = own
    return (slice(rows.start, rows.stop), slice(columns.start, columns.stop)), copy


def _sizes(part: Part) -> tuple[int, int]:
    rows, columns = part
    return rows.stop - rows.start, columns.stop - columns.start
