"""What a run says of itself before and after: the picture of its mesh, the figures at its end."""

import json
from pathlib import Path

import pytest
import torch

from titan_lite.compiler.receipt import Receipt
from titan_lite.compiler.timeline import Timeline
from titan_lite.config.recipe import load_config
from titan_lite.layout import make_layout
from titan_lite.metrics.lines import end_lines, mesh_picture, short_names, start_lines

DEBUG = Path(__file__).parents[3] / "train_configs/debug_model.toml"
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def degrees(**sizes):
    return {axis: sizes.get(axis, 1) for axis in AXES}


@pytest.mark.parametrize(
    ("sizes", "picture"),
    [
        ({}, []),
        (dict(dp_shard=2), ["    +-----+", "    | 0 1 |", "    +-----+  in a box: dp_shard 0 to 1"]),
        (dict(pp=2), ["        +---+", "  pp 0  | 0 |  layers 0-2", "  pp 1  | 1 |  layers 3-5", "        +---+"]),
        (
            dict(pp=2, dp_shard=2, tp=2),
            [
                "          dp_shard 0   dp_shard 1",
                "        +------------+------------+",
                "  pp 0  |    0 1     |    2 3     |  layers 0-2",
                "  pp 1  |    4 5     |    6 7     |  layers 3-5",
                "        +------------+------------+  in a box: tp 0 to 1",
            ],
        ),
    ],
    ids=["one rank", "one axis", "pipeline", "three axes"],
)
def test_the_picture_of_a_mesh(sizes, picture):
    assert mesh_picture(degrees(**sizes), ["layers 0-2", "layers 3-5"]) == picture


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
    assert mesh_picture(degrees(dp_shard=512))[1].split()[1:-1] == [*map(str, range(14)), "..", "511"]


def test_ranks_stand_where_the_mesh_has_them():
    sizes = degrees(pp=2, dp_shard=2, tp=2)
    ranks = torch.arange(8).view(*sizes.values())
    lines = [line for line in mesh_picture(sizes) if "pp " in line]
    for pipeline, line in enumerate(lines):
        boxes = [[int(rank) for rank in box.split()] for box in line.split("|")[1:3]]
        assert boxes == ranks[pipeline, 0, :, 0, :].tolist()


def test_short_names():
    assert short_names(("tok_embeddings", "layers.0", "layers.1", "layers.2")) == "tok_embeddings, layers 0-2"
    assert short_names(("layers.3", "norm", "output")) == "layer 3, norm, output"
    assert short_names(()) == ""


def said(*overrides, ranks=2):
    config, _ = load_config(DEBUG, overrides)
    return start_lines(
        config,
        make_layout(config, ranks),
        device=torch.device("cpu"),
        parameters=[torch.empty(2**26, device="meta")],
        without_effect=[],
        priced=True,
    )


def test_the_start_says_what_will_run():
    threads = torch.get_num_threads()
    lines = said()
    assert lines[0] == "Llama 3 debug flavor"
    assert lines[1] == f"model: llama3 debug, 5,770,496 parameters; torch {torch.__version__}, eager"
    assert lines[2] == f"layout: 2 ranks = dp_shard 2, each one CPU, {threads} thread{'s' * (threads > 1)}"
    assert lines[3:6] == mesh_picture(degrees(dp_shard=2))
    assert lines[6] == "batch: 2,048 tokens a step = 8 sequences of 256, in 2 local batches of 2 a rank"
    assert lines[7] == (  # 2^26 parameters of four bytes, four times; gathered and reduced in float32
        "memory: 1.00 GiB a rank for parameters, gradients and optimizer state, 0.50 GiB for weights and gradients that are "
        "whole for a step; activations beside that"
    )
    assert lines[8:] == ["checkpoints: every 50 steps and at the end (checkpoint.interval)"]


def test_the_start_of_other_runs():
    lines = said(
        "--compile.enable", "--no-checkpoint.enable", "--training.dtype=bfloat16", "--training.global_batch_size=2", ranks=1
    )
    assert lines[1].endswith("inductor (model, loss)")
    assert lines[2].startswith("layout: 1 rank, each one CPU")
    assert lines[3].endswith("512 tokens a step = 2 sequences of 256, in 1 local batch of 2 a rank")
    assert lines[4:] == [
        "memory: 0.50 GiB a rank for parameters, gradients and optimizer state; activations beside that",
        "checkpoints: none (checkpoint.enable = false)",
        "compiling comes first: the first step and the first validation take longer",
    ]
    lines = said("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B")
    assert lines[4:6] == [
        "  pp 0  | 0 |  tok_embeddings, layer 0; layers 3-4",
        "  pp 1  | 1 |  layers 1-2; layer 5, norm, output",
    ]
    assert "pipeline: 4 stages, Interleaved1F1B, 2 microbatches of 1; ranks wait 20.0% of the time" in lines[8]


def test_the_end_is_told_in_figures_of_the_whole_run(tmp_path):
    lines = [
        {"step": 10, "loss": 3.0, "tps": 100.0, "mfu": 10.0, "data_wait": 9.0, "memory_gib": 0.5},
        {"resumed_from": 10},
        {"step": 20, "loss": 2.0, "tps": 300.0, "mfu": 30.0, "data_wait": 1.0, "memory_gib": 0.7},
        {"step": 30, "loss": 1.0, "tps": 200.0, "mfu": 20.0, "data_wait": 2.0, "memory_gib": 0.6},
        {"step": 30, "validation_loss": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timeline = Timeline("forward", (), 0.4, 0.3, 0.2, 0.1, 0.0, 0)
    receipts = [
        Receipt("forward", {}, (), 0, "", timeline),
        Receipt("inference", {}, (), 0, "", timeline),
        Receipt("forward", {}, (), 0, "", timeline, pp_rank=1),
    ]
    arguments = dict(step=30, tokens=3000, skipped=1, steps_on_disk=(10, 30))
    assert end_lines(tmp_path, "done", receipts=receipts, **arguments) == [
        "done: step 30, 3,000 tokens, 1 step skipped; loss 1.0000; validation loss 1.5000",
        "speed: 200 tokens a second and device, MFU 20.0%, waiting for data 2.0% (medians); peak memory 0.70 GiB",
        "communication: 100 ms of 400 ms exposed, as estimated (compile.json)",
        "checkpoints: step-10, step-30",
        f"to look at: python -m titan_lite.report {tmp_path}; tensorboard --logdir {tmp_path}",
    ]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tps": 5.0, "data_wait": 0.0, "memory_gib": 0.1}\n')
    told = end_lines(tmp_path, "stopped", step=1, tokens=9, skipped=0, receipts=[], steps_on_disk=())
    assert told[0] == "stopped: step 1, 9 tokens, 0 steps skipped"
    assert "MFU n/a" in told[1]
    assert told[2] == "checkpoints: none"
    alone = [Receipt("forward", {}, (), 0, "", Timeline("forward", (), 0.4, 0.4, 0.0, 0.0, 0.0, 0))]
    assert end_lines(tmp_path, "stopped", step=1, tokens=9, skipped=0, receipts=alone, steps_on_disk=()) == told
    (tmp_path / "metrics.jsonl").write_text("")
    assert len(end_lines(tmp_path, "done", step=0, tokens=0, skipped=0, receipts=[], steps_on_disk=())) == 3
