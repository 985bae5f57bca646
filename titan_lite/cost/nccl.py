"""Estimate NCCL's collectives: the algorithm and protocol that is fastest for a size and a number
of ranks, as NCCL chooses.

    nccl_seconds("all_gather", 2**30, 8, 1, inside=1.9e-6, between=4e-6, speed=360e9, nvls=1.08)           # 2.7e-3

Of every algorithm and protocol NCCL knows a latency for the start, one for each hop, and a
bandwidth (src/graph/tuning.cc), and takes the way with the least sum. The constants here are fitted
to collectives of eight H100 in openxla/xla (xla/service/gpu/model/collective_interpolator_data.h, 1
MiB to 2 GiB). tests/unit/cost/test_nccl.py has them, and others that the fit has not seen.
"""

import math

# protocol -> (seconds of the start, latency of a hop relative to a link's, bandwidth relative to
# the largest). LL sends a flag with every 4 bytes, LL128 one with every 120, Simple waits for whole
# chunks.
PROTOCOLS = {"LL": (0.0, 0.32, 0.39), "LL128": (6.5e-6, 1.0, 0.78), "Simple": (28.5e-6, 1.8, 1.0)}
TREE = 0.92  # bandwidth of a tree, relative to a ring (tuning.cc)
# latency of a tree's hop between nodes, relative to a ring's (tuning.cc: 5.0 and 2.7, 8.5 and 4.0
# microseconds)
TREE_HOP = 2.0
# Seconds for each rank that an all-to-all sends to, after the start of Simple: 8 MiB on 64 H800,
# with a card of 400 Gb/s each, take 296 to 338 microseconds (NVIDIA/nccl issue 1531).
PEER = 1.4e-6
NVLS_START = 67e-6  # seconds
NVLS_RANKS = 5  # with fewer, the switch is not faster than a ring (NVIDIA/nccl issue 1455)
# Multiprocessors that a collective takes: blocks of an all-gather on H100
# (forums.developer.nvidia.com topic 337991), channels on A100 (NVIDIA/nccl-tests issue 100). A
# product of 132 tiles needs two waves on the rest: published are 80 and 47% of the peak (that
# topic). Computation beside a collective was 18.9% slower on average (arXiv 2507.03114): on 108 of
# 132 it is 22% slower.
CHANNELS = 24


def nccl_seconds(
    kind: str,
    nbytes: float,
    ranks: int,
    nodes: int,
    *,
    inside: float,
    between: float,
    speed: float,
    nvls: float,
) -> float:
    """Return the seconds of a collective without its launch.

    inside, between: seconds of a hop within and between nodes; speed: bytes per second of a rank in
    a ring; nvls: that of an all-reduce in the switch of a node, relative to a ring's, or 0.
    """
    rounds = 2 if kind == "all_reduce" else 1
    travels = rounds * nbytes * (ranks - 1) / ranks / speed
    shapes = [(rounds * ((ranks - nodes) * inside + (nodes - 1) * between), 1.0)]
    if kind == "all_reduce" and nodes > 1:  # a tree of nodes, with chains inside
        shapes.append(
            (2 * ((ranks / nodes - 1) * inside + math.log2(nodes) * TREE_HOP * between), TREE)
        )
    found = [
        start + hop * latency + travels / (width * share)
        for latency, width in shapes
        for start, hop, share in PROTOCOLS.values()
    ]
    if kind == "all_reduce" and nodes == 1 and ranks >= NVLS_RANKS and nvls:
        found.append(NVLS_START + travels / nvls)
    return min(found)


def all_to_all_latency(ranks: int) -> float:
    """Return the seconds of an all-to-all of no bytes, without its launch."""
    return PROTOCOLS["Simple"][0] + (ranks - 1) * PEER
