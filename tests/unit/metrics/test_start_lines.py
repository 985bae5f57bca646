"""The lines at a run's start, and the picture of its mesh."""

import pytest
import torch
from tiny import DEBUG, ROOT

from titan_lite.config import load_config
from titan_lite.distributed.layout import Layout
from titan_lite.metrics.start_lines import (
    describe_layout,
    mesh_picture,
    short_names,
    start_lines,
)

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def degrees(**sizes):
    return {axis: sizes.get(axis, 1) for axis in AXES}


@pytest.mark.parametrize(
    ("sizes", "picture"),
    [
        ({}, []),
        (
            dict(dp_shard=2),
            [
                "    +-----+",
                "    | 0 1 |",
                "    +-----+  numbers are ranks; columns: dp_shard (FSDP)",
            ],
        ),
        (
            dict(pp=2),
            [
                "        +---+",
                "  pp 0  | 0 |  layers 0-2",
                "  pp 1  | 1 |  layers 3-5",
                "        +---+  numbers are ranks; rows: pp (pipeline)",
            ],
        ),
        (
            dict(pp=2, dp_shard=2, tp=2),
            [
                "          dp_shard 0   dp_shard 1",
                "        +------------+------------+",
                "  pp 0  |    0 1     |    2 3     |  layers 0-2",
                "  pp 1  |    4 5     |    6 7     |  layers 3-5",
                (
                    "        +------------+------------+  numbers are ranks; rows: pp (pipeline),"
                    " boxes: dp_shard (FSDP), columns in a box: tp (tensor parallelism)"
                ),
            ],
        ),
    ],
    ids=["one rank", "one axis", "pipeline", "three axes"],
)
def test_the_picture_of_a_mesh(sizes, picture):
    assert mesh_picture(degrees(**sizes), ["layers 0-2", "layers 3-5"]) == picture


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


def test_of_many_ranks_the_middle_is_left_out():
    found = mesh_picture(degrees(dp_replicate=2, dp_shard=64, cp=2, tp=8))
    rows = [line.split("|")[:3] for line in found[2:-1]]
    assert [[" ".join(part.split()) for part in row] for row in rows] == [
        ["dp_replicate 0, dp_shard 0", "0 1 .. 7", "8 9 .. 15"],
        ["dp_replicate 0, dp_shard 1", "16 17 .. 23", "24 25 .. 31"],
        ["...", ".. .. .. ..", ".. .. .. .."],
        ["dp_replicate 1, dp_shard 63", "2032 2033 .. 2039", "2040 2041 .. 2047"],
    ]
    assert len({len(line) for line in (found[1], *(line for line in found[2:-1]))}) == 1
    assert mesh_picture(degrees(dp_shard=512))[1].split()[1:-1] == [
        *map(str, range(14)),
        "..",
        "511",
    ]


def test_ranks_stand_where_the_mesh_has_them():
    sizes = degrees(pp=2, dp_shard=2, tp=2)
    ranks = torch.arange(8).view(*sizes.values())
    lines = [line for line in mesh_picture(sizes) if line.startswith("  pp ")]
    for pipeline, line in enumerate(lines):
        boxes = [[int(rank) for rank in box.split()] for box in line.split("|")[1:3]]
        assert boxes == ranks[pipeline, 0, :, 0, :].tolist()


def test_short_names():
    assert (
        short_names(("tok_embeddings", "layers.0", "layers.1", "layers.2"))
        == "tok_embeddings, layers 0-2"
    )
    assert short_names(("layers.3", "norm", "output")) == "layer 3, norm, output"
    assert short_names(()) == ""


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
    assert lines[3:6] == mesh_picture(degrees(dp_shard=2))
    assert (
        lines[6]
        == "batch: 2,048 tokens a step = 8 sequences of 256, in 2 local batches of 2 a rank;"
        " weights gathered once a step (parallelism.fsdp_communication)"
    )
    assert lines[7] == "tokenizer: assets/tokenizer/debug.model"
    assert lines[8] == (  # 5,770,496 parameters of 16 bytes on two ranks, and of 8 bytes unsharded
        "memory: at least 0.04 GiB a rank for parameters, gradients and optimizer state, 0.04 GiB"
        " for unsharded weights and gradients, held for the step; at least 0.01 GiB for a"
        " local batch and its activations"
    )
    assert lines[9:] == ["checkpoints: every 50 steps and at the end (checkpoint.interval)"]


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
    assert lines[1].endswith("inductor (model, loss)")
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
    assert lines[4:6] == [
        "  pp 0  | 0 |  tok_embeddings, layer 0; layers 3-4",
        "  pp 1  | 1 |  layers 1-2; layer 5, norm, output",
    ]
    assert lines[9] == "pipeline: 4 stages, Interleaved1F1B, 2 microbatches of 1"


def test_the_layout_names_the_ranks_of_experts():
    options = ["--parallelism.tensor_parallel_degree=2", "--model.name=qwen3_moe"]
    split = [*options, "--parallelism.expert_parallel_degree=4"]
    whole, over_ep = (
        describe_layout(Layout.from_config(load_config(DEBUG, words), 8))
        for words in (options, split)
    )
    assert whole == "8 ranks = dp_shard 4 x tp 2"
    assert over_ep == f"{whole}, experts over ep 4"
