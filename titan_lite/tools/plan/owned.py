"""Price the complete matrices of an optimizer such as Muon: what owners compute, and how long
matrices travel (features/matrix_optimizers/owners.py).

    owned = owned_matrices(layout, machine)
    owned.computing, owned.waiting, owned.sent      # seconds, seconds, bytes of a rank
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_lite.cost.machine import Machine
from titan_lite.distributed.tensor_parallel import largest_shard
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import ITEM_BYTES
from titan_lite.tools.plan.rank_bytes import owner_buckets, owner_costs
from titan_lite.tools.plan.trace import PlannedLayout

# Operations of float32 matmuls, divided by n^3, in the time of an eigendecomposition in float64 on
# a CPU: measured 26 to 47 for n from 1024 to 256.
ON_CPU = 30.0


@dataclass(frozen=True)
class Owned:
    """The costs of the pipeline rank with most parameters, in an optimizer step."""

    computing: float = 0.0  # seconds of the busiest owner in each bucket
    waiting: float = 0.0  # seconds in which nothing is computed
    sent: float = 0.0  # bytes of a rank
    across: float = 0.0  # the part of them to other nodes


def owned_matrices(layout: PlannedLayout, machine: Machine) -> Owned:
    """Return the costs of the optimizer's owners; all zero for an optimizer without any."""
    costs = owner_costs(layout.config)
    if costs is None:
        return Owned()
    ranks = range(layout.world_size // layout.degrees["pp"])
    copies = layout.degrees["dp_replicate"]
    ranks_of_copy = ranks[: len(ranks) // copies]
    dtype = costs.dtype
    speed = machine.flops(getattr(torch, dtype)) * machine.matmul_efficiency
    on_device = costs.flops
    if not machine.multiprocessors:
        on_device = functools.partial(costs.flops, eigendecomposition=ON_CPU)

    # Seconds of each bucket: to owners, on the busiest one, and back to all copies.
    scatters: list[float] = []
    computations: list[float] = []
    returns: list[float] = []
    sent = across = 0.0
    for bucket in owner_buckets(costs, layout.shapes_of_rank, len(ranks)):
        flops = max(map(on_device, bucket.values()))
        computations.append(flops / speed)
        nbytes = ITEM_BYTES[dtype] * max(map(math.prod, bucket.values()))
        seconds, near, far = all_to_all(machine, nbytes, ranks_of_copy)
        scatters.append(seconds)
        sent = sent + near + far
        across += far
        seconds, near, far = all_to_all(machine, copies * nbytes, ranks)
        returns.append(seconds)
        sent = sent + near + far
        across += far
    computing = sum(computations)
    # While a bucket is computed, the next one goes to its owners and the one before it returns.
    travelling = [
        after + before
        for after, before in zip([*scatters[1:], 0.0], [0.0, *returns[:-1]], strict=True)
    ]
    total = scatters[0] + sum(map(max, computations, travelling)) + returns[-1]
    of_experts = sum(  # which a rank has whole
        on_device(largest_shard(layout, fqn, shape)) / speed
        for fqn, shape in layout.shapes_of_rank.items()
        if is_of_experts(shape)
    )
    return Owned(computing + of_experts, total - computing, sent, across)


def all_to_all(machine: Machine, nbytes: float, ranks: Sequence[int]) -> tuple[float, float, float]:
    """Return the seconds of an all-to-all, and the bytes that a rank sends within its node and to
    other nodes.

    nbytes: those of a rank for all ranks, itself included. Unlike a ring, every rank has only its
    own network card.
    """
    if len(ranks) < 2:
        return 0.0, 0.0, 0.0
    in_node = min(len(ranks), machine.ranks_per_node)
    near = nbytes * (in_node - 1) / len(ranks)
    far = nbytes * (len(ranks) - in_node) / len(ranks)
    return machine.collective("all_to_all", nbytes, ranks), near, far
