"""Find copies of parameters and optimizer state that are not bitwise equal, and values that are not
finite.

    copies = ReplicaCheck(config.training.compare_copies_freq, describe_saved)
    copies.check(step, state_tensors)           # a collective; raises TrainingError on all ranks
    copies.check_if_due(step, state_tensors)    # the same, every compare_copies_freq steps

Copies stay equal by construction: ranks start from the same bits, a collective gives all ranks of
its group the same sum, and the update is the same function of both. After a faulty device, a
flipped bit or a wrong collective, the run would train a mixture of different copies, and a
checkpoint would take each tensor from one rank or another.

Every rank computes a checksum of its part of every tensor on the device. One all-reduce for each
mesh axis with copies gives the minimum and the maximum over ranks that should agree, 16 bytes per
tensor; then one flag is copied to the host. Ranks exchange more only if something is wrong.
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

from titan_lite.distributed.process_group import gather_objects
from titan_lite.dtensor import local
from titan_lite.resilience import TrainingError

CHUNK = {
    "cpu": 2**16,
    "cuda": 2**22,
}  # elements whose bits are summed at once: 8 bytes each fit a cache, or need few kernels
NAMED = 1000  # most tensors in one rank's findings
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
Place = tuple[str, tuple[int, ...]]  # (name of a tensor, the part of it that a rank has)


class Wrong(NamedTuple):
    """The findings of one rank."""

    host: str
    differing: dict[Place, int]  # checksums of parts that differ between ranks
    not_finite: list[str]  # names of tensors


class ReplicaCheck:
    """Compare copies every `freq` steps (0: never).

    describe_saved: returns the step to resume from, in words.
    """

    def __init__(self, freq: int, describe_saved: Callable[[], str]):
        self.freq, self.describe_saved = freq, describe_saved

    def check_if_due(self, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        if self.freq and step % self.freq == 0:
            self.check(step, tensors)

    def check(self, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Compare all copies. Raises the same TrainingError on all ranks.

        tensors: returns {"FQN": DTensor, "optimizer.state.FQN.step": a plain tensor, equal on all
        ranks, ...}.
        """
        found = find(tensors())
        if found is not None:
            raise TrainingError(
                f"step {step}: {describe(found)}; so nothing was saved at this step;"
                f" {self.describe_saved()}",
                everywhere=True,
            )


def find(tensors: Mapping[str, Tensor]) -> list[Wrong] | None:
    """Return the findings of all ranks, by rank, or None if nothing is wrong. A collective."""
    examined = [examine(tensor) for tensor in tensors.values()]
    sums, finite = (
        torch.stack([each for each, _ in examined]),
        torch.stack([each for _, each in examined]),
    )
    differ = torch.zeros_like(finite)
    mesh = next(
        (tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)), None
    )
    for axis in range(mesh.ndim) if mesh is not None else ():
        copied = [
            number for number, tensor in enumerate(tensors.values()) if _is_copied(tensor, axis)
        ]
        if mesh is None or mesh.size(axis) == 1 or not copied:
            continue
        places = torch.tensor(copied, device=sums.device)
        extremes = torch.cat((sums[places], ~sums[places]))  # max(~x) is ~min(x), without overflow
        dist.all_reduce(extremes, dist.ReduceOp.MAX, mesh.get_group(axis))
        most, least = extremes.chunk(2)
        differ[places] |= most != ~least
    wrong = (differ | ~finite).any().int()
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    if not wrong:
        return None
    marks = zip(tensors.items(), sums.tolist(), differ.tolist(), finite.tolist(), strict=True)
    marked = [
        (name, tensor, value, is_other, is_finite)
        for (name, tensor), value, is_other, is_finite in marks
    ]
    mine = Wrong(
        socket.gethostname(),
        dict(
            [
                ((name, _part(tensor)), value)
                for name, tensor, value, is_other, _ in marked
                if is_other
            ][:NAMED]
        ),
        [name for name, _, _, _, is_finite in marked if not is_finite][:NAMED],
    )
    return gather_objects(mine)


