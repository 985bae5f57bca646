"""A run that resumes with other values of keys has the same bits, and no line says otherwise.

Keys that are to change what is trained, such as optimizer.lr, are not among them.
"""

import shutil

import pytest
import torch
from checkpoints import tensors_of
from commands import train
from tiny import AOT_EAGER, DEBUG, NO_VALIDATION, NO_WORKERS, SMALL

pytestmark = pytest.mark.ranks(2)

LINE = "results differ by floating-point rounding: "
BASE = [
    *SMALL,
    "--model.n_layers=4",
    *NO_VALIDATION,
    *NO_WORKERS,
    "--lr_scheduler.decay_begin=4",
    "--lr_scheduler.decay_length=4",
    "--lr_scheduler.warmup_steps=1",
]
BASE += ["--training.global_batch_size=8", "--training.local_batch_size=2"]
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
TENSOR = ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=8"]
EXPERTS = ["--model.name=qwen3_moe", "--model.vocab_size=2048", "--model.head_dim=16"]
EXPERTS += ["--parallelism.expert_parallel_degree=2"]

# name of a layout: its options, and keys that have another value there and change no bit
SILENT = {
    "eager": (
        [],
        [
            "training.gc_freq=3",
            "training.compare_replicas_freq=2",
            "training.max_nonfinite_steps=2",
            "activation_checkpoint.mode=full",
            "parallelism.fsdp_keep_gathered=layers.0",
            "checkpoint.async_mode=async",
            "checkpoint.interval=1",
            "data.num_workers=2",
            "data.prefetch=1",
            "data.max_document_mib=64",
            "metrics.log_freq=2",
            "metrics.no-enable_tensorboard",
            "profiling.enable_profiling",
            "comm.trace_buf_size=0",
        ],
    ),
    "compiled": (
        AOT_EAGER,
        [
            "compile.bucketing=none",
            "compile.no-reordering",
            "compile.no-defer_weight_grads",
            "activation_checkpoint.mode=memory_budget",
            "parallelism.fsdp_reshard_after_forward=never",
        ],
    ),
    "pipeline": (
        PIPELINE,
        [
            "parallelism.pipeline_parallel_schedule=GPipe",
            "parallelism.pipeline_parallel_last_stage_less_layers=2",
        ],
    ),
    "tensor": ([*AOT_EAGER, *TENSOR], ["compile.tensor_parallel_chunks=2"]),
    "experts": (EXPERTS, ["experts.capacity_factor=1.25"]),
}


def trained(folder, *options):
    """Train to the next two steps, and return (what is printed, the tensors of the last one)."""
    done = train(2, DEBUG, folder, *BASE, "--checkpoint.keep_latest_k=0", *options)
    assert done.returncode == 0
    last = max((folder / "checkpoint").glob("step-*"))
    return done.stdout, tensors_of(last)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SILENT)
def test_a_resume_without_the_line_is_the_run_without_the_changes(layout, tmp_path):
    options, keys = SILENT[layout]
    alone, changed = tmp_path / "alone", tmp_path / "changed"
    trained(alone, *options, "--training.steps=2")
    shutil.copytree(alone, changed)
    _, expected = trained(alone, *options, "--training.steps=4")
    others = [f"--{key}" for key in keys]
    output, found = trained(changed, *options, *others, "--training.steps=4")
    assert LINE not in output
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
