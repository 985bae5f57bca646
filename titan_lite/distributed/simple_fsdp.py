"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is a DTensor, and reading it is a differentiable all-gather.

    apply_simple_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=True)
    materialize(model, device)                  # the meta shards get memory; no rank ever holds the full model
    model.layers["0"].attention.wq.weight       # all-gather; its backward is the reduce-scatter of the gradient

Each module's class is swapped for a subclass whose properties gather: no hooks on modules, no streams, no flat buffers. A
traced graph holds the plain collectives, and a graph pass moves them; eager mode runs the same ones, started a few earlier. FQNs,
`parameters()` and `state_dict()` read `_parameters`, which holds the shards; they never communicate.

FSDP, HSDP and DDP differ only in the sizes of the mesh axes dp_replicate and dp_shard:

    FSDP   dp_replicate 1, dp_shard n    all-gather                reduce-scatter
    HSDP   dp_replicate m, dp_shard n    all-gather in the copy    reduce-scatter, then all-reduce of the shard over copies
    DDP    dp_replicate m, dp_shard 1    nothing                   all-reduce

What tensor parallelism has split is sharded further: "the whole" below is then what a tensor-parallel rank has of it. Gradients
are *summed* over ranks: the loss is already divided by the number of tokens of all ranks.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.traceback import annotate
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.compiler.resharding import parameters_within

collectives = torch.ops._c10d_functional
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(frozen=True)
class GatherPlan:
    """How one parameter is gathered and its gradient reduced; plain values only, so that tracing sees constants.

    fqn: its name, the first one where weights are tied. rows: length of dimension 0 of the whole; own_rows: of this rank's
    shard, which begins at first_row. A shard has ceil(rows / shard_degree) rows, the last shards fewer or none: these are
    padded for the collectives. sum_groups: the groups whose ranks have the same shard, and gradients of it to add up.
    """

    fqn: str
    rows: int
    own_rows: int
    first_row: int
    shard_degree: int
    shard_group: str
    sum_groups: tuple[str, ...]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def chunk(self) -> int:
        """Rows of a padded shard."""
        return -(-self.rows // self.shard_degree)

    def gather(self, shard: Tensor) -> Tensor:
        """This rank's rows -> the whole in param_dtype, as nodes of a graph."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return shard
        whole = collectives.all_gather_into_tensor(_pad_rows(shard, self.chunk), self.shard_degree, self.shard_group)
        return collectives.wait_tensor(whole)[: self.rows]

    # Out of sight of dispatch modes: selective checkpointing counts operators, and this may be a gather ahead of its read.
    @_disable_current_modes()
    @torch.no_grad()
    def start_gather(self, shard: Tensor) -> "_InFlight":
        """The same in eager mode, on its way."""
        shard = shard.to(self.param_dtype)
        if self.shard_degree == 1:
            return _InFlight(shard, None)
        # Not the functional collective: started ahead of its read on gloo, it corrupted the heap within a minute (torch 2.13).
        shard = _pad_rows(shard, self.chunk)
        whole = shard.new_empty(self.chunk * self.shard_degree, *shard.shape[1:])
        group = _resolve_process_group(self.shard_group)  # type: ignore[arg-type]
        return _InFlight(whole[: self.rows], _all_gather(whole, shard, group=group, async_op=True))

    def start_reduce(self, gradient: Tensor) -> Tensor:
        """This rank's gradient of the whole -> the sum over dp_shard of its own rows in reduce_dtype, perhaps still in flight."""
        gradient = gradient.to(self.reduce_dtype)
        if self.shard_degree == 1:
            return gradient
        gradient = _pad_rows(gradient, self.chunk * self.shard_degree).contiguous()
        return collectives.reduce_scatter_tensor(gradient, "sum", self.shard_degree, self.shard_group)

    def finish_reduce(self, gradient: Tensor) -> Tensor:
        if self.shard_degree > 1:
            gradient = collectives.wait_tensor(gradient)[: self.own_rows]
        for group in self.sum_groups:  # after the reduce-scatter: only a shard travels between copies
            gradient = collectives.wait_tensor(collectives.all_reduce(gradient.contiguous(), "sum", group))
        return gradient


class _InFlight(NamedTuple):
    """A tensor that may be read once its communication is waited for."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


class _Gather(torch.autograd.Function):
    """Shard -> whole weight; gradient of the whole -> gradient of the shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, plan: GatherPlan, eager: "_Eager | None") -> Tensor:
        ctx.plan, ctx.eager, ctx.shard_dtype = plan, eager, shard.dtype
        whole = plan.gather(shard) if eager is None else eager.gather(shard, plan)
        return whole.view_as(whole)  # autograd wants a tensor of its own where nothing had to be gathered or cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.eager is None:
            return ctx.plan.finish_reduce(ctx.plan.start_reduce(gradient)).to(ctx.shard_dtype), None, None
        return ctx.eager.reduce(gradient, ctx.plan, ctx.shard_dtype), None, None


