"""Compute a rank's memory: replay the allocations and frees of two steps through a model of CUDA's
caching allocator.

memory = memory_of(layout, stages, machine)               # stages: the tensors of each pipeline stage (tape.py)
memory.reserved, memory.rows["activations"]               # bytes

A step allocates as the trainer does: weights gathered for the step, then forward, loss and backward
of each microbatch in the order of the schedule, then reduced gradients, and at the end of the first
step the optimizer's state. The second step finds the gaps that the first one left.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from titan_lite.cost.machine import GIB, Machine
from titan_lite.distributed.memory import ITEM_BYTES, STORED_BYTES, itemsizes, owner_bytes
from titan_lite.distributed.pipeline_schedule import computations, order_of
from titan_lite.distributed.step_gather import IN_FLIGHT
from titan_lite.optim.state import WHOLE_MATRICES, costs_of, moment_bytes
from titan_lite.tools.plan.allocator import MIB, Block, CachingAllocator, OutOfDeviceMemory
from titan_lite.tools.plan.tape import GRAPHS, Stage, Weight, buckets_of
from titan_lite.tools.plan.trace import PlannedLayout

Held = tuple[str, Block | None]  # part of the memory, block

# Bytes of CUDA's context, with the kernels that it loads.
CONTEXT = 0.5 * GIB
# NCCL keeps a buffer for each protocol, channel and connection (src/include/device.h,
# defaultBuffSizes in src/init.cc): LL, LL128 and SIMPLE, for the neighbour in a ring. On 8 GPUs
# with NVSwitch it reports 24 channels.
CHANNELS = 24
CHANNEL_BUFFERS = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * MIB
# A workspace of cuBLAS comes from the allocator, one for each thread that multiplies: forward's and
# backward's (aten/src/ATen/cuda/CublasHandlePool.cpp).
WORKSPACE, HOPPER_WORKSPACE, THREADS = 4096 * 2048 + 16 * 8192, 32 * MIB, 2
WHOLES = "weights gathered for the step"
ERRORS = "errors between copies"
WORDS = {
    "forward": "forward",
    "loss_forward": "loss",
    "loss_backward": "backward of the loss",
    "backward": "backward",
}


@dataclass(frozen=True)
class Memory:
    """The memory of the pipeline rank that needs most, in bytes."""

    rank: int  # of the pipeline
    moment: str  # of the peak
    rows: dict[str, float]  # parts of the peak
    reserved: float  # the expected `torch.cuda.max_memory_reserved`
    outside: float  # of tensors

    @property
    def peak(self) -> float:
        """Return the expected `torch.cuda.max_memory_allocated`."""
        return sum(self.rows.values())

    @property
    def total(self) -> float:
        return self.reserved + self.outside


def memory_of(layout: PlannedLayout, stages: Sequence[Stage], machine: Machine) -> Memory:
    """Return the memory of a layout on such a machine.

    What does not fit is replayed on a device without a limit.

    Of ranks with alike stages, only the one with most microbatches in flight is replayed.
    """
    outside = outside_of_tensors(layout)
    order = order_of(layout.config.parallelism, layout.pipeline)
    most: dict[tuple[int, ...], tuple[int, int]] = {}  # by stages: in flight, rank
    for rank in range(layout.degrees["pp"]):
        alike = tuple(id(stages[stage].tape) for stage in layout.pipeline.stages_of(rank))
        flying, peak = 0, 0
        for kind, *_ in computations(order[rank]):
            flying += (kind == "F") - (kind in "BI")
            peak = max(peak, flying)
        most[alike] = max(most.get(alike, (0, 0)), (peak, -rank))
    found = []
    for _, rank in most.values():
        for device in (int(machine.memory * GIB - outside), 2**60):
            allocator = CachingAllocator(device, expandable=True)  # as launch.py sets it
            with suppress(OutOfDeviceMemory):
                run = replay(layout, stages, -rank, machine, allocator)
                found.append(Memory(-rank, run.moment, run.rows, allocator.most_reserved, outside))
                break
    return max(found, key=lambda memory: memory.reserved)


def outside_of_tensors(layout: PlannedLayout) -> float:
    """Return the bytes that a rank has outside of the allocator.

    A communicator joins all ranks, or those along an axis.
    """
    communicators = (
        1 + sum(degree > 1 for degree in layout.degrees.values()) if layout.world_size > 1 else 0
    )
    return CONTEXT + communicators * CHANNELS * CHANNEL_BUFFERS


def replay(
    layout: PlannedLayout,
    stages: Sequence[Stage],
    rank: int,
    machine: Machine,
    allocator: CachingAllocator,
) -> "Replay":
    """Replay two steps of pipeline rank `rank`, with at most two local batches each."""
    run = Replay(
        layout, {stage: stages[stage] for stage in layout.pipeline.stages_of(rank)}, allocator
    )
    actions = computations(order_of(layout.config.parallelism, layout.pipeline)[rank])
    run.start(machine)
    for _ in range(2):
        run.gather()
        # in a second local batch, gradients of the first exist
        for _ in range(min(2, layout.accumulation)):
            for kind, stage, microbatch in actions:
                for graph in GRAPHS[:2] if kind == "F" else GRAPHS[2:] if kind in "BI" else ():
                    run.graph(stage, graph, microbatch)
        run.reduce()
        run.now = "summing over copies"
        run.compress()
        run.update()
    return run


class Replay:
    """A rank's allocations. moment, rows: of the most bytes allocated so far, and their parts."""

    def __init__(
        self, layout: PlannedLayout, stages: Mapping[int, Stage], allocator: CachingAllocator
    ):
        self.layout, self.stages, self.allocator = layout, stages, allocator
        self.computed, self.summed = itemsizes(layout.config.training)
        self.moment, self.rows = "start", dict[str, float]()
        self.now, self._rows = "start", Counter[str]()
        self.tensors: dict[tuple[int, int | None], list[Held]] = {}  # by stage and microbatch
        self.gradients: dict[int, dict[int, Held]] = defaultdict(
            dict
        )  # by stage: by number on its tape
        self.shards: list[Held] = []  # of reduced gradients
        self.wholes: list[Held] = []
        self.has_state = False
        # of gradients, which a graph gives away (distributed/arriving.py)
        self.copies = layout.config.compile.compiles("model")
        self.weights = [weight for stage in stages.values() for weight in stage.weights]
        self.errors: list[Held] = []  # of this step

    def make(self, row: str, nbytes: float) -> Held:
        block = self.allocator.malloc(int(nbytes))
        if block is not None:
            self._rows[row] += block.size
            if self.allocator.allocated == self.allocator.most_allocated:
                self.moment, self.rows = (
                    self.now,
                    {name: float(size) for name, size in self._rows.items() if size},
                )
        return row, block

    def end(self, held: Held) -> None:
        row, block = held
        if block is not None:
            self._rows[row] -= block.size
            self.allocator.free(block)

    def start(self, machine: Machine) -> None:
        """Allocate what stays from before the first step, or from its start, to the end."""
        for number, stage in self.stages.items():
            for weight in stage.weights:
                self.make("parameters", STORED_BYTES * weight.held)
            self.make("parameters", stage.buffers)
            for weight in stage.weights:
                if any(weight.factors):  # an error, and Q
                    self.make(ERRORS, 4 * weight.held)
                    self.make(ERRORS, 4 * weight.factors[1])
            # torch's stages receive each microbatch in a buffer of its own
            # (distributed/pipelining/stage.py)
            neighbours = (number > 0) + (number < len(self.layout.pipeline.modules) - 1)
            for _ in range(neighbours * self.layout.pipeline.microbatches):
                self.make("received by the pipeline", stage.between)
        if not machine.is_cpu:
            for _ in range(THREADS):
                self.make(
                    "workspaces of cuBLAS",
                    HOPPER_WORKSPACE if machine.name.startswith("H") else WORKSPACE,
                )

    def graph(self, number: int, name: str, microbatch: int | None) -> None:
        """Run a graph of a microbatch."""
        tape = self.stages[number].tape
        self.now = WORDS[name]
        held = self.tensors.setdefault((number, microbatch), [("", None)] * len(tape.sizes))
        for event in tape.events.get(name, ()):
            if event >= 0:
                held[event] = self.make(tape.rows[event], tape.sizes[event])
            elif ~event < len(tape.elements):
                self.add(number, ~event, held[~event])
            else:
                self.end(held[~event])

    def add(self, number: int, gradient: int, held: Held) -> None:
        """Keep a gradient of the first microbatch, and add later ones to it: full ones in the dtype
        that they are reduced in.
        """
        sums, tape = self.gradients[number], self.stages[number].tape
        summed = tape.elements[gradient] * self.summed
        if gradient not in sums and (
            not self.layout.gathers_once or (summed == tape.sizes[gradient] and not self.copies)
        ):
            sums[gradient] = held
            return
        elif gradient not in sums:
            sums[gradient] = self.make("gradients", summed)
        self.end(held)

    def gather(self) -> None:
        """Gather the weights for the step, IN_FLIGHT buckets at once (distributed/step_gather.py)."""
        self.now = "gathering weights"
        for stage in self.stages.values() if self.layout.gathers_once else ():
            under_way: list[tuple[Held, Held, list[Weight]]] = []
            # a weight that is not sharded, of the same dtype, is no copy
            kept = [
                not _sharded([weight]) and self.itemsize(weight) == STORED_BYTES
                for weight in stage.weights
            ]
            weights = [
                weight for weight, stays in zip(stage.weights, kept, strict=True) if not stays
            ]
            buckets = buckets_of(weights, "gathered_with")
            for place, bucket in enumerate(buckets):
                itemsize = self.itemsize(bucket[0])  # a bucket has one dtype
                shard = self.make(
                    "working", _sharded(bucket) * itemsize * sum(weight.held for weight in bucket)
                )
                row = "working" if len(bucket) > 1 else WHOLES
                under_way.append(
                    (
                        shard,
                        self.make(row, itemsize * sum(weight.whole for weight in bucket)),
                        bucket,
                    )
                )
                while len(under_way) == IN_FLIGHT or (under_way and place == len(buckets) - 1):
                    shard, table, bucket = under_way.pop(0)
                    self.end(shard)
                    if len(bucket) > 1:
                        itemsize = self.itemsize(bucket[0])
                        self.wholes += [
                            self.make(WHOLES, itemsize * weight.whole) for weight in bucket
                        ]
                        self.end(table)
                    else:
                        self.wholes.append(table)

    def itemsize(self, weight: Weight) -> int:
        """Return the bytes of an element of a gathered weight."""
        return 1 if weight.float8 else self.computed

    def reduce(self) -> None:
        """Reduce the sums of full gradients, IN_FLIGHT buckets at once, and free the full weights."""
        self.now = "reducing gradients"
        for number, stage in self.stages.items() if self.layout.gathers_once else ():
            sums: dict[int, list[Held]] = defaultdict(list)  # by elements
            for gradient, held in sorted(self.gradients.pop(number, {}).items()):
                sums[stage.tape.elements[gradient]].append(held)
            under_way: list[list[Held]] = []
            buckets = buckets_of(stage.weights, "reduced_with")
            for place, bucket in enumerate(buckets):
                mine = [sums[weight.whole].pop() for weight in bucket]
                if len(mine) > 1:  # copied into one
                    row = "working" if _sharded(bucket) else "gradients"
                    table = self.make(row, self.summed * sum(weight.whole for weight in bucket))
                    for held in mine:
                        self.end(held)
                else:
                    (table,) = mine
                done = []  # when the bucket has been reduced
                if _sharded(bucket):
                    done.append(table)
                    table = self.make(
                        "gradients", self.summed * sum(weight.held for weight in bucket)
                    )
                self.shards.append(table)
                under_way.append(done)
                while len(under_way) == IN_FLIGHT or (under_way and place == len(buckets) - 1):
                    for held in under_way.pop(0):
                        self.end(held)
        while self.wholes:
            self.end(self.wholes.pop())

    def compress(self) -> None:
        """Make the errors of this step, which the update chooses or drops
        (distributed/powersgd.py).
        """
        for weight in self.weights:
            if any(weight.factors):
                self.errors.append(self.make(ERRORS, 4 * weight.held))

    def update(self) -> None:
        """Make the optimizer's state in the first step, and free the gradients.

        Norms and fused updates need no memory.
        """
        while self.errors:
            self.end(self.errors.pop())
        self.now, config, own = (
            "optimizer step",
            self.layout.config,
            [weight.held for weight in self.weights],
        )
        costs = costs_of(config.optimizer)
        matrices = [weight.held * weight.matrix for weight in self.weights]
        state: list[list[float]] = [
            [4, *moment_bytes(config.optimizer, *each)] for each in zip(own, matrices, strict=True)
        ]  # with a step count
        state.append([owner_bytes(config, self.layout)])
        for nbytes in () if self.has_state else (nbytes for each in state for nbytes in each):
            self.make("optimizer state", nbytes)
        self.has_state = True
        if costs.has_owners:
            whole = self.layout.degrees["tp"] * max(
                weight.whole * weight.matrix for weight in self.weights
            )
            self.end(self.make("working", WHOLE_MATRICES * ITEM_BYTES[costs.owner_dtype] * whole))
        for held in (
            *self.shards,
            *(held for sums in self.gradients.values() for held in sums.values()),
        ):
            self.end(held)
        self.shards.clear()
        self.gradients.clear()


def _sharded(weights: Sequence[Weight]) -> bool:
    return any(weight.held != weight.whole for weight in weights)
