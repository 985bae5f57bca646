"""Trace the parts of a model: one block of each kind, and what is beside the blocks.

    parts = trace_parts(TraceableModel(model, weights, model.layers), {"tokens": tokens}, settings)

model_graph.py makes the graphs of the model from copies of these.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from titan_lite.compile.graph import placeholders
from titan_lite.compile.joint import (
    BackwardHalves,
    CheckpointRule,
    TracedFunction,
    TraceSettings,
    trace,
)
from titan_lite.compile.torch_patches import is_compiling
from titan_lite.dtensor import local

# Attributes of every module but `training`, and of sharded ones: `ModelWeights.described` describes
# parameters. And the FQN of a router or of experts, which copies of a traced block replace.
MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "_fsdp", "fqn"}) - {"training"}
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class ModelWeights(Protocol):
    """The parameters of a model as inputs of its graphs."""

    @property
    def variant(self) -> Hashable:
        """Models with equal variants have equal graphs."""
        ...

    @property
    def kept(self) -> Collection[str] | None:
        """FQNs of those that stay gathered until backward; None: all."""
        ...

    def graph_inputs(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the tensors that graphs read for each parameter, by FQN."""
        ...

    def described(self, modules: Iterable[nn.Module]) -> Mapping[str, object]:
        """Return the parameters that these modules themselves have, by FQN, described.

        Descriptions of two parameters are equal if graphs that read them are.
        """
        ...

    def reading(self, inputs: Mapping[str, Sequence[Tensor]]) -> AbstractContextManager[None]:
        """Return a context in which modules read these tensors in place of `graph_inputs`."""
        ...


