"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is a DTensor, and reading it is a
differentiable all-gather.

    apply_simple_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=True)
    materialize(model, device)                  # allocates the meta shards; no rank ever holds the full model
    model.layers["0"].attention.wq.weight       # all-gather; its backward is the reduce-scatter of the gradient

Each module's class is replaced by a subclass with properties that gather: no module hooks, no
streams, no flat parameters. A traced graph has plain collectives (gather.py), and graph passes move
them. Eager mode runs the same ones, prefetched (eager.py) or once for several microbatches
(accumulation.py). FQNs, `parameters()` and `state_dict()` read `_parameters`, which holds the
shards; they never communicate.

FSDP, HSDP and DDP differ only in the sizes of the mesh axes dp_replicate and dp_shard:

    FSDP   dp_replicate 1, dp_shard n    all-gather                reduce-scatter
    HSDP   dp_replicate m, dp_shard n    all-gather in the copy    reduce-scatter, then all-reduce of the shard over copies
    DDP    dp_replicate m, dp_shard 1    nothing                   all-reduce

A parameter that tensor parallelism has split is sharded further; "unsharded" then means a
tensor-parallel rank's part of it. Gradients are *summed* over ranks: the loss is already divided by
the number of tokens of all ranks.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.traceback import annotate

from titan_lite.cost.collectives import tracing
from titan_lite.distributed.arriving import Arriving
from titan_lite.distributed.float8_scales import Scales
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.distributed.prefetch import Eager
from titan_lite.dtensor import local
from titan_lite.models.float8 import Float8Linear, Scaled, stand_in
from titan_lite.models.fqns import parameters_within
from titan_lite.sharding import chunk_range


class _Gather(torch.autograd.Function):
    """Shard -> (unsharded weight, None), or for float8 (bytes, stand-in for the weight in
    autograd).

    The gradient of the weight, or of the stand-in -> the gradient of the shard. In eager mode the
    shard is the parameter itself, since DTensor's way to its local tensor and back takes 0.1 ms.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        plan: ShardSpec,
        eager: Eager | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.plan, ctx.eager, ctx.shard_dtype = plan, eager, shard.dtype
        ctx.parameter, shard = (
            (shard, local(shard)) if isinstance(shard, DTensor) else (None, shard)
        )
        ctx.set_materialize_grads(
            False
        )  # for bytes, which have no gradient, autograd would make zeros
        weight = plan.gather(shard, scale) if eager is None else eager.gather(shard, plan, scale)
        weight = weight.view_as(
            weight
        )  # autograd needs a new tensor where nothing is gathered or cast
        return weight, stand_in(weight, plan.param_dtype) if plan.float8 else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        gradient = gradients[1] if ctx.plan.float8 else gradients[0]
        assert gradient is not None
        if ctx.eager is None:
            reduced = ctx.plan.finish_reduce(ctx.plan.start_reduce(gradient)).to(ctx.shard_dtype)
        else:
            reduced = ctx.eager.reduce(gradient, ctx.plan, ctx.shard_dtype)
            reduced = reduced if ctx.parameter is None else as_shard_of(ctx.parameter, reduced)
        return reduced, None, None, None


class _Model:
    """State shared by the modules of one sharded model."""

    def __init__(self, resharded: frozenset[str]):
        self.resharded = resharded  # FQNs of weights that are dropped after forward
        self.scales = Scales()
        self.plans: dict[
            nn.Parameter, ShardSpec
        ] = {}  # one entry for tied weights; parameters hash by identity
        self.eager = Eager(self.plans, self.scales)
        # Within `gathered_for_step` alone: unsharded weights by FQN, their stand-ins in autograd
        # (of float8 weights), and sums of their gradients if these have another dtype.
        self.gathered: dict[str, Tensor] = {}
        self.stand_ins: dict[str, Tensor] = {}
        self.handles: dict[
            str, Tensor
        ] = {}  # of a compiled model's weights that may be in flight, instead (arriving.py)
        self.sums: dict[str, Tensor] = {}
        self.step: Any = None  # gathers and reduces with overlap


class _Module(NamedTuple):
    """The attribute `_fsdp` of a sharded module."""

    model: _Model
    plans: dict[str, ShardSpec]  # of its own parameters, by name


def apply_simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    keep_gathered: Sequence[str] = (),
    float8_gather: bool = False,
    sums_copies: bool = True,
) -> None:
    """Shard every parameter of `model` on dimension 0 over axis dp_shard of `mesh`, in place; see
    `parameter_mesh` (mesh.py).

    Of a DTensor of tensor parallelism, the local part is sharded. A parameter on the meta device
    becomes a meta shard (see `materialize`). One with data must be equal on all ranks, and each
    rank keeps its rows. param_dtype: of gathered weights and of computation; reduce_dtype: of sums
    of gradients. reshard_after_forward: drop gathered weights after forward and gather them again
    in backward (less memory, one more all-gather). keep_gathered: FQN prefixes of modules that keep
    their gathered weights nevertheless, such as "layers.31". float8_gather: weights of tensorwise
    float8 products (models/float8.py) are gathered in float8. sums_copies: False leaves
    dp_replicate to powersgd.py.
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
                if isinstance(module, Float8Linear) and module.recipe == "tensorwise":
                    shared.scales.add(fqn)
                    plan = replace(plan, float8=float8_gather)
                if not sums_copies:
                    plan = replace(plan, sum_groups=plan.sum_groups[1:])
                shared.plans[shards[parameter]] = plan
            module._parameters[name] = shards[parameter]
            plans[name] = shared.plans[shards[parameter]]
        module.__dict__["_fsdp"] = _Module(shared, plans)
        cls: Any = type(module)
        module.__class__ = _sharded_class(cls, tuple(plans), module is model)


