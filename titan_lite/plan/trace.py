"""What a pipeline stage computes, sends and holds: traced from the real model, by the real compile stage, on no hardware.

    with start_tracing(layout.world_size) as processes:       # each is rank 0 of a world that is not there
        traced = finish_trace(start_trace(processes, layout, machines))    # {modules beside blocks: ...}
    traced[("tok_embeddings",)].figures(n_layers=7)           # {"forward.compute": 0.41, "backward.exposed.tp": 0.08, ...}

A stage is built as the trainer builds it, on fake tensors in a fake process group, and the graphs that the passes leave are
priced node by node. Blocks are alike, so two depths are traced and any other lies on the line through them; what depends on a
block's number (its own buckets or weights to keep) is traced whole. Rank 0 stands for all of its stage: of uneven shards it has
the largest.
"""

import dataclasses
import functools
import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.schedule import Schedule
from titan_lite.compiler.stage import compile_model
from titan_lite.compiler.timeline import Timeline
from titan_lite.config import Config, Parallelism
from titan_lite.distributed.build import build_stages, compile_stages
from titan_lite.distributed.context_parallel import attend_to_the_past
from titan_lite.distributed.gather import GatherPlan, local
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.simple_fsdp import materialize, model_of
from titan_lite.distributed.tensor_parallel import axis_of
from titan_lite.layout import Layout
from titan_lite.loss import build_loss, own_vocabulary
from titan_lite.models.llama3 import Transformer
from titan_lite.plan.costs import Axes, Figures, axes_of, by_axis, bytes_of, figures_of, held_figures, round_figures
from titan_lite.plan.eager_order import run_ahead

PROCESSES = 2
GRAPHS = ("forward", "loss_forward", "loss_backward", "backward")
Kind = tuple[str, ...]  # the modules of a stage beside its blocks


@dataclass(frozen=True, kw_only=True)
class PlannedLayout(Layout):
    """A layout with the recipe that it is of."""

    config: Config

    @property
    def fused(self) -> bool:
        """Whether Inductor makes kernels of the model."""
        return self.config.compile.compiles("model") and self.config.compile.backend == "inductor"


@dataclass(frozen=True)
class Sample:
    """Of a stage with some number of blocks: what figures.py says, on each machine; and on the first one its graphs, in the order
    in which they run, the groups of their collectives named by axis."""

    figures: Sequence[Figures]
    timelines: Sequence[Timeline]


@dataclass(frozen=True)
class Traced:
    """Of a kind of stage, at each depth that was traced, and on each machine, what figures.py says. timelines: of the deepest."""

    depths: Mapping[int, Sequence[Figures]]
    timelines: Sequence[Timeline] = ()

    def figures(self, n_layers: int, machine: int = 0) -> Figures:
        """Of a stage with so many blocks: as traced, or on the line through two depths."""
        if n_layers in self.depths:
            return dict(self.depths[n_layers][machine])
        (low, at_low), (high, at_high) = ((depth, figures[machine]) for depth, figures in sorted(self.depths.items()))
        share = (n_layers - low) / (high - low)
        keys = {**at_low, **at_high}
        return {key: at_low.get(key, 0.0) + share * (at_high.get(key, 0.0) - at_low.get(key, 0.0)) for key in keys}


@contextmanager
def start_tracing(world_size: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for one world: a fake process group is one per process, and its size is for good.

    They are forked from a server that has imported this module, seconds of work, and nothing else: it serves all worlds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(PROCESSES, context, initializer=start_fake_world, initargs=(world_size,)) as processes:
        try:
            yield processes
        except BaseException:
            processes.shutdown(wait=False, cancel_futures=True)
            raise


def start_fake_world(world_size: int) -> None:
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)  # what a run is warned of is no news of a plan
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def start_trace(
    processes: ProcessPoolExecutor,
    layout: PlannedLayout,
    machines: Sequence[Machine],
    full: bool = False,
    shared: dict[Any, Future[Sample]] | None = None,
) -> dict[tuple[Kind, int], Future[Sample]]:
    """Tasks by kind of stage and blocks, for every kind that the recipe has. full: at its very number of blocks. shared: tasks
    of layouts before, of which those of equal stages are taken."""
    wanted: dict[Kind, set[int]] = defaultdict(set)
    for modules in layout.pipeline.modules:
        wanted[kind_of_stage(modules)].add(layers_of(modules))
    started = {}
    for kind, counts in wanted.items():
        both = None if full else depths_to_trace(layout.config)
        depths = set(both) if both and max(counts) > both[1] else counts
        for depth in sorted(depths, reverse=True):  # the longest first
            key = (*traced_by(layout), kind, depth)
            started[kind, depth] = (shared or {}).get(key) or processes.submit(trace_stage, layout, kind, depth, machines)
            if shared is not None:
                shared[key] = started[kind, depth]
    return started


