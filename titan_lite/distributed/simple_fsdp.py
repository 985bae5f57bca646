"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is a DTensor, and reading it is a differentiable all-gather.

    apply_simple_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=True)
    materialize(model, device)                  # the meta shards get memory; no rank ever holds the full model
    model.layers["0"].attention.wq.weight       # all-gather; its backward is the reduce-scatter of the gradient

Each module's class is swapped for a subclass whose properties gather: no hooks on modules, no streams, no flat parameters. A
traced graph holds the plain collectives (gather.py), and a graph pass moves them; eager mode runs the same ones, started a few
earlier (eager.py), or once for several microbatches (accumulation.py). FQNs, `parameters()` and `state_dict()` read
`_parameters`, which holds the shards; they never communicate.

FSDP, HSDP and DDP differ only in the sizes of the mesh axes dp_replicate and dp_shard:

    FSDP   dp_replicate 1, dp_shard n    all-gather                reduce-scatter
    HSDP   dp_replicate m, dp_shard n    all-gather in the copy    reduce-scatter, then all-reduce of the shard over copies
    DDP    dp_replicate m, dp_shard 1    nothing                   all-reduce

What tensor parallelism has split is sharded further: "the whole" below is then what a tensor-parallel rank has of it. Gradients
are *summed* over ranks: the loss is already divided by the number of tokens of all ranks.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.traceback import annotate

from titan_lite.compiler.fqns import parameters_within
from titan_lite.distributed.eager import Eager
from titan_lite.distributed.gather import GatherPlan, local


class _Gather(torch.autograd.Function):
    """Shard -> whole weight; gradient of the whole -> gradient of the shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, plan: GatherPlan, eager: Eager | None) -> Tensor:
        ctx.plan, ctx.eager, ctx.shard_dtype = plan, eager, shard.dtype
        whole = plan.gather(shard) if eager is None else eager.gather(shard, plan)
        return whole.view_as(whole)  # autograd wants a tensor of its own where nothing had to be gathered or cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.eager is None:
            return ctx.plan.finish_reduce(ctx.plan.start_reduce(gradient)).to(ctx.shard_dtype), None, None
        return ctx.eager.reduce(gradient, ctx.plan, ctx.shard_dtype), None, None


class _Model:
    """The state that the modules of one sharded model share. plans: one entry for tied weights; parameters hash by identity.
    resharded: FQNs of the weights that are dropped after forward.

    Only within `gathered_for_step`, by FQN: gathered, the whole weights; sums, of their gradients where these are added up in
    another dtype than they are computed in.
    """

    def __init__(self, resharded: frozenset[str]):
        self.resharded = resharded
        self.eager = Eager()
        self.plans: dict[nn.Parameter, GatherPlan] = {}
        self.gathered: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}


class _Module(NamedTuple):
    """The attribute `_fsdp` of a sharded module; plans: of its own parameters, by name."""

    model: _Model
    plans: dict[str, GatherPlan]


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
        module.__dict__["_fsdp"] = _Module(shared, plans)
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
    chunk = -(-whole.shape[0] // degree)
    rows = whole[min(rank * chunk, whole.shape[0]) : (rank + 1) * chunk].clone()
    same_shard = ["dp_replicate"] if tp_placement.is_shard() else ["dp_replicate", "tp"]
    plan = GatherPlan(
        fqn=fqn,
        rows=whole.shape[0],
        own_rows=rows.shape[0],
        row_shape=tuple(whole.shape[1:]),
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


def as_shard_of(parameter: Tensor, rows: Tensor) -> DTensor:
    """A DTensor placed as `parameter` is."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


@functools.cache  # so a class swapped alike is the same class in every model; it must not close over a mesh
def _sharded_class(cls: Any, names: tuple[str, ...], is_root: bool) -> Any:
    """A subclass whose property of each name gathers; the root's forward also frames what eager mode adds."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return cls.forward(self, *args, **kwargs)
        model = model_of(self)
        with model.eager.forward(bool(model.resharded) and torch.is_grad_enabled()):
            return cls.forward(self, *args, **kwargs)

    members: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    if is_root:
        members["forward"] = forward
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def _read(module: nn.Module, name: str) -> Tensor:
    """`module.weight`: the whole weight, in param_dtype."""
    fsdp: _Module = module._fsdp  # type: ignore[assignment]
    parameter, plan = module._parameters[name], fsdp.plans[name]
    if plan.fqn in fsdp.model.gathered:
        return fsdp.model.gathered[plan.fqn]
    assert parameter is not None
    shard = local(parameter)
    if tracing():
        with annotate({"fqn": plan.fqn}):  # on its nodes, those of backward too, by which passes know them
            return _Gather.apply(shard, plan, None)
    whole = _Gather.apply(shard, plan, fsdp.model.eager)
    if plan.fqn in fsdp.model.resharded:
        fsdp.model.eager.remember(whole, parameter, plan)
    return whole


def model_of(root: nn.Module) -> _Model:
    return root._fsdp.model  # type: ignore[union-attr, return-value]


def tracing() -> bool:
    """True while this code is becoming a graph, under torch.compile or make_fx."""
    return torch.compiler.is_compiling() or _are_we_tracing()


def materialize(root: nn.Module, device: torch.device) -> None:
    """Give a meta model uninitialised memory on `device`, each rank its shards; tied weights stay tied (`to_empty` unties)."""
    model = model_of(root)
    filled: dict[Any, nn.Parameter] = {}
    for meta in model.plans:
        rows = torch.empty_like(local(meta), device=device)
        filled[meta] = nn.Parameter(as_shard_of(meta, rows), requires_grad=meta.requires_grad)
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
