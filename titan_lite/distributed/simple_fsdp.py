"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is a DTensor, and reading it is a differentiable all-gather.

    apply_simple_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=True)
    materialize(model, device)                  # the meta shards get memory; no rank ever holds the full model
    model.layers["0"].attention.wq.weight       # all-gather; its backward is the reduce-scatter of the gradient

Each module's class is swapped for a subclass whose properties gather: no hooks on modules, no streams, no flat buffers. A
traced graph holds the plain collectives, and a graph pass moves them; eager mode runs the same ones, started a few earlier. FQNs,
`parameters()` and `state_dict()` read `_parameters`, which holds the shards; they never communicate.

FSDP, HSDP and DDP differ only in the placements over the mesh axes (dp_replicate, dp_shard):

    FSDP   dp_replicate 1, dp_shard n    all-gather                reduce-scatter
    HSDP   dp_replicate m, dp_shard n    all-gather in the copy    reduce-scatter, then all-reduce of the shard over copies
    DDP    dp_replicate m, dp_shard 1    nothing                   all-reduce

Gradients are *summed* over ranks: the loss is already divided by the number of tokens of all ranks.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class GatherPlan:
    """How one parameter is gathered and its gradient reduced; plain values only, so that tracing sees constants.

    fqn: its name, and the first of its names where weights are tied. rows: length of dimension 0 of the whole; own_rows: of this rank's shard. A shard has ceil(rows / shard_degree) rows, the
    last shards fewer or none: these are padded for the collectives.
    """

    fqn: str
    rows: int
    own_rows: int
    shard_degree: int
    shard_group: str
    replicate_degree: int
    replicate_group: str
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def start_gather(self, shard: Tensor) -> Tensor:
        """This rank's rows -> all rows in param_dtype, padded and perhaps still in flight."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return shard
        chunk = -(-self.rows // self.shard_degree)
        return collectives.all_gather_into_tensor(_pad_rows(shard, chunk), self.shard_degree, self.shard_group)

    def finish_gather(self, gathered: Tensor) -> Tensor:
        return gathered if self.shard_degree == 1 else collectives.wait_tensor(gathered)[: self.rows]

    def start_reduce(self, gradient: Tensor) -> Tensor:
        """This rank's gradient of the whole -> the sum over dp_shard of its own rows in reduce_dtype, perhaps still in flight."""
        gradient = gradient.to(self.reduce_dtype)
        if self.shard_degree == 1:
            return gradient
        chunk = -(-self.rows // self.shard_degree)
        gradient = _pad_rows(gradient, chunk * self.shard_degree).contiguous()
        return collectives.reduce_scatter_tensor(gradient, "sum", self.shard_degree, self.shard_group)

    def finish_reduce(self, gradient: Tensor) -> Tensor:
        if self.shard_degree > 1:
            gradient = collectives.wait_tensor(gradient)[: self.own_rows]
        if self.replicate_degree > 1:  # after the reduce-scatter: only a shard travels between copies
            gradient = collectives.wait_tensor(collectives.all_reduce(gradient.contiguous(), "sum", self.replicate_group))
        return gradient


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


class _Gather(torch.autograd.Function):
    """Shard -> whole weight; gradient of the whole -> gradient of the shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, plan: GatherPlan, eager: "_Eager | None") -> Tensor:
        ctx.plan, ctx.eager, ctx.shard_dtype = plan, eager, shard.dtype
        whole = plan.finish_gather(plan.start_gather(shard)) if eager is None else eager.gather(shard, plan)
        return whole.view_as(whole)  # autograd wants a tensor of its own where nothing had to be gathered or cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.eager is None:
            return ctx.plan.finish_reduce(ctx.plan.start_reduce(gradient)).to(ctx.shard_dtype), None, None
        return ctx.eager.reduce(gradient, ctx.plan, ctx.shard_dtype), None, None


class _Eager:
    """What eager mode adds, and a graph pass does under torch.compile: resharding after forward, and overlap.

    Resharding: whatever autograd would save of a gathered weight is dropped, and gathered anew in backward. A read is
    remembered by the address of the gathered weight's storage, so that its views (the transpose that a matrix product saves)
    are recognised; it counts while the weight lives, so that an activation at a freed weight's address is not taken for it.

    Overlap: weights are read in the same order every time, so a read starts the gathers that followed it last time; and a
    reduction is waited for when its gradient is used, or when IN_FLIGHT younger ones have been started. Both bounds are the
    memory that overlap may cost. The order is learnt from the program alone, so it is the same on every rank.
    """

    IN_FLIGHT = 4

    def __init__(self) -> None:
        self.reads: dict[int, tuple[weakref.ref[Tensor], Tensor, GatherPlan]] | None = None  # only during a forward that reshards
        self.backward = False
        self.previous: GatherPlan | None = None
        self.followers: dict[tuple[bool, GatherPlan], tuple[Tensor, GatherPlan]] = {}
        self.gathering: dict[GatherPlan, Tensor] = {}
        self.reducing: deque[AsyncCollectiveTensor] = deque()

    def gather(self, shard: Tensor, plan: GatherPlan) -> Tensor:
        if plan.shard_degree == 1:
            return plan.start_gather(shard)
        started = self.gathering.pop(plan, None)
        started = plan.start_gather(shard) if started is None else started
        if self.previous is not None:
            self.followers[self.backward, self.previous] = (shard.detach(), plan)
        self.previous = plan
        ahead = plan
        for _ in range(self.IN_FLIGHT):
            if (self.backward, ahead) not in self.followers:
                break
            next_shard, ahead = self.followers[self.backward, ahead]
            if ahead is not plan and ahead not in self.gathering:
                self.gathering[ahead] = ahead.start_gather(next_shard)
        return plan.finish_gather(started)

    def reduce(self, gradient: Tensor, plan: GatherPlan, dtype: torch.dtype) -> Tensor:
        started = plan.start_reduce(gradient)
        if plan.shard_degree == 1 or plan.replicate_degree > 1 or started.shape[0] != plan.own_rows or started.dtype != dtype:
            return plan.finish_reduce(started).to(dtype)
        waits_when_used = AsyncCollectiveTensor(started)
        self.reducing.append(waits_when_used)
        if len(self.reducing) > self.IN_FLIGHT:
            self.reducing.popleft().trigger_wait()
        return waits_when_used

    @contextmanager
    def forward(self, reshard: bool) -> Iterator[None]:
        """One forward of the model."""
        self._drop_unused()
        self.backward, self.reads = False, {} if reshard else None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if reshard else nullcontext():
                yield
        finally:
            self._drop_unused()
            self.backward, self.reads = True, None

    def remember(self, whole: Tensor, shard: Tensor, plan: GatherPlan) -> None:
        if self.reads is not None and whole.data_ptr() != shard.data_ptr():
            self.reads[_storage_address(whole)] = (weakref.ref(whole), shard.detach(), plan)

    def _pack(self, tensor: Tensor) -> Any:
        read = self.reads.get(_storage_address(tensor)) if self.reads and type(tensor) is Tensor else None
        if read is None or read[0]() is None:
            return tensor
        return (read[1], read[2], tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shard, plan, size, stride, offset = packed
        return self.gather(shard, plan).as_strided(size, stride, offset)

    def _drop_unused(self) -> None:
        self.previous = None
        while self.gathering:
            collectives.wait_tensor(self.gathering.popitem()[1])


def _storage_address(tensor: Tensor) -> int:
    # Not tensor.untyped_storage(): a Python object of a storage that gloo's thread is just letting go of corrupts the heap
    # (torch 2.13, one run in three under stress).
    return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()


class _State:
    """What the modules of one sharded model share."""

    def __init__(self, mesh: DeviceMesh, reshard_after_forward: bool):
        self.mesh = mesh
        self.reshard_after_forward = reshard_after_forward
        self.eager = _Eager()
        self.plans: dict[nn.Parameter, GatherPlan] = {}  # one entry for tied weights; parameters hash by identity


def apply_simple_fsdp(
    model: nn.Module, mesh: DeviceMesh, *, param_dtype: torch.dtype, reduce_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard every parameter of `model` on dimension 0 over mesh axes (dp_replicate, dp_shard), in place.

    A parameter on the meta device becomes a meta shard (see `materialize`); one with data is cut, each rank keeping its rows,
    and must hold the same numbers on all ranks. param_dtype: of gathered weights, and so of the computation; reduce_dtype:
    in which gradients are summed. reshard_after_forward: drop gathered weights after forward and gather them again in
    backward (less memory, one more all-gather), or keep them.
    """
    mesh = mesh["dp_replicate", "dp_shard"]
    state = _State(mesh, reshard_after_forward)
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        plans = {}
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in sharded:
                sharded[parameter] = shard = _shard(parameter, mesh)
                state.plans[shard] = GatherPlan(
                    fqn=f"{prefix}.{name}",
                    rows=parameter.shape[0],
                    own_rows=shard.to_local().shape[0],  # type: ignore[operator]
                    shard_degree=mesh["dp_shard"].size(),
                    shard_group=mesh.get_group("dp_shard").group_name,
                    replicate_degree=mesh["dp_replicate"].size(),
                    replicate_group=mesh.get_group("dp_replicate").group_name,
                    param_dtype=param_dtype,
                    reduce_dtype=reduce_dtype,
                )
            module._parameters[name] = sharded[parameter]
            plans[name] = state.plans[sharded[parameter]]
        module.__dict__.update(_fsdp_state=state, _fsdp_plans=plans, _fsdp_wholes={})
        module.__class__ = _sharded_class(type(module), tuple(plans), module is model)


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The whole parameter -> this rank's rows of it, as a DTensor over (dp_replicate, dp_shard)."""
    placements = (Replicate(), Shard(0))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    rows = parameter.detach().narrow(0, min(offset[0], parameter.shape[0]), shape[0]).clone()
    # shape and stride are given, since uneven shards do not tell the whole
    whole = DTensor.from_local(rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


@functools.cache  # so a class swapped alike is the same class in every model; it must not close over a mesh
def _sharded_class(cls: type[nn.Module], names: tuple[str, ...], is_root: bool) -> type[nn.Module]:
    """A subclass whose property of each name gathers; the root's forward reshards."""
    members: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    if is_root:
        members["forward"] = _resharding_forward(cls.forward)
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def _read(module: nn.Module, name: str) -> Tensor:
    """`module.weight`: the whole weight, in param_dtype."""
    whole = module._fsdp_wholes.get(name)  # type: ignore[union-attr, operator]
    if whole is not None:
        return whole
    plan = module._fsdp_plans[name]  # type: ignore[index]
    shard = module._parameters[name].to_local()  # type: ignore[union-attr, operator]
    if tracing():
        return _Gather.apply(shard, plan, None)
    eager: _Eager = module._fsdp_state.eager  # type: ignore[union-attr, assignment]
    whole = _Gather.apply(shard, plan, eager)
    eager.remember(whole, shard, plan)
    return whole


def _resharding_forward(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return forward(self, *args, **kwargs)
        state: _State = self._fsdp_state  # type: ignore[assignment]
        with state.eager.forward(state.reshard_after_forward and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)

    return wrapped


def tracing() -> bool:
    """Whether this code is becoming a graph, under torch.compile or make_fx."""
    return torch.compiler.is_compiling() or _are_we_tracing()


@contextmanager
def gathered_for_step(model: nn.Module) -> Iterator[None]:
    """Within: all weights stay gathered and gradients accumulate unreduced, in reduce_dtype; on leaving, they are reduced once
    into `parameter.grad`. For gradient accumulation (as Llama 3 did): k microbatches cost the communication of one, and the
    memory of the rank's whole weights and gradients.
    """
    state: _State = model._fsdp_state  # type: ignore[assignment]
    with torch.no_grad():
        started = {p: plan.start_gather(p.to_local()) for p, plan in state.plans.items()}  # type: ignore[operator]
        leaves = {p: state.plans[p].finish_gather(started.pop(p)).detach() for p in state.plans}
    sums: dict[nn.Parameter, Tensor] = {}
    for parameter, leaf in leaves.items():
        leaf.requires_grad_(parameter.requires_grad)
        if state.plans[parameter].param_dtype != state.plans[parameter].reduce_dtype:
            leaf.register_post_accumulate_grad_hook(functools.partial(_accumulate, sums, parameter, state.plans[parameter].reduce_dtype))
    for module in model.modules():
        module._fsdp_wholes.update({n: leaves[module._parameters[n]] for n in module._fsdp_plans})  # type: ignore
    try:
        yield
    finally:
        for module in model.modules():
            module._fsdp_wholes.clear()  # type: ignore[union-attr, operator]
    reduced = {}
    for parameter, plan in state.plans.items():
        leaf = leaves.pop(parameter)
        gradient = sums.pop(parameter, leaf.grad)
        if gradient is not None:
            reduced[parameter] = plan.start_reduce(gradient)
    for parameter, gradient in reduced.items():
        own = state.plans[parameter].finish_reduce(gradient).to(parameter.dtype)
        parameter.grad = DTensor.from_local(own, state.mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride())  # type: ignore


def _accumulate(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter, dtype: torch.dtype, leaf: Tensor) -> None:
    """Add a microbatch's gradient to the sum in `dtype`, which is wider than the one it was computed in."""
    assert leaf.grad is not None
    if parameter in sums:
        sums[parameter] += leaf.grad
    else:
        sums[parameter] = leaf.grad.to(dtype)
    leaf.grad = None


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a meta model uninitialised memory on `device`: each rank its shards. Tied weights stay tied (`Module.to_empty` unties)."""
    state: _State = model._fsdp_state  # type: ignore[assignment]
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for meta in state.plans:
        local = torch.empty_like(meta.to_local(), device=device)  # type: ignore[operator]
        whole = DTensor.from_local(local, state.mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride())  # type: ignore
        filled[meta] = nn.Parameter(whole, requires_grad=meta.requires_grad)
    state.plans = {filled[meta]: plan for meta, plan in state.plans.items()}
    for module in model.modules():
        for name in module._fsdp_plans:  # type: ignore[union-attr]
            module._parameters[name] = filled[module._parameters[name]]  # type: ignore[index]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)


def shard_of(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(the rows this rank holds, sharing memory with the parameter; their offset in the whole), under no_grad."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(), compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]