class _Eager:
    """What eager mode adds, and a graph pass does under torch.compile: resharding after forward, and overlap.

    Resharding: whatever autograd would save of a weight that is not kept is dropped, and gathered anew in backward. A read is
    remembered by the address of the gathered weight's storage, so that its views (the transpose that a matrix product saves)
    are recognised; it counts while the weight lives, so that an activation at a freed weight's address is not taken for it.

    Overlap: weights are read in the same order every time, so a read starts the gathers that followed it last time; and a
    reduction is waited for when its gradient is used, or when IN_FLIGHT younger ones have been started. Both bounds are the
    memory that overlap may cost. The order is learnt from the program alone, so it is the same on every rank. What DDP and HSDP
    all-reduce is waited for at once.
    """

    IN_FLIGHT = 4

    def __init__(self) -> None:
        # gathered weights by storage address, only during a forward that reshards
        self.reads: dict[int, tuple[weakref.ref[Tensor], nn.Parameter, GatherPlan]] | None = None
        self.backward = False
        self.order: list[tuple[Tensor, GatherPlan]] = []  # of the gathers in this forward or backward so far
        self.last_order: dict[bool, list[tuple[Tensor, GatherPlan]]] = {
            False: [],
            True: [],
        }  # in the last backward (True) or forward
        self.gathering: dict[tuple[GatherPlan, int], _InFlight] = {}  # the address tells whether the shard is still the same
        self.reducing: deque[AsyncCollectiveTensor] = deque()

    def gather(self, shard: Tensor, plan: GatherPlan) -> Tensor:
        if plan.shard_degree == 1:
            return plan.start_gather(shard).wait()
        started = self.gathering.pop((plan, shard.data_ptr()), None) or plan.start_gather(shard)
        place, last = len(self.order), self.last_order[self.backward]
        self.order.append((shard.detach(), plan))
        if place < len(last) and last[place][1] is plan:
            for next_shard, next_plan in last[place + 1 : place + 1 + self.IN_FLIGHT]:
                key = (next_plan, next_shard.data_ptr())
                if key not in self.gathering:
                    self.gathering[key] = next_plan.start_gather(next_shard)
        return started.wait()

    def reduce(self, gradient: Tensor, plan: GatherPlan, dtype: torch.dtype) -> Tensor:
        started = plan.start_reduce(gradient)
        if plan.shard_degree == 1 or plan.sum_groups or started.shape[0] != plan.own_rows or started.dtype != dtype:
            return plan.finish_reduce(started).to(dtype)
        waits_when_used = AsyncCollectiveTensor(started)
        if not self.reducing:  # the first of this backward; after the last, gradients belong to the optimizer alone
            torch.autograd.Variable._execution_engine.queue_callback(self.reducing.clear)
        self.reducing.append(waits_when_used)
        if len(self.reducing) > self.IN_FLIGHT:
            self.reducing.popleft().trigger_wait()
        return waits_when_used

    @contextmanager
    def forward(self, reshard: bool) -> Iterator[None]:
        """One forward of the model."""
        self._begin(backward=False)
        self.reads = {} if reshard else None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if reshard else nullcontext():
                yield
        finally:
            self._begin(backward=True)
            self.reads = None

    def remember(self, whole: Tensor, parameter: nn.Parameter, plan: GatherPlan) -> None:
        if self.reads is not None and whole.data_ptr() != _local(parameter).data_ptr():
            self.reads[_storage_address(whole)] = (weakref.ref(whole), parameter, plan)

    def _pack(self, tensor: Tensor) -> Any:
        read = self.reads.get(_storage_address(tensor)) if self.reads and type(tensor) is Tensor else None
        if read is None or read[0]() is None:
            return tensor
        _, parameter, plan = read
        return (parameter, parameter._version, plan, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter, version, plan, size, stride, offset = packed
        if parameter._version != version:
            raise RuntimeError(f"{plan.fqn} was changed between its forward and its backward, which needs what it was")
        return self.gather(_local(parameter).detach(), plan).as_strided(size, stride, offset)

    def _begin(self, backward: bool) -> None:
        """A forward or a backward begins, and what came before is over."""
        while self.gathering:  # foreseen, and not read
            self.gathering.popitem()[1].wait()
        if self.order:
            self.last_order[self.backward] = self.order
        self.backward, self.order = backward, []


def _storage_address(tensor: Tensor) -> int:
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


class _Model:
    """What the modules of one sharded model share. plans: one entry for tied weights; parameters hash by identity. resharded:
    FQNs of the weights that are dropped after forward.

    Only within `gathered_for_step`, gathered: the whole weights; sums: of their gradients, where these are added up in another
    dtype than they are computed in.
    """

    def __init__(self, resharded: frozenset[str]):
        self.resharded = resharded
        self.eager = _Eager()
        self.plans: dict[nn.Parameter, GatherPlan] = {}
        self.gathered: dict[nn.Parameter, Tensor] = {}
        self.sums: dict[nn.Parameter, Tensor] = {}


@dataclass
class _Module:
    """What a sharded module carries as `_fsdp`. wholes: weights by name while they stay gathered for a step."""

    model: _Model
    plans: dict[str, GatherPlan]
    wholes: dict[str, Tensor]


def apply_simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    keep_gathered: Sequence[str] = (),
) -> None:
    """Shard every parameter of `model` on dimension 0 over axis dp_shard of `mesh`, in place; see `parameter_mesh` (mesh.py).

    A DTensor over the axis tp is one that tensor parallelism has placed; its part on this rank is sharded. A parameter on the
    meta device becomes a meta shard (see `materialize`); one with data is cut, each rank keeping its rows, and must hold the
    same numbers on all ranks. param_dtype: of gathered weights, and so of the computation; reduce_dtype: in which gradients are
    summed. reshard_after_forward: drop gathered weights after forward and gather them again in backward (less memory, one more
    all-gather), or keep them. keep_gathered: FQN prefixes of modules whose weights are kept all the same, such as "layers.31".
    """
    names = {fqn for fqn, _ in model.named_parameters()} if reshard_after_forward else set()
    shared = _Model(frozenset(names.difference(parameters_within(model, keep_gathered))))
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        plans = {}
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in shards:
                fqn = f"{prefix}.{name}".removeprefix(".")
                shards[parameter], plan = _shard(parameter, mesh, fqn, param_dtype, reduce_dtype)
                shared.plans[shards[parameter]] = plan
            module._parameters[name] = shards[parameter]
            plans[name] = shared.plans[shards[parameter]]
        module.__dict__["_fsdp"] = _Module(shared, plans, wholes={})
        cls: Any = type(module)
        module.__class__ = _sharded_class(cls, tuple(plans), module is model)


