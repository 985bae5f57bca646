"""Run a model by compiled graphs, which are made at the first call with arguments of new shapes.

model._compiled_call_impl = CompiledModel(traceable, config, settings, compile_graph)
model(tokens).sum().backward()
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from titan_lite.compile.errors import compile_errors
from titan_lite.compile.joint import TraceSettings, results_of
from titan_lite.compile.model_graph import compose
from titan_lite.compile.model_parts import TraceableModel, Value, trace_parts
from titan_lite.compile.segments import BoxedFunction
from titan_lite.config import Compile
from titan_lite.dtensor import as_shard_of, local

# (graph, its name: "forward", "backward" or "inference") -> what runs it
CompileGraph = Callable[[GraphModule, str], BoxedFunction]


@dataclass(frozen=True)
class CompiledGraphs:
    """The compiled graphs of a model, for arguments of certain shapes."""

    inputs: Sequence[Value]
    forward: BoxedFunction  # inputs -> output, saved values
    backward: BoxedFunction | None  # saved values, gradient of the output -> gradients of inputs
    output_stride: Sequence[int]  # and that of its gradient


class CompiledModel:
    """Calls a model."""

    def __init__(
        self,
        traceable: TraceableModel,
        config: Compile,
        settings: TraceSettings,
        compile_graph: CompileGraph,
    ):
        self.traceable = traceable
        self.config = config
        self.settings = settings
        self.compile_graph = compile_graph
        self.signature = inspect.signature(traceable.model.forward)
        self.graphs: dict[Hashable, CompiledGraphs] = {}  # by what they depend on

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = {
            name: argument
            for name, argument in self.signature.bind(*args, **kwargs).arguments.items()
            if argument is not None
        }
        graphs = self.compiled(arguments)
        weights = self.traceable.weights.graph_inputs()
        inputs = [self.tensor_of(value, arguments, weights) for value in graphs.inputs]
        if graphs.backward is None:
            with torch.no_grad():
                return graphs.forward([local(tensor) for tensor in inputs])[0]
        return _Run.apply(graphs, *inputs)

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

    def compiled(self, arguments: Mapping[str, Tensor]) -> CompiledGraphs:
        """Return the graphs for such arguments. Traces and compiles those that are new."""
        key = (
            torch.is_grad_enabled(),
            self.traceable.weights.variant,
            *((name, *described(argument)) for name, argument in arguments.items()),
        )
        if key not in self.graphs:
            self.graphs[key] = self.compile(arguments)
        return self.graphs[key]

    def compile(self, arguments: Mapping[str, Tensor]) -> CompiledGraphs:
        """Trace and compile. Backward is compiled before forward runs, as are its errors found."""
        with compile_errors(self.config, "model", in_backend=False):
            graphs = compose(trace_parts(self.traceable, arguments, self.settings))
        output, *_ = results_of(graphs.forward)
        stride = output.meta["val"].stride()
        with compile_errors(self.config, "model", in_backend=True):
            if graphs.backward is None:
                forward = self.compile_graph(graphs.forward, "inference")
                return CompiledGraphs(graphs.inputs, forward, None, stride)
            forward = self.compile_graph(graphs.forward, "forward")
            backward = self.compile_graph(graphs.backward, "backward")
        return CompiledGraphs(graphs.inputs, forward, backward, stride)


def described(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return what graphs depend on of an argument."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


class _RunContext(FunctionCtx):
    """What a forward keeps for backward."""

    saved_tensors: Sequence[Tensor]
    maybe_clear_saved_tensors: Callable[[], None]
    graphs: CompiledGraphs
    parameters: Sequence[DTensor | None]  # by input: itself if it is sharded


class _Run(torch.autograd.Function):
    """Inputs -> output of a model, by its compiled graphs."""

    @staticmethod
    def forward(ctx: _RunContext, graphs: CompiledGraphs, *inputs: Tensor) -> Tensor:
        ctx.graphs = graphs
        ctx.parameters = [tensor if isinstance(tensor, DTensor) else None for tensor in inputs]
        output, *saved = graphs.forward([local(tensor) for tensor in inputs])
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: _RunContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # so that the graph can free them
        values.append(with_stride(gradient, ctx.graphs.output_stride))
        assert ctx.graphs.backward is not None
        gradients = ctx.graphs.backward(values)
        of_inputs = [
            gradient if gradient is None or parameter is None else as_shard_of(parameter, gradient)
            for gradient, parameter in zip(gradients, ctx.parameters, strict=True)
        ]
        return None, *of_inputs


def with_stride(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the tensor, copied if it has another layout in memory."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
