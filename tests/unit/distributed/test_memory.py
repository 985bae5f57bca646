"""Bytes that a layout takes, and what fsdp_communication = "auto" makes of them."""

import pytest
from tiny import DEBUG, RECIPES

from titan_lite.config import load_config
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.memory import gathered_once_bytes, steady_bytes


def layout_of(recipe, ranks, gib, *options):
    config = load_config(RECIPES / f"{recipe}.toml", options)
    return config, Layout.from_config(config, ranks, device_memory=gib * 2**30)


@pytest.mark.parametrize(
    ("gib", "options", "once"),
    [
        # 8B in bfloat16 with float32 sums on 8 ranks: 15 GiB sharded, and 8.03e9 x (2 + 2 + 4)
        # bytes = 60 GiB unsharded
        (80, (), False),
        (141, (), True),
        (80, ("--parallelism.fsdp_communication=step",), True),
        (141, ("--parallelism.fsdp_communication=microbatch",), False),
        (141, ("--compile.bucketing=greedy",), False),
        (141, ("--parallelism.fsdp_reshard_after_forward=always",), False),
        (141, ("--training.global_batch_size=8",), False),
    ],
)
def test_weights_are_gathered_once_a_step_where_that_fits(gib, options, once):
    accumulates = [
        "--training.local_batch_size=1",
        "--training.global_batch_size=32",
        "--compile.bucketing=block",
    ]
    _, layout = layout_of("llama3_8b", 8, gib, *accumulates, *options)
    assert layout.gathers_once == once


def test_the_memory_of_a_rank_is_that_of_the_stages_with_most_parameters():
    config, layout = layout_of(
        "llama3_8b",
        8,
        80,
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.tensor_parallel_degree=2",
    )
    halves = (
        32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) / 2 + 4096 * 128_256
    )  # and norms
    assert layout.parameters_of_rank == pytest.approx(halves / 2, rel=1e-2)
    assert steady_bytes(config, layout) == pytest.approx(16 * halves / 4, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_the_copy_of_a_tied_table_takes_memory_for_weights_and_gradients_alone(optimizer):
    options = [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_last_stage_less_layers=0",
        "--model.tied_embeddings=yes",
        "--model.n_layers=7",  # four of them in the last stage
        f"--optimizer.name={optimizer}",
    ]
    config = load_config(DEBUG, options)
    layout = Layout.from_config(config, 2)
    table = 2048 * 256
    matrices = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 768)
    norms = (4 * 2 + 1) * 256
    moments = 2 * (matrices + norms) - (matrices if optimizer == "Muon" else 0)
    assert steady_bytes(config, layout) == 4 * (2 * (matrices + norms + table) + moments)
    per_number = gathered_once_bytes(config, layout) / (matrices + norms + table)
    assert per_number == 4 + 4 + 4  # a weight, a gradient and its sum, in float32


def test_weights_gathered_once_in_float8_have_one_byte():
    float8, gathered = (
        ["--training.mixed_precision_param=bfloat16", "--float8.enable"],
        ["--float8.all_gather"],
    )
    of_a_block = (
        4 * 256 * 256 * 3 // 4 + 3 * 256 * 768
    )  # wq and wo are square, wk and wv half of it
    for options, one_byte in (
        ([], 0),
        (gathered, 6),
        ([*gathered, "--float8.filter_fqns=layers.0"], 5),
    ):
        config = load_config(DEBUG, [*float8, *options])
        expected = (2 + 2 + 4) * 5_770_496 - one_byte * of_a_block
        assert gathered_once_bytes(config, Layout.from_config(config, 2)) == expected
