"""Extend a plan to 512 up to 100,000 ranks: the step, the start, saves, and the goodput that failures leave.

    print("\\n".join(describe_scale(plan)))                               # a table with a column for each number of ranks
    goodput(interval=600, blocked=2, again=300, mtbf=10_000)             # 0.938, the share of the time that ends in kept steps
    best_interval(blocked=2, mtbf=10_000)                                # 198.7 s

All degrees but that of FSDP stay, as do the local batch and the number of local batches in a step (weak scaling). A figure is
from the plan, measured by scripts/measure_scale.py, published, or assumed; the table names those that are not from the plan.

    step       the plan's, with longer rings for FSDP, fewer numbers to update and more owners, on the slowest of N ranks
    start      one store serves all ranks, and every rank reads the index of all tensors of a step: both grow with N
    saves      the bytes that a rank writes fall with N; the index, which the first rank writes, grows until each part is one row
    failures   a device fails as often as in Llama 3's run, independently of others, and each failure stops the run
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from titan_lite.compiler.hardware import GB, Machine
from titan_lite.config import ConfigError
from titan_lite.distributed.powersgd import as_matrix
from titan_lite.layout import STORED
from titan_lite.layout_checks import error_bytes, largest_shard, on_meta_device
from titan_lite.optimizer.state import OF_MATRIX, is_matrix, share_of_matrices
from titan_lite.plan.owned import owned_matrices
from titan_lite.plan.progress import rounded
from titan_lite.plan.simulate import DEVIATION, slowest_of
from titan_lite.plan.summary import Plan
from titan_lite.plan.trace import PlannedLayout
from titan_lite.shape import shape_words

RANKS = (512, 4096, 16_384, 100_000)

# Measured by `python scripts/measure_scale.py` (docs/benchmarks.md has its table), in seconds or bytes. Times over ranks are
# those of 256 processes by their number: with two cores for all of them, an upper bound.
CONNECT = 5.8e-3  # a rank's connection to the store, which serves one after another
MEET = 0.18e-3  # a rank's part of a meeting in the store
GROUP = 1.9e-3  # a rank's part of the store's work for a process group
HOP = 0.44e-3  # one of the 2 (N - 1) hops of gloo's ring all-reduce
RECEIVE = 8.8e-3  # the first rank's for the message of one other rank
ENTRY_BYTES, WRITE_ENTRY, READ_ENTRY = 179, 7.4e-5, 9.2e-5  # of .metadata: one part of one tensor
SENT_ENTRY_BYTES = 157  # what a rank sends to the first one for it
FILE_BYTES, CHECK_FILE = (
    122,
    1.2e-4,
)  # of manifest.json; the first rank looks at the size of every file after a save
ROW_BYTES = 72  # of state.json: a row of one source
HASH_BYTE = 1.9e-9

# Published.
MTBF = (
    54 * 24 * 3600 * 16_384 / 419
)  # s, of one GPU: 419 unexpected interruptions in 54 days (arXiv 2407.21783, section 3.3.4)
HARDWARE = 0.78  # of these interruptions (there)
STORAGE = (
    2e12 / 16_384
)  # B/s of a GPU: 2 TB/s sustained (there, section 3.3.1), growing with the GPUs

# Assumed.
COMPILING = 60.0  # s, the same at any number of ranks
HOST_COPY = 20 * GB  # B/s of a GPU to host memory, while all GPUs of a node copy
REPAIR = 24 * 3600.0  # s until a node with faulty hardware is back

COLLECTIVES_OF_SAVE = 6  # all-reduces of one number in Checkpointer.save, beside one gather
SUMMED = 16  # bytes that a rank sends to compare schedules, for each graph


@dataclass(frozen=True)
class Scale:
    """The figures of one number of ranks. Seconds and bytes, unless the name says otherwise."""

    layout: PlannedLayout
    planned_step: float
    slowest: float  # time of a step on the slowest rank, relative to the mean
    meeting: float
    groups: float
    reading: float  # the index, this rank's part of the tensors, and the hash of its share
    parts: int  # of all tensors in .metadata
    saved: float  # bytes that a rank writes
    blocked: float  # seconds of a save in which no step runs
    writing: float  # until the step is on disk
    recipe_interval: float
    noticing: float  # limit until a hanging run ends
    machine: Machine

    @property
    def ranks(self) -> int:
        return self.layout.world_size

    @property
    def step(self) -> float:
        return self.planned_step * self.slowest

    @property
    def start(self) -> float:
        return self.meeting + self.groups + COMPILING + self.reading

    @property
    def mtbf(self) -> float:
        return MTBF / self.ranks

    @property
    def again(self) -> float:
        """Return the time lost by a failure besides the steps since the last save, which began before it was on disk."""
        return self.noticing + self.start + (self.writing - self.blocked)

    @property
    def best_interval(self) -> float:
        """Return the best time between saves, of which only one runs at a time."""
        return max(best_interval(self.blocked, self.mtbf), self.writing, self.step)

    def goodput(self, interval: float) -> float:
        return goodput(max(interval, self.writing), self.blocked, self.again, self.mtbf)

    @property
    def in_repair(self) -> float:
        """Return the mean number of nodes in repair (Little's law)."""
        return HARDWARE * REPAIR / self.mtbf

    def gain(self, spares: int) -> float:
        """Return the GPUs' worth of work that the last of so many spare nodes adds: the run waits if more are in repair."""
        return poisson(spares, self.in_repair) * self.goodput(self.best_interval) * self.ranks

    @property
    def spares(self) -> int:
        """Return the largest number of spare nodes of which the last one adds more than its own GPUs."""
        worth = [
            spare
            for spare in range(1, int(self.in_repair) + 100)
            if self.gain(spare) > self.machine.ranks_per_node
        ]
        return max(worth, default=0)

    @property
    def worth(self) -> float:
        """Return the GPUs' worth of work that each of the spare nodes adds, on average."""
        return sum(map(self.gain, range(1, self.spares + 1))) / max(1, self.spares)


def goodput(interval: float, blocked: float, again: float, mtbf: float) -> float:
    """Return the share of the time that ends in kept steps, with failures at random moments (Daly, FGCS 22 (2006), equation 20).

    interval: seconds of training between two saves; blocked: seconds that a save takes from training; again: seconds from a
    failure until the run is at the step that it resumes from; mtbf: mean seconds between failures of the whole run.
    """
    failures = math.expm1(min((interval + blocked) / mtbf, 700))
    return interval * math.exp(-again / mtbf) / (mtbf * failures)


def best_interval(blocked: float, mtbf: float) -> float:
    """Return the seconds between two saves with the best goodput.

    Young's sqrt(2 blocked mtbf) (CACM 17 (1974), page 530), as refined by Daly (FGCS 22 (2006), equation 37).
    """
    if blocked >= 2 * mtbf:
        return mtbf
    small = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - blocked


def poisson(count: int, mean: float) -> float:
    return (
        math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        if mean
        else float(count == 0)
    )


def at_scale(layout: PlannedLayout, ranks: int) -> PlannedLayout:
    """Return the layout with as many FSDP ranks as at most `ranks` ranks allow. Raises ConfigError if not even one does."""
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
    """Raise ConfigError if the recipe saves nothing, or needs more ranks besides those of FSDP than the table begins with."""
    if not layout.config.checkpoint.enable:
        raise ConfigError(
            "checkpoint.enable = false: --scale weighs saves against failures; use --checkpoint.enable"
        )
    at_scale(layout, RANKS[0])


def step_seconds(plan: Plan, layout: PlannedLayout) -> float:
    """Return the mean step of a plan with another number of FSDP ranks. What the longer rings add is not hidden.

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


def parts_of(layout: PlannedLayout) -> int:
    """Return the number of parts of tensors in a checkpoint.

    Moments have as many parts as their parameter, and it has a count of steps. PowerSGD's errors have them for each copy.
    """
    parallelism = layout.config.parallelism
    found = 0
    for fqn, parameter in on_meta_device(layout.model).named_parameters():
        rows, *others = shard = largest_shard(layout, fqn, parameter.shape)
        parts = math.prod(
            math.ceil(size / part) for size, part in zip(parameter.shape, shard, strict=True)
        )
        kind = OF_MATRIX[layout.config.optimizer.name if is_matrix(fqn) else "AdamW"]
        found += (1 + kind.moments) * parts + 1 + len(kind.on_owner)
        if parallelism.replicate_compression != "none" and as_matrix(
            rows, others, parallelism.replicate_rank
        ):
            found += (
                layout.degrees["dp_replicate"] + 1
            ) * parts  # errors, and one Q for all copies
    return found


def scale_of(plan: Plan, ranks: int) -> Scale:
    """Return the figures of a plan's recipe on at most so many ranks. Raises ConfigError."""
    layout, config, machine = at_scale(plan.layout, ranks), plan.layout.config, plan.machine
    world, parts = layout.world_size, parts_of(layout)
    moments = 2 - (2 - OF_MATRIX[config.optimizer.name].moments) * share_of_matrices(
        layout.shapes_of_rank
    )
    each = STORED * (1 + moments)
    state, once = (
        each * layout.parameters_of_rank / shards(layout),
        layout.owner_bytes(config),
    )  # an owner's is saved once
    once += error_bytes(config, layout)  # as is the error of each copy
    state, saved = state + once, state / layout.degrees["dp_replicate"] + once
    agreement = COLLECTIVES_OF_SAVE * 2 * (world - 1) * HOP + (world - 1) * RECEIVE
    files = saved / STORAGE + saved * HASH_BYTE + parts * WRITE_ENTRY + world * CHECK_FILE
    copying = state / HOST_COPY
    wait = config.checkpoint.async_mode == "disabled"
    step = step_seconds(plan, layout)
    groups = 2 + sum(
        degree > 1 for degree in layout.degrees.values()
    )  # of all ranks: those of the run and of saves
    return Scale(
        layout=layout,
        planned_step=step,
        slowest=slowest_of(world),
        meeting=world
        * (2 * CONNECT + MEET),  # the meeting and the watchdog have connections of their own
        groups=world * groups * GROUP,
        reading=parts * READ_ENTRY + state / STORAGE + saved / STORAGE + saved * HASH_BYTE,
        parts=parts,
        saved=saved,
        blocked=agreement + files if wait else copying,
        writing=agreement + files,
        recipe_interval=config.checkpoint.interval * step * slowest_of(world),
        noticing=config.comm.train_timeout_seconds,
        machine=machine,
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

    graphs = (
        2 * len(plan.layout.pipeline.modules) // plan.layout.degrees["pp"]
    )  # forward and backward of a rank's stages
    mode = "waits for it" if config.checkpoint.async_mode == "disabled" else "waits for the copy"
    tokens = plan.layout.tokens // plan.layout.dp_degree
    return [
        f"{shape_words(config.model)} on {plan.machine.name}, {tokens:,} tokens a step on each data-parallel rank",
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
            ("connecting to the store, meeting", lambda at: at.meeting),
            ("process groups, without NCCL's connections", lambda at: at.groups),
            ("compiling (assumed)", lambda at: COMPILING),
            ("reading and checking a step", lambda at: at.reading),
        ),
        f"save (async_mode = {config.checkpoint.async_mode}: the loop {mode})",
        *rows(
            ("a rank writes, GB", lambda at: at.saved / GB),
            ("files", lambda at: f"{at.ranks + 3:,}"),
            (".metadata, MB", lambda at: at.parts * ENTRY_BYTES / 1e6),
            ("manifest.json, MB", lambda at: at.ranks * FILE_BYTES / 1e6),
            ("loader's state in state.json, MB", lambda at: at.layout.most_rows * ROW_BYTES / 1e6),
            ("the first rank receives, MB", lambda at: at.parts * SENT_ENTRY_BYTES / 1e6),
            ("the loop waits, s", lambda at: at.blocked),
            ("until the step is on disk, s", lambda at: at.writing),
        ),
        "comparison of schedules",
        *rows((f"a rank sends for {graphs} graphs, bytes", lambda at: float(SUMMED * graphs))),
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
            (
                "without spare nodes the run waits, %",
                lambda at: 100 * (1 - poisson(0, at.in_repair)),
            ),
            ("spare nodes that add more than their GPUs", lambda at: f"{at.spares:,}"),
            ("  each adds on average, GPU-hours a day", lambda at: 24 * at.worth),
        ),
        "",
        "measured, on two cores (scripts/measure_scale.py): connections, groups, agreement over ranks, files",
        f"published: {MTBF / 3600:,.0f} hours between failures of a GPU, {HARDWARE:.0%} of them hardware (arXiv 2407.21783)",
        f"published: {STORAGE / 1e6:.0f} MB/s of storage a GPU (the same); GPUs differ by {DEVIATION:.1%} (arXiv 2208.11035)",
        f"assumed: {COMPILING:.0f} s of compiling, {HOST_COPY / GB:.0f} GB/s to the host, {REPAIR / 3600:.0f} hours of repair",
        f"assumed: a failure is noticed after comm.train_timeout_seconds = {config.comm.train_timeout_seconds}",
    ]
