"""Trace the graphs of a pipeline stage, as the trainer builds and compiles it, and price them.

    with start_tracing(layout.world_size) as processes:       # each is rank 0 of a fake world
        tasks = submit_traces(processes, layout, machine, full=False, shared={})
    tasks["norm", "output"][3].result()                       # TracedStage of 3 blocks and these
    costs_at(depths, n_layers=7)                              # StageCosts

No hardware is needed: a stage is built with fake tensors and a fake process group. The cost of a
graph is the sum over its nodes. Costs are linear in the number of blocks, since blocks are equal:
two depths are traced, and others are extrapolated. If blocks differ (`depths_to_trace`), every
depth is traced. Rank 0 represents all ranks of its stage, since it has the largest of uneven
shards.
"""

import dataclasses
import gc
import logging
import math
import os
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy
from tqdm import tqdm

from titan_lite.compile.graph import merge_waits
from titan_lite.compile.graph_passes import GraphPasses, choose_passes
from titan_lite.compile.passes.bucketing import by_block, merge_buckets
from titan_lite.compile.passes.order_activations import order_activation_collectives
from titan_lite.compile.passes.reordering import move_gather_before, wait_for_reductions_late
from titan_lite.compile.passes.resharding import REGION
from titan_lite.compile.settings import PassSettings
from titan_lite.config import KEYS_OF_MODULES, Compile, Config, flatten
from titan_lite.config.section import added_keys
from titan_lite.cost.costs import Costs
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import GROUPED, expected_rows
from titan_lite.cost.timeline import Timeline
from titan_lite.distributed.axes import Axes, axes_of, by_axis
from titan_lite.distributed.buckets import Bucket, Specs, gather_buckets, reduce_buckets
from titan_lite.distributed.context_parallel import ContextParallelAttention, causal_attention
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.parallelize import ParallelModel, parallelize
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.distributed.pipeline_schedule import PipelineSchedule, backwards_of
from titan_lite.distributed.simple_fsdp import materialize
from titan_lite.distributed.stage import Stage
from titan_lite.distributed.step_gather import OncePerStepGatherer, StepGradients
from titan_lite.dtensor import local
from titan_lite.feature import KeptNumbers, features_of
from titan_lite.graph import parameter_all_gathers, parameters_of, wait_of
from titan_lite.models.attention import fits_flash
from titan_lite.models.fqns import is_matrix, is_of_experts
from titan_lite.processes import end_with_program, fork_server
from titan_lite.tools.plan.costs import (
    GRAPHS,
    GRAPHS_OF_BACKWARD,
    StageCosts,
    graph_costs,
    once_per_step_costs,
)
from titan_lite.tools.plan.rank_bytes import kept_of_shard
from titan_lite.tools.plan.tape import (
    ScheduledGraph,
    StageTensors,
    Weight,
    lifetimes_of,
)

PROCESSES = 2
StageModules = tuple[str, ...]  # a stage's modules other than blocks


@dataclass(frozen=True, kw_only=True)
class PlannedLayout(Layout):
    """A layout with its recipe."""

    config: Config
    # Rows of the experts of the rank that has most, relative to the mean of all ranks.
    expert_imbalance: float = 1.0


@dataclass(frozen=True)
class TracedStage:
    """The costs of a stage at one depth, and its tensors."""

    costs: StageCosts
    # Of its graphs, in the order they run, with groups named by axis.
    timelines: Sequence[Timeline]
    tensors: StageTensors


def costs_at(depths: Mapping[int, TracedStage], n_layers: int) -> StageCosts:
    """Return the costs of a stage of `n_layers` blocks.

    They are traced, or extrapolated from the two deepest traced stages.
    """
    if n_layers in depths:
        return depths[n_layers].costs
    low, high = sorted(depths)[-2:]
    share = (n_layers - low) / (high - low)
    return depths[low].costs.extrapolated(depths[high].costs, share)