def _shard(
    parameter: nn.Parameter, mesh: DeviceMesh, fqn: str, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> tuple[nn.Parameter, GatherPlan]:
    """The whole parameter -> this rank's rows of it, as a DTensor on `mesh`; and how to gather it."""
    tp_placement: Placement = Replicate()
    whole = parameter.detach()
    if isinstance(parameter, DTensor):
        (tp_placement,), whole = parameter.placements, parameter.to_local().detach()
    degree, rank = mesh["dp_shard"].size(), mesh["dp_shard"].get_local_rank()
    first_row = min(rank * -(-whole.shape[0] // degree), whole.shape[0])
    rows = whole[first_row : (rank + 1) * -(-whole.shape[0] // degree)].clone()
    same_shard = ["dp_replicate"] if tp_placement.is_shard() else ["dp_replicate", "tp"]
    plan = GatherPlan(
        fqn=fqn,
        rows=whole.shape[0],
        own_rows=rows.shape[0],
        first_row=first_row,
        shard_degree=degree,
        shard_group=mesh.get_group("dp_shard").group_name,
        sum_groups=tuple(mesh.get_group(axis).group_name for axis in same_shard if mesh[axis].size() > 1),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    # A rank's rows are a part of its tensor-parallel part: the axis on the right was split first.
    strided = tp_placement.is_shard(0) and mesh["tp"].size() > 1
    placements = (Replicate(), _StridedShard(0, split_factor=mesh["tp"].size()) if strided else Shard(0), tp_placement)
    # shape and stride are given, since uneven shards do not tell those of the whole
    sharded = DTensor.from_local(rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad), plan


def _as_shard_of(parameter: Tensor, rows: Tensor) -> DTensor:
    """A DTensor placed as `parameter` is."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _local(parameter: Tensor) -> Tensor:
    """This rank's rows; differentiable."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


@functools.cache  # so a class swapped alike is the same class in every model; it must not close over a mesh
def _sharded_class(cls: Any, names: tuple[str, ...], is_root: bool) -> Any:
    """A subclass whose property of each name gathers; the root's forward also frames what eager mode adds."""
    members: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    if is_root:
        members["forward"] = _root_forward(cls.forward)
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def _read(module: nn.Module, name: str) -> Tensor:
    """`module.weight`: the whole weight, in param_dtype."""
    fsdp: _Module = module._fsdp  # type: ignore[assignment]
    if name in fsdp.wholes:
        return fsdp.wholes[name]
    parameter, plan = module._parameters[name], fsdp.plans[name]
    assert parameter is not None
    shard = _local(parameter)
    if tracing():
        with annotate({"fqn": plan.fqn}):  # on its nodes, those of backward too, by which passes know them
            return _Gather.apply(shard, plan, None)
    whole = _Gather.apply(shard, plan, fsdp.model.eager)
    if plan.fqn in fsdp.model.resharded:
        fsdp.model.eager.remember(whole, parameter, plan)
    return whole


def _root_forward(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return forward(self, *args, **kwargs)
        model = _model_of(self)
        with model.eager.forward(bool(model.resharded) and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)

    return wrapped


def _model_of(root: nn.Module) -> _Model:
    return root._fsdp.model  # type: ignore[union-attr, return-value]


def tracing() -> bool:
    """Whether this code is becoming a graph, under torch.compile or make_fx."""
    return torch.compiler.is_compiling() or _are_we_tracing()


@contextmanager
def gathered_for_step(root: nn.Module) -> Iterator[None]:
    """Within: all weights stay gathered and gradients accumulate unreduced, in reduce_dtype; on leaving, they are reduced once
    into `parameter.grad`. For gradient accumulation (as Llama 3 did): k microbatches cost the communication of one, and the
    memory of the rank's whole weights and gradients.
    """
    model = _model_of(root)
    with torch.no_grad():
        started = {parameter: plan.start_gather(_local(parameter)) for parameter, plan in model.plans.items()}
        wholes = {parameter: started.pop(parameter).wait().detach() for parameter in model.plans}
    model.gathered, model.sums = wholes, {}
    for parameter, whole in wholes.items():
        whole.requires_grad_(parameter.requires_grad)
        plan = model.plans[parameter]
        if plan.param_dtype != plan.reduce_dtype:
            whole.register_post_accumulate_grad_hook(functools.partial(_fold, model.sums, parameter, plan.reduce_dtype))
    modules = [module for module in root.modules() if module._fsdp.plans]  # type: ignore[union-attr]
    for module in modules:
        names: list[str] = list(module._fsdp.plans)  # type: ignore[union-attr, arg-type]
        module._fsdp.wholes.update({name: wholes[module._parameters[name]] for name in names})  # type: ignore
    try:
        yield
    finally:
        sums, model.gathered, model.sums = model.sums, {}, {}
        for module in modules:
            module._fsdp.wholes.clear()  # type: ignore[union-attr, operator]
    reducing = {}
    for parameter, plan in model.plans.items():
        gradient = sums.pop(parameter, wholes.pop(parameter).grad)
        if gradient is not None:
            reducing[parameter] = plan.start_reduce(gradient)
    for parameter, gradient in reducing.items():
        own = model.plans[parameter].finish_reduce(gradient).to(parameter.dtype)
        parameter.grad = _as_shard_of(parameter, own)


def gradient_leaves(root: nn.Module) -> list[Tensor]:
    """What autograd accumulates into: the gathered weights within `gathered_for_step`, else the parameters."""
    model = _model_of(root)
    return [model.gathered.get(parameter, parameter) for parameter in model.plans]


def fold_gradients(root: nn.Module) -> None:
    """Within `gathered_for_step`, after a backward that ran no hooks: what is in `.grad` joins the sums in reduce_dtype."""
    model = _model_of(root)
    for parameter, whole in model.gathered.items():
        dtype = model.plans[parameter].reduce_dtype
        if whole.grad is not None and whole.dtype != dtype:
            _fold(model.sums, parameter, dtype, whole)


def _fold(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter, dtype: torch.dtype, whole: Tensor) -> None:
    """Add a microbatch's gradient to the sum in `dtype`, which is not the one it was computed in."""
    assert whole.grad is not None
    if parameter in sums:
        sums[parameter] += whole.grad
    else:
        sums[parameter] = whole.grad.to(dtype)
    whole.grad = None


def materialize(root: nn.Module, device: torch.device) -> None:
    """Give a meta model uninitialised memory on `device`, each rank its shards; tied weights stay tied (`to_empty` unties)."""
    model = _model_of(root)
    filled: dict[Any, nn.Parameter] = {}
    for meta in model.plans:
        rows = torch.empty_like(_local(meta), device=device)
        filled[meta] = nn.Parameter(_as_shard_of(meta, rows), requires_grad=meta.requires_grad)
    model.plans = {filled[meta]: plan for meta, plan in model.plans.items()}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = filled.get(parameter)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)


def shard_of(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(the rows this rank holds, sharing memory with the parameter; their offset in the whole), under no_grad."""
    assert isinstance(parameter, DTensor)
    offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]
    return parameter.to_local(), tuple(int(start) for start in offset)
