"""The lines at a run's start."""

import pytest
import torch
from tiny import DEBUG, ROOT

from titan_lite.config import load_config
from titan_lite.distributed.layout import Layout
from titan_lite.metrics.start_lines import describe_layout, start_lines


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (["--lr_scheduler.warmup_steps=200"], True),
        (["--lr_scheduler.warmup_steps=20"], False),
        (
            [
                "--lr_scheduler.warmup_steps=200",
                "--lr_scheduler.decay_begin=500",
                "--lr_scheduler.decay_length=500",
            ],
            False,
        ),
    ],
)
def test_a_warm_up_that_is_longer_than_the_run_is_told(options, is_told):
    config = load_config(DEBUG, ["--training.steps=20", *options])
    layout = Layout.from_config(config, 1)
    lines = start_lines(config, layout, torch.device("cpu"), priced=True, tokens_known=2048)
    told = [line for line in lines if line.startswith("learning rate: lr_scheduler.warmup_steps")]
    words = (
        "lr_scheduler.warmup_steps = 200 is longer than training.steps = 20: it only rises, to 10%"
    )
    assert bool(told) == is_told
    assert all(words in line for line in told)


def said(*overrides, ranks=2):
    config = load_config(DEBUG, overrides)
    return start_lines(
        config,
        Layout.from_config(config, ranks),
        device=torch.device("cpu"),
        priced=True,
        tokens_known=2048,
    )


def test_the_start_says_what_will_run(monkeypatch):
    monkeypatch.chdir(ROOT)  # a file below the current folder is named relative to it
    threads = torch.get_num_threads()
    lines = said()
    assert lines[0] == "Llama 3 debug flavor"
    assert (
        lines[1] == f"model: llama3 debug, 5,770,496 parameters; torch {torch.__version__}, eager"
    )
    assert (
        lines[2]
        == f"layout: 2 ranks = dp_shard 2, each one CPU, {threads} thread{'s' * (threads > 1)}"
    )
    assert (
        lines[3]
        == "batch: 2,048 tokens a step = 8 sequences of 256, in 2 local batches of 2 a rank;"
        " weights gathered once a step (parallelism.fsdp_communication)"
    )
    assert lines[4] == "tokenizer: assets/tokenizer/debug.model"
    assert lines[5] == (  # 5,770,496 parameters of 16 bytes on two ranks, and of 8 bytes unsharded
        "memory: at least 0.04 GiB a rank for parameters, gradients and optimizer state, 0.04 GiB"
        " for unsharded weights and gradients, held for the step; at least 0.01 GiB for a"
        " local batch and its activations"
    )
    assert lines[6:] == ["checkpoints: every 50 steps and at the end (checkpoint.interval)"]


def test_the_start_says_that_a_vocabulary_is_far_larger_than_the_tokenizers():
    (line,) = (line for line in said("--model.vocab_size=128256") if "vocabulary" in line)
    assert line == (
        "vocabulary: 128,256 rows of embedding and output for 2,048 tokens of the tokenizer: 126,208"
        " are never a label, and cost memory and time (model.vocab_size)"
    )
    assert not any("vocabulary" in line for line in said("--model.vocab_size=2176"))  # rounded up


def test_the_start_of_other_runs():
    lines = said(
        "--compile.enable",
        "--checkpoint.no-enable",
        "--training.global_batch_size=2",
        ranks=1,
    )
    assert lines[1].endswith("inductor")
    assert lines[2].startswith("layout: 1 rank, each one CPU")
    assert lines[3].endswith("512 tokens a step = 2 sequences of 256, in 1 local batch of 2 a rank")
    assert lines[5:] == [
        (
            "memory: at least 0.09 GiB a rank for parameters, gradients and optimizer state; at least 0.01"
            " GiB for a local batch and its activations"
        ),
        "checkpoints: none (checkpoint.enable = false)",
        "compiling comes first: the first step and the first validation take longer",
    ]
    assert said("--training.float32_matmul_precision=high")[1].endswith(
        "eager; float32 matmuls in high precision (TF32 on GPUs)"
    )
    assert (
        "attention" not in said("--training.attention_kernel=FA2")[2]
    )  # float32 fits no such kernel
    assert said("--training.attention_kernel=FA2", "--training.mixed_precision_param=bfloat16")[
        1
    ].endswith("attention by FA2 (training.attention_kernel)")
    line = "documents: attention stays within them, by a mask of 0.00 GiB (training.mask_documents)"
    assert line in said("--training.mask_documents")
    lines = said(
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
    )
    assert lines[5] == (
        "pipeline: 4 stages, Interleaved1F1B, 2 microbatches of 1; stages on a rank: 2,"
        " ranks of a stage: 1"
    )


def test_the_layout_names_the_ranks_of_experts():
    options = ["--parallelism.tensor_parallel_degree=2", "--model.name=qwen3_moe"]
    split = [*options, "--parallelism.expert_parallel_degree=4"]
    whole, over_ep = (
        describe_layout(Layout.from_config(load_config(DEBUG, words), 8))
        for words in (options, split)
    )
    assert whole == "8 ranks = dp_shard 4 x tp 2"
    assert over_ep == f"{whole}, experts over ep 4"
