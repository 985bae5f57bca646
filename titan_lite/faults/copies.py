"""Finds copies of parameters and optimizer state that are not equal to the bit, and values in them that are not finite.

    copies = Copies(config.training.compare_copies_freq, describe_saved)
    copies.check(step, state_tensors)           # all ranks together; TrainingError on all of them
    copies.check_if_due(step, state_tensors)    # the same, every compare_copies_freq steps

Ranks with copies stay equal by construction: they start from the same bits, a collective gives all ranks of its group the same
sum, and the update is the same function of both. A faulty device, a flipped bit or a wrong collective parts them, after which the
run would train a mixture, and a checkpoint would take each tensor from one rank or another.

Every rank makes a checksum of its part of every tensor on the device. The minimum and the maximum over ranks that should agree
are one all-reduce for each axis of the mesh along which there are copies, 16 bytes a tensor; then one flag travels to the host.
Only where something is wrong do ranks tell each other more.
"""

import functools
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_lite.faults import TrainingError
from titan_lite.ranks import gather_objects

CHUNK = {"cpu": 2**16, "cuda": 2**22}  # numbers whose bits are summed at once: 8 bytes each in a cache, or in few kernels
NAMED = 1000  # tensors of one rank that the others are told of
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
Place = tuple[str, tuple[int, ...]]  # of a tensor's name and the part of it that a rank holds


class Wrong(NamedTuple):
    """One rank's findings. differing: the checksums of those that not all ranks with the same part have."""

    host: str
    differing: dict[Place, int]
    not_finite: list[str]


