"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is a DTensor; reading it all-gathers it, and
backward reduces its gradient.

    apply_simple_fsdp(model, mesh, FSDPOptions(param_dtype=torch.bfloat16))
    materialize(model, device)                  # allocates the shards; no rank holds the full model
    model.layers["0"].attention.wq.weight       # all-gather; backward: reduce-scatter

Each module's class is replaced by a subclass whose parameters are properties (`read_parameter`): no
module hooks, no streams, no flat parameters. FQNs, `parameters()` and `state_dict()` read
`_parameters`, which holds the shards; they never communicate. In eager mode a gatherer decides when
collectives run (`Sharding.eager`). A compiled model is traced with a `TracedGatherer`, whose reader
says what graphs have as inputs (`Sharding.reader`). The first row below is the default, and
`Sharding.gathered_for_step` selects the second:

                eager                                    compiled
    each        PrefetchGatherer (prefetch.py):          ShardReader: plain collectives in the
    microbatch  one block ahead, resharded               graph, which passes move and merge
                after forward
    each step   OncePerStepGatherer (step_gather.py):    StepReader (step_gather.py):
                once for all microbatches, at            full weights are inputs of the graph,
                the first read                           gathered while it runs

FSDP, HSDP and DDP differ only in the sizes of the mesh axes dp_replicate and dp_shard:

    FSDP   dp_replicate 1, dp_shard n    all-gather                reduce-scatter
    HSDP   dp_replicate m, dp_shard n    all-gather in a replica   reduce-scatter, then all-reduce
                                                                   of the shard over replicas
    DDP    dp_replicate m, dp_shard 1    nothing                   all-reduce

A parameter that tensor or expert parallelism has split is sharded further; "unsharded" then means
a rank's part of it. Gradients are *summed* over ranks: the loss is already divided by
the number of tokens of all ranks.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.traceback import annotate

from titan_lite.distributed.buckets import Specs
from titan_lite.distributed.mesh import axis_of
from titan_lite.distributed.param_collectives import PLAIN, GatheredWeight, ShardSpec, Weight
from titan_lite.distributed.prefetch import PrefetchGatherer
from titan_lite.distributed.specialize import specialize
from titan_lite.distributed.step_gather import (
    OncePerStepGatherer,
    StepGradients,
    StepReader,
)
from titan_lite.dtensor import as_shard_of, local
from titan_lite.models.fqns import is_in_block, is_of_experts, parameters_within
from titan_lite.sharding import chunk_range


class ShardedParameters(NamedTuple):
    """The attribute `_fsdp` of a module whose parameters are sharded."""

    specs: dict[str, ShardSpec]  # by parameter name: how to gather it and reduce its gradient
    sharding: "Sharding"  # of the model, shared by all its modules: has the gatherer


def read_parameter(module: nn.Module, name: str) -> Weight:
    """Return the full weight for `module.weight`; its backward reduces the gradient."""
    sharded: ShardedParameters = module._fsdp  # type: ignore[assignment]
    gatherer = sharded.sharding.gatherer
    return gatherer.read(module._parameters[name], sharded.specs[name])  # type: ignore[arg-type]


class ShardReader:
    """Under the compiler: collectives are nodes of the graph, which passes move and merge.

    Graphs have shards as inputs, and scales of those that travel with one.
    """

    def graph_inputs(self, parameter: nn.Parameter, spec: ShardSpec) -> tuple[Tensor, ...]:
        return (parameter, *spec.scales)

    def read_inputs(self, inputs: Sequence[Tensor], spec: ShardSpec) -> Weight:
        """Return the full weight, as nodes of a graph with these inputs."""
        shard, *scales = inputs

        def gather(shard: Tensor, spec: ShardSpec) -> Tensor:
            return spec.gather(shard, *scales)

        weight, stand_in = GatheredWeight.apply(shard, spec, gather, _reduce)
        return spec.transport.receive(weight, stand_in, *scales)


def _reduce(gradient: Tensor, spec: ShardSpec, shard: Tensor) -> Tensor:
    return spec.finish_reduce(spec.start_reduce(gradient)).to(shard.dtype)


