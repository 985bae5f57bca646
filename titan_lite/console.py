"""What a run says of itself before its first step, a line each.

for line in start_lines(config, mesh, device=device, ...): logger.info(line)
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.check import gathers_once, without_effect
from titan_lite.config import Config
from titan_lite.distributed.pipeline import Pipeline


def start_lines(
    config: Config,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    parameters: int,
    own_parameters: int,
    local_batches: int,
    pipeline: Pipeline | None,
    priced: bool,
) -> list[str]:
    """parameters: of the model; own_parameters: of this rank's stages, before tensor parallelism; local_batches: of a rank in a
    step; priced: whether the compile stage knows the machine."""
    training, parallelism = config.training, config.parallelism
    axes = ", ".join(f"{axis} {mesh[axis].size()}" for axis in mesh.mesh_dim_names or ())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = training.local_batch_size * mesh["dp_replicate"].size() * mesh["dp_shard"].size() * local_batches
    compiled = f"{config.compile.backend} ({', '.join(config.compile.components)})" if config.compile.enable else "eager"
    microbatches = local_batches * (pipeline.plan.microbatches if pipeline else 1)
    lines = [
        *([config.job.description] if config.job.description else []),
        *without_effect(config, microbatches),
        f"model: {config.model.name} {config.model.flavor}, {parameters:,} parameters; torch {torch.__version__}, {compiled}",
        f"ranks: {mesh.size()} ({axes}), each one {name}",
        f"batch: {rows} sequences of {training.seq_len} tokens a step = {rows * training.seq_len:,} tokens, "
        f"in {local_batches} local batches of {training.local_batch_size} a rank",
    ]
    if config.compile.compiles("model") and not priced:
        lines.append(f"no prices for {name}: what communication costs is not estimated (compile.machine)")
    if pipeline is not None:
        schedule = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
        lines.append(
            f"pipeline: {len(pipeline.plan.modules)} stages, {schedule}, {pipeline.plan.microbatches} microbatches of "
            f"{parallelism.pipeline_parallel_microbatch_size}; ranks wait {100 * pipeline.bubble:.1f}% of the time (the "
            "bubble), if all stages are equally fast"
        )
    if gathers_once(parallelism, microbatches):
        dtypes = (getattr(torch, name).itemsize for name in (training.mixed_precision_param, training.mixed_precision_reduce))
        held = own_parameters / mesh["tp"].size() * sum(dtypes) / 2**30
        lines.append(
            "weights are gathered and gradients reduced once a step, which are held meanwhile: "
            f"{held:.2f} GiB a rank (parallelism.fsdp_communication)"
        )
    return lines
