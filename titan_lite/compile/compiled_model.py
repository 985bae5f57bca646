"""Run a model by compiled graphs, which are made at the first call with arguments of new shapes.

compiled = CompiledModel(traceable, config, settings, backend)
compiled(tokens).sum().backward()       # as model(tokens)
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from titan_lite import progress
from titan_lite.compile.errors import compile_errors
from titan_lite.compile.graph import placeholders, results_of
from titan_lite.compile.joint import TraceSettings
from titan_lite.compile.model_graph import ModelGraphs, compose
from titan_lite.compile.model_parts import TraceableModel, Value, described, trace_parts
from titan_lite.compile.segments import BoxedFunction
from titan_lite.config import Compile
from titan_lite.dtensor import as_shard_of, local

# graphs by their names as in GraphPasses.run -> what runs each
Backend = Callable[[Mapping[str, GraphModule]], Mapping[str, BoxedFunction]]


@dataclass(frozen=True)
class CompiledHalves:
    """A compiled backward in halves (BackwardHalves)."""

    # saved values, gradient of the output -> gradients of inputs, values for the other half
    input: BoxedFunction
    weight: BoxedFunction  # some inputs of the first half, values from it -> gradients of inputs
    saved: Sequence[int]  # indices of those inputs


@dataclass(frozen=True)
class CompiledGraphs:
    """The compiled graphs of a model, for arguments of certain shapes."""

    inputs: Sequence[Value]
    output_stride: Sequence[int]  # and that of its gradient
    forward: BoxedFunction  # inputs -> output, saved values
    # saved values, gradient of the output -> gradients of inputs
    backward: BoxedFunction | None = None
    halves: CompiledHalves | None = None

    @property
    def has_gradients(self) -> bool:
        return self.backward is not None or self.halves is not None


class CompiledModel:
    """Call a model by its graphs, which are kept for each kind of call."""

    def __init__(
        self,
        traceable: TraceableModel,
        config: Compile,
        settings: TraceSettings,
        backend: Backend,
    ):
        self.traceable = traceable
        self.config = config
        self.settings = settings
        self.backend = backend
        self.signature = inspect.signature(traceable.model.forward)
        self.graphs: dict[Hashable, CompiledGraphs] = {}  # by what they depend on
        self.second_halves: list[SecondHalf] | None = None  # within `first_halves`

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = {
            name: argument
            for name, argument in self.signature.bind(*args, **kwargs).arguments.items()
            if argument is not None
        }
        weights = self.traceable.weights.graph_inputs()
        graphs = self.graphs_for(arguments, weights)
        inputs = [self.tensor_of(value, arguments, weights) for value in graphs.inputs]
        if not graphs.has_gradients:
            with torch.no_grad():
                return graphs.forward([local(tensor) for tensor in inputs])[0]
        return _Run.apply(self, graphs, *inputs)

    def tensor_of(
        self,
        value: Value,
        arguments: Mapping[str, Tensor],
        weights: Mapping[str, Sequence[Tensor]],
    ) -> Tensor:
        if value.kind == "argument":
            return arguments[value.name]
        if value.kind == "buffer":
            return self.traceable.model.get_buffer(value.name)
        return weights[value.name][value.index]

    def graphs_for(
        self, arguments: Mapping[str, Tensor], weights: Mapping[str, Sequence[Tensor]]
    ) -> CompiledGraphs:
        """Return the graphs for such arguments. Traces and compiles those that are new."""
        key = (
            torch.is_grad_enabled(),
            self.traceable.model.training,
            self.traceable.weights.variant,
            tuple(tensor.requires_grad for tensors in weights.values() for tensor in tensors),
            *((name, *described(argument)) for name, argument in arguments.items()),
        )
        if key not in self.graphs:
            with progress.phase(progress.COMPILING):
                self.graphs[key] = self.make_graphs(arguments)
        return self.graphs[key]

    def make_graphs(self, arguments: Mapping[str, Tensor]) -> CompiledGraphs:
        """Trace and compile. Backward is compiled before forward runs, as are its errors found."""
        with compile_errors(self.config, in_backend=False):
            parts = trace_parts(self.traceable, arguments, self.settings)
            graphs = compose(parts, self.settings.full_backward)
        output = results_of(graphs.forward.graph)[0]
        stride = output.meta["val"].stride()
        with compile_errors(self.config, in_backend=True):
            return self.compile_graphs(graphs, stride)

    def compile_graphs(self, graphs: ModelGraphs, stride: Sequence[int]) -> CompiledGraphs:
        name = "forward" if graphs.has_gradients else "inference"
        by_name = {name: graphs.forward}
        if graphs.backward is not None:
            by_name["backward"] = graphs.backward
        if graphs.halves is not None:
            by_name["backward_input"] = graphs.halves.input
            by_name["backward_weight"] = graphs.halves.weight
        run = self.backend(by_name)
        halves = None
        if graphs.halves is not None:
            names = [node.name for node in placeholders(graphs.halves.input.graph)]
            halves = CompiledHalves(
                input=run["backward_input"],
                weight=run["backward_weight"],
                saved=[names.index(name) for name in graphs.halves.saved],
            )
        return CompiledGraphs(graphs.inputs, stride, run[name], run.get("backward"), halves)

    @contextmanager
    def first_halves(self) -> Iterator["list[SecondHalf]"]:
        """Return a context in which a backward makes the gradient of the model's argument alone.

        It yields what is left to do, of each backward in it.
        """
        self.second_halves = []
        try:
            yield self.second_halves
        finally:
            self.second_halves = None


@dataclass(frozen=True)
class SecondHalf:
    """The half of a backward that makes the gradients of weights."""

    halves: CompiledHalves
    values: list[Any]  # its inputs
    weights: Sequence[Tensor | None]  # of the model's inputs, those with gradients

    @torch.no_grad()
    def run(self) -> None:
        """Compute the gradients, and add them to `.grad`. It can run once."""
        gradients = self.halves.weight(self.values)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if weight is None or gradient is None:
                continue
            if weight.grad is not None:
                local(weight.grad).add_(gradient)
            elif isinstance(weight, DTensor):
                weight.grad = as_shard_of(weight, gradient)
            else:
                weight.grad = gradient


class _RunContext(FunctionCtx):
    """The values that a forward keeps for backward."""

    saved_tensors: Sequence[Tensor]
    maybe_clear_saved_tensors: Callable[[], None]
    model: CompiledModel
    graphs: CompiledGraphs
    weights: Sequence[Tensor | None]  # the inputs that are weights with gradients, by input


class _Run(torch.autograd.Function):
    """Inputs -> output of a model, by its compiled graphs."""

    @staticmethod
    def forward(
        ctx: _RunContext, model: CompiledModel, graphs: CompiledGraphs, *inputs: Tensor
    ) -> Tensor:
        ctx.model = model
        ctx.graphs = graphs
        ctx.weights = [
            tensor if value.kind == "weight" and tensor.requires_grad else None
            for value, tensor in zip(graphs.inputs, inputs, strict=True)
        ]
        output, *saved = graphs.forward([local(tensor) for tensor in inputs])
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: _RunContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # so that the graph can free them
        values.append(with_stride(gradient, ctx.graphs.output_stride))
        if ctx.model.second_halves is not None:
            gradients, second_half = run_first_half(ctx, values)
            ctx.model.second_halves.append(second_half)
        else:
            assert ctx.graphs.backward is not None, "backward always runs in halves"
            gradients = ctx.graphs.backward(values)
        of_inputs = [
            as_shard_of(weight, gradient)
            if gradient is not None and isinstance(weight, DTensor)
            else gradient
            for weight, gradient in zip(ctx.weights, gradients, strict=True)
        ]
        return None, None, *of_inputs


def run_first_half(
    ctx: _RunContext, values: list[Any]
) -> tuple[Sequence[Tensor | None], SecondHalf]:
    """Return the gradients of inputs that the first half makes, and the other half."""
    halves = ctx.graphs.halves
    assert halves is not None, "backward never runs in halves"
    kept = [values[index] for index in halves.saved]
    results = halves.input(values)
    gradients = results[: len(ctx.weights)]
    crossing = results[len(ctx.weights) :]
    return gradients, SecondHalf(halves, [*kept, *crossing], ctx.weights)


def with_stride(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the tensor, copied if it has another layout in memory."""
    if tensor.stride() == stride:
        return tensor
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