# Has the inputs of graphs for a parameter (`graph_inputs`), and reads it from what stands for them
# (`read_inputs`). OncePerStepGatherer does where eager mode is priced.
GraphReader = ShardReader | StepReader | OncePerStepGatherer
# Decides when the collectives of a parameter run in eager mode (`read`). `leaf` is the tensor that
# autograd accumulates its gradient into; `take_gradients` takes those of all leaves, after a
# backward that has set `.grad` and run no hooks.
EagerGatherer = PrefetchGatherer | OncePerStepGatherer


class TracedGatherer:
    """Reads the parameters of a model, or of a part of it, that is traced by one call.

    A block may use a weight several times, such as one norm for queries and keys. The graph has one
    read of it, and autograd adds up the gradients of its uses. With a read for each use, the graph
    would merge two whose gradients are equal into one.
    """

    def __init__(self, reader: GraphReader, inputs: Mapping[str, Sequence[Tensor]]):
        self.reader = reader
        self.inputs = inputs  # of the graph, by FQN
        # those of blocks that were read, by FQN and whether autograd records the read
        self.of_blocks: dict[tuple[str, bool], Weight] = {}

    def read(self, parameter: nn.Parameter, spec: ShardSpec) -> Weight:
        """Return the full weight as nodes of the graph."""
        if not is_in_block(spec.fqn):
            return self._read(spec)
        key = (spec.fqn, torch.is_grad_enabled())
        if key not in self.of_blocks:
            self.of_blocks[key] = self._read(spec)
        return self.of_blocks[key]

    def _read(self, spec: ShardSpec) -> Weight:
        with annotate({"fqn": spec.fqn}):  # names the nodes for passes, those of backward too
            return self.reader.read_inputs(self.inputs[spec.fqn], spec)