@contextmanager
def start_tracing(world_size: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes to trace in. A process has one fake process group, with a fixed world size.

    They are forked from one server for all worlds, since importing this module takes seconds.
    """
    # A process that is forked from one that has counted GPUs cannot use CUDA, as a trace would.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = fork_server([__name__])
    others = set(mp.active_children())
    with ProcessPoolExecutor(
        PROCESSES, context, initializer=start_fake_world, initargs=(world_size,)
    ) as processes:
        try:
            yield processes
        except BaseException:
            processes.shutdown(wait=False, cancel_futures=True)
            for process in set(mp.active_children()) - others:  # ends traces that are running
                process.kill()
            raise


def start_fake_world(world_size: int) -> None:
    """Make this process rank 0 of a fake process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the program handles them
    end_with_program()
    # torch uses tqdm; the semaphore of its default lock would outlive a killed process.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)  # warnings are for runs, not for plans
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def submit_traces(
    processes: ProcessPoolExecutor,
    layout: PlannedLayout,
    machine: Machine,
    full: bool,
    shared: dict[Hashable, Future[TracedStage]],
) -> dict[StageModules, dict[int, Future[TracedStage]]]:
    """Submit traces and return the tasks by a stage's modules beside blocks and number of blocks.

    full: trace every depth of the layout; shared: tasks of earlier layouts, reused for equal
    stages.
    """
    tasks: dict[StageModules, dict[int, Future[TracedStage]]] = defaultdict(dict)
    for beside, (depths, kinds) in kinds_of_stages(layout.config, layout.pipeline).items():
        pair = None if full else depths_to_trace(layout.config)
        if pair is not None and max(depths) > pair[1]:
            depths = frozenset(depth for depth in depths if depth < pair[0]).union(pair)
        for depth in sorted(depths, reverse=True):  # the longest first
            key = (trace_key(layout), beside, kinds, depth)
            if key not in shared:
                shared[key] = processes.submit(trace_stage, layout, beside, kinds, depth, machine)
            tasks[beside][depth] = shared[key]
    return tasks


def kinds_of_stages(
    config: Config, pipeline: PipelineSchedule
) -> dict[StageModules, tuple[frozenset[int], frozenset[str]]]:
    """Return by a stage's modules beside blocks: its numbers of blocks, and its kinds of backward
    (`backwards_of`).
    """
    found: dict[StageModules, tuple[frozenset[int], frozenset[str]]] = {}
    backwards = backwards_of(config.parallelism, pipeline)
    for modules, kinds in zip(pipeline.modules, backwards, strict=True):
        beside = modules_beside_blocks(modules)
        depths, others = found.get(beside, (frozenset(), frozenset()))
        found[beside] = (depths | {blocks_in(modules)}, others | kinds)
    return found


# sections that graphs do not depend on, beside what the layout has of them
NOT_TRACED = (
    *("job", "model", "optimizer", "lr_scheduler", "checkpoint", "data", "validation", "metrics"),
    *("profiling", "comm", "fault_tolerance", "debug"),
)


def trace_key(layout: PlannedLayout) -> tuple[Hashable, ...]:
    """Return all that a stage's graphs depend on besides its modules and kinds of backward: not the
    number or order of microbatches.
    """
    config = layout.config
    degrees = tuple(degree for axis, degree in layout.degrees.items() if axis != "pp")
    traced = config.replace(
        parallelism=config.parallelism.without_pipeline(),
        training=config.training.replace(local_batch_size=1, global_batch_size=-1),
    )
    return (
        layout.model,
        layout.expert_imbalance,
        layout.microbatch_size,
        layout.gathers_once,
        degrees,
        *(section for name, section in traced if name not in NOT_TRACED),
        *(
            getattr(getattr(traced, keys.table), name)
            for keys in added_keys()
            for name in keys.model_fields
        ),
    )


def depths_to_trace(config: Config) -> tuple[int, int] | None:
    """Return two depths to extrapolate from, or None if blocks differ."""
    if config.compile.buckets_across_blocks or names_blocks(config):
        return None
    period = checkpointing_period(config)
    # The first and the last blocks differ from those between them: they have gathers and reductions
    # of embedding and output beside them, and wait longer. From four blocks on, each further block
    # takes the same time. (Three blocks of Qwen3 32B wait longer than four.)
    first = math.ceil(4 / period) * period
    return first, 2 * first


def checkpointing_period(config: Config) -> int:
    """Return the number of blocks after which activation checkpointing repeats."""
    checkpointing = config.activation_checkpoint
    option = checkpointing.selective_ac_option
    if checkpointing.mode == "selective" and option.isdigit():
        return int(option)
    return 1


def names_blocks(config: Config) -> bool:
    """Return True if a key names single blocks, as in "layers.31"."""
    values = flatten(config)
    names = [name for key in KEYS_OF_MODULES for name in values[key]]
    return any(word.isdigit() for name in names for word in re.split("[ .]", name))


def modules_beside_blocks(modules: Sequence[str]) -> StageModules:
    return tuple(name for name in modules if not name.startswith("layers."))


def blocks_in(modules: Sequence[str]) -> int:
    return len(modules) - len(modules_beside_blocks(modules))


def trace_stage(
    layout: PlannedLayout,
    beside: StageModules,
    kinds: Collection[str],
    n_layers: int,
    machine: Machine,
) -> TracedStage:
    """Trace a stage of `n_layers` blocks and the modules `beside` them in a fake world, and price
    it on a machine.

    kinds: of backward, as in `backwards_of`.
    """
    gc.collect()  # graphs of earlier traces
    config = layout.config
    mesh = build_mesh(layout.degrees, "cpu")
    axes = axes_of(mesh, layout.expert_parallel)
    machine = machine.with_attention_kernel(config.training.attention_kernel)
    graph_passes = PricedPasses(layout, machine, axes)
    compile = config.compile.replace(backend="aot_eager")  # which only traces
    traced = dataclasses.replace(layout, config=config.replace(compile=compile))
    model = parallelize_stage(traced, mesh, beside, kinds, n_layers, graph_passes)
    (stage,) = model.stages
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize_stage(layout, stage)
        inputs = stage_inputs(config, layout, stage, machine)
        stage(inputs.input, **inputs.model_kwargs)

    graphs = graph_passes.graphs
    specs = stage.sharding.specs
    updated = {parameter: spec for parameter, spec in specs.items() if is_updated(layout, spec)}
    costs = StageCosts(
        graphs={name: graph.costs for name, graph in graphs.items()},
        once=costs_once(layout, specs, updated, machine, axes, graphs),
        shard_elements=float(sum(local(parameter).numel() for parameter in specs)),
        full_elements=float(sum(full_elements(spec) for spec in specs.values())),
        hidden_bytes=float(inputs.hidden.nbytes),
    )
    timelines = [graphs[name].timeline for name in GRAPHS if name in graphs]
    period = n_layers if depths_to_trace(config) is None else checkpointing_period(config)
    lifetimes = {
        kind: lifetimes_of(
            {name: graphs[name].scheduled for name in GRAPHS_OF_BACKWARD[kind] if name in graphs},
            n_layers,
            period,
        )
        for kind in sorted(kinds)
    }
    tensors = StageTensors(
        lifetimes,
        weights_of(layout, specs),
        buffers=sum(buffer.nbytes for buffer in stage.model.buffers()),
        hidden=inputs.hidden.nbytes,
    )
    return TracedStage(costs, timelines, tensors)


def costs_once(
    layout: PlannedLayout,
    specs: Specs,
    updated: Specs,
    machine: Machine,
    axes: Axes,
    graphs: Mapping[str, "PricedGraph"],
) -> dict[str, Costs]:
    """Return the costs of what happens once in a step.

    updated: those of `specs` that the optimizer updates.
    """
    once: dict[str, Costs] = {}
    if layout.gathers_once:
        halves = ("backward_input", "backward_weight")
        backward = ("backward",) if "backward" in graphs else halves
        computing = {
            phase: sum(graphs[name].costs.compute for name in names)
            for phase, names in (("forward", ("forward",)), ("backward", backward))
        }
        hidden_under = {} if machine.is_cpu else computing
        once = once_per_step_costs(specs, machine, axes, hidden_under)
    once["after_backward"] = after_backward = Costs()
    for feature in features_of(layout.config):
        feature.add_costs_after_backward(layout.config, after_backward, updated, machine, axes)
    return once


def full_elements(spec: ShardSpec) -> int:
    """Return the elements of a gathered parameter."""
    return spec.rows * math.prod(spec.row_shape)


def is_updated(layout: PlannedLayout, spec: ShardSpec) -> bool:
    """Return False for the copy of a tied table in the last stage (distributed/tied_table.py): in
    one stage, the table has the embedding's name.
    """
    return not (layout.model.tied_embeddings and spec.fqn == "output.weight")


def weights_of(layout: PlannedLayout, specs: Specs) -> list[Weight]:
    """Return the weights of a stage, and the buckets of those that are gathered once per step."""
    gathered_with = _bucket_numbers(gather_buckets(specs))
    reduced_with = _bucket_numbers(reduce_buckets(specs))
    return [
        Weight(
            shard_elements=local(parameter).numel(),
            full_elements=full_elements(spec),
            block=int(spec.fqn.split(".")[1]) if spec.fqn.startswith("layers.") else -1,
            gathered_itemsize=spec.gather_dtype.itemsize,
            gathered_with=gathered_with[parameter],
            reduced_with=reduced_with[parameter],
            matrix=is_matrix(spec.fqn),
            of_experts=is_of_experts((spec.rows, *spec.row_shape)),
            updated=is_updated(layout, spec),
            kept=kept_of_shard(layout.config, (spec.chunk, *spec.row_shape))
            if is_updated(layout, spec)
            else KeptNumbers(),
        )
        for parameter, spec in specs.items()
    ]


def _bucket_numbers(buckets: Sequence[Bucket]) -> dict[nn.Parameter, int]:
    return {
        parameter: number
        for number, bucket in enumerate(buckets)
        for parameter in bucket.parameters
    }


def parallelize_stage(
    layout: PlannedLayout,
    mesh: DeviceMesh,
    beside: StageModules,
    kinds: Collection[str],
    n_layers: int,
    graph_passes: GraphPasses,
) -> ParallelModel:
    """Return one stage on the meta device, compiled by `graph_passes`."""
    modules = (*beside, *(f"layers.{number}" for number in range(n_layers)))
    alone = dataclasses.replace(
        layout,
        model=dataclasses.replace(layout.model, n_layers=max(n_layers, 1)),
        pipeline=PipelineSchedule((modules,), (0,), layout.pipeline.microbatches),
    )
    model = parallelize(layout.config, alone, mesh, graph_passes=graph_passes, backwards=[kinds])
    attention: Any
    for attention in model.stages[0].model.modules():
        attend = getattr(attention, "attend", None)
        if isinstance(attend, ContextParallelAttention):
            attention.attend = dataclasses.replace(attend, attend=attend_as_on_gpus)
    return model


def materialize_stage(layout: PlannedLayout, stage: Stage) -> None:
    """Allocate the parameters in a fake world, gathered or sharded as in a step."""
    materialize(stage.model, torch.device("cpu"))
    if layout.gathers_once:
        sharding = stage.sharding
        gradients = StepGradients(sharding.specs, sharding.prefetch, microbatches=1)
        step = OncePerStepGatherer(sharding.prefetch, gradients)
        for spec in sharding.specs.values():
            full = torch.zeros(spec.rows, *spec.row_shape, dtype=spec.gather_dtype)
            step.keep(full, spec, requires_grad=True)
        sharding.reader = step


class StageInputs(NamedTuple):
    """The arguments of a stage, for a microbatch."""

    input: Tensor  # token ids (B, t), or hidden states of a stage without the embedding
    hidden: Tensor  # (B, t, C), the hidden states that travel between pipeline stages
    model_kwargs: dict[str, Tensor]


def stage_inputs(
    config: Config, layout: Layout, stage: Stage, machine: Machine | None = None
) -> StageInputs:
    """Return zeros of the shapes that a stage is called with.

    machine: whose attention may get documents' ends instead of a mask; None: it gets a mask.
    """
    ids = torch.zeros(layout.microbatch_size, len(stage.model.positions), dtype=torch.long)
    hidden = torch.zeros(
        layout.microbatch_size,
        len(stage.model.positions) // layout.degrees["tp"],
        layout.model.dim,
        dtype=getattr(torch, config.training.mixed_precision_param),
        requires_grad=True,
    )
    model_kwargs = {"labels": ids}
    if config.training.mask_documents:
        model_kwargs["doc_starts"] = ids
        if machine is not None and masks_by_kernel_on(machine, config, layout):
            doc_stats = torch.zeros(layout.microbatch_size, 2, dtype=torch.long)
            model_kwargs["doc_stats"] = doc_stats
    return StageInputs(hidden if stage.model.tok_embeddings is None else ids, hidden, model_kwargs)


def masks_by_kernel_on(machine: Machine, config: Config, layout: Layout) -> bool:
    """Return True if attention on such a machine gets documents' ends instead of a mask."""
    dtype = getattr(torch, config.training.mixed_precision_param)
    is_cuda = not machine.is_cpu and not machine.name.startswith("MI")
    return is_cuda and layout.degrees["cp"] == 1 and fits_flash(dtype, layout.model.head_dim)


def attend_as_on_gpus(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with context parallelism as on GPUs: by a causal operator of the same cost and shapes.

    Its mask is aligned differently, but nothing is computed here. A mask of documents is handled as
    on all devices.
    """
    if mask is not None:
        return causal_attention(q, k, v, mask)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@dataclass(frozen=True)
class PricedGraph:
    """A graph as it runs, and what it costs."""

    scheduled: ScheduledGraph
    costs: Costs
    timeline: Timeline  # with groups named by axis


class PricedPasses(GraphPasses):
    """Run the passes, or reorder as eager mode does, and price each graph."""

    def __init__(self, layout: PlannedLayout, machine: Machine, axes: Axes):
        config = layout.config
        priced_as = mode_of(config.compile)
        is_eager = priced_as == "eager"
        settings = PassSettings(
            config.compile.replace(backend="aot_eager"),  # which only traces
            machine,
            fused=priced_as == "inductor",
        )
        passes = [order_activation_collectives] if is_eager else choose_passes(config)
        super().__init__(settings, passes)
        self.priced_as = priced_as
        self.layout = layout
        self.machine = machine
        self.axes = axes
        self.accumulates_at_once = is_eager or layout.gathers_once
        # the caller of a graph of aot_eager does, until it returns
        self.keeps_inputs = priced_as == ""
        self.graphs: dict[str, PricedGraph] = {}

    @property
    def decomposes(self) -> bool:
        return self.priced_as == "inductor"

    def tag_joint(self, graph: Graph) -> None:
        if self.priced_as == "eager":
            save_as_autograd(graph)

    def run(self, module: GraphModule, name: str) -> None:
        fused = self.settings.fused
        load_experts(module.graph, self.layout)
        if self.priced_as == "eager":
            schedule_as_in_eager_mode(module.graph)
        super().run(module, name)
        timeline = self.reports[-1].timeline
        assert timeline is not None
        self.graphs[name] = PricedGraph(
            ScheduledGraph(module.graph, fused, self.keeps_inputs, self.accumulates_at_once),
            graph_costs(module.graph, timeline, self.machine, self.axes),
            by_axis(timeline, self.axes),
        )


def mode_of(config: Compile) -> Literal["", "eager", "inductor"]:
    """Return what runs a model; "" for aot_eager."""
    if not config.enable:
        return "eager"
    return "inductor" if config.backend == "inductor" else ""


def load_experts(graph: Graph, layout: PlannedLayout) -> None:
    """Give the experts of a graph the rows of the rank that has most, at most those that there is
    room for.
    """
    for node in graph.nodes:
        if node.target in GROUPED:
            rows, ends = (cast(Node, node.args[index]).meta["val"] for index in (0, 2))
            spare = len(ends) < layout.model.n_experts  # the last row (models/experts.py)
            loaded = round(layout.expert_imbalance * expected_rows(node))
            custom = node.meta.get("custom", {})
            node.meta["custom"] = {**custom, "balanced_rows": min(len(rows) - spare, loaded)}


def save_as_autograd(graph: Graph) -> None:
    """Let forward save what autograd saves.

    These are all activations but those within checkpointed blocks. Forward computes nothing of
    backward.
    """
    in_forward = [node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_forward"]
    plain = {node for node in in_forward if not node.meta.get("recompute")}
    for node in graph.nodes:
        is_checkpointed = node.meta.get("ac_graph_id", REGION) != REGION
        is_read_outside = is_checkpointed and plain & node.users.keys()
        if node in plain or is_read_outside:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.op == "call_function" and node.meta.get("partitioner_tag") != "is_forward":
            node.meta["partitioner_tag"] = "must_be_in_backward"


def schedule_as_in_eager_mode(graph: Graph) -> None:
    """Bucket and reorder collectives as eager mode does after the first step
    (distributed/prefetch.py): a bucket is in flight once the one before is copied out, and each
    collective of a reduction is waited for when the next of its kind starts.
    """
    merge_waits(graph)
    merge_buckets(graph, by_block(graph))
    position = next(node for node in graph.nodes if node.op != "placeholder")
    for gather in [node for node in parameter_all_gathers(graph) if parameters_of(node)]:
        move_gather_before(gather, position)
        wait = wait_of(gather)
        columns = [part for rows in wait.users for part in rows.users]
        copies = [user for part in columns for user in part.users if user.meta.get("copies")]
        position = max([wait, *copies]).next
    wait_for_reductions_late(graph)
    graph.lint()
