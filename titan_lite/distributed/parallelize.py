"""The ordered recipe that makes a single-device model a distributed one.

    with torch.device("meta"):
        model = Transformer(config)                  # or several, the stages of a pipeline (pipeline.py)
    parallelize([model], mesh, ...)
    compile_stages([model], mesh, ...)
    materialize(model, device)
    model.init_weights(seed, shard_of)

The order matters: context and tensor parallelism decide what a rank has of tokens and weights; activation checkpointing lies
inside of what SimpleFSDP makes of a block, so that recomputing a block gathers its weights again; the compiler comes last and
sees everything.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.receipt import Receipt
from titan_lite.compiler.schedule import Schedule
from titan_lite.compiler.stage import compile_model
from titan_lite.config import ActivationCheckpoint, Compile, Parallelism, Training
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.context_parallel import apply_context_parallel
from titan_lite.distributed.mesh import AXES, parameter_mesh, stage_exchange
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel


def parallelize(
    stages: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
) -> None:
    """In place; FQNs stay what they were. Blocks are the children of each stage's `layers`, called by their number.

    Compiling is left to `compile_stages`, which comes last.
    """
    reshard, keep = _resharding(parallelism)
    parameters = parameter_mesh(mesh)
    for model in stages:
        apply_context_parallel(model, mesh["cp"])
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


def compile_stages(
    stages: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    machine: Machine | None = None,
    dump_folder: Path | None = None,
    must_merge: bool = True,
    schedule: Schedule | None = None,
    priced_as: str = "",
) -> list[Receipt]:
    """Each stage as one graph, in place. Returns what becomes its receipts once graphs are compiled, at the first call.

    machine: what the passes price with; dump_folder: where they write graphs, if compile.dump_graphs; must_merge: as in Schedule.
    schedule: passes of one's own instead, which these then have no say in; priced_as: as in compile_model.
    """
    schedule = schedule or Schedule(
        compile,
        machine,
        fused=compile.backend == "inductor",
        exchange=stage_exchange(mesh),
        dump=_dump_folder(mesh, compile.bucketing, dump_folder) if dump_folder and compile.dump_graphs else None,
        must_merge=must_merge,
    )
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


def _dump_folder(mesh: DeviceMesh, bucketing: str, dump_folder: Path) -> Path | None:
    """Of the first rank of each pipeline rank; the others have the same graphs."""
    if any(mesh[axis].get_local_rank() for axis in AXES if axis != "pp"):
        return None
    return dump_folder / "graphs" / f"pp_{mesh['pp'].get_local_rank()}_{bucketing}"


def _resharding(parallelism: Parallelism) -> tuple[bool, tuple[str, ...]]:
    """(whether gathered weights are dropped after forward, the modules that keep theirs)"""
    mode = parallelism.fsdp_reshard_after_forward
    return mode != "never", parallelism.fsdp_keep_gathered if mode == "default" else ()
