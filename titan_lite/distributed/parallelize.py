"""Build a rank's pipeline stages: parallelize, checkpoint, shard, compile.

For the trainer, the planner, tests and benchmarks.

    stages = build_stages(functools.partial(Transformer, layout.model), modules, mesh, ...)     # on the meta device
    compile_stages(stages, mesh, ...)
    for model in stages:
        materialize(model, device)
        model.init_weights(seed, shard_of)

The order matters. Context and tensor parallelism decide which tokens and weights a rank has.
Checkpointing comes before SimpleFSDP, so that recomputing a block gathers its weights again. The
compiler comes last, to see all collectives.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.compile.compile import compile_model
from titan_lite.compile.report import CompileReport
from titan_lite.compile.schedule import Schedule
from titan_lite.config import ActivationCheckpoint, Compile, Float8, Parallelism, Training
from titan_lite.cost.machine import Machine
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.axes import axes_of, by_axis
from titan_lite.distributed.context_parallel import (
    Attend,
    apply_context_parallel,
    attend_to_the_past,
    own_positions,
)
from titan_lite.distributed.degrees import AXES
from titan_lite.distributed.mesh import parameter_mesh
from titan_lite.distributed.pipeline import Pipeline, SingleStage, keep_modules
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.process_group import gather_objects
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp
from titan_lite.distributed.stage_ranks import stage_peers
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel
from titan_lite.models.float8 import apply_float8

Model = TypeVar("Model", bound=nn.Module)


def build_stages(
    make_model: Callable[[Sequence[int]], Model],
    modules: Sequence[Sequence[str]],
    mesh: DeviceMesh,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    float8: Float8,
    loss: Callable[..., Tensor] | None = None,
    attend: Attend | None = None,
    compiled: bool = False,
) -> list[Model]:
    """Return a parallel model on the meta device for each list of FQNs in `modules`: the modules
    that it keeps.

    make_model: (positions of this rank's tokens within a sequence) -> the model, with blocks as the
    children of `layers`.
    loss: of the module `output`, given labels. attend: the attention of context parallelism.
    Default: `attend_to_the_past`.
    compiled: the stages will be (compile_stages).
    """
    positions = own_positions(training.seq_len, mesh["cp"].get_local_rank(), mesh["cp"].size())
    attend = attend or functools.partial(attend_to_the_past, kernel=training.attention_kernel)
    reshard, keep = _resharding(parallelism)
    parameters = parameter_mesh(mesh)
    stages = []
    for fqns in modules:
        with torch.device("meta"):
            model = make_model(positions)
        keep_modules(model, fqns)
        apply_context_parallel(model, mesh["cp"], attend)
        if float8.enable:
            apply_float8(model, float8.recipe, float8.filter_fqns)
        apply_tensor_parallel(model, mesh["tp"], compiled=compiled)
        if loss is not None and "output" in fqns:
            model.get_submodule("output").loss_sum = loss  # type: ignore[assignment]
        blocks = model.get_submodule("layers")
        assert isinstance(blocks, nn.ModuleDict)
        option = activation_checkpoint.selective_ac_option
        apply_activation_checkpoint(blocks, activation_checkpoint.mode, option, compiled=compiled)
        apply_simple_fsdp(
            model,
            parameters,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            reshard_after_forward=reshard,
            keep_gathered=keep,
            float8_gather=float8.all_gather,
            sums_copies=parallelism.replicate_compression == "none",
        )
        stages.append(model)
    return stages


def compile_stages(
    stages: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    compile: Compile,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    machine: Machine | None = None,
    dump_folder: Path | None = None,
    schedule: Schedule | None = None,
    priced_as: str = "",
) -> list[CompileReport]:
    """Compile each stage as one graph, in place.

    Returns the list of receipts, which is filled at the first call of a stage.

    machine: the hardware to estimate times for. dump_folder: where compile.dump_graphs writes.
    schedule: replaces the passes that these arguments select. priced_as: see compile_model. May
    create process groups: call it on all ranks.
    """
    if schedule is None:
        dump = None
        if (
            dump_folder
            and compile.dump_graphs
            and all(mesh[axis].get_local_rank() == 0 for axis in AXES if axis != "pp")
        ):
            # other ranks have the same graphs
            folder = f"pp_{mesh['pp'].get_local_rank()}_{compile.bucketing}"
            dump = dump_folder / "graphs" / folder
        schedule = Schedule(
            compile,
            machine,
            fused=compile.backend == "inductor",
            peers=stage_peers(mesh),
            dump=dump,
            async_tensor_parallel=parallelism.enable_async_tensor_parallel,
        )
    reshard, keep = _resharding(parallelism)
    for model in stages:
        # only blocks have matrix products to overlap with
        overlaps = parallelism.enable_async_tensor_parallel and any(
            True for _ in model.get_submodule("layers").children()
        )
        compile_model(
            model,
            compile,
            reshard_after_forward=reshard,
            keep_gathered=keep,
            memory_budget=(
                activation_checkpoint.memory_budget
                if activation_checkpoint.mode == "memory_budget"
                else 1.0
            ),
            async_tensor_parallel=mesh.get_group("tp").group_name if overlaps else "",
            schedule=schedule,
            priced_as=priced_as,
        )
    return schedule.receipts


def build_runner(
    stages: Sequence[nn.Module],
    plan: PipelineSchedule,
    mesh: DeviceMesh,
    parallelism: Parallelism,
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    tokens: tuple[int, int],
    output: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> SingleStage | Pipeline:
    """Return the runner of this rank's stages: a Pipeline if there are several pipeline ranks.

    tokens, output, dtype: as for it;
    loss_sum: as for SingleStage.
    """
    if mesh["pp"].size() == 1:
        return SingleStage(stages[0], loss_sum)
    return Pipeline(
        stages,
        plan,
        mesh["pp"],
        parallelism,
        tokens=tokens,
        hidden=(tokens[0], tokens[1] // mesh["tp"].size(), stages[0].config.dim),  # type: ignore[arg-type]
        output=output,
        dtype=dtype,
        loss_sum=loss_sum,
        device=device,
    )


def gather_receipts(receipts: list[CompileReport], mesh: DeviceMesh) -> list[CompileReport]:
    """Return the receipts of all pipeline ranks, with pp_rank and the axes of groups.

    Call it on all ranks.
    """
    axes = axes_of(mesh)
    receipts = [
        replace(each, timeline=each.timeline and by_axis(each.timeline, axes)) for each in receipts
    ]
    if mesh["pp"].size() == 1:
        return receipts
    mine = [replace(receipt, pp_rank=mesh["pp"].get_local_rank()) for receipt in receipts]
    return [receipt for theirs in gather_objects(mine, mesh.get_group("pp")) for receipt in theirs]


def _resharding(parallelism: Parallelism) -> tuple[bool, tuple[str, ...]]:
    """Return (True if gathered weights are dropped after forward, FQN prefixes of modules that keep
    theirs).
    """
    mode = parallelism.fsdp_reshard_after_forward
    return mode != "never", parallelism.fsdp_keep_gathered if mode == "default" else ()
