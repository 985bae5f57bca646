"""Estimate NCCL's collectives: the algorithm and protocol that is fastest for a size and a number
of ranks, as NCCL chooses.

    ring = Ring(8, 1, hop_in_node=1.9e-6, hop_between_nodes=4e-6, bandwidth=360e9)
    nccl_seconds("all_gather", 2**30, ring, nvls=1.08)          # 2.7e-3

Of every algorithm and protocol NCCL knows a latency for the start, one for each hop, and a
bandwidth (src/graph/tuning.cc), and takes the way with the least sum. The constants here are fitted
to collectives of eight H100 in openxla/xla (xla/service/gpu/model/collective_interpolator_data.h, 1
MiB to 2 GiB). tests/unit/cost/test_nccl.py has them, and others that the fit has not seen.
"""

import math
from dataclasses import dataclass

# Multiprocessors that a collective takes: blocks of an all-gather on H100
# (forums.developer.nvidia.com topic 337991), channels on A100 (NVIDIA/nccl-tests issue 100). A
# matmul of 132 tiles needs two waves on the rest: published are 80 and 47% of the peak (that
# topic). Computation beside a collective was 18.9% slower on average (arXiv 2507.03114): on 108 of
# 132 it is 22% slower.
CHANNELS = 24
TREE_BANDWIDTH = 0.92  # of a tree, relative to a ring (tuning.cc)
# Latency of a tree's hop between nodes, relative to a ring's (tuning.cc: 5.0 and 2.7, 8.5 and 4.0
# microseconds).
TREE_HOP = 2.0
NVLS_START = 67e-6  # seconds
NVLS_RANKS = 5  # with fewer, the switch is not faster than a ring (NVIDIA/nccl issue 1455)
# Seconds for each rank that an all-to-all sends to, after the start of Simple: 8 MiB on 64 H800,
# with a card of 400 Gb/s each, take 296 to 338 microseconds (NVIDIA/nccl issue 1531).
ALL_TO_ALL_PEER = 1.4e-6


@dataclass(frozen=True)
class Protocol:
    """A way to know that a chunk of data has arrived."""

    start: float  # seconds
    hop: float  # latency of a hop, relative to a link's
    bandwidth: float  # relative to the largest


LL = Protocol(0.0, 0.32, 0.39)  # a flag with every 4 bytes
LL128 = Protocol(6.5e-6, 1.0, 0.78)  # a flag with every 120 bytes
SIMPLE = Protocol(28.5e-6, 1.8, 1.0)  # waits for whole chunks


@dataclass(frozen=True)
class Ring:
    """A ring through the ranks of a group, node after node."""

    ranks: int
    nodes: int
    hop_in_node: float  # seconds
    hop_between_nodes: float  # seconds
    bandwidth: float  # bytes per second of a rank

    def latency(self, kind: str) -> float:
        """Return the seconds in which no bytes travel around the ring."""
        inside = (self.ranks - self.nodes) * self.hop_in_node
        return rounds(kind) * (inside + (self.nodes - 1) * self.hop_between_nodes)

    def travel(self, kind: str, nbytes: float) -> float:
        """Return the seconds of unsharded `nbytes`, without latency."""
        return rounds(kind) * nbytes * (self.ranks - 1) / self.ranks / self.bandwidth

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds of a collective without protocols, such as gloo's."""
        return self.latency(kind) + self.travel(kind, nbytes)


def rounds(kind: str) -> int:
    """Return 2 for an all-reduce, which is a reduce-scatter and an all-gather; else 1."""
    return 2 if kind == "all_reduce" else 1


def nccl_seconds(kind: str, nbytes: float, ring: Ring, *, nvls: float) -> float:
    """Return the seconds of a collective on GPUs, without its launch.

    nvls: bandwidth of an all-reduce in the switch of a node, relative to the ring's, or 0.
    """
    travel = ring.travel(kind, nbytes)
    algorithms = [(ring.latency(kind), 1.0)]  # (latency, bandwidth relative to the ring's)
    if kind == "all_reduce" and ring.nodes > 1:
        algorithms.append((_tree_latency(ring), TREE_BANDWIDTH))
    candidates = [
        protocol.start + protocol.hop * latency + travel / (bandwidth * protocol.bandwidth)
        for latency, bandwidth in algorithms
        for protocol in (LL, LL128, SIMPLE)
    ]
    if kind == "all_reduce" and ring.nodes == 1 and ring.ranks >= NVLS_RANKS and nvls:
        candidates.append(NVLS_START + travel / nvls)
    return min(candidates)


def _tree_latency(ring: Ring) -> float:
    """Return the latency of an all-reduce up and down a tree of nodes, with chains inside."""
    inside = (ring.ranks / ring.nodes - 1) * ring.hop_in_node
    return 2 * (inside + math.log2(ring.nodes) * TREE_HOP * ring.hop_between_nodes)


def all_to_all_latency(ranks: int) -> float:
    """Return the seconds of an all-to-all of no bytes, without its launch."""
    return SIMPLE.start + (ranks - 1) * ALL_TO_ALL_PEER
