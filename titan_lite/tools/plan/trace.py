"""Trace the graphs of a pipeline stage with the real model and compile stage, on no hardware, and
price them.

    with start_tracing(layout.world_size) as processes:       # each is rank 0 of a fake world
        tasks = start_trace(processes, layout, machines, full=False, shared={})      # {modules beside blocks: {blocks: task}}
    figures_at(depths, n_layers=7, machine=0)                 # {"forward.compute": 0.41, "backward.exposed.tp": 0.08, ...}

A stage is built as by the trainer, with fake tensors and a fake process group. The cost of a graph
is the sum over its nodes. Figures are linear in the number of blocks, since blocks are equal: two
depths are traced, and others are extrapolated. If blocks differ (`depths_to_trace`), every depth is
traced. Rank 0 represents all ranks of its stage, since it has the largest of uneven shards.
"""

import dataclasses
import gc
import logging
import math
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from titan_lite.compile.compile import compile_model
from titan_lite.compile.graph import merge_waits
from titan_lite.compile.passes.bucketing import merge_buckets
from titan_lite.compile.passes.choose_buckets import by_block
from titan_lite.compile.passes.reordering import move_gather_before, wait_for_reductions_late
from titan_lite.compile.schedule import Schedule
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, Config, Parallelism
from titan_lite.cost.collectives import (
    parameter_all_gathers,
    parameters_of,
    wait_of,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.timeline import Timeline
from titan_lite.distributed.axes import Axes, axes_of, by_axis
from titan_lite.distributed.buckets import Plans, gather_buckets, reduce_buckets
from titan_lite.distributed.context_parallel import causal_attention
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.materialize import materialize
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.parallelize import parallelize
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.powersgd import factor_sizes
from titan_lite.distributed.simple_fsdp import model_of
from titan_lite.distributed.step_gather import hold
from titan_lite.distributed.tensor_parallel import axis_of
from titan_lite.dtensor import local
from titan_lite.models.attention import fits_flash
from titan_lite.models.llama3 import Transformer
from titan_lite.models.loss import Loss, VocabularyShard
from titan_lite.optim.state import is_matrix
from titan_lite.processes import end_with_parent
from titan_lite.tools.plan.costs import Figures, copies_figures, figures_of, round_figures
from titan_lite.tools.plan.tape import GRAPHS, ScheduledGraph, Tensors, Weight, lives_of

PROCESSES = 2
Kind = tuple[str, ...]  # a stage's modules other than blocks


@dataclass(frozen=True, kw_only=True)
class PlannedLayout(Layout):
    """A layout with its recipe."""

    config: Config


@dataclass(frozen=True)
class Traced:
    """The costs of a stage at one depth, and its tensors."""

    figures: Sequence[Figures]  # on each machine (costs.py)
    timelines: Sequence[
        Timeline
    ]  # of its graphs on the first machine, in the order they run, with groups named by axis
    tensors: Tensors


def figures_at(depths: Mapping[int, Traced], n_layers: int, machine: int) -> Figures:
    """Return the figures of a stage with `n_layers` blocks, traced or extrapolated from the two
    deepest ones.
    """
    if n_layers in depths:
        return dict(depths[n_layers].figures[machine])
    (low, at_low), (high, at_high) = (
        (depth, traced.figures[machine]) for depth, traced in sorted(depths.items())[-2:]
    )
    share = (n_layers - low) / (high - low)
    keys = {**at_low, **at_high}
    return {
        key: at_low.get(key, 0.0) + share * (at_high.get(key, 0.0) - at_low.get(key, 0.0))
        for key in keys
    }


@contextmanager
def start_tracing(world_size: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes to trace in. A process has one fake process group, with a fixed world size.

    They are forked from one server for all worlds, since importing this module takes seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # inherited by the server: Ctrl-C in its imports prints no traceback
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, here)
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
    end_with_parent()
    tqdm.set_lock(
        threading.RLock()
    )  # torch uses tqdm; the semaphore of its default lock would outlive a killed process
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)  # warnings are for runs, not for plans
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def start_trace(
    processes: ProcessPoolExecutor,
    layout: PlannedLayout,
    machines: Sequence[Machine],
    full: bool,
    shared: dict[Any, Future[Traced]],
) -> dict[Kind, dict[int, Future[Traced]]]:
    """Submit traces and return the tasks by kind of stage and number of blocks.

    full: trace every depth of the layout; shared: tasks of earlier layouts, reused for equal
    stages.
    """
    wanted: dict[Kind, set[int]] = defaultdict(set)
    for modules in layout.pipeline.modules:
        wanted[kind_of_stage(modules)].add(layers_of(modules))
    started: dict[Kind, dict[int, Future[Traced]]] = defaultdict(dict)
    for kind, counts in wanted.items():
        pair = None if full else depths_to_trace(layout.config)
        few = {count for count in counts if pair and count < pair[0]}
        depths = few.union(pair) if pair and max(counts) > pair[1] else counts
        for depth in sorted(depths, reverse=True):  # the longest first
            key = (*traced_by(layout), kind, depth)
            if key not in shared:
                shared[key] = processes.submit(trace_stage, layout, kind, depth, machines)
            started[kind][depth] = shared[key]
    return started


