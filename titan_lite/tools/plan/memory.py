"""Compute a rank's memory: replay the allocations and frees of two steps through a model of CUDA's
caching allocator.

    memory = memory_of(layout, stages, machine)         # stages: of each pipeline stage (tape.py)
    memory.reserved, memory.parts["activations"]        # bytes

A step allocates as the trainer does: weights gathered for the step, then forward, loss and backward
of each microbatch in the order of the schedule, then reduced gradients, and at the end of the first
step the optimizer's state. The second step finds the gaps that the first one left.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_lite.cost.machine import GIB, Machine
from titan_lite.cost.nccl import CHANNELS
from titan_lite.distributed.pipeline_schedule import backward_kinds, computations, order_of
from titan_lite.distributed.step_gather import IN_FLIGHT
from titan_lite.optim.state import owner_costs
from titan_lite.tools.plan.allocator import MIB, Block, CachingAllocator
from titan_lite.tools.plan.costs import GRAPHS_OF_ACTION
from titan_lite.tools.plan.rank_bytes import (
    COMPLETE_MATRICES,
    ITEM_BYTES,
    PLAIN_TENSORS,
    STORED_BYTES,
    algorithms_of,
    copied_table_shard,
    itemsizes,
    moment_bytes,
    owner_bytes,
)
from titan_lite.tools.plan.tape import Stage, Tape, Weight, buckets_of
from titan_lite.tools.plan.trace import PlannedLayout

# Bytes of CUDA's context, with the kernels that it loads.
CONTEXT = 0.5 * GIB
# NCCL keeps a buffer for each protocol, channel and connection (src/include/device.h,
# defaultBuffSizes in src/init.cc): LL, LL128 and SIMPLE, for the neighbour in a ring. On 8 GPUs
# with NVSwitch it reports 24 channels.
CHANNEL_BUFFERS = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * MIB  # bytes
# A workspace of cuBLAS comes from the allocator, one for each thread that multiplies: forward's and
# backward's (aten/src/ATen/cuda/CublasHandlePool.cpp).
WORKSPACE = 4096 * 2048 + 16 * 8192  # bytes
HOPPER_WORKSPACE = 32 * MIB
THREADS = 2

# Parts of a rank's memory, besides those of a tape.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
WORKING = "working"
FULL_WEIGHTS = "weights gathered for the step"
KEPT_BY_FEATURES = "kept by features"
PIPELINE_BUFFERS = "received by the pipeline"
WORKSPACES = "workspaces of cuBLAS"
OPTIMIZER_STATE = "optimizer state"

PHASE_OF_GRAPH = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward of inputs",
    "backward_weight": "backward of weights",
}


@dataclass(frozen=True)
class Memory:
    """The memory of the pipeline rank that needs most, in bytes."""

    rank: int  # of the pipeline
    phase: str  # of the step, at the peak
    parts: dict[str, float]  # of the peak
    reserved: float  # the expected `torch.cuda.max_memory_reserved`
    outside: float  # of tensors

    @property
    def peak(self) -> float:
        """Return the expected `torch.cuda.max_memory_allocated`."""
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        return self.reserved + self.outside

    @property
    def largest_part(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True)
class Allocation:
    """A tensor that is allocated, and the part of the memory that it counts to."""

    part: str
    block: Block | None  # None: no bytes


@dataclass(frozen=True)
class GradientSum:
    """The gradient of a weight, summed over microbatches."""

    elements: int
    allocation: Allocation


def memory_of(layout: PlannedLayout, stages: Sequence[Stage], machine: Machine) -> Memory:
    """Return the memory of a layout on such a machine."""
    memories = [
        memory_of_rank(layout, stages, rank, machine) for rank in ranks_to_replay(layout, stages)
    ]
    return max(memories, key=lambda memory: memory.reserved)


def ranks_to_replay(layout: PlannedLayout, stages: Sequence[Stage]) -> list[int]:
    """Return a pipeline rank for each kind of stages, the one with most bytes between actions."""
    order = order_of(layout.config.parallelism, layout.pipeline)
    chosen: dict[tuple[int, ...], tuple[int, int]] = {}  # by stages: (most bytes, rank)
    for rank in range(layout.degrees["pp"]):
        alike = tuple(id(stages[stage]) for stage in layout.pipeline.stages_of(rank))
        most = most_between(computations(order[rank]), stages)
        if alike not in chosen or most > chosen[alike][0]:
            chosen[alike] = (most, rank)
    return [rank for _, rank in chosen.values()]


def most_between(actions: Sequence[tuple[str, int, int | None]], stages: Sequence[Stage]) -> int:
    """Return the most bytes that a rank's microbatches have between two actions, without
    gradients of weights.
    """
    backward_of = backward_kinds(actions)

    @functools.cache
    def kept(kind: str, stage: int, backward: str) -> int:
        tape = stages[stage].tapes[backward]
        return sum(tape.kept_by(graph) for graph in GRAPHS_OF_ACTION[kind])

    return max(
        itertools.accumulate(
            kept(kind, stage, backward_of[stage, microbatch]) for kind, stage, microbatch in actions
        )
    )


def memory_of_rank(
    layout: PlannedLayout, stages: Sequence[Stage], rank: int, machine: Machine
) -> Memory:
    """Return the memory of a pipeline rank."""
    run = replay(layout, stages, rank, machine)
    outside = outside_of_tensors(layout)
    return Memory(rank, run.peak_phase, run.peak_parts, run.allocator.reserved, outside)


def outside_of_tensors(layout: PlannedLayout) -> float:
    """Return the bytes that a rank has outside of the allocator.

    A communicator joins all ranks, or those along an axis, or the two with a tied table's shard.
    """
    communicators = 0
    if layout.world_size > 1:
        communicators = 1 + sum(degree > 1 for degree in layout.degrees.values())
        communicators += layout.sends_table
        of_experts = (
            layout.degrees["dp_replicate"],
            layout.expert_ranks // layout.expert_parallel,
            layout.expert_parallel,
        )
        if layout.model.n_experts and max(layout.degrees["tp"], layout.expert_parallel) > 1:
            communicators += sum(degree > 1 for degree in of_experts)  # mesh.expert_mesh
    return CONTEXT + communicators * CHANNELS * CHANNEL_BUFFERS


def replay(
    layout: PlannedLayout,
    stages: Sequence[Stage],
    rank: int,
    machine: Machine,
) -> "Replay":
    """Replay two steps of pipeline rank `rank`, with at most two local batches each."""
    own = {stage: stages[stage] for stage in layout.pipeline.stages_of(rank)}
    actions = computations(order_of(layout.config.parallelism, layout.pipeline)[rank])
    run = Replay(layout, own, backward_kinds(actions))
    run.allocate_model(machine)
    for _ in range(2):
        run.gather_weights()
        # In a second local batch, gradients of the first exist.
        for _ in range(min(2, layout.accumulation)):
            for kind, stage, microbatch in actions:
                for graph in GRAPHS_OF_ACTION[kind]:
                    run.run_graph(stage, graph, microbatch)
        run.reduce_gradients()
        run.receive_table_gradient()
        run.keep_until_update()
        run.update()
    return run


class Replay:
    """A rank's allocations.

    peak_phase, peak_parts: of the most bytes allocated so far, the phase of the step and the parts.
    """

    def __init__(
        self,
        layout: PlannedLayout,
        stages: Mapping[int, Stage],
        backward_of: Mapping[tuple[int, int | None], str],
    ):
        """backward_of: the kind of backward, by stage and microbatch."""
        self.layout = layout
        self.stages = stages
        self.backward_of = backward_of
        self.allocator = CachingAllocator()
        computed, summed = itemsizes(layout.config.training)
        self.computed_itemsize = computed
        self.summed_itemsize = summed
        # A compiled graph gives its gradients away, and they are copied.
        self.copies_gradients = layout.config.compile.compiles("model")
        self.weights = [weight for stage in stages.values() for weight in stage.weights]

        self.phase = "start"
        self.parts: Counter[str] = Counter()  # bytes that are allocated
        self.peak_phase = "start"
        self.peak_parts: dict[str, float] = {}

        # By (stage, microbatch): of each tensor of the tape.
        self.tensors: dict[tuple[int, int | None], list[Allocation]] = {}
        # By stage, then by index on the tape that made the first one.
        self.gradients: dict[int, dict[int, GradientSum]] = defaultdict(dict)
        self.reduced_gradients: list[Allocation] = []
        self.full_weights: list[Allocation] = []
        self.kept: list[Allocation] = []  # by features, until the update
        self.has_optimizer_state = False

    def allocate(self, part: str, nbytes: float) -> Allocation:
        block = self.allocator.malloc(int(nbytes))
        if block is not None:
            self.parts[part] += block.size
            if self.allocator.allocated == self.allocator.most_allocated:
                self.peak_phase = self.phase
                self.peak_parts = {name: float(size) for name, size in self.parts.items() if size}
        return Allocation(part, block)

    def free(self, allocation: Allocation) -> None:
        if allocation.block is not None:
            self.parts[allocation.part] -= allocation.block.size
            self.allocator.free(allocation.block)

    def allocate_model(self, machine: Machine) -> None:
        """Allocate what stays from before the first step, or from its start, to the end."""
        for number, stage in self.stages.items():
            for weight in stage.weights:
                self.allocate(PARAMETERS, STORED_BYTES * weight.shard_elements)
            self.allocate(PARAMETERS, stage.buffers)
            for weight in stage.weights:
                self.allocate(KEPT_BY_FEATURES, STORED_BYTES * weight.kept.always)
            # torch's stages receive each microbatch in a buffer of its own
            # (distributed/pipelining/stage.py).
            neighbours = (number > 0) + (number < len(self.layout.pipeline.modules) - 1)
            for _ in range(neighbours * self.layout.pipeline.microbatches):
                self.allocate(PIPELINE_BUFFERS, stage.hidden)
        if not machine.is_cpu:
            workspace = HOPPER_WORKSPACE if machine.name.startswith("H") else WORKSPACE
            for _ in range(THREADS):
                self.allocate(WORKSPACES, workspace)

    def run_graph(self, number: int, name: str, microbatch: int | None) -> None:
        """Run a graph of a microbatch in a stage."""
        self.phase = PHASE_OF_GRAPH[name]
        tape = self.stages[number].tapes[self.backward_of[number, microbatch]]
        nothing = [Allocation("", None)] * len(tape.sizes)
        tensors = self.tensors.setdefault((number, microbatch), nothing)
        for event in tape.events.get(name, ()):
            if event >= 0:
                tensors[event] = self.allocate(tape.parts[event], tape.sizes[event])
            elif ~event < len(tape.elements):
                self.accumulate(number, tape, ~event, tensors[~event])
            else:
                self.free(tensors[~event])

    def accumulate(self, number: int, tape: Tape, gradient: int, allocation: Allocation) -> None:
        """Keep a gradient of the first microbatch, and add later ones to it.

        Gradients of full weights are added in the dtype that they are reduced in. A microbatch
        makes all of a stage's gradients before another one does.
        """
        sums = self.gradients[number]
        elements = tape.elements[gradient]
        summed_bytes = elements * self.summed_itemsize
        if gradient in sums:
            self.free(allocation)
            return
        is_sum = not self.layout.gathers_once or (
            summed_bytes == tape.sizes[gradient] and not self.copies_gradients
        )
        if is_sum:
            sums[gradient] = GradientSum(elements, allocation)
        else:
            sums[gradient] = GradientSum(elements, self.allocate(GRADIENTS, summed_bytes))
            self.free(allocation)

    def gather_weights(self) -> None:
        """Gather the weights for the step, IN_FLIGHT buckets at once, as step_gather.py does."""
        self.phase = "gathering weights"
        if not self.layout.gathers_once:
            return
        for stage in self.stages.values():
            # A weight that is not sharded, of the same dtype, is no copy.
            copied = [
                weight
                for weight in stage.weights
                if weight.is_sharded or self.gathered_itemsize(weight) != STORED_BYTES
            ]
            in_flight: list[_GatheringBucket] = []
            for bucket in buckets_of(copied, "gathered_with"):
                in_flight.append(self.start_gather(bucket))
                if len(in_flight) == IN_FLIGHT:
                    self.finish_gather(in_flight.pop(0))
            for gathering in in_flight:
                self.finish_gather(gathering)

    def start_gather(self, bucket: list[Weight]) -> "_GatheringBucket":
        itemsize = self.gathered_itemsize(bucket[0])  # a bucket has one dtype
        shard_bytes = 0
        if _is_sharded(bucket):
            shard_bytes = itemsize * sum(weight.shard_elements for weight in bucket)
        shard = self.allocate(WORKING, shard_bytes)
        part = WORKING if len(bucket) > 1 else FULL_WEIGHTS
        full_bytes = itemsize * sum(weight.full_elements for weight in bucket)
        return _GatheringBucket(bucket, shard, self.allocate(part, full_bytes))

    def finish_gather(self, gathering: "_GatheringBucket") -> None:
        self.free(gathering.shard)
        if len(gathering.weights) == 1:
            self.full_weights.append(gathering.full)
            return
        itemsize = self.gathered_itemsize(gathering.weights[0])
        for weight in gathering.weights:  # copied out
            full = self.allocate(FULL_WEIGHTS, itemsize * weight.full_elements)
            self.full_weights.append(full)
        self.free(gathering.full)

    def gathered_itemsize(self, weight: Weight) -> int:
        """Return the bytes of an element of a gathered weight."""
        return 1 if weight.float8 else self.computed_itemsize

    def reduce_gradients(self) -> None:
        """Reduce the sums of full gradients, IN_FLIGHT buckets at once; free the full weights."""
        self.phase = "reducing gradients"
        if self.layout.gathers_once:
            for number, stage in self.stages.items():
                self.reduce_gradients_of_stage(number, stage)
        while self.full_weights:
            self.free(self.full_weights.pop())

    def reduce_gradients_of_stage(self, number: int, stage: Stage) -> None:
        sums: dict[int, list[Allocation]] = defaultdict(list)  # by elements
        for _, gradient in sorted(self.gradients.pop(number, {}).items()):
            sums[gradient.elements].append(gradient.allocation)
        in_flight: list[list[Allocation]] = []  # freed when a bucket has been reduced
        for bucket in buckets_of(stage.weights, "reduced_with"):
            gradients = [sums[weight.full_elements].pop() for weight in bucket]
            in_flight.append(self.start_reduce(bucket, gradients))
            if len(in_flight) == IN_FLIGHT:
                self.free_all(in_flight.pop(0))
        for reduced in in_flight:
            self.free_all(reduced)

    def start_reduce(self, bucket: list[Weight], gradients: list[Allocation]) -> list[Allocation]:
        """Allocate a bucket and its result. Return what is freed when it has been reduced."""
        is_sharded = _is_sharded(bucket)
        full = gradients[0]
        if len(gradients) > 1:  # copied into one
            elements = sum(weight.full_elements for weight in bucket)
            full = self.allocate(
                WORKING if is_sharded else GRADIENTS, self.summed_itemsize * elements
            )
            self.free_all(gradients)
        if not is_sharded:
            self.reduced_gradients.append(full)
            return []
        elements = sum(weight.shard_elements for weight in bucket)
        self.reduced_gradients.append(self.allocate(GRADIENTS, self.summed_itemsize * elements))
        return [full]

    def receive_table_gradient(self) -> None:
        """Receive the gradient of a tied table's copy in another rank's last stage, to be added."""
        self.phase = "adding gradients of the tied table"
        last_stage = len(self.layout.pipeline.modules) - 1
        if 0 in self.stages and last_stage not in self.stages:
            nbytes = STORED_BYTES * copied_table_shard(self.layout)
            self.free(self.allocate(WORKING, nbytes))

    def keep_until_update(self) -> None:
        """Allocate what features keep from the last backward to the update."""
        self.phase = "after backward"
        for weight in self.weights:
            nbytes = STORED_BYTES * weight.kept.before_update
            self.kept.append(self.allocate(KEPT_BY_FEATURES, nbytes))

    def update(self) -> None:
        """Allocate the optimizer's state in the first step, and free the gradients.

        Norms and updates of one kernel need no memory.
        """
        self.free_all(self.kept)
        self.kept.clear()
        self.phase = "optimizer step"
        if not self.has_optimizer_state:
            for nbytes in self.optimizer_state_bytes():
                self.allocate(OPTIMIZER_STATE, nbytes)
            self.has_optimizer_state = True
        self.free(self.allocate(WORKING, self.update_working_bytes()))
        self.free_all(self.reduced_gradients)
        for gradients in self.gradients.values():
            self.free_all([gradient.allocation for gradient in gradients.values()])
        self.reduced_gradients.clear()
        self.gradients.clear()

    def update_working_bytes(self) -> float:
        """Return the bytes of tensors that an update needs beside the optimizer's state."""
        config = self.layout.config
        costs = owner_costs(config.optimizer)
        if costs is not None:
            elements = max(
                (
                    weight.shard_elements
                    if weight.of_experts
                    else self.layout.degrees["tp"] * weight.full_elements
                    for weight in self.weights
                    if weight.matrix
                ),
                default=0,
            )
            return COMPLETE_MATRICES * ITEM_BYTES[costs.dtype] * elements
        algorithm, _ = algorithms_of(config.optimizer)
        if not algorithm.update_bytes:  # one kernel
            return 0.0
        shards = [weight.shard_elements for weight in self.weights if weight.updated]
        return PLAIN_TENSORS * STORED_BYTES * max(shards, default=0)

    def optimizer_state_bytes(self) -> Iterator[float]:
        """Yield the bytes of each tensor: step count and moments, then what an owner has."""
        config = self.layout.config
        for weight in self.weights:
            if not weight.updated:
                continue
            yield 4
            matrix_elements = weight.shard_elements if weight.matrix else 0
            yield from moment_bytes(config.optimizer, weight.shard_elements, matrix_elements)
        yield owner_bytes(config, self.layout)

    def free_all(self, allocations: Sequence[Allocation]) -> None:
        for allocation in allocations:
            self.free(allocation)


@dataclass(frozen=True)
class _GatheringBucket:
    weights: list[Weight]
    shard: Allocation  # of all weights, cast and padded
    full: Allocation  # where the collective writes to


def _is_sharded(weights: Sequence[Weight]) -> bool:
    return any(weight.is_sharded for weight in weights)
