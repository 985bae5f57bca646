"""Extend a plan to 512 up to 100,000 ranks: the step, the start, saves, and the goodput that
failures leave.

    print("\\n".join(describe_scale(plan)))                               # a table with a column for each number of ranks
    goodput(interval=600, blocked=2, again=300, mtbf=10_000)             # 0.938, the share of the time that ends in kept steps
    best_interval(blocked=2, mtbf=10_000)                                # 198.7 s

All degrees but that of FSDP stay, as do the local batch and the number of local batches in a step
(weak scaling). A figure is from the plan, published, or assumed; the table names those that are not
from the plan.

    step       the plan's, with longer rings for FSDP, fewer numbers to update and more owners, on the slowest of N ranks
    start      one rank's store serves all others; then compiling, and reading the parameters
    saves      the bytes that a rank writes fall with N, and the first rank hears of each of N when they are written
    failures   a device fails as often as in Llama 3's run, independently of others, and each failure stops the run
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from titan_lite.config import ConfigError
from titan_lite.cost.machine import GB
from titan_lite.distributed.memory import STORED_BYTES, compression_error_bytes, owner_bytes
from titan_lite.models.shapes import shape_words
from titan_lite.optim.state import costs_of, share_of_matrices
from titan_lite.tools.plan.owned import owned_matrices
from titan_lite.tools.plan.simulate import DEVIATION, slowest_of
from titan_lite.tools.plan.summary import Plan, rounded
from titan_lite.tools.plan.trace import PlannedLayout

RANKS = (512, 4096, 16_384, 100_000)

# Published.
MTBF = (
    54 * 24 * 3600 * 16_384 / 419
)  # s, of one GPU: 419 interruptions in 54 days (arXiv 2407.21783, section 3.3.4)
STORAGE = (
    2e12 / 16_384
)  # B/s of a GPU: 2 TB/s sustained (there, section 3.3.1), growing with the GPUs

# Assumed. Work of the first rank and of its store for one rank, when all meet: at the start, and in
# each save. An upper bound: 256 processes on two cores took that.
MEETING = 0.02  # s
COMPILING = 60.0  # s, the same at any number of ranks
HASHING = 0.5 * GB  # B/s of SHA-256 on a core
HOST_COPY = 20 * GB  # B/s of a GPU to host memory, while all GPUs of a node copy


@dataclass(frozen=True)
class Scale:
    """The figures of one number of ranks. Seconds and bytes, unless the name says otherwise."""

    layout: PlannedLayout
    planned_step: float
    slowest: float  # time of a step on the slowest rank, relative to the mean
    meeting: float
    reading: float  # this rank's part of the tensors, and the hash of its share
    saved: float  # bytes that a rank writes
    blocked: float  # seconds of a save in which no step runs
    writing: float  # until the step is on disk
    recipe_interval: float
    noticing: float  # limit until a hanging run ends

    @property
    def ranks(self) -> int:
        return self.layout.world_size

    @property
    def step(self) -> float:
        return self.planned_step * self.slowest

    @property
    def start(self) -> float:
        return self.meeting + COMPILING + self.reading

    @property
    def mtbf(self) -> float:
        return MTBF / self.ranks

    @property
    def again(self) -> float:
        """Return the time lost by a failure besides the steps since the last save, which began
        before it was on disk.
        """
        return self.noticing + self.start + (self.writing - self.blocked)

    @property
    def best_interval(self) -> float:
        """Return the best time between saves, of which only one runs at a time."""
        return max(best_interval(self.blocked, self.mtbf), self.writing, self.step)

    def goodput(self, interval: float) -> float:
        return goodput(max(interval, self.writing), self.blocked, self.again, self.mtbf)


def goodput(interval: float, blocked: float, again: float, mtbf: float) -> float:
    """Return the share of the time that ends in kept steps, with failures at random moments (Daly,
    FGCS 22 (2006), equation 20).

    interval: seconds of training between two saves; blocked: seconds that a save takes from
    training; again: seconds from a failure until the run is at the step that it resumes from; mtbf:
    mean seconds between failures of the whole run.
    """
    failures = math.expm1(min((interval + blocked) / mtbf, 700))
    return interval * math.exp(-again / mtbf) / (mtbf * failures)


def best_interval(blocked: float, mtbf: float) -> float:
    """Return the seconds between two saves with the best goodput.

    Young's sqrt(2 blocked mtbf) (CACM 17 (1974), page 530), as refined by Daly (FGCS 22 (2006),
    equation 37).
    """
    if blocked >= 2 * mtbf:
        return mtbf
    small = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - blocked


def at_scale(layout: PlannedLayout, ranks: int) -> PlannedLayout:
    """Return the layout with as many FSDP ranks as at most `ranks` ranks allow.

    Raises ConfigError if not even one does.
    """
    others = layout.world_size // layout.degrees["dp_shard"]
    if ranks < others:
        product = " x ".join(
            f"{axis} {degree}"
            for axis, degree in layout.degrees.items()
            if degree > 1 and axis != "dp_shard"
        )
        raise ConfigError(
            f"--scale starts at {RANKS[0]} ranks, and {product} needs {others}; use lower degrees"
        )
    degrees = {**layout.degrees, "dp_shard": ranks // others}
    return dataclasses.replace(layout, degrees=degrees)


def check_scale(layout: PlannedLayout) -> None:
    """Raise ConfigError if the recipe saves nothing, or needs more ranks besides those of FSDP than
    the table begins with.
    """
    if not layout.config.checkpoint.enable:
        raise ConfigError(
            "checkpoint.enable = false: --scale weighs saves against failures; use"
            " --checkpoint.enable"
        )
    at_scale(layout, RANKS[0])


def step_seconds(plan: Plan, layout: PlannedLayout) -> float:
    """Return the mean step of a plan with another number of FSDP ranks.

    What the longer rings add is not hidden.

    The sums of gradients over copies, and PowerSGD's products, stay those of the plan's shards.
    """
    stated, machine, degrees = plan.steps[0], plan.machine, plan.layout.degrees
    before, after = shards(plan.layout), shards(layout)
    seconds = stated.seconds - stated.parts.get("exposed.slowest", 0.0)
    if not machine.multiprocessors:  # figures that a run measured are those of its slowest rank
        seconds /= slowest_of(plan.layout.world_size)
    seconds -= stated.parts.get("optimizer", 0.0) * (1 - before / after)
    few, many = (owned_matrices(each, machine) for each in (plan.layout, layout))
    seconds += many.computing + many.waiting - few.computing - few.waiting
    modules = max(
        len(layout.pipeline.modules[stage]) for stage in range(len(layout.pipeline.modules))
    )
    rounds = 1 if layout.gathers_once else layout.microbatches
    count = (
        (2 if layout.gathers_once else 3) * modules * rounds
    )  # gathered for forward and backward, and reduced
    nbytes = stated.sent.get("dp_shard", 0.0) / count

    def ring(degree: int) -> float:
        return machine.collective(
            "all_gather", nbytes, range(0, degree * degrees["tp"], degrees["tp"])
        )

    return seconds + count * (ring(after) - ring(before)) if nbytes else seconds


def shards(layout: PlannedLayout) -> int:
    """Return the ranks that share each parameter."""
    return layout.degrees["dp_shard"] * layout.degrees["cp"]


def scale_of(plan: Plan, ranks: int) -> Scale:
    """Return the figures of a plan's recipe on at most so many ranks. Raises ConfigError."""
    layout = at_scale(plan.layout, ranks)
    config = plan.layout.config
    world = layout.world_size
    optimizer = costs_of(config.optimizer)
    moments = 2 - (2 - optimizer.moments) * share_of_matrices(layout.shapes_of_rank)
    sharded = STORED_BYTES * (1 + moments) * layout.parameters_of_rank / shards(layout)
    # An owner's matrices and the error of each copy are saved once, and sharded tensors by one of
    # the copies.
    once = owner_bytes(config, layout) + compression_error_bytes(config, layout)
    held = sharded + once
    saved = sharded / layout.degrees["dp_replicate"] + once
    meeting = world * MEETING
    writing = saved / STORAGE + saved / HASHING + meeting
    waits = config.checkpoint.async_mode == "disabled"
    step = step_seconds(plan, layout)
    return Scale(
        layout=layout,
        planned_step=step,
        slowest=slowest_of(world),
        meeting=meeting,
        reading=held / STORAGE + saved / STORAGE + saved / HASHING,
        saved=saved,
        blocked=writing if waits else held / HOST_COPY,
        writing=writing,
        recipe_interval=config.checkpoint.interval * step * slowest_of(world),
        noticing=config.comm.train_timeout_seconds,
    )