@contextmanager
def entries_replaced(entries: dict[str, Any], replaced: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which a dictionary has other values for some of its keys."""
    before = dict(entries)
    entries.update(replaced)
    try:
        yield
    finally:
        entries.update(before)


@dataclass(frozen=True)
class Value:
    """An input of a model's graphs, or what one part of the model gives to another."""

    # Inputs are arguments of the model, buffers, and tensors of weights. "hidden": the hidden
    # states before a block; "block_output": those after the last one; "shared": what all blocks
    # read; "output": that of the model.
    kind: Literal["argument", "buffer", "weight", "hidden", "block_output", "shared", "output"]
    name: str = ""  # of an argument; FQN of a buffer or a weight
    index: int = 0  # among the weight's tensors, or among what blocks read

    @property
    def is_input(self) -> bool:
        return self.kind in ("argument", "buffer", "weight")

    @property
    def label(self) -> str:
        """The name of an input's node in a graph."""
        name = self.name.replace(".", "_")
        return f"{name}_{self.index}" if self.index else name


HIDDEN = Value("hidden")
BLOCK_OUTPUT = Value("block_output")
OUTPUT = Value("output")


@dataclass(frozen=True)
class Part:
    """A traced part of a model: its graphs, and what their inputs and results are."""

    traced: TracedFunction
    inputs: Sequence[Value]
    results: Sequence[Value]
    halves: BackwardHalves | None = None  # of its backward, if it can run in halves

    @property
    def placeholders(self) -> dict[Value, Node]:
        """The inputs, in the forward graph."""
        return dict(zip(self.inputs, placeholders(self.traced.forward.graph), strict=True))

    @property
    def differentiable(self) -> list[Value]:
        """The results that have a gradient, in the order in which backward takes it."""
        return [self.results[index] for index in self.traced.differentiable]


@dataclass(frozen=True)
class Block:
    """A block of a model, and the traced block of its kind."""

    fqn: str
    part: Part
    traced_fqn: str

    def name(self, traced: str) -> str:
        """Return the FQN in this block for an FQN in the traced block, and other names as such."""
        prefix = f"{self.traced_fqn}."
        if not traced.startswith(prefix):
            return traced
        return f"{self.fqn}.{traced.removeprefix(prefix)}"

    def value(self, traced: Value) -> Value:
        """Return the value of this block for one of the traced block."""
        return replace(traced, name=self.name(traced.name))


@dataclass(frozen=True)
class ModelParts:
    """The traced parts of a model.

    Values that the model passes on as they are have no node in the graphs of `outer`: `output` may
    be BLOCK_OUTPUT, and `hidden` an argument.
    """

    outer: Part  # what the model does before and after its blocks
    blocks: Sequence[Block]
    output: Value
    hidden: Value | None  # that enters the first block; None: there are no blocks
    different_blocks: int


class BlockCalls:
    """The calls of a model's blocks while the model is traced without them.

    Raises ValueError for a model that does not call its blocks one after the other, each with the
    result of the one before and with the same other arguments.
    """

    def __init__(self, blocks: nn.ModuleDict, block_output: Tensor | None):
        self.stand_ins = {name: _StandIn(self, name) for name in blocks}
        # what the last block returns; None: something like the first argument
        self.block_output = block_output
        self.arguments: tuple[object, ...] = ()  # of the first one
        self.called: list[str] = []

    def call(self, name: str, arguments: tuple[object, ...]) -> object:
        """Return what stands for the result of a block."""
        if not self.called:
            self.arguments = arguments
        expected = pytree.tree_leaves(self.arguments)
        given = pytree.tree_leaves(arguments)
        alike = len(given) == len(expected) and all(map(operator.is_, given, expected))
        in_order = [*self.called, name] == list(self.stand_ins)[: len(self.called) + 1]
        if not in_order or not alike:
            raise ValueError(
                f"block {name} is not called once, with the result of the block before it and with"
                " its other arguments, so blocks cannot be traced one by one"
            )
        self.called.append(name)
        if len(self.called) < len(self.stand_ins):
            return arguments[0]
        if self.block_output is None:
            hidden = arguments[0]
            assert isinstance(hidden, Tensor)
            self.block_output = torch.empty_like(hidden, requires_grad=torch.is_grad_enabled())
        return self.block_output

    def check_complete(self) -> None:
        if len(self.called) < len(self.stand_ins):
            raise ValueError(
                f"the model calls {len(self.called)} of its {len(self.stand_ins)} blocks"
            )


class _StandIn(nn.Module):
    """Stands in for a block."""

    def __init__(self, calls: BlockCalls, name: str):
        super().__init__()
        self.calls = calls
        self.name = name

    def forward(self, *arguments: object) -> object:
        return self.calls.call(self.name, arguments)


@dataclass(frozen=True)
class TraceableModel:
    """A model, and what a compiler must know of it."""

    model: nn.Module
    weights: ModelWeights
    # The module that has the model's blocks. They are called one after the other, each with the
    # result of the one before and with the same other arguments, which have no gradients.
    blocks: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    # of a block that activation checkpointing recomputes; None of others
    checkpoint_rule: Callable[[nn.Module], CheckpointRule | None] = lambda block: None


def trace_parts(
    traceable: TraceableModel, arguments: Mapping[str, Tensor], settings: TraceSettings
) -> ModelParts:
    """Return the parts for arguments like these, by name."""
    check_no_hooks(traceable.model)
    tracer = _Tracer(traceable, arguments, settings)
    outer = tracer.trace_outer()
    blocks = [tracer.trace_block(block) for block in traceable.blocks.values()]
    hidden = None if tracer.block_arguments is None else tracer.block_arguments.hidden
    return ModelParts(outer, blocks, tracer.output, hidden, len(tracer.traced))


def check_no_hooks(model: nn.Module) -> None:
    """Raise ValueError for a hook of a module: one of a block would be that of all, or of none."""
    for fqn, module in model.named_modules():
        for name in HOOKS:
            if getattr(module, name):
                raise ValueError(f"{fqn or 'the model'} has hooks ({name}), which graphs leave out")


class _Tracer:
    """Traces the parts of a model: what is beside the blocks, then the blocks in order."""

    def __init__(
        self,
        traceable: TraceableModel,
        arguments: Mapping[str, Tensor],
        settings: TraceSettings,
    ):
        self.model = traceable.model
        self.weights = traceable.weights
        self.settings = settings
        self.blocks = traceable.blocks
        self.checkpoint_rule = traceable.checkpoint_rule
        self.fqns = {module: fqn for fqn, module in self.model.named_modules()}
        self.weight_tensors = self.weights.graph_inputs()
        # Inductor's cache of graphs asks for a ShapeEnv, though all shapes are static.
        self.mode = detect_fake_mode(list(arguments.values())) or FakeTensorMode(
            shape_env=ShapeEnv(), static_shapes=True
        )
        self.arguments = {
            Value("argument", name): self.fake(tensor) for name, tensor in arguments.items()
        }
        self.output = OUTPUT
        self.block_arguments: BlockArguments | None = None  # None: there are no blocks
        self.hidden: Tensor  # fake, that enters the next block
        self.shared: dict[Value, Tensor] = {}  # fake, that all blocks read
        self.traced: list[tuple[tuple[object, ...], Block]] = []  # a block of each kind

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor like this rank's part of `tensor`."""
        part = local(tensor.detach())
        with self.mode:
            fake = torch.empty_strided(
                part.shape, part.stride(), dtype=part.dtype, device=part.device
            )
        return fake.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())

    def inputs_of(self, modules: Sequence[nn.Module]) -> dict[Value, Tensor]:
        """Return the buffers and the weights' tensors that these modules have, fake."""
        inputs: dict[Value, Tensor] = {}
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    fqn = f"{self.fqns[module]}.{name}".removeprefix(".")
                    inputs[Value("buffer", fqn)] = self.fake(buffer)
        for fqn in self.weights.described(modules):
            for index, tensor in enumerate(self.weight_tensors[fqn]):
                inputs[Value("weight", fqn, index)] = self.fake(tensor)
        return inputs

    @contextmanager
    def reading(self, given: Mapping[Value, Tensor]) -> Iterator[None]:
        """Return a context in which modules read these buffers and weights."""
        weights: dict[str, list[Tensor]] = defaultdict(list)
        with ExitStack() as stack:
            for value, tensor in given.items():
                if value.kind == "weight":
                    weights[value.name].append(tensor)
                elif value.kind == "buffer":
                    path = value.name.split(".")
                    owner = self.model.get_submodule(".".join(path[:-1]))
                    stack.enter_context(entries_replaced(owner._buffers, {path[-1]: tensor}))
            stack.enter_context(self.weights.reading(weights))
            yield

    def trace_outer(self) -> Part:
        """Trace what the model does before and after its blocks."""
        within_blocks = set(self.blocks.modules())
        others = [module for module in self.model.modules() if module not in within_blocks]
        inputs = {**self.arguments, **self.inputs_of(others)}
        with self.mode, is_compiling():
            call = self.call_outer(inputs)
            if call.block_arguments is not None:
                inputs[BLOCK_OUTPUT] = self.fake(call.block_arguments.block_output)
                call = self.call_outer(inputs)

        def results(*tensors: Tensor) -> list[Tensor]:
            return list(self.call_outer(dict(zip(inputs, tensors, strict=True))).results.values())

        traced = trace(
            results, list(inputs.values()), self.mode, self.settings, static=static_inputs(inputs)
        )
        outer = self.part(traced, inputs, list(call.results))
        self.output = call.output
        self.block_arguments = call.block_arguments
        if self.block_arguments is not None:
            known = {**inputs, **fake_results(outer)}
            self.hidden = known[self.block_arguments.hidden]
            self.shared = {value: known[value] for value in self.block_arguments.shared}
        return outer

    def call_outer(self, given: Mapping[Value, Tensor]) -> "OuterCall":
        """Call the model without its blocks. given: its inputs, and what the last block returns."""
        calls = BlockCalls(self.blocks, given.get(BLOCK_OUTPUT))
        with self.reading(given), entries_replaced(self.blocks._modules, calls.stand_ins):
            output = self.model.forward(**{value.name: given[value] for value in self.arguments})
        calls.check_complete()
        results: dict[Value, Tensor] = {}
        known = {id(tensor): value for value, tensor in given.items()}

        def value_of(tensor: Tensor, new: Value) -> Value:
            """Return which value a tensor is: one that is known, or a new result."""
            if id(tensor) not in known:
                known[id(tensor)] = new
                results[new] = tensor
            return known[id(tensor)]

        output_value = value_of(output, OUTPUT)
        if not calls.arguments:
            return OuterCall(results, output_value, None)
        hidden, *others = calls.arguments
        leaves, tree = pytree.tree_flatten(tuple(others))
        assert isinstance(hidden, Tensor)
        assert calls.block_output is not None
        block_arguments = BlockArguments(
            hidden=value_of(hidden, HIDDEN),
            others=[
                value_of(leaf, Value("shared", index=index)) if isinstance(leaf, Tensor) else leaf
                for index, leaf in enumerate(leaves)
            ],
            tree=tree,
            block_output=calls.block_output,
        )
        return OuterCall(results, output_value, block_arguments)

    def trace_block(self, module: nn.Module) -> Block:
        """Return the next block, traced if no block of its kind was."""
        assert self.block_arguments is not None
        fqn = self.fqns[module]
        modules = list(module.modules())
        inputs = {HIDDEN: self.hidden, **self.shared, **self.inputs_of(modules)}
        kind = self.kind_of(module, inputs)
        alike = [block for other_kind, block in self.traced if kind == other_kind]
        if alike:
            block = replace(alike[0], fqn=fqn)
        else:
            traced = trace(
                functools.partial(self.call_block, module, list(inputs)),
                list(inputs.values()),
                self.mode,
                self.settings,
                self.checkpoint_rule(module),
                static_inputs(inputs),
            )
            block = Block(fqn, self.part(traced, inputs, [HIDDEN]), traced_fqn=fqn)
            self.traced.append((kind, block))
        self.hidden = fake_results(block.part)[HIDDEN]
        return block

    def call_block(
        self, module: nn.Module, values: Sequence[Value], *tensors: Tensor
    ) -> list[Tensor]:
        """Call a block with tensors in place of `values`."""
        assert self.block_arguments is not None
        given = dict(zip(values, tensors, strict=True))
        others = [
            given[other] if isinstance(other, Value) else other
            for other in self.block_arguments.others
        ]
        with self.reading(given):
            arguments = pytree.tree_unflatten(others, self.block_arguments.tree)
            return [module(given[HIDDEN], *arguments)]

    def part(
        self, traced: TracedFunction, inputs: Mapping[Value, Tensor], results: Sequence[Value]
    ) -> Part:
        halves = None
        if traced.backward is not None and self.settings.split_backward is not None:
            halves = self.settings.split_backward(traced, list(inputs))
        return Part(traced, list(inputs), results, halves)

    def kind_of(self, block: nn.Module, inputs: Mapping[Value, Tensor]) -> tuple[object, ...]:
        """Return all that the graphs of a block depend on: modules, weights and inputs."""
        modules = [
            (name, type(module), attributes_of(module)) for name, module in block.named_modules()
        ]
        prefix = f"{self.fqns[block]}."
        weights = self.weights.described(list(block.modules()))
        return (
            modules,
            {fqn.removeprefix(prefix): value for fqn, value in weights.items()},
            [described(tensor) for tensor in inputs.values()],
        )


