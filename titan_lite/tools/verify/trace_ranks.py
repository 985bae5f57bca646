"""Trace the graphs of a small recipe's stages as given ranks have them, after all passes.

    traced = trace_stage(small, index=0, rank=3, choices=FirstRanksChoices())
    traced.graphs["backward"], traced.groups

No process is started: the process group is fake, and what a graph computes with it has no meaning.
A stage is built, cut and compiled by the code of a run (`parallelize`).
"""

import dataclasses
import gc
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import TracerBase
from torch.testing._internal.distributed.fake_pg import FakeStore

import titan_lite
from titan_lite.collectives import all_gather
from titan_lite.compile.graph_passes import GraphPasses, choose_passes
from titan_lite.compile.model_parts import Value
from titan_lite.compile.rank_agreement import OneRank
from titan_lite.compile.settings import PassSettings
from titan_lite.compile.torch_patches import replaced
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed import param_collectives
from titan_lite.distributed.axes import ranks_in
from titan_lite.distributed.buckets import Bucket, Specs, gather_buckets, reduce_buckets
from titan_lite.distributed.mesh import build_mesh, data_rank
from titan_lite.distributed.parallelize import parallelize
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.simple_fsdp import materialize
from titan_lite.dtensor import local
from titan_lite.graph import KINDS, group_of
from titan_lite.tools.plan.trace import stage_inputs
from titan_lite.tools.verify.small import SmallRecipe

PACKAGE = Path(titan_lite.__file__).parent
TRACERS = (str(PACKAGE / "compile"), str(PACKAGE / "tools"))
# Code that model code calls.
COLLECTIVES = PACKAGE / "collectives.py"
BENEATH = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    "<",
)


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Return a context in which this process is a rank of a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class TracedStage:
    """A stage as one rank has it."""

    rank: int
    graphs: Mapping[str, GraphModule]  # by their names as in GraphPasses.run
    inputs: Sequence[Value]  # of forward
    kept: Sequence[int]  # of backward_input's inputs, those that backward_weight has too
    # the parameters of the graphs "gather" and "reduce", which a step has that gathers once
    once: Mapping[str, Sequence[str]]
    groups: Mapping[str, tuple[int, ...]]  # ranks of each process group
    # what the code of a run makes of a rank, which the specification states too
    positions: Sequence[int]
    data_rank: int
    shards: Mapping[str, tuple[int, ...]]  # shapes, by FQN
    is_even: Mapping[str, bool]  # all shards of a parameter have as many rows, by FQN
    buffers: Mapping[str, Tensor]


@contextmanager
def _with_source_lines() -> Iterator[None]:
    """Return a context in which traced operators have their source line in meta["source"]."""
    create = TracerBase.create_node

    def create_node(tracer: TracerBase, *arguments: Any, **keywords: Any) -> Node:
        node = create(tracer, *arguments, **keywords)
        source = _line_of(sys._getframe(1))
        number = node.meta.get("seq_nr")
        if source is None and number is not None:  # of autograd: that of the operator in forward
            alike = (other for other in tracer.graph.nodes if other.meta.get("seq_nr") == number)
            source = next(alike).meta.get("source")
        if source is not None:
            node.meta["source"] = source
        return node

    with replaced(TracerBase, "create_node", create_node):
        yield


