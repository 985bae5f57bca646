"""A run that resumes with another value of a key has the same bits, or a line that says otherwise.

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

# name of a layout: its options, and the keys that may change there, with another value
LAYOUTS = {
    "eager": (
        [],
        [
            "training.gc_freq=3",
            "training.compare_replicas_freq=2",
            "training.max_nonfinite_steps=2",
            "training.loss_chunk_tokens=16",
            "training.local_batch_size=1",
            "activation_checkpoint.mode=full",
            "activation_checkpoint.mode=selective",
            "parallelism.fsdp_reshard_after_forward=never",
            "parallelism.fsdp_keep_gathered=layers.0",
            "parallelism.fsdp_communication=microbatch",
            "parallelism.data_parallel_replicate_degree=2",
            "parallelism.tensor_parallel_degree=2",
            "checkpoint.async_mode=async",
            "checkpoint.interval=1",
            "data.num_workers=2",
            "data.prefetch=1",
            "data.max_document_mib=64",
            "metrics.log_freq=2",
            "metrics.no-enable_tensorboard",
            "profiling.enable_profiling",
            "comm.trace_buf_size=0",
            "debug.deterministic",
        ],
    ),
    "compiled": (
        AOT_EAGER,
        [
            "compile.bucketing=none",
            "compile.bucketing=greedy",
            "compile.bucketing=auto",
            "compile.no-reordering",
            "compile.no-defer_weight_grads",
            "compile.components=loss",
            "activation_checkpoint.mode=memory_budget",
            "parallelism.fsdp_reshard_after_forward=never",
            "parallelism.fsdp_keep_gathered=layers.0",
        ],
    ),
    "pipeline": (
        PIPELINE,
        [
            "parallelism.pipeline_parallel_schedule=GPipe",
            "parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
            "parallelism.pipeline_parallel_microbatch_size=2",
            "parallelism.pipeline_parallel_split_points=layers.3",
            "parallelism.pipeline_parallel_first_stage_less_layers=0",
            "parallelism.pipeline_parallel_last_stage_less_layers=2",
        ],
    ),
    "tensor": ([*AOT_EAGER, *TENSOR], ["compile.tensor_parallel_chunks=2"]),
    "experts": (
        EXPERTS,
        ["experts.capacity_factor=1.25", "parallelism.expert_parallel_degree=1"],
    ),
}


def trained(folder, *options):
    """Train to the next two steps, and return (what is printed, the tensors of the last one)."""
    done = train(2, DEBUG, folder, *BASE, "--checkpoint.keep_latest_k=0", *options)
    assert done.returncode == 0
    last = max((folder / "checkpoint").glob("step-*"))
    return done.stdout, tensors_of(last)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, tmp_path_factory):
    """Options, the folder of a run that stopped after two steps, and its tensors after four."""
    folder = tmp_path_factory.mktemp("run")
    options, _ = LAYOUTS[request.param]
    trained(folder / "stopped", *options, "--training.steps=2")
    shutil.copytree(folder / "stopped", folder / "alone")
    output, expected = trained(folder / "alone", *options, "--training.steps=4")
    assert LINE not in output  # so that it is about the change
    return options, folder / "stopped", expected


# of which the line was once missing; the others are for a release
FOUND = ["compile.bucketing=greedy", "parallelism.expert_parallel_degree=1"]
CHANGES = [
    pytest.param(name, key, marks=pytest.mark.slow if key in FOUND else pytest.mark.release)
    for name, (_, keys) in LAYOUTS.items()
    for key in keys
]


@pytest.mark.parametrize(("layout", "key"), CHANGES, indirect=["layout"])
def test_a_resume_without_the_line_is_the_run_without_the_change(layout, key, tmp_path):
    options, stopped, expected = layout
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    output, found = trained(folder, *options, "--training.steps=4", f"--{key}")
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert LINE in output or not differing
