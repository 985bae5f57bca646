"""Trace the graphs of a small recipe's stages as given ranks have them, after all passes.

    traced = trace_stage(small, index=0, rank=3, choices=FirstRanksChoices())
    traced.graphs["backward"], traced.groups

No process is started: the process group is fake, and what a graph computes with it has no meaning.
A stage is built, cut and compiled by the code of a run (`parallelize`).
"""

import dataclasses
import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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
from titan_lite.distributed.buckets import Specs, gather_buckets
from titan_lite.distributed.mesh import build_mesh, data_rank
from titan_lite.distributed.parallelize import parallelize
from titan_lite.distributed.pipeline import DeviceBatch
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.simple_fsdp import Sharding
from titan_lite.distributed.step_gather import StepReader
from titan_lite.dtensor import gradient_shard, local
from titan_lite.graph import KINDS, ancestors, aten, group_of
from titan_lite.tools.plan.trace import stage_inputs
from titan_lite.tools.verify.small import BOS, NO_TOKEN, SmallRecipe

MICROBATCHES = 2  # of a step that gathers once
PACKAGE = os.path.dirname(titan_lite.__file__)
TRACERS = (f"{PACKAGE}/compile", f"{PACKAGE}/tools")
# Code that model code calls. The standard library's folder may have packages in it.
COLLECTIVES = f"{PACKAGE}/collectives.py"
BENEATH = (os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"), "<")


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Return a context in which this process is a rank of a fake process group."""
    with replaced(sys, "excepthook", sys.excepthook):  # torch's would name this rank for ever
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
    batch: DeviceBatch | None  # of SmallRecipe.batch; None at real sizes
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
        is_own = file.startswith(PACKAGE)
        if file != COLLECTIVES and (is_own or not file.startswith(BENEATH)):
            return f"{file.removeprefix(os.path.dirname(PACKAGE) + '/')}:{frame.f_lineno}"
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
        parallel.materialize(torch.device("cpu"))
        if layout.gathers_once:
            stack.enter_context(stage.gathered_for_step(MICROBATCHES))
        inputs = stage_inputs(small.config, layout, stage)
        stage(inputs.input, **inputs.model_kwargs)
        once: dict[str, Sequence[str]] = {}
        if layout.gathers_once:
            graph_passes.graphs["gather"], once["gather"] = _gather(stage.sharding.specs)
            graph_passes.graphs["reduce"], once["reduce"] = _reduction(stage.sharding)
    assert stage.compiled is not None
    (compiled,) = stage.compiled.graphs.values()
    groups = {
        group_of(node): ranks_in(group_of(node))
        for module in graph_passes.graphs.values()
        for node in module.graph.nodes
        if node.target in KINDS
    }
    batch = None
    if mode is None:
        stage.model.init_buffers()
        of_rank = {name: tensor[data_rank(mesh)[0]] for name, tensor in small.batch.items()}
        batch = parallel.to_device(
            of_rank["tokens"], of_rank["labels"], bos_id=BOS, eos_id=NO_TOKEN
        )
    return TracedStage(
        rank=dist.get_rank(),
        graphs=graph_passes.graphs,
        inputs=compiled.inputs,
        kept=compiled.halves.saved if compiled.halves else (),
        once=once,
        groups=groups,
        positions=list(stage.model.positions),
        data_rank=data_rank(mesh)[0],
        batch=batch,
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
    members = [spec for bucket in buckets for spec in bucket.specs]

    def gather(shards: Sequence[Tensor]) -> list[Tensor]:
        left = list(shards)
        weights: list[Tensor] = []
        for bucket in buckets:
            own_shards = tuple(left.pop(0) for _ in bucket.specs)
            own = dataclasses.replace(bucket, parameters=own_shards)  # type: ignore[arg-type]
            tables = own.allocate_tables()
            weights += own.finish_gather(own.start_gather(tables), tables)
        return weights

    shards = [torch.empty(spec.own_rows, *spec.row_shape) for spec in members]
    with replaced(param_collectives, "all_gather_single", _all_gather_single):
        return _step_graph(gather, shards, [spec.fqn for spec in members])


def _all_gather_single(
    output: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> None:
    """Gather as torch does, by operators that can be traced; there is no work to wait for."""
    output.copy_(all_gather(shard, group.size(), group.group_name))


def _reduction(sharding: Sharding) -> tuple[GraphModule, list[str]]:
    """Return the graph that reduces gradients once a step, and the parameters they are of.

    A gradient comes in unequal parts: one for each microbatch and each read of its weight.
    """
    reader = sharding.reader
    assert isinstance(reader, StepReader)
    parameters = [*sharding.specs][::-1]  # backward comes to the last one first
    specs = [sharding.specs[parameter] for parameter in parameters]

    @torch.no_grad()
    def reduce(gradients: Sequence[Tensor]) -> list[Tensor]:
        for spec, gradient in zip(specs, gradients, strict=True):
            parts = reader.reads[spec.fqn] * MICROBATCHES
            for number in range(1, parts + 1):
                reader.receive(spec.fqn, gradient * (number / (parts * (parts + 1) / 2)))
        sharding.prefetch.reducer.finish_backward()
        return [gradient_shard(parameter) for parameter in parameters]

    gradients = [torch.empty(spec.rows, *spec.row_shape) for spec in specs]
    return _step_graph(reduce, gradients, [spec.fqn for spec in specs])


def _step_graph(
    function: Callable[[Sequence[Tensor]], list[Tensor]], inputs: list[Tensor], fqns: list[str]
) -> tuple[GraphModule, list[str]]:
    """Return a graph that runs once a step, and the parameters that its inputs are of."""
    module = make_fx(functionalize(function))(inputs)
    for node in module.graph.find_nodes(op="call_function", target=aten.copy.default):
        node.replace_all_uses_with(node.args[1])  # what is written into memory
    module.graph.eliminate_dead_code()
    of_inputs = dict(zip(module.graph.find_nodes(op="placeholder"), fqns, strict=True))
    for node in module.graph.nodes:
        if node.target in KINDS:
            sources = ancestors([node])
            node.meta["bucket"] = [fqn for source, fqn in of_inputs.items() if source in sources]
    return module, fqns