def described(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return what graphs depend on of an argument."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def attributes_of(module: nn.Module) -> dict[str, object]:
    """Return the attributes that a module's code may read, beside parameters and buffers."""
    return {
        name: (type(value), _comparable(value))  # 1 == True
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES
    }


def _comparable(value: object) -> object:
    """Return a value with its arrays of numpy, whose == is no bool, as descriptions."""
    return pytree.tree_map_only(
        np.ndarray, lambda array: (array.dtype.str, array.shape, array.tobytes()), value
    )


def static_inputs(inputs: Iterable[Value]) -> list[int]:
    """Return the indices of the inputs that stay in memory during a step."""
    return [i for i, value in enumerate(inputs) if value.kind in ("buffer", "weight")]


def fake_results(part: Part) -> dict[Value, Tensor]:
    """Return fake tensors like the results of a part."""
    fakes = {}
    for value, node in zip(part.results, part.traced.results, strict=True):
        fakes[value] = node.meta["val"].detach().requires_grad_(value in part.differentiable)
    return fakes


@dataclass(frozen=True)
class BlockArguments:
    """The arguments of the first block, and what the last one returns."""

    hidden: Value
    others: Sequence[object]  # all other arguments, flat: Values, and constants
    tree: pytree.TreeSpec  # of the others
    block_output: Tensor

    @property
    def shared(self) -> list[Value]:
        """The values that all blocks read."""
        return list(dict.fromkeys(other for other in self.others if isinstance(other, Value)))


@dataclass(frozen=True)
class OuterCall:
    """A call of the model without its blocks."""

    results: Mapping[Value, Tensor]  # the output and what blocks read, without what was given
    output: Value
    block_arguments: BlockArguments | None  # None: there are no blocks