def describe_scale(plan: Plan) -> list[str]:
    """Return the table. `check_scale` must have passed."""
    config = plan.layout.config
    scales = [scale_of(plan, ranks) for ranks in RANKS]

    def row(name: str, *values: Any) -> str:
        return f"  {name:<46}" + "".join(
            f"{each if isinstance(each, str) else rounded(each):>11}" for each in values
        )

    def rows(*named: tuple[str, Any]) -> list[str]:
        return [row(name, *map(figure, scales)) for name, figure in named]

    mode = "waits for it" if config.checkpoint.async_mode == "disabled" else "waits for the copy"
    tokens = plan.layout.tokens // plan.layout.dp_degree
    return [
        (
            f"{shape_words(config.model)} on {plan.machine.name}, {tokens:,} tokens a step on each"
            " data-parallel rank"
        ),
        "",
        row("ranks", *(f"{scale.ranks:,}" for scale in scales)),
        *rows(
            ("along dp_shard", lambda at: f"{at.layout.degrees['dp_shard']:,}"),
            ("million tokens a step", lambda at: at.layout.tokens / 1e6),
        ),
        "step",
        *rows(
            ("planned, s, mean of all ranks", lambda at: at.planned_step),
            ("slowest of all ranks, %", lambda at: f"+{100 * (at.slowest - 1):.1f}"),
            ("tokens/s per GPU", lambda at: at.layout.tokens / at.step / at.ranks),
        ),
        "start, s",
        *rows(
            ("meeting in the store (assumed)", lambda at: at.meeting),
            ("compiling (assumed)", lambda at: COMPILING),
            ("reading and checking a step", lambda at: at.reading),
        ),
        f"save (async_mode = {config.checkpoint.async_mode}: the loop {mode})",
        *rows(
            ("a rank writes, GB", lambda at: at.saved / GB),
            ("the loop waits, s", lambda at: at.blocked),
            ("until the step is on disk, s", lambda at: at.writing),
        ),
        "failures",
        *rows(
            ("mean time between failures, hours", lambda at: at.mtbf / 3600),
            ("a failure costs besides lost steps, s", lambda at: at.again),
            (
                "goodput with the recipe's interval, %",
                lambda at: 100 * at.goodput(at.recipe_interval),
            ),
            (
                f"  checkpoint.interval = {config.checkpoint.interval}, minutes",
                lambda at: at.recipe_interval / 60,
            ),
            ("best interval, steps", lambda at: at.best_interval / at.step),
            ("  minutes", lambda at: at.best_interval / 60),
            ("goodput with it, %", lambda at: 100 * at.goodput(at.best_interval)),
        ),
        "",
        f"published: {MTBF / 3600:,.0f} hours between failures of a GPU (arXiv 2407.21783)",
        (
            f"published: {STORAGE / 1e6:.0f} MB/s of storage a GPU (the same); GPUs differ by"
            f" {DEVIATION:.1%} (arXiv 2208.11035)"
        ),
        (
            f"assumed: {1e3 * MEETING:.0f} ms of meeting a rank, {COMPILING:.0f} s of compiling,"
            f" SHA-256 at {HASHING / GB:g} GB/s, {HOST_COPY / GB:.0f} GB/s to the host"
        ),
        (
            "assumed: a failure is noticed after comm.train_timeout_seconds ="
            f" {config.comm.train_timeout_seconds}"
        ),
    ]