def _line_of(frame: FrameType | None) -> str | None:
    """Return the innermost line of the model's code, or of a family's; None: there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(TRACERS):
            return None
        path = Path(file)
        if path.is_relative_to(PACKAGE) and path != COLLECTIVES:
            return f"{path.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
        if path != COLLECTIVES and not file.startswith(BENEATH):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class FirstRanksChoices(OneRank):
    """Ranks that are traced one after the other: what the first chooses, the others take."""

    def __init__(self) -> None:
        self.choices: list[str] = []
        self.taken = 0

    def broadcast(self, text: str) -> str:
        if self.taken == len(self.choices):
            self.choices.append(text)
        self.taken += 1
        return self.choices[self.taken - 1]


class _Keep(GraphPasses):
    """The passes of the recipe, which keep the graphs."""

    def __init__(self, small: SmallRecipe, choices: FirstRanksChoices):
        compile = small.config.compile
        # Without a machine every block that can be cut into chunks of tokens is; buckets by cost
        # need one.
        machine = None
        if compile.buckets_across_blocks:
            # One node: on several, the costs of a rank depend on its place in its node (3 ranks of
            # tp may be on two nodes of 8), and so does where its waits stand.
            machine = load_machine(compile.machine or "H100")
            machine = dataclasses.replace(machine, ranks_per_node=small.layout.world_size)
        choices.taken = 0
        settings = PassSettings(compile, machine, ranks=choices)
        super().__init__(settings, choose_passes(small.config))
        self.graphs: dict[str, GraphModule] = {}

    def run(self, module: GraphModule, name: str) -> None:
        super().run(module, name)
        self.graphs[name] = module


def trace_stage(
    small: SmallRecipe,
    index: int,
    rank: int,
    choices: FirstRanksChoices,
    mode: AbstractContextManager[object] | None = None,
) -> TracedStage:
    """Return stage `index` of the chain as a rank has it.

    choices: one object for all ranks of the stage, of which the first is traced first.
    mode: in which tensors are made and the stage runs, such as FakeTensorMode for real sizes.
    """
    with _fake_world(small.layout.world_size, rank):
        return _trace(small, index, choices, mode)


def _trace(
    small: SmallRecipe,
    index: int,
    choices: FirstRanksChoices,
    mode: AbstractContextManager[object] | None,
) -> TracedStage:
    """Return stage `index` of the chain as this rank of a fake world has it."""
    graph_passes = _Keep(small, choices)
    pipeline = PipelineSchedule((tuple(small.chain[index]),), (0,), 1)
    layout = dataclasses.replace(small.layout, pipeline=pipeline)
    mesh = build_mesh(layout.degrees, "cpu")
    parallel = parallelize(
        small.config, layout, mesh, graph_passes=graph_passes, backwards=[small.backwards[index]]
    )
    (stage,) = parallel.stages
    with ExitStack() as stack:
        if gc.isenabled():  # collections take a quarter of a trace
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(_with_source_lines())
        stack.enter_context(mode or nullcontext())
        materialize(stage.model, torch.device("cpu"))
        if layout.gathers_once:
            stack.enter_context(stage.gathered_for_step(microbatches=1))
        inputs = stage_inputs(small.config, layout, stage)
        stage(inputs.input, **inputs.model_kwargs)
        once: dict[str, Sequence[str]] = {}
        if layout.gathers_once:
            specs = stage.sharding.specs
            graph_passes.graphs["gather"], once["gather"] = _gather(specs)
            graph_passes.graphs["reduce"], once["reduce"] = _reduction(specs)
    assert stage.compiled is not None
    (compiled,) = stage.compiled.graphs.values()
    groups = {
        group_of(node): ranks_in(group_of(node))
        for module in graph_passes.graphs.values()
        for node in module.graph.nodes
        if node.target in KINDS
    }
    if mode is None:
        stage.model.init_buffers()
    return TracedStage(
        rank=dist.get_rank(),
        graphs=graph_passes.graphs,
        inputs=compiled.inputs,
        kept=compiled.halves.saved if compiled.halves else (),
        once=once,
        groups=groups,
        positions=list(stage.model.positions),
        data_rank=data_rank(mesh)[0],
        shards={
            spec.fqn: tuple(local(parameter).shape)
            for parameter, spec in stage.sharding.specs.items()
        },
        is_even={
            spec.fqn: spec.rows % spec.axis.degree == 0 for spec in stage.sharding.specs.values()
        },
        buffers=dict(stage.model.named_buffers()),
    )


def _gather(specs: Specs) -> tuple[GraphModule, list[str]]:
    """Return the graph that gathers weights once a step, and the parameters they are of."""
    buckets = gather_buckets(specs)

    def gather(shards: Sequence[Tensor]) -> list[Tensor]:
        left = list(shards)
        weights: list[Tensor] = []
        for bucket in buckets:
            own_shards = tuple(left.pop(0) for _ in bucket.specs)
            own = dataclasses.replace(bucket, parameters=own_shards)  # type: ignore[arg-type]
            tables = own.allocate_tables()
            weights += own.finish_gather(own.start_gather(tables), tables)
        return weights

    members = [spec for bucket in buckets for spec in bucket.specs]
    shards = [torch.empty(spec.own_rows, *spec.row_shape) for spec in members]
    with replaced(param_collectives, "all_gather_single", _all_gather_single):
        module = make_fx(functionalize(gather))(shards)
    module.graph.eliminate_dead_code()  # memory, which nothing is written into any more
    _name(module, [bucket for bucket in buckets if bucket.specs[0].axis.degree > 1])
    return module, [spec.fqn for spec in members]


def _all_gather_single(
    output: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> None:
    """Gather as torch does, by operators that can be traced; there is no work to wait for."""
    output.copy_(all_gather(shard, group.size(), group.group_name))


def _reduction(specs: Specs) -> tuple[GraphModule, list[str]]:
    """Return the graph that reduces gradients once a step, and the parameters they are of."""
    buckets = reduce_buckets(specs)

    def reduce(gradients: Sequence[Tensor]) -> list[Tensor]:
        left = list(gradients)
        rows: list[Tensor] = []
        for bucket in buckets:
            own = [left.pop(0) for _ in bucket.specs]
            rows += bucket.finish_reduce(bucket.start_reduce(own))
        return rows

    members = [spec for bucket in buckets for spec in bucket.specs]
    gradients = [torch.empty(spec.rows, *spec.row_shape) for spec in members]
    module = make_fx(reduce)(gradients)
    _name(module, [bucket for bucket in buckets for _ in bucket.specs[0].reduce_groups])
    return module, [spec.fqn for spec in members]


def _name(module: GraphModule, buckets: Sequence[Bucket]) -> None:
    """Name the parameters of each collective of a graph. buckets: of each."""
    nodes = [node for node in module.graph.nodes if node.target in KINDS]
    for node, bucket in zip(nodes, buckets, strict=True):
        node.meta["bucket"] = [spec.fqn for spec in bucket.specs]