def _shard(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    fqn: str,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> tuple[nn.Parameter, ShardSpec]:
    """Return this rank's rows of a parameter as a DTensor, and the plan to gather it."""
    tp_placement: Placement = Replicate()
    unsharded = parameter.detach()
    if isinstance(parameter, DTensor):
        (tp_placement,) = parameter.placements
        unsharded = local(parameter).detach()
    size = unsharded.shape[0]
    degree = mesh["dp_shard"].size()
    own = chunk_range(size, degree, mesh["dp_shard"].get_local_rank())
    rows = unsharded[own.start : own.stop].clone(memory_format=torch.contiguous_format)
    same_shard = ["dp_replicate"] if tp_placement.is_shard() else ["dp_replicate", "tp"]
    plan = ShardSpec(
        fqn=fqn,
        rows=size,
        own_rows=rows.shape[0],
        row_shape=tuple(rows.shape[1:]),
        shard_degree=degree,
        shard_group=mesh.get_group("dp_shard").group_name,
        sum_groups=tuple(
            mesh.get_group(axis).group_name for axis in same_shard if mesh[axis].size() > 1
        ),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    # FSDP splits a rank's tensor-parallel part: the axis on the right, tp, is split first.
    strided = tp_placement.is_shard(0) and mesh["tp"].size() > 1
    placements = (
        Replicate(),
        _StridedShard(0, split_factor=mesh["tp"].size()) if strided else Shard(0),
        tp_placement,
    )
    # shape and stride are given: they cannot be inferred from uneven shards
    sharded = DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad), plan


def as_shard_of(parameter: Tensor, rows: Tensor) -> DTensor:
    """Return a DTensor of this rank's `rows`, with the placements of `parameter`.

    DTensor.from_local takes five times as long.
    """
    assert isinstance(parameter, DTensor)
    return DTensor(rows, copy.copy(parameter._spec), requires_grad=False)


# one class for all modules replaced alike, in every model; it must not close over a mesh
@functools.cache
def _sharded_class(cls: Any, names: tuple[str, ...], is_root: bool) -> Any:
    """Return a subclass with a gathering property for each name.

    The root's forward also runs within `Eager.forward`.
    """

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return cls.forward(self, *args, **kwargs)
        model = model_of(self)
        with model.eager.forward(
            bool(model.resharded) and model.step is None and torch.is_grad_enabled()
        ):
            return cls.forward(self, *args, **kwargs)

    members: dict[str, Any] = {
        name: property(functools.partial(_read, name=name)) for name in names
    }
    if is_root:
        members["forward"] = forward
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def _read(module: nn.Module, name: str) -> Tensor | Scaled:
    """Return the unsharded parameter in gather_dtype, for `module.weight`; with its scale for
    tensorwise float8 products.
    """
    fsdp: _Module = module._fsdp  # type: ignore[assignment]
    model, parameter, plan = fsdp.model, module._parameters[name], fsdp.plans[name]
    scale = model.scales.of(plan.fqn)
    if plan.fqn not in model.gathered and model.step is not None:
        model.step.gather(plan)
    if plan.fqn in model.handles:
        weight, stands_in = Arriving.apply(model.gathered[plan.fqn], model.handles[plan.fqn], plan)
    elif plan.fqn in model.gathered:
        weight, stands_in = model.gathered[plan.fqn], model.stand_ins.get(plan.fqn)
    else:
        assert parameter is not None
        if tracing():
            # names the nodes for graph passes, those of backward too
            with annotate({"fqn": plan.fqn}):
                weight, stands_in = _Gather.apply(local(parameter), plan, None, scale)
        else:
            weight, stands_in = _Gather.apply(parameter, plan, model.eager, scale)
            if plan.fqn in model.resharded:
                model.eager.remember(weight, parameter, plan)
    return weight if scale is None else Scaled(weight, scale, stands_in)


def model_of(root: nn.Module) -> _Model:
    return root._fsdp.model  # type: ignore[union-attr, return-value]


def refresh_scales(roots: Sequence[nn.Module]) -> None:
    """Refresh the scales of float8 weights, whenever parameters have changed."""
    for model in map(model_of, roots):
        model.scales.refresh({plan.fqn: parameter for parameter, plan in model.plans.items()})


def shard_of(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return (this rank's rows, a view of the parameter; their offset in the unsharded parameter).

    Call it under no_grad.
    """
    assert isinstance(parameter, DTensor)
    offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )[1]
    return local(parameter), tuple(int(start) for start in offset)
