"""The ordered recipe that makes a single-device model a distributed one.

    with torch.device("meta"):
        model = Transformer(config)
    parallelize(model, mesh, ...)
    materialize(model, device)
    model.init_weights(seed, shard_of)

The order matters: tensor parallelism decides what a rank has to shard; activation checkpointing lies inside of what SimpleFSDP
makes of a block, so that recomputing a block gathers its weights again; the compiler comes last and sees everything.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.compiler.stage import compile_model
from titan_lite.config import ActivationCheckpoint, Compile, Parallelism, Training
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> None:
    """In place; FQNs stay what they were. Blocks are the children of `model.layers`."""
    reshard = {"always": True, "never": False, "default": mesh["pp"].size() == 1}[parallelism.fsdp_reshard_after_forward]
    apply_tensor_parallel(model, mesh["tp"])
    apply_activation_checkpoint(model.get_submodule("layers").children(), activation_checkpoint.mode)
    apply_simple_fsdp(
        model,
        mesh,
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard_after_forward=reshard,
    )
    if compile.enable:
        compile_model(model, compile, reshard_after_forward=reshard)
