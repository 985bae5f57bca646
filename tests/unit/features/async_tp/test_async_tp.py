"""Asynchronous tensor parallelism and chunks of tokens among the passes, and what a plan turns off."""

import pytest

from titan_lite.compile.graph_passes import choose_passes
from titan_lite.config import load_config
from titan_lite.feature import features_of

COMPILED = ["--compile.enable", "--parallelism.tensor_parallel_degree=2"]
ASYNC = "--parallelism.enable_async_tensor_parallel"
BLOCKS = ["bucket_by_block", "overlap_collectives"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["defer_weight_grads", "order_activation_collectives", *BLOCKS]),
        (
            ["--compile.tensor_parallel_chunks=2"],
            [
                *("defer_weight_grads", "cut_token_chunks", "order_activation_collectives"),
                *BLOCKS,
            ],
        ),
        (
            ["--compile.tensor_parallel_chunks=2", "--compile.no-defer_weight_grads"],
            ["cut_token_chunks", "order_activation_collectives", *BLOCKS],
        ),
        ([ASYNC], ["mark_fused_collectives", *BLOCKS, "keep_with_matmuls"]),
        (
            [ASYNC, "--compile.tensor_parallel_chunks=2", "--compile.bucketing=auto"],
            ["mark_fused_collectives", "overlap_by_inductor", "keep_with_matmuls"],
        ),
    ],
)
def test_the_recipe_selects_the_passes_and_their_order(options, expected):
    config = load_config("llama3_8b", [*COMPILED, *options])
    assert [each.__name__ for each in choose_passes(config)] == expected


@pytest.mark.parametrize(
    ("degree", "expected"), [("1", {ASYNC.removeprefix("--"): "false"}), ("4", {})]
)
def test_a_plan_without_tensor_parallelism_is_without_its_overlap(degree, expected):
    change = {"parallelism.tensor_parallel_degree": degree}
    turned_off = {}
    for feature in features_of(load_config("llama3_8b", [*COMPILED, ASYNC])):
        turned_off |= feature.turned_off_by(change)
    assert turned_off == expected
