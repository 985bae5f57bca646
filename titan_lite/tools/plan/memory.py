"""Compute a rank's memory: count the bytes that a step allocates and frees, by part.

    memory = memory_of(layout, stages, machine)         # stages: of each pipeline stage (tape.py)
    memory.reserved, memory.parts["activations"]        # bytes

The step is one of those after the first, when the optimizer has its state. It allocates as the
trainer does: weights gathered for the step, then forward, loss and backward of each microbatch in
the order of the schedule, then reduced gradients and what the update needs. CUDA's caching
allocator reserves more than the peak of these bytes: RESERVED_OVER_PEAK.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from titan_lite.cost.machine import GIB, Machine
from titan_lite.cost.nccl import CHANNELS
from titan_lite.distributed.pipeline_schedule import backward_kinds, computations, order_of
from titan_lite.distributed.step_gather import IN_FLIGHT
from titan_lite.tools.plan.costs import GRAPH_OF_ACTION
from titan_lite.tools.plan.rank_bytes import (
    COMPLETE_MATRICES,
    ITEM_BYTES,
    PLAIN_TENSORS,
    STORED_BYTES,
    TENSORS_OF_BFLOAT16,
    algorithms_of,
    copied_table_shard,
    itemsizes,
    moment_bytes,
    owner_bytes,
    owner_costs,
    plain_update_bytes,
)
from titan_lite.tools.plan.tape import Stage, Tape, Weight, buckets_of
from titan_lite.tools.plan.trace import PlannedLayout

MIB = 2**20

# CUDA's caching allocator keeps gaps between tensors. The median of 20 published settings, with
# expandable segments as launch.py sets them: what the run reserved, without what FSDP2 keeps beside
# a plan, over the planned peak (scripts/compare_published.py). 18 are between 1.09 and 1.20.
RESERVED_OVER_PEAK = 1.13
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
STEP_COUNT = 4  # bytes, of each parameter that the optimizer updates

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


def memory_of(layout: PlannedLayout, stages: Sequence[Stage], machine: Machine) -> Memory:
    """Return the memory of a layout on such a machine."""
    runs = [replay(layout, stages, rank, machine) for rank in range(layout.degrees["pp"])]
    rank, run = max(enumerate(runs), key=lambda each: each[1].peak)
    reserved = RESERVED_OVER_PEAK * run.peak
    return Memory(rank, run.peak_phase, run.peak_parts, reserved, outside_of_tensors(layout))


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


def replay(layout: PlannedLayout, stages: Sequence[Stage], rank: int, machine: Machine) -> "Replay":
    """Replay a step of pipeline rank `rank`, with at most two local batches."""
    own = {stage: stages[stage] for stage in layout.pipeline.stages_of(rank)}
    actions = computations(order_of(layout.config.parallelism, layout.pipeline)[rank])
    run = Replay(layout, own, backward_kinds(actions))
    run.allocate_model(machine)
    run.gather_weights()
    # In a second local batch, gradients of the first exist.
    for _ in range(min(2, layout.accumulation)):
        for kind, stage, microbatch in actions:
            run.run_graph(stage, GRAPH_OF_ACTION[kind], microbatch)
    run.reduce_gradients()
    run.receive_table_gradient()
    run.keep_until_update()
    run.update()
    return run


class Replay:
    """The bytes of a rank in a step.

    peak, peak_phase, peak_parts: the most so far, the phase of the step then, and the parts.
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
        computed, summed = itemsizes(layout.config.training)
        self.computed_itemsize = computed
        self.summed_itemsize = summed
        # A compiled graph gives its gradients away, and they are copied.
        self.copies_gradients = layout.config.compile.enable
        self.weights = [weight for stage in stages.values() for weight in stage.weights]

        self.phase = "start"
        self.parts: Counter[str] = Counter()  # bytes that are allocated
        self.allocated = 0  # their sum
        self.peak = 0
        self.peak_phase = "start"
        self.peak_parts: dict[str, float] = {}
        # By stage: indexes of gradients on the tape that made the first ones.
        self.summed: dict[int, set[int]] = defaultdict(set)

    def allocate(self, part: str, nbytes: float) -> None:
        self.parts[part] += int(nbytes)
        self.allocated += int(nbytes)
        if self.allocated > self.peak:
            self.peak = self.allocated
            self.peak_phase = self.phase
            self.peak_parts = {name: float(size) for name, size in self.parts.items() if size}

    def free(self, part: str, nbytes: float) -> None:
        self.allocate(part, -nbytes)

    def allocate_for_a_moment(self, part: str, nbytes: float) -> None:
        self.allocate(part, nbytes)
        self.free(part, nbytes)

    def allocate_model(self, machine: Machine) -> None:
        """Allocate what stays from step to step."""
        for number, stage in self.stages.items():
            for weight in stage.weights:
                self.allocate(PARAMETERS, STORED_BYTES * weight.shard_elements)
            self.allocate(PARAMETERS, stage.buffers)
            for weight in stage.weights:
                self.allocate(KEPT_BY_FEATURES, STORED_BYTES * weight.kept.always)
            # torch's stages receive each microbatch in a buffer of its own
            # (distributed/pipelining/stage.py).
            neighbours = (number > 0) + (number < len(self.layout.pipeline.modules) - 1)
            buffers = neighbours * self.layout.pipeline.microbatches
            self.allocate(PIPELINE_BUFFERS, buffers * stage.hidden)
        self.allocate(OPTIMIZER_STATE, self.optimizer_state_bytes())
        if not machine.is_cpu:
            workspace = HOPPER_WORKSPACE if machine.name.startswith("H") else WORKSPACE
            self.allocate(WORKSPACES, THREADS * workspace)

    def run_graph(self, number: int, name: str, microbatch: int | None) -> None:
        """Run a graph of a microbatch in a stage."""
        self.phase = PHASE_OF_GRAPH[name]
        tape = self.stages[number].tapes[self.backward_of[number, microbatch]]
        for event in tape.events.get(name, ()):
            if event >= 0:
                self.allocate(tape.parts[event], tape.sizes[event])
            elif ~event < len(tape.elements):
                self.accumulate(number, tape, ~event)
            else:
                self.free(tape.parts[~event], tape.sizes[~event])

    def accumulate(self, number: int, tape: Tape, gradient: int) -> None:
        """Keep a gradient of the first microbatch, and add later ones to it.

        Gradients of full weights are added in the dtype that they are reduced in. A microbatch
        makes all of a stage's gradients before another one does.
        """
        nbytes = tape.sizes[gradient]
        summed_bytes = tape.elements[gradient] * self.summed_itemsize
        is_added = gradient in self.summed[number]
        is_copied = self.layout.gathers_once and (summed_bytes != nbytes or self.copies_gradients)
        self.summed[number].add(gradient)
        if is_copied and not is_added:
            self.allocate(GRADIENTS, summed_bytes)
        if is_copied or is_added:
            self.free(GRADIENTS, nbytes)

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
                if weight.is_sharded or weight.gathered_itemsize != STORED_BYTES
            ]
            buckets = buckets_of(copied, "gathered_with")
            overlap(buckets, self.start_gather, self.finish_gather)

    def start_gather(self, bucket: list[Weight]) -> None:
        itemsize = bucket[0].gathered_itemsize  # a bucket has one dtype
        part = WORKING if len(bucket) > 1 else FULL_WEIGHTS
        self.allocate(WORKING, itemsize * shard_elements(bucket))  # cast and padded
        self.allocate(part, itemsize * full_elements(bucket))

    def finish_gather(self, bucket: list[Weight]) -> None:
        itemsize = bucket[0].gathered_itemsize
        self.free(WORKING, itemsize * shard_elements(bucket))
        if len(bucket) > 1:  # copied out
            self.allocate(FULL_WEIGHTS, itemsize * full_elements(bucket))
            self.free(WORKING, itemsize * full_elements(bucket))

    def reduce_gradients(self) -> None:
        """Reduce the sums of full gradients, IN_FLIGHT buckets at once; free the full weights."""
        self.phase = "reducing gradients"
        if self.layout.gathers_once:
            for stage in self.stages.values():
                buckets = buckets_of(stage.weights, "reduced_with")
                overlap(buckets, self.start_reduce, self.finish_reduce)
        self.free(FULL_WEIGHTS, self.parts[FULL_WEIGHTS])

    def start_reduce(self, bucket: list[Weight]) -> None:
        """Allocate a bucket and its result, if it is sharded."""
        nbytes = self.summed_itemsize * full_elements(bucket)
        if len(bucket) > 1:  # copied into one
            self.allocate(part_of_reduction(bucket), nbytes)
            self.free(GRADIENTS, nbytes)
        self.allocate(GRADIENTS, self.summed_itemsize * shard_elements(bucket))

    def finish_reduce(self, bucket: list[Weight]) -> None:
        if is_sharded(bucket):
            self.free(part_of_reduction(bucket), self.summed_itemsize * full_elements(bucket))

    def receive_table_gradient(self) -> None:
        """Receive the gradient of a tied table's copy in another rank's last stage, to be added."""
        self.phase = "adding gradients of the tied table"
        last_stage = len(self.layout.pipeline.modules) - 1
        if 0 in self.stages and last_stage not in self.stages:
            nbytes = STORED_BYTES * copied_table_shard(self.layout)
            self.allocate_for_a_moment(WORKING, nbytes)

    def keep_until_update(self) -> None:
        """Allocate what features keep from the last backward to the update."""
        self.phase = "after backward"
        numbers = sum(weight.kept.before_update for weight in self.weights)
        self.allocate_for_a_moment(KEPT_BY_FEATURES, STORED_BYTES * numbers)

    def update(self) -> None:
        """Allocate what the update needs. Norms and updates of one kernel need no memory."""
        self.phase = "optimizer step"
        self.allocate_for_a_moment(WORKING, self.update_working_bytes())

    def update_working_bytes(self) -> float:
        """Return the bytes of tensors that an update needs beside the optimizer's state."""
        config = self.layout.config
        costs = owner_costs(config)
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
        if not plain_update_bytes(config.optimizer, algorithm):  # one kernel
            return 0.0
        shards = [weight.shard_elements for weight in self.weights if weight.updated]
        tensors = PLAIN_TENSORS
        if config.optimizer.state_dtype == "bfloat16":
            tensors += TENSORS_OF_BFLOAT16 * len(algorithm.moments)
        return tensors * STORED_BYTES * max(shards, default=0)

    def optimizer_state_bytes(self) -> float:
        """Return the bytes of step counts and moments, and of what an owner has."""
        config = self.layout.config
        nbytes = owner_bytes(config, self.layout)
        for weight in self.weights:
            if weight.updated:
                matrix_elements = weight.shard_elements if weight.matrix else 0
                nbytes += STEP_COUNT
                nbytes += moment_bytes(config.optimizer, weight.shard_elements, matrix_elements)
        return nbytes


def overlap(
    buckets: Sequence[list[Weight]],
    start: Callable[[list[Weight]], None],
    finish: Callable[[list[Weight]], None],
) -> None:
    """Start buckets in order. When IN_FLIGHT have started, the first of them is finished."""
    in_flight: list[list[Weight]] = []
    for bucket in buckets:
        start(bucket)
        in_flight.append(bucket)
        if len(in_flight) == IN_FLIGHT:
            finish(in_flight.pop(0))
    for bucket in in_flight:
        finish(bucket)


def is_sharded(bucket: Sequence[Weight]) -> bool:
    return any(weight.is_sharded for weight in bucket)


def full_elements(bucket: Sequence[Weight]) -> int:
    return sum(weight.full_elements for weight in bucket)


def shard_elements(bucket: Sequence[Weight]) -> int:
    """Return the elements of this rank's shards; 0 if none is sharded, for nothing is copied."""
    return sum(weight.shard_elements for weight in bucket) if is_sharded(bucket) else 0


def part_of_reduction(bucket: Sequence[Weight]) -> str:
    """Return the part of the memory of what a bucket is reduced from."""
    return WORKING if len(bucket) > 1 and is_sharded(bucket) else GRADIENTS
