"""Estimate the goodput of a planned run: the share of its time that ends in kept steps, when GPUs
fail as often as in Llama 3's run, independently of others, and each failure stops the run.

    goodput_of(plan)                                            # saves as often as the recipe says
    goodput(interval=600, blocked=2, again=300, mtbf=10_000)    # 0.938
"""

import math

from titan_lite.cost.machine import GB
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.rank_bytes import (
    STORED_BYTES,
    kept_by_features,
    moment_bytes,
    owner_bytes,
    share_of_matrices,
)

# Published.
# Seconds between failures of one GPU: 419 interruptions of 16,384 GPUs in 54 days (arXiv
# 2407.21783, section 3.3.4).
MTBF_OF_GPU = 54 * 24 * 3600 * 16_384 / 419
# B/s of storage for one GPU: 2 TB/s sustained (there, section 3.3.1), growing with the GPUs.
STORAGE = 2e12 / 16_384

# Assumed.
# Seconds of the first rank and of its store for each rank, when all meet: at the start, and in each
# save. An upper bound: 256 processes on two cores took that.
MEETING = 0.02
COMPILING = 60.0  # seconds, the same at any number of ranks
HASHING = 0.5 * GB  # B/s of SHA-256 on a core
HOST_COPY = 20 * GB  # B/s of a GPU to host memory, while all GPUs of a node copy


def goodput_of(plan: Plan) -> float:
    """Return the goodput of a plan's recipe on its ranks."""
    layout = plan.layout
    config = layout.config
    own = layout.parameters_of_rank / layout.fsdp_degree
    in_matrices = own * share_of_matrices(layout.shapes_of_rank)
    sharded = STORED_BYTES * own + moment_bytes(config.optimizer, own, in_matrices)
    # An owner's matrices and the error of each copy are saved once, and sharded tensors by one of
    # the copies.
    once = owner_bytes(config, layout)
    once += STORED_BYTES * kept_by_features(config, layout).always
    held = sharded + once
    saved = sharded / layout.degrees["dp_replicate"] + once  # bytes that a rank writes
    meeting = layout.world_size * MEETING
    writing = saved / STORAGE + saved / HASHING + meeting  # seconds until the step is on disk
    waits = config.checkpoint.async_mode == "disabled"
    blocked = writing if waits else held / HOST_COPY  # seconds of a save in which no step runs
    reading = held / STORAGE + saved / STORAGE + saved / HASHING
    start = meeting + COMPILING + reading
    noticing = config.comm.train_timeout_seconds
    interval = config.checkpoint.interval * plan.nominal.seconds
    return goodput(
        max(interval, writing),  # only one save runs at a time
        blocked,
        noticing + start + (writing - blocked),  # the last save began before it was on disk
        MTBF_OF_GPU / layout.world_size,
    )


def goodput(interval: float, blocked: float, again: float, mtbf: float) -> float:
    """Return the share of the time that ends in kept steps, with failures at random moments (Daly,
    FGCS 22 (2006), equation 20).

    interval: seconds of training between two saves; blocked: seconds that a save takes from
    training; again: seconds from a failure until the run is at the step that it resumes from; mtbf:
    mean seconds between failures of the whole run.
    """
    failures = math.expm1(min((interval + blocked) / mtbf, 700))
    return interval * math.exp(-again / mtbf) / (mtbf * failures)
