"""Price the whole matrices of an optimizer such as Muon: what owners compute, and how long matrices
travel (optim/matrix_owners.py).

owned = owned_matrices(layout, machine)
owned.computing, owned.waiting, owned.sent             # seconds, seconds, bytes of a rank
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_lite.cost.machine import Machine
from titan_lite.distributed.memory import ITEM_BYTES
from titan_lite.optim.state import costs_of, owner_buckets
from titan_lite.tools.plan.trace import PlannedLayout


@dataclass(frozen=True)
class Owned:
    """The figures of the pipeline rank with most parameters, in an optimizer step."""

    computing: float = 0.0  # seconds of the busiest owner in each bucket
    waiting: float = 0.0  # seconds in which nothing is computed
    sent: float = 0.0  # bytes of a rank
    across: float = 0.0  # the part of them to other nodes


def owned_matrices(layout: PlannedLayout, machine: Machine) -> Owned:
    """Return the figures of the optimizer's owners; all zero for an optimizer without any."""
    config = layout.config.optimizer
    costs = costs_of(config)
    if not costs.has_owners:
        return Owned()
    ranks, copies = range(layout.world_size // layout.degrees["pp"]), layout.degrees["dp_replicate"]
    of_copy = ranks[: len(ranks) // copies]
    speed = machine.flops(getattr(torch, costs.owner_dtype)) * machine.matmul_efficiency
    device = "cuda" if machine.multiprocessors else "cpu"
    computes, sent, across = list[float](), 0.0, 0.0
    goes, returns = list[float](), list[float]()
    for bucket in owner_buckets(config, layout.shapes_of_rank, len(ranks)):
        computes.append(max(costs.owner_flops(shape, device) for shape in bucket.values()) / speed)
        nbytes = ITEM_BYTES[costs.owner_dtype] * max(map(math.prod, bucket.values()))
        for times, size, group in ((goes, nbytes, of_copy), (returns, copies * nbytes, ranks)):
            seconds, near, far = all_to_all(machine, size, group)
            times.append(seconds)
            sent, across = sent + near + far, across + far
    # While a bucket is computed, the next one goes to its owners and the one before it returns.
    under = [sum(pair) for pair in zip([*goes[1:], 0.0], [0.0, *returns[:-1]], strict=True)]
    total = goes[0] + sum(map(max, computes, under)) + returns[-1]
    return Owned(sum(computes), total - sum(computes), sent, across)


def all_to_all(machine: Machine, nbytes: float, ranks: Sequence[int]) -> tuple[float, float, float]:
    """Return the seconds of an all-to-all, and the bytes that a rank sends within its node and to
    other nodes.

    nbytes: those of a rank for all ranks, itself included. Unlike a ring, every rank has only its
    own network card.
    """
    if len(ranks) < 2:
        return 0.0, 0.0, 0.0
    here = min(len(ranks), machine.ranks_per_node)
    near, far = nbytes * (here - 1) / len(ranks), nbytes * (len(ranks) - here) / len(ranks)
    return machine.collective("all_to_all", nbytes, ranks), near, far