def examine(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (checksum, int64; True if all elements are finite) of this rank's part, as scalars on
    its mesh's device.

    With less than 2^31 elements of up to 32 bits, the checksum changes if one element changes or if
    two different elements are swapped. Element n is multiplied, modulo 2^64, by a weight whose
    lower half is 2n + 1. This is odd, so a difference below 2^32 does not vanish, nor does it after
    multiplication by the difference of two weights. The upper half spreads the weights, so that
    several changes do not cancel.
    """
    numbers = local(tensor).detach().reshape(-1)
    device = numbers.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    weights = _weights(device)
    for place, part in enumerate(numbers.split(len(weights))):
        bits = part.view(INTEGERS[part.itemsize])
        total += (bits * weights[: len(bits)]).sum() + 2 * len(weights) * place * bits.sum()
        finite &= part.isfinite().all()
    return total, finite


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return the factors of the checksum for the first chunk's elements, int64."""
    odd = torch.arange(1, 2 * CHUNK[device.type], 2, device=device)
    return odd + odd * odd * odd * 2**32


def _is_copied(tensor: Tensor, axis: int) -> bool:
    """Return True if all ranks along this mesh axis should have the same elements; a plain tensor
    is the same on all ranks.
    """
    return not isinstance(tensor, DTensor) or tensor.placements[axis].is_replicate()


def _part(tensor: Tensor) -> tuple[int, ...]:
    """Return this rank's mesh coordinates along the axes that shard the tensor, and -1 along the
    others.
    """
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        -1 if _is_copied(tensor, axis) else int(place) for axis, place in enumerate(coordinates)
    )


def describe(found: Collection[Wrong]) -> str:
    """Describe the findings of all ranks: ranks whose copies differ, values that are not finite,
    and the hardware to suspect.
    """
    hosts = [each.host for each in found]
    holders: dict[Place, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    not_finite: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(found):
        for place, value in each.differing.items():
            holders[place][value].append(rank)
        for name in each.not_finite:
            not_finite[name].append(rank)

    # A majority is right. Without a majority, blame the rank that is wrong elsewhere.
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

    parts = []
    if blamed:
        names = _names(
            place
            for place, by_value in holders.items()
            if blamed & {r for some in by_value.values() for r in some}
        )
        parts.append(
            f"{_ranks(blamed, hosts)} differ{'s' * (len(blamed) == 1)} from the other copies of"
            f" {names}"
        )
    if candidates:
        names = _names(place for place, ranks in parted.items() if candidates.intersection(ranks))
        parts.append(
            f"{_ranks(candidates, hosts)} have different copies of {names}, and which is right is"
            " unknown"
        )
    if not_finite:
        verb, where = (
            "are" if len(not_finite) > 1 else "is",
            {rank for some in not_finite.values() for rank in some},
        )
        parts.append(
            f"{_names((name, ()) for name in not_finite)} {verb} not finite on"
            f" {_ranks(where, hosts)}"
        )
    if holders:
        parts.append(
            f"if it happens again, suspect the hardware of {_ranks(blamed | candidates, hosts)},"
            " and exclude that node"
        )
    return "; ".join(parts)


def _names(places: Iterable[Place]) -> str:
    """Return [("optimizer.state.norm.weight.step", ...), ...] as "norm.weight.step and 2 others"."""
    names = [*dict.fromkeys(name.removeprefix("optimizer.state.") for name, _ in places)]
    others = len(names) - 1
    return names[0] + (f" and {others} other{'s' * (others > 1)}" if others else "")


def _ranks(ranks: Collection[int], hosts: list[str]) -> str:
    """Return {0, 1} as "ranks 0 (node-a) and 1 (node-b)"."""
    each = [f"{rank} ({hosts[rank]})" for rank in sorted(ranks)]
    words = " and ".join(filter(None, (", ".join(each[:-1]), each[-1])))
    return f"rank{'s' * (len(each) > 1)} {words}"