def traced_by(layout: PlannedLayout) -> tuple[Any, ...]:
    """What a stage's graphs depend on, beside its modules: not on how many microbatches there are, and in which order."""
    config = layout.config
    of_pipeline: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(Parallelism) if field.name.startswith("pipeline_parallel")
    }
    degrees = tuple(degree for axis, degree in layout.degrees.items() if axis != "pp")
    return (
        layout.model,
        layout.sequences,
        layout.gathers_once,
        degrees,
        config.compile,
        config.activation_checkpoint,
        dataclasses.replace(config.parallelism, **of_pipeline),
        dataclasses.replace(config.training, local_batch_size=1, global_batch_size=-1),
    )


def finish_trace(started: Mapping[tuple[Kind, int], Future[Sample]]) -> dict[Kind, Traced]:
    depths: dict[Kind, dict[int, Sample]] = defaultdict(dict)
    for (kind, depth), task in started.items():
        depths[kind][depth] = task.result()
    return {
        kind: Traced({depth: sample.figures for depth, sample in each.items()}, each[max(each)].timelines)
        for kind, each in depths.items()
    }


def depths_to_trace(config: Config) -> tuple[int, int] | None:
    """Two numbers of blocks on whose line all others lie; None where blocks are not alike."""
    parallelism, checkpointing = config.parallelism, config.activation_checkpoint
    named = (*parallelism.fsdp_keep_gathered, *config.compile.buckets)
    if any("layers." in name for name in named) or (config.compile.compiles("model") and config.compile.bucketing == "auto"):
        return None
    option = checkpointing.selective_ac_option
    period = int(option) if checkpointing.mode == "selective" and option.isdigit() else 1
    first = -(-3 // period) * period  # of two blocks, the first has the embedding's gather beside it and the second the output's
    return first, first + period


def kind_of_stage(modules: Sequence[str]) -> Kind:
    return tuple(name for name in modules if not name.startswith("layers."))


def layers_of(modules: Sequence[str]) -> int:
    return len(modules) - len(kind_of_stage(modules))


def trace_stage(layout: PlannedLayout, kind: Kind, n_layers: int, machines: Sequence[Machine]) -> Sample:
    """In a fake world: a stage of `kind` with so many blocks, on each machine."""
    torch._dynamo.reset()
    gc.collect()  # the graphs before
    config = layout.config
    mesh = build_mesh(layout.degrees, "cpu")
    shape = dataclasses.replace(layout.model, n_layers=max(n_layers, 1))
    (model,) = build_stages(
        functools.partial(Transformer, shape),
        [[*kind, *(f"layers.{number}" for number in range(n_layers))]],
        mesh,
        training=config.training,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        attend=attend_as_on_gpus,
    )
    plans = [(plan, local(parameter).numel()) for parameter, plan in model_of(model).plans.items()]
    priced = _Priced(
        config.compile if config.compile.compiles("model") else dataclasses.replace(config.compile, reordering=False),
        machines[0],
        eager=not config.compile.compiles("model"),
        fused=layout.fused,
        must_merge=False,
        machines=machines,
        axes=axes_of(mesh),
        blocks=n_layers,
    )
    dtype = getattr(torch, config.training.mixed_precision_param)
    tokens, tp = len(model.positions), axis_of(mesh["tp"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize(model, torch.device("cpu"))
        if layout.gathers_once:
            model_of(model).gathered = {plan.fqn: _whole(plan) for plan in model_of(model).plans.values()}
        compile_stages(
            [model],
            mesh,
            "",
            compile=dataclasses.replace(config.compile, backend="aot_eager"),
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
            schedule=priced,
            priced_as=priced_as(layout, "model"),
        )
        between = (layout.sequences, tokens // tp.degree, layout.model.dim)
        ids = torch.zeros(layout.sequences, tokens, dtype=torch.long)
        given = ids if "tok_embeddings" in kind else torch.zeros(between, dtype=dtype, requires_grad=True)
        model(given, ids if config.training.mask_documents else None)
        if "output" in kind:
            loss = _Loss(build_loss(layout.model.vocab_size, tp.rank, tp.degree, tp.group))
            vocabulary = len(own_vocabulary(layout.model.vocab_size, tp.rank, tp.degree))
            how = priced_as(layout, "loss")
            priced.blocks, priced.prefix, priced.fused, priced.eager = 1, "loss_", how == "inductor", how == "eager"
            plain = dataclasses.replace(config.compile, backend="aot_eager", bucketing="none", reordering=False)
            compile_model(loss, plain, reshard_after_forward=False, schedule=priced, priced_as=how)
            logits = torch.zeros(layout.sequences, tokens, vocabulary, dtype=dtype, requires_grad=True)
            loss(logits, torch.zeros(layout.sequences, tokens, dtype=torch.long))
    held = held_figures(plans, [buffer.numel() * buffer.element_size() for buffer in model.buffers()])
    held["activations.between"] = float(dtype.itemsize * torch.Size(between).numel())
    if "output" in kind:
        held["activations.logits"] = float(logits.numel() * logits.element_size())
    found = []
    for number, machine in enumerate(machines):
        figures = dict(held)
        if layout.gathers_once:
            figures |= round_figures([plan for plan, _ in plans], machine, axes_of(mesh))
        for graph, each in priced.figures.items():
            figures |= {f"{graph}.{key}": value for key, value in each[number].items()}
        found.append(figures)
    return Sample(found, [priced.timelines[name] for name in sorted(priced.timelines, key=GRAPHS.index)])


def priced_as(layout: PlannedLayout, component: str) -> str:
    """How a component runs, as in compile_model."""
    if not layout.config.compile.compiles(component):
        return "eager"
    return "inductor" if layout.config.compile.backend == "inductor" else ""


def attend_as_on_gpus(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """As distributed/context_parallel.py, by an operator that knows of the mask, and has none: of the same cost and shapes.

    Where the mask begins is another place for it; nothing is computed here. With a mask of documents GPUs do the same.
    """
    if mask is not None:
        return attend_to_the_past(q, k, v, mask)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class _Loss(nn.Module):
    def __init__(self, loss_sum: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.loss_sum = loss_sum

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_sum(logits, labels)


def _whole(plan: GatherPlan) -> Tensor:
    return torch.zeros(plan.rows, *plan.row_shape, dtype=plan.param_dtype, requires_grad=True)


@dataclass
class _Priced(Schedule):
    """The passes; and of every graph that they leave, by name, its figures on each machine and its timeline on the first."""

    machines: Sequence[Machine] = ()
    eager: bool = False
    axes: Axes = field(default_factory=dict)
    blocks: int = 1
    prefix: str = ""
    figures: dict[str, list[Figures]] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def bucket(self, module: GraphModule, name: str) -> None:
        if self.eager:
            run_ahead(module.graph)
        else:
            super().bucket(module, name)

    def __call__(self, module: GraphModule, name: str) -> None:
        super().__call__(module, name)
        # Of no machine's making. What aot_eager compiles is called with arguments that stay until it returns.
        held = bytes_of(module.graph, self.fused, self.blocks, keeps_inputs=not self.fused and not self.eager)
        each = [held | figures_of(module.graph, machine, self.fused, self.axes) for machine in self.machines]
        self.figures[self.prefix + name] = each
        self.timelines[self.prefix + name] = by_axis(self.receipts[-1].timeline, self.prefix + name, self.axes)
