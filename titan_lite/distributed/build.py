"""A rank's pipeline stages, built in the one order that works; for the trainer, the planner, tests and benchmarks.

    stages = build_stages(functools.partial(Transformer, layout.model), modules, mesh, ...)     # on the meta device
    compile_stages(stages, mesh, "block", ...)
    for model in stages:
        materialize(model, device)
        model.init_weights(seed, shard_of)

The order matters: context and tensor parallelism decide which tokens and weights a rank has; activation checkpointing lies inside
of what SimpleFSDP makes of a block, so that recomputing a block gathers its weights again; the compiler comes last and sees
everything.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.receipt import Receipt
from titan_lite.compiler.schedule import Schedule
from titan_lite.compiler.stage import compile_model
from titan_lite.config import ActivationCheckpoint, Compile, Parallelism, Training
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.axes import axes_of, by_axis
from titan_lite.distributed.context_parallel import Attend, apply_context_parallel, attend_to_the_past, own_positions
from titan_lite.distributed.degrees import AXES
from titan_lite.distributed.mesh import parameter_mesh
from titan_lite.distributed.peers import stage_peers
from titan_lite.distributed.pipeline import Pipeline, SingleStage, keep_modules
from titan_lite.distributed.pipeline_plan import PipelinePlan
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel
from titan_lite.ranks import gather_objects

Model = TypeVar("Model", bound=nn.Module)


def build_stages(
    make_model: Callable[[Sequence[int]], Model],
    modules: Sequence[Sequence[str]],
    mesh: DeviceMesh,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    attend: Attend | None = None,
) -> list[Model]:
    """One model on the meta device for each entry of `modules`, which are the modules it keeps, made parallel; FQNs stay.

    make_model: (positions of this rank's tokens within a sequence) -> the model, whose blocks are the children of `layers`.
    attend: another attention of context parallelism.
    """
    positions = own_positions(training.seq_len, mesh["cp"].get_local_rank(), mesh["cp"].size())
    attend = attend or functools.partial(attend_to_the_past, kernel=training.attention_kernel)
    reshard, keep = _resharding(parallelism)
    parameters = parameter_mesh(mesh)
    stages = []
    for fqns in modules:
        with torch.device("meta"):
            model = make_model(positions).to(getattr(torch, training.dtype))
        keep_modules(model, fqns)
        apply_context_parallel(model, mesh["cp"], attend)
        apply_tensor_parallel(model, mesh["tp"])
        blocks = model.get_submodule("layers")
        assert isinstance(blocks, nn.ModuleDict)
        apply_activation_checkpoint(blocks, activation_checkpoint.mode, activation_checkpoint.selective_ac_option)
        apply_simple_fsdp(
            model,
            parameters,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            reshard_after_forward=reshard,
            keep_gathered=keep,
        )
        stages.append(model)
    return stages


def compile_stages(
    stages: Sequence[nn.Module],
    mesh: DeviceMesh,
    bucketing: str,
    *,
    compile: Compile,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    machine: Machine | None = None,
    dump_folder: Path | None = None,
    schedule: Schedule | None = None,
    priced_as: str = "",
    fits: Callable[[Receipt], bool] | None = None,
) -> list[Receipt]:
    """Each stage as one graph, in place. Returns what becomes its receipts once graphs are compiled, at the first call.

    bucketing: in place of compile.bucketing. machine: what the passes price with; dump_folder: where compile.dump_graphs writes;
    schedule: passes of one's own in their place; priced_as: as in compile_model; fits: as in Schedule. It may make process
    groups, which all ranks do together.
    """
    if schedule is None:
        must_merge, compile = compile.bucketing != "measured", replace(compile, bucketing=bucketing)
        dump = None
        if dump_folder and compile.dump_graphs and all(mesh[axis].get_local_rank() == 0 for axis in AXES if axis != "pp"):
            dump = dump_folder / "graphs" / f"pp_{mesh['pp'].get_local_rank()}_{bucketing}"  # other ranks' are the same
        fused = compile.backend == "inductor"
        schedule = Schedule(compile, machine, fused, peers=stage_peers(mesh), dump=dump, must_merge=must_merge, fits=fits)
    reshard, keep = _resharding(parallelism)
    for model in stages:
        # a stage without blocks has no matrix product to overlap with
        overlaps = parallelism.enable_async_tensor_parallel and any(True for _ in model.get_submodule("layers").children())
        compile_model(
            model,
            compile,
            reshard_after_forward=reshard,
            keep_gathered=keep,
            memory_budget=activation_checkpoint.memory_budget if activation_checkpoint.mode == "memory_budget" else 1.0,
            async_tensor_parallel=mesh.get_group("tp").group_name if overlaps else "",
            schedule=schedule,
            priced_as=priced_as,
        )
    return schedule.receipts


def build_runner(
    stages: Sequence[nn.Module],
    plan: PipelinePlan,
    mesh: DeviceMesh,
    parallelism: Parallelism,
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    logits: tuple[int, int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> SingleStage | Pipeline:
    """The plain model, or this rank's part of the pipeline. logits: (B, T, v) of a microbatch, on this rank; dtype: of what
    travels between stages."""
    if mesh["pp"].size() == 1:
        return SingleStage(stages[0], loss_sum)
    sequences, tokens, _ = logits
    return Pipeline(
        stages,
        plan,
        mesh["pp"],
        parallelism,
        tokens=(sequences, tokens),
        hidden=(sequences, tokens // mesh["tp"].size(), stages[0].config.dim),  # type: ignore[arg-type]
        logits=logits,
        dtype=dtype,
        loss_sum=loss_sum,
        device=device,
    )


def gather_receipts(receipts: list[Receipt], mesh: DeviceMesh) -> list[Receipt]:
    """The receipts of all pipeline ranks, each with its rank, groups in its timeline named by axis; called by all together."""
    axes = axes_of(mesh)
    receipts = [replace(each, timeline=each.timeline and by_axis(each.timeline, axes)) for each in receipts]
    if mesh["pp"].size() == 1:
        return receipts
    mine = [replace(receipt, pp_rank=mesh["pp"].get_local_rank()) for receipt in receipts]
    return [receipt for theirs in gather_objects(mine, mesh.get_group("pp")) for receipt in theirs]


def _resharding(parallelism: Parallelism) -> tuple[bool, tuple[str, ...]]:
    """(whether gathered weights are dropped after forward, the modules that keep theirs)"""
    mode = parallelism.fsdp_reshard_after_forward
    return mode != "never", parallelism.fsdp_keep_gathered if mode == "default" else ()