class Copies:
    """freq: steps from one comparison to the next, 0: none of these. describe_saved: says from which step the run can go on."""

    def __init__(self, freq: int, describe_saved: Callable[[], str]):
        self.freq, self.describe_saved = freq, describe_saved

    def check_if_due(self, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        if self.freq and step % self.freq == 0:
            self.check(step, tensors)

    def check(self, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """tensors: makes {"model.FQN": DTensor, "optimizer.FQN.step": one that all ranks hold alike, ...}.

        Raises TrainingError, the same on all ranks.
        """
        found = find(tensors())
        if found is not None:
            raise TrainingError(
                f"step {step}: {describe(found)}; so nothing was saved at this step; {self.describe_saved()}", everywhere=True
            )


def find(tensors: Mapping[str, Tensor]) -> list[Wrong] | None:
    """The findings of all ranks, by rank; None where all is right. All ranks together."""
    examined = [examine(tensor) for tensor in tensors.values()]
    sums, finite = torch.stack([each for each, _ in examined]), torch.stack([each for _, each in examined])
    differ = torch.zeros_like(finite)
    mesh = next((tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    for axis in range(mesh.ndim) if mesh is not None else ():
        copied = [number for number, tensor in enumerate(tensors.values()) if _is_copied(tensor, axis)]
        if mesh is None or mesh.size(axis) == 1 or not copied:
            continue
        places = torch.tensor(copied, device=sums.device)
        extremes = torch.cat((sums[places], ~sums[places]))  # the maximum of ~x is that of x upside down, and no x overflows
        dist.all_reduce(extremes, dist.ReduceOp.MAX, mesh.get_group(axis))
        most, least = extremes.chunk(2)
        differ[places] |= most != ~least
    wrong = (differ | ~finite).any().int()
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    if not wrong:
        return None
    marks = zip(tensors.items(), sums.tolist(), differ.tolist(), finite.tolist(), strict=True)
    marked = [(name, tensor, value, is_other, is_finite) for (name, tensor), value, is_other, is_finite in marks]
    mine = Wrong(
        socket.gethostname(),
        dict([((name, _part(tensor)), value) for name, tensor, value, is_other, _ in marked if is_other][:NAMED]),
        [name for name, _, _, _, is_finite in marked if not is_finite][:NAMED],
    )
    return gather_objects(mine)


def examine(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(checksum, int64; whether all numbers are finite) of this rank's part, scalars on its device.

    Of less than 2^31 numbers, the checksum changes with each one of up to 32 bits that changes, and with any two different ones
    that change places. Number n counts times a weight whose lower half is 2n + 1, modulo 2^64: odd, so a difference of less than
    2^32 does not vanish; nor does it times the difference of two weights. The upper half spreads them, so that several changes do
    not cancel.
    """
    numbers = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    finite = torch.ones((), dtype=torch.bool, device=tensor.device)
    weights = _weights(tensor.device)
    for place, chunk in enumerate(numbers.split(len(weights))):
        bits = chunk.view(INTEGERS[chunk.itemsize])
        total += (bits * weights[: len(bits)]).sum() + 2 * len(weights) * place * bits.sum()
        finite &= chunk.isfinite().all()
    return total, finite


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """int64, of the numbers of the first chunk."""
    odd = torch.arange(1, 2 * CHUNK[device.type], 2, device=device)
    return odd + odd * odd * odd * 2**32


def _is_copied(tensor: Tensor, axis: int) -> bool:
    """True where all ranks along this axis of the mesh should hold the same numbers; a plain tensor is the same on all."""
    return not isinstance(tensor, DTensor) or tensor.placements[axis].is_replicate()


def _part(tensor: Tensor) -> tuple[int, ...]:
    """This rank's coordinates on the mesh along the axes that cut the tensor, -1 along the others."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return tuple(-1 if _is_copied(tensor, axis) else int(place) for axis, place in enumerate(coordinates))


def describe(found: Collection[Wrong]) -> str:
    """A sentence: which ranks' copies of what differ, where values are not finite, and what to suspect. found: by rank."""
    hosts = [each.host for each in found]
    holders: dict[Place, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    not_finite: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(found):
        for place, value in each.differing.items():
            holders[place][value].append(rank)
        for name in each.not_finite:
            not_finite[name].append(rank)

    # More than half are right. Where none are, the rank that is wrong elsewhere is the one.
    outvoted, parted = set[int](), dict[Place, list[int]]()
    for place, by_value in holders.items():
        ranks = sorted(rank for some in by_value.values() for rank in some)
        majority = next((some for some in by_value.values() if 2 * len(some) > len(ranks)), None)
        if majority is None:
            parted[place] = ranks
        else:
            outvoted.update(set(ranks).difference(majority))
    known = outvoted.union(*not_finite.values())
    blamed, candidates = set(outvoted), set[int]()
    for ranks in parted.values():
        guilty = known.intersection(ranks)
        if guilty and len(guilty) < len(ranks):
            blamed |= guilty
        else:
            candidates.update(ranks)

    told = []
    if blamed:
        names = _names(place for place, by_value in holders.items() if blamed & {r for some in by_value.values() for r in some})
        told.append(f"{_ranks(blamed, hosts)} differ{'s' * (len(blamed) == 1)} from the other copies of {names}")
    if candidates:
        names = _names(place for place, ranks in parted.items() if candidates.intersection(ranks))
        told.append(f"{_ranks(candidates, hosts)} hold different copies of {names}, and which is right cannot be told")
    if not_finite:
        verb, where = "are" if len(not_finite) > 1 else "is", {rank for some in not_finite.values() for rank in some}
        told.append(f"{_names((name, ()) for name in not_finite)} {verb} not finite on {_ranks(where, hosts)}")
    if holders:
        told.append(f"if it comes again, suspect the hardware of {_ranks(blamed | candidates, hosts)}, and leave that node out")
    return "; ".join(told)


def _names(places: Iterable[Place]) -> str:
    """[("model.norm.weight", ...), ...] -> "norm.weight and 2 others"."""
    names = [*dict.fromkeys(name.partition(".")[2] for name, _ in places)]
    others = len(names) - 1
    return names[0] + (f" and {others} other{'s' * (others > 1)}" if others else "")


def _ranks(ranks: Collection[int], hosts: list[str]) -> str:
    """{0, 1} -> "ranks 0 (node-a) and 1 (node-b)"."""
    each = [f"{rank} ({hosts[rank]})" for rank in sorted(ranks)]
    words = " and ".join(filter(None, (", ".join(each[:-1]), each[-1])))
    return f"rank{'s' * (len(each) > 1)} {words}"