class Sharding:
    """The sharding of a model: specs of parameters and gatherers, which all its modules share.

    It is the ModelWeights of a compiled model (compile/model_parts.py).
    """

    def __init__(self, specs: Specs, resharded: frozenset[str], reads: Counter[str]):
        self.specs = specs
        self.transports = dict.fromkeys(spec.transport for spec in specs.values())  # each once
        self.resharded = resharded  # FQNs of weights that are dropped after forward
        self.reads = reads  # of each weight in a graph's forward, by FQN: two of the tied table
        self.shard_reader = ShardReader()
        self.prefetch = PrefetchGatherer(specs, resharded)
        # `gathered_for_step` replaces one of these. A compiled model that is called outside of a
        # step, for validation, has its own graph.
        self.eager: EagerGatherer = self.prefetch
        self.reader: GraphReader = self.shard_reader
        self.traced: TracedGatherer | None = None  # within `reading` alone

    @property
    def gatherer(self) -> EagerGatherer | TracedGatherer:
        """The gatherer of a read."""
        return self.eager if self.traced is None else self.traced

    @property
    def variant(self) -> str:
        """The reader that has made the inputs of graphs, on which these depend beside arguments."""
        return type(self.reader).__name__

    @property
    def kept(self) -> frozenset[str] | None:
        """FQNs of weights that stay gathered until backward; None: all."""
        if not self.resharded:
            return None
        return frozenset(spec.fqn for spec in self.specs.values()).difference(self.resharded)

    def graph_inputs(self) -> dict[str, tuple[Tensor, ...]]:
        return {
            spec.fqn: self.reader.graph_inputs(parameter, spec)
            for parameter, spec in self.specs.items()
        }

    def described(self, modules: Iterable[nn.Module]) -> dict[str, object]:
        """Return by FQN all that makes the graphs of two blocks differ in their weights."""
        found: dict[str, object] = {}
        for module in modules:
            sharded: ShardedParameters = module._fsdp  # type: ignore[assignment]
            for spec in sharded.specs.values():
                found[spec.fqn] = (replace(spec, fqn=""), spec.fqn in self.resharded)
        return found

    @contextmanager
    def reading(self, inputs: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
        """Return a context in which reads are nodes of a graph with these inputs."""
        self.traced = TracedGatherer(self.reader, inputs)
        try:
            yield
        finally:
            self.traced = None

    def replace_parameters(self, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        self.specs = {replaced[parameter]: spec for parameter, spec in self.specs.items()}
        self.eager = self.prefetch = PrefetchGatherer(self.specs, self.resharded)

    def parameters_have_changed(self) -> None:
        """Compute the scales with which weights travel. A collective."""
        parameters = {spec.fqn: parameter for parameter, spec in self.specs.items()}
        for transport in self.transports:
            transport.parameters_have_changed(parameters)

    def gradient_leaves(self) -> list[Tensor]:
        """Return the tensors that autograd accumulates into: parameters, or a step's weights."""
        return [self.eager.leaf(parameter, spec) for parameter, spec in self.specs.items()]

    @property
    def is_gathered_for_step(self) -> bool:
        """True within `gathered_for_step` of an eager model."""
        return self.eager is not self.prefetch

    @contextmanager
    def gathered_for_step(self, microbatches: int, *, compiled: bool) -> Iterator[None]:
        """Gather weights once for the microbatches of an optimizer step, and reduce gradients once.

        Gradients are summed in reduce_dtype, and reduced into `parameter.grad` in the last
        backward. compiled: graphs read the weights.
        """
        gradients = StepGradients(self.specs, self.prefetch, microbatches)
        step: OncePerStepGatherer | StepReader
        if compiled:
            self.reader = step = StepReader(self.specs, gradients, self.reads)
        else:
            self.eager = step = OncePerStepGatherer(self.prefetch, gradients)
        try:
            yield
            step.finish()
        finally:
            self.eager = self.prefetch
            self.reader = self.shard_reader
            step.close()

    @contextmanager
    def backward_of_weights(self) -> Iterator[None]:
        """Run the half of a backward that computes gradients of weights, which a pipeline schedule
        does apart from the other half. It sets `.grad` of `gradient_leaves` and runs no hooks.
        """
        with self.prefetch.backward_of_weights():
            yield
            self.eager.take_gradients()


def _sharding_of(root: nn.Module) -> Sharding:
    """Return the sharding of a model after `apply_simple_fsdp`."""
    return root._fsdp.sharding  # type: ignore[union-attr, return-value]


@dataclass(frozen=True)
class FSDPOptions:
    """Settings of the gathers and reductions of `apply_simple_fsdp`."""

    param_dtype: torch.dtype = torch.float32  # of gathered weights and of computation
    reduce_dtype: torch.dtype = torch.float32  # of sums of gradients
    # FQN prefixes, such as "layers.31", of weights that stay gathered until backward; None: all.
    # Others are resharded: dropped after forward, and gathered again in backward, for less memory.
    keep_gathered: Sequence[str] | None = ()
    # False: gradients are not summed over dp_replicate; something else does it once a step
    reduce_over_replicas: bool = True


def apply_simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    options: FSDPOptions,
    mesh_of_experts: DeviceMesh | None = None,
) -> Sharding:
    """Shard every parameter of `model` on dimension 0 over axis dp_shard of `mesh`, in place.

    mesh: see `parameter_mesh` (mesh.py). Of a DTensor of tensor or expert parallelism, the local
    part is sharded. A parameter on the meta device becomes a meta shard (see `materialize`). One
    with data must be equal on all ranks, and each rank keeps its rows. Tied weights stay tied. The
    attribute `transport` of a module is the Transport of its weights.

    mesh_of_experts: see `expert_mesh`; a rank has whole matrices of experts. None: `mesh`.
    """
    resharded: frozenset[str] = frozenset()
    if options.keep_gathered is not None:
        kept = parameters_within(model, options.keep_gathered)
        resharded = frozenset(fqn for fqn, _ in model.named_parameters()).difference(kept)

    shards: dict[nn.Parameter, nn.Parameter] = {}  # by the unsharded parameter
    specs: dict[nn.Parameter, ShardSpec] = {}  # by the sharded one
    for prefix, module in model.named_modules():
        transport = getattr(module, "transport", PLAIN)
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in shards:
                continue
            fqn = f"{prefix}.{name}".removeprefix(".")
            own_mesh = mesh
            if mesh_of_experts is not None and is_of_experts(parameter.shape):
                own_mesh = mesh_of_experts
            shard, spec = shard_parameter(parameter, own_mesh, fqn, options)
            shards[parameter] = shard
            specs[shard] = replace(spec, transport=transport)

    # Reads of a graph's forward: one for each module that has the weight, such as two of a tied
    # table, but within a block one of each (TracedGatherer).
    reads = Counter(
        specs[shards[parameter]].fqn
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    for fqn in filter(is_in_block, reads):
        reads[fqn] = 1
    sharding = Sharding(specs, resharded, reads)
    for module in model.modules():
        own_specs = {}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = shards[parameter]
                own_specs[name] = specs[shards[parameter]]
        module.__dict__["_fsdp"] = ShardedParameters(own_specs, sharding)
        specialize(module, sharded, tuple(own_specs), module is model)
    return sharding


def shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, fqn: str, options: FSDPOptions
) -> tuple[nn.Parameter, ShardSpec]:
    """Return this rank's rows of a parameter as a DTensor, and the spec to gather it.

    The last axis of `mesh` is tp or, for experts, ep. The gradient of a parameter that is split
    over it already, a DTensor, is not summed over it; that of a replicated one is.
    """
    assert mesh.mesh_dim_names is not None
    axis = mesh.mesh_dim_names[-1]
    part_placement: Placement = Replicate()
    unsharded = parameter.detach()
    if isinstance(parameter, DTensor):
        (part_placement,) = parameter.placements
        unsharded = local(parameter).detach()
    size = unsharded.shape[0]
    shards = axis_of(mesh["dp_shard"])
    own = chunk_range(size, shards.degree, shards.rank)
    rows = unsharded[own.start : own.stop].clone(memory_format=torch.contiguous_format)

    sum_axes = ["dp_replicate"] if options.reduce_over_replicas else []
    if not part_placement.is_shard():
        sum_axes.append(axis)
    spec = ShardSpec(
        fqn=fqn,
        rows=size,
        row_shape=tuple(rows.shape[1:]),
        axis=shards,
        sum_groups=tuple(
            mesh.get_group(name).group_name for name in sum_axes if mesh[name].size() > 1
        ),
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
    )

    # FSDP splits a rank's part: the axis on the right, tp or ep, is split first.
    dp_placement: Placement = Shard(0)
    if part_placement.is_shard(0) and mesh[axis].size() > 1:
        dp_placement = _StridedShard(0, split_factor=mesh[axis].size())
    sharded = DTensor.from_local(
        rows,
        mesh,
        (Replicate(), dp_placement, part_placement),
        run_check=False,
        shape=parameter.shape,  # cannot be inferred from uneven shards, nor the stride
        stride=parameter.stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad), spec


def sharded(cls: type[nn.Module], names: tuple[str, ...], is_root: bool) -> dict[str, object]:
    """Return the members of a sharded module: a property for each parameter. The root's forward
    begins a phase of PrefetchGatherer.
    """

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        sharding = _sharding_of(self)
        if sharding.traced is not None:
            return cls.forward(self, *args, **kwargs)
        drops = bool(sharding.resharded) and not sharding.is_gathered_for_step
        reshard = drops and torch.is_grad_enabled()
        with sharding.prefetch.forward(reshard):
            return cls.forward(self, *args, **kwargs)

    members: dict[str, object] = {
        name: property(functools.partial(read_parameter, name=name)) for name in names
    }
    if is_root:
        members["forward"] = forward
    return members


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate shards and buffers, uninitialized. Tied weights stay tied, unlike in `to_empty`."""
    sharding = _sharding_of(root)
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for meta in sharding.specs:
        shard = as_shard_of(meta, torch.empty_like(local(meta), device=device))
        allocated[meta] = nn.Parameter(shard, requires_grad=meta.requires_grad)
    sharding.replace_parameters(allocated)
    for transport in sharding.transports:
        transport.allocate(device)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = allocated[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