def traced_by(layout: PlannedLayout) -> tuple[Any, ...]:
    """Return all that a stage's graphs depend on besides its modules: not the number or order of
    microbatches.
    """
    config = layout.config
    of_pipeline: dict[str, Any] = {
        name: field.default
        for name, field in Parallelism.model_fields.items()
        if name.startswith("pipeline_parallel")
    }
    degrees = tuple(degree for axis, degree in layout.degrees.items() if axis != "pp")
    return (
        layout.model,
        layout.microbatch_size,
        layout.gathers_once,
        degrees,
        config.compile,
        config.float8,
        config.activation_checkpoint,
        config.parallelism.replace(**of_pipeline),
        config.training.replace(local_batch_size=1, global_batch_size=-1, global_batch_ramp=()),
    )


def depths_to_trace(config: Config) -> tuple[int, int] | None:
    """Return two depths to extrapolate from, or None if blocks differ."""
    if names_blocks(config) or (
        config.compile.compiles("model") and config.compile.bucketing == "auto"
    ):
        return None
    checkpointing = config.activation_checkpoint
    option = checkpointing.selective_ac_option
    period = int(option) if checkpointing.mode == "selective" and option.isdigit() else 1
    first = (
        -(-3 // period) * period
    )  # of two blocks, the first has the embedding's all-gather and the second the output's
    return first, first + period


def names_blocks(config: Config) -> bool:
    """Return True if a key names single blocks, as in "layers.31"."""
    named = " ".join(
        (
            *config.parallelism.fsdp_keep_gathered,
            *config.compile.buckets,
            *config.float8.filter_fqns,
        )
    )
    return any(map(str.isdigit, re.split("[ .]", named)))


def kind_of_stage(modules: Sequence[str]) -> Kind:
    return tuple(name for name in modules if not name.startswith("layers."))


def layers_of(modules: Sequence[str]) -> int:
    return len(modules) - len(kind_of_stage(modules))


def trace_stage(
    layout: PlannedLayout, kind: Kind, n_layers: int, machines: Sequence[Machine]
) -> Traced:
    """Trace a stage of `kind` with `n_layers` blocks in a fake world, and price it on each machine."""
    torch._dynamo.reset()
    gc.collect()  # graphs of earlier traces
    config = layout.config
    mesh = build_mesh(layout.degrees, "cpu")
    axes = axes_of(mesh)
    machines = [
        machine.with_attention_kernel(config.training.attention_kernel) for machine in machines
    ]
    passes = PricedSchedule(
        "model",
        config.compile,
        machines,
        axes,
        async_tensor_parallel=config.parallelism.enable_async_tensor_parallel,
        gathers_once=layout.gathers_once,
    )
    traced = config.compile.replace(backend="aot_eager")
    as_traced = dataclasses.replace(layout, config=config.replace(compile=traced))
    model = build_stage(as_traced, mesh, kind, n_layers, passes)
    plans = model_of(model).plans
    loss_passes = PricedSchedule("loss", config.compile, machines, axes)
    dtype = getattr(torch, config.training.mixed_precision_param)
    tokens, tp = len(model.positions), axis_of(mesh["tp"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize_stage(layout, model)
        ids, between = stage_inputs(layout, model)
        labels = {"labels": ids} if layout.loss_chunk else {}
        model(
            ids if "tok_embeddings" in kind else between,
            **labels,
            **documents_for(layout, ids, machines[0]),
        )
        if "output" in kind and not layout.loss_chunk:
            shard = VocabularyShard(layout.model.vocab_size, tp.rank, tp.degree, tp.group)
            loss = _Loss(Loss(shard).of_logits)
            compile_model(loss, loss_passes, reshard_after_forward=False)
            logits = torch.zeros(
                layout.microbatch_size, tokens, len(shard.entries), dtype=dtype, requires_grad=True
            )
            loss(logits, torch.zeros(layout.microbatch_size, tokens, dtype=torch.long))
    held = {
        "held": float(
            sum(local(parameter).numel() for parameter in plans)
        ),  # elements of this rank's shards
        "whole": float(
            sum(plan.rows * math.prod(plan.row_shape) for plan in plans.values())
        ),  # elements when all are gathered
        "activations.between": float(between.nbytes),
    }
    graphs = {
        **passes.graphs,
        **{f"loss_{name}": graph for name, graph in loss_passes.graphs.items()},
    }
    found = []
    for number, machine in enumerate(machines):
        computing = {name: each[number]["compute"] for name, (each, _) in passes.graphs.items()}
        under = {} if machine.is_cpu else computing
        figures = held | (round_figures(plans, machine, axes, under) if layout.gathers_once else {})
        for name, (each, _) in graphs.items():
            figures |= {f"{name}.{key}": value for key, value in each[number].items()}
        figures |= copies_figures(plans, machine, axes, config.parallelism)
        found.append(figures)
    in_order = sorted(graphs, key=GRAPHS.index)
    timelines = [dataclasses.replace(graphs[name][1], graph=name) for name in in_order]
    scheduled = {
        **passes.scheduled,
        **{f"loss_{name}": graph for name, graph in loss_passes.scheduled.items()},
    }
    pair = depths_to_trace(config)
    lives = lives_of(scheduled, n_layers, pair[1] - pair[0] if pair else n_layers)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return Traced(
        found,
        timelines,
        Tensors(lives, weights_of(plans, config.parallelism), buffers, between.nbytes),
    )


def weights_of(plans: Plans, parallelism: Parallelism) -> list[Weight]:
    """Return the weights of a stage, and the buckets of those that are gathered once per step."""
    gathered, reduced = (
        {parameter: number for number, (members, _) in enumerate(buckets) for parameter in members}
        for buckets in (gather_buckets(plans), reduce_buckets(plans))
    )
    found = []
    for parameter, plan in plans.items():
        block = int(plan.fqn.split(".")[1]) if plan.fqn.startswith("layers.") else -1
        whole = plan.rows * math.prod(plan.row_shape)
        buckets = gathered[parameter], reduced[parameter]
        kind: dict[str, Any] = dict(
            float8=plan.float8,
            matrix=is_matrix(plan.fqn),
        )
        kind |= dict(factors=factor_sizes(plan, parallelism) or (0, 0))
        found.append(Weight(local(parameter).numel(), whole, block, *buckets, **kind))
    return found


def build_stage(
    layout: PlannedLayout, mesh: DeviceMesh, kind: Kind, n_layers: int, schedule: Schedule
) -> Transformer:
    """Return a stage of `kind` with `n_layers` blocks on the meta device, compiled by `schedule`."""
    modules = (*kind, *(f"layers.{number}" for number in range(n_layers)))
    alone = dataclasses.replace(
        layout,
        model=dataclasses.replace(layout.model, n_layers=max(n_layers, 1)),
        pipeline=PipelineSchedule((modules,), (0,), layout.pipeline.microbatches),
    )
    model = parallelize(layout.config, alone, mesh, schedule=schedule, attend=attend_as_on_gpus)
    (stage,) = model.stages
    return stage


def materialize_stage(layout: PlannedLayout, model: Transformer) -> None:
    """Allocate the parameters in a fake world, gathered or sharded as in a step."""
    materialize(model, torch.device("cpu"))
    if layout.gathers_once:
        for plan in model_of(model).plans.values():
            hold(
                model_of(model),
                plan,
                torch.zeros(plan.rows, *plan.row_shape, dtype=plan.gather_dtype),
            )


def stage_inputs(layout: PlannedLayout, model: Transformer) -> tuple[Tensor, Tensor]:
    """Return this rank's token ids of a microbatch, (B, T), and the input of a stage without the
    embedding, (B, T, C).
    """
    tokens, tp = len(model.positions), layout.degrees["tp"]
    dtype = getattr(torch, layout.config.training.mixed_precision_param)
    ids = torch.zeros(layout.microbatch_size, tokens, dtype=torch.long)
    return ids, torch.zeros(
        layout.microbatch_size, tokens // tp, layout.model.dim, dtype=dtype, requires_grad=True
    )


def documents_for(layout: PlannedLayout, ids: Tensor, machine: Machine) -> dict[str, Tensor]:
    """Return a stage's arguments for the documents in `ids` on such a machine, with
    training.mask_documents.
    """
    if not layout.config.training.mask_documents:
        return {}
    dtype = getattr(torch, layout.config.training.mixed_precision_param)
    kernel = not machine.is_cpu and not machine.name.startswith("MI")
    if kernel and layout.degrees["cp"] == 1 and fits_flash(dtype, layout.model.head_dim):
        return {
            "doc_starts": ids,
            "doc_stats": torch.zeros(layout.microbatch_size, 2, dtype=torch.long),
        }
    return {"doc_starts": ids}


def attend_as_on_gpus(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with context parallelism as on GPUs: by a causal operator of the same cost and shapes.

    Its mask is aligned differently, but nothing is computed here. A mask of documents is handled as
    on all devices.
    """
    if mask is not None:
        return causal_attention(q, k, v, mask)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class _Loss(nn.Module):
    def __init__(self, loss_sum: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.loss_sum = loss_sum

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_sum(logits, labels)


def without_passes(compile: Compile) -> Compile:
    return compile.replace(
        bucketing="none", reordering=False, defer_weight_grads=False, tensor_parallel_chunks=1
    )


class PricedSchedule(Schedule):
    """Run the passes, or reorder as eager mode does, and compute the figures of each graph."""

    def __init__(
        self,
        component: str,  # "model" or "loss"
        config: Compile,
        machines: Sequence[Machine],
        axes: Axes,
        *,
        async_tensor_parallel: bool = False,
        gathers_once: bool = False,  # gradients leave the backward at once
    ):
        priced_as = mode_of(component, config)
        if priced_as == "eager" or component == "loss":
            config = without_passes(config)
        settings = PassSettings(
            config.replace(backend="aot_eager"),  # which only traces
            machines[0],
            fused=priced_as == "inductor",
            async_tensor_parallel=async_tensor_parallel,
            must_merge=False,
        )
        super().__init__(settings, priced_as=priced_as)
        self.machines = machines
        self.axes = axes
        self.gradients_leave_at_once = priced_as == "eager" or gathers_once
        # The caller of a graph of aot_eager keeps its inputs until it returns, and so does an eager
        # autograd.Function (as in last_uses).
        self.keeps_inputs = priced_as == "" or (priced_as == "eager" and component == "loss")
        # by name of the graph: figures on each machine, and the timeline on the first one
        self.graphs: dict[str, tuple[list[Figures], Timeline]] = {}
        self.scheduled: dict[str, ScheduledGraph] = {}

    def run(self, module: GraphModule, name: str) -> None:
        fused = self.settings.fused
        if self.priced_as == "eager":
            as_in_eager_mode(module.graph)
        super().run(module, name)
        self.scheduled[name] = ScheduledGraph(
            module.graph, fused, self.keeps_inputs, self.gradients_leave_at_once
        )
        figures = [figures_of(module.graph, machine, fused, self.axes) for machine in self.machines]
        timeline = self.reports[-1].timeline
        assert timeline is not None
        self.graphs[name] = figures, by_axis(timeline, self.axes)


def mode_of(component: str, config: Compile) -> Literal["", "eager", "inductor"]:
    """Return what runs a component: Schedule.priced_as."""
    if not config.compiles(component):
        return "eager"
    return "inductor" if config.backend == "inductor" else ""


def as_in_eager_mode(graph: Graph) -> None:
    """Bucket and reorder collectives as eager mode does after the first step
    (distributed/prefetch.py): a bucket is in flight once the one before is copied out, and each
    collective of a reduction is waited for when the next of its kind starts.
    """
    merge_waits(graph)
    merge_buckets(graph, by_block(graph))
    place = next(node for node in graph.nodes if node.op != "placeholder")
    for gather in [node for node in parameter_all_gathers(graph) if parameters_of(node)]:
        move_gather_before(gather, place)
        wait = wait_of(gather)
        columns = [part for rows in wait.users for part in rows.users]
        place = max(
            [wait, *(node for part in columns for node in part.users if node.meta.get("copies"))]
        ).next
    wait_for_reductions_late(graph)
    graph.lint()
