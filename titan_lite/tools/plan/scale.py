"""Extend a plan to 512 up to 100,000 ranks: the step, the start, saves, and the goodput that
failures leave.

    print("\\n".join(describe_scale(plan)))             # a column for each number of ranks
    goodput(interval=600, blocked=2, again=300, mtbf=10_000)    # 0.938
    best_interval(blocked=2, mtbf=10_000)               # 198.7 s

All degrees but that of FSDP stay, as do the local batch and the number of local batches in a step
(weak scaling). A number is from the plan, published, or assumed; the table names those that are not
from the plan.

    step       the plan's, with longer rings for FSDP, fewer numbers to update and more owners, on
               the slowest of N ranks
    start      one rank's store serves all others; then compiling, and reading the parameters
    saves      the bytes that a rank writes fall with N, and the first rank hears of each of N when
               they are written
    failures   a device fails as often as in Llama 3's run, independently of others, and each
               failure stops the run
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from titan_lite.config import ConfigError
from titan_lite.cost.machine import GB
from titan_lite.distributed.memory import STORED_BYTES, compression_error_bytes, owner_bytes
from titan_lite.models.shapes import shape_words
from titan_lite.optim.state import moment_bytes, share_of_matrices
from titan_lite.tools.plan.owned import owned_matrices
from titan_lite.tools.plan.plan import Plan
from titan_lite.tools.plan.simulate import DEVIATION, slowest_of, table_seconds
from titan_lite.tools.plan.summary import describe_degrees, rounded
from titan_lite.tools.plan.trace import PlannedLayout

RANKS = (512, 4096, 16_384, 100_000)

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


@dataclass(frozen=True)
class Scale:
    """A run on one number of ranks."""

    layout: PlannedLayout
    planned_step: float  # seconds
    slowest: float  # time of a step on the slowest rank, relative to the mean
    meeting: float  # seconds
    reading: float  # seconds: this rank's part of the tensors, and the hash of its share
    saved: float  # bytes that a rank writes
    blocked: float  # seconds of a save in which no step runs
    writing: float  # seconds until the step is on disk
    recipe_interval: float  # seconds between saves
    noticing: float  # seconds until a hanging run ends

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
        return MTBF_OF_GPU / self.ranks

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
        product = describe_degrees({**layout.degrees, "dp_shard": 1})
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
    step = plan.nominal
    machine = plan.machine
    fsdp_before = plan.layout.fsdp_degree
    fsdp_after = layout.fsdp_degree
    seconds = step.seconds - step.parts.get("exposed.slowest", 0.0)
    if not machine.multiprocessors:  # what a run measured is of its slowest rank
        seconds /= slowest_of(plan.layout.world_size)
    seconds -= step.parts.get("optimizer", 0.0) * (1 - fsdp_before / fsdp_after)
    owned_before = owned_matrices(plan.layout, machine)
    owned_after = owned_matrices(layout, machine)
    seconds += (
        owned_after.computing + owned_after.waiting - owned_before.computing - owned_before.waiting
    )
    seconds += table_seconds(layout, machine) - table_seconds(plan.layout, machine)

    sent = step.sent.get("dp_shard", 0.0)
    if not sent:
        return seconds
    modules = max(map(len, layout.pipeline.modules))
    rounds = 1 if layout.gathers_once else layout.microbatches
    # Gathered, for forward and backward unless it is once, and reduced.
    collectives_of_module = 2 if layout.gathers_once else 3
    collectives = collectives_of_module * modules * rounds
    tp = plan.layout.degrees["tp"]

    def ring_seconds(degree: int) -> float:
        return machine.collective("all_gather", sent / collectives, range(0, degree * tp, tp))

    return seconds + collectives * (ring_seconds(fsdp_after) - ring_seconds(fsdp_before))


def scale_of(plan: Plan, ranks: int) -> Scale:
    """Return a plan's recipe on at most so many ranks. Raises ConfigError."""
    layout = at_scale(plan.layout, ranks)
    config = plan.layout.config
    world = layout.world_size
    own = layout.parameters_of_rank / layout.fsdp_degree
    in_matrices = own * share_of_matrices(layout.shapes_of_rank)
    sharded = STORED_BYTES * own + sum(moment_bytes(config.optimizer, own, in_matrices))
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
    waits_for = "it" if config.checkpoint.async_mode == "disabled" else "the copy"
    tokens = plan.layout.tokens // plan.layout.dp_degree
    steps_between_saves = config.checkpoint.interval

    def row(name: str, value: Callable[[Scale], float | str]) -> str:
        """Return a line with the value for each number of ranks."""
        cells = [value(scale) for scale in scales]
        texts = [cell if isinstance(cell, str) else rounded(cell) for cell in cells]
        return f"  {name:<46}" + "".join(f"{text:>11}" for text in texts)

    return [
        (
            f"{shape_words(config.model)} on {plan.machine.name}, {tokens:,} tokens a step on each"
            " data-parallel rank"
        ),
        "",
        row("ranks", lambda scale: f"{scale.ranks:,}"),
        row("along dp_shard", lambda scale: f"{scale.layout.degrees['dp_shard']:,}"),
        row("million tokens a step", lambda scale: scale.layout.tokens / 1e6),
        "step",
        row("planned, s, mean of all ranks", lambda scale: scale.planned_step),
        row("slowest of all ranks, %", lambda scale: f"+{100 * (scale.slowest - 1):.1f}"),
        row("tokens/s per GPU", lambda scale: scale.layout.tokens / scale.step / scale.ranks),
        "start, s",
        row("meeting in the store (assumed)", lambda scale: scale.meeting),
        row("compiling (assumed)", lambda scale: COMPILING),
        row("reading and checking a step", lambda scale: scale.reading),
        f"save (async_mode = {config.checkpoint.async_mode}: the loop waits for {waits_for})",
        row("a rank writes, GB", lambda scale: scale.saved / GB),
        row("the loop waits, s", lambda scale: scale.blocked),
        row("until the step is on disk, s", lambda scale: scale.writing),
        "failures",
        row("mean time between failures, hours", lambda scale: scale.mtbf / 3600),
        row("a failure costs besides lost steps, s", lambda scale: scale.again),
        row(
            "goodput with the recipe's interval, %",
            lambda scale: 100 * scale.goodput(scale.recipe_interval),
        ),
        row(
            f"  checkpoint.interval = {steps_between_saves}, minutes",
            lambda scale: scale.recipe_interval / 60,
        ),
        row("best interval, steps", lambda scale: scale.best_interval / scale.step),
        row("  minutes", lambda scale: scale.best_interval / 60),
        row("goodput with it, %", lambda scale: 100 * scale.goodput(scale.best_interval)),
        "",
        f"published: {MTBF_OF_GPU / 3600:,.0f} hours between failures of a GPU (arXiv 2407.21783)",
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
