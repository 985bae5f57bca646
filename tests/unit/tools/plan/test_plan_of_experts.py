"""The plan of a mixture of experts: parameters and FLOPs of a token, experts on all ranks of a copy, and
matmuls priced by the rows of an expert.
"""

import json

import pytest
import torch
from tiny import DEBUG_TOKENIZER, RECIPES

from titan_lite.config import load_config
from titan_lite.config.families import QWEN3_MOE
from titan_lite.cost.op_cost import flops_of, node_seconds
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.layout import Layout, least_state_bytes
from titan_lite.distributed.tensor_parallel import largest_shard
from titan_lite.features.moe.feature import FEATURE
from titan_lite.models.experts import grouped_mm, grouped_mm_of_weights
from titan_lite.models.shapes import (
    active_parameters,
    block_weights,
    flops_per_token,
    numbers_in,
    parameter_shapes,
)
from titan_lite.tools.plan.command import main

A3B = QWEN3_MOE.flavors["30B-A3B"]
H100 = load_machine("H100")


@pytest.mark.parametrize(
    ("flavor", "total", "active"),
    # "30.5B in total and 3.3B activated", "235B in total and 22B activated" (model cards)
    [("30B-A3B", 30.53e9, 3.35e9), ("235B-A22B", 235.09e9, 22.19e9)],
)
def test_parameters_are_those_of_the_published_models(flavor, total, active):
    config = QWEN3_MOE.flavors[flavor]
    assert numbers_in(parameter_shapes(config)) == pytest.approx(total, rel=1e-3)
    assert active_parameters(config) == pytest.approx(active, rel=1e-3)


def test_flops_of_a_token_are_those_of_the_experts_that_it_has():
    weights = block_weights(A3B)
    assert weights.experts == 128 * 3 * 2048 * 768
    assert weights.active_experts * 16 == weights.experts
    embedding = A3B.vocab_size * A3B.dim
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    matmuls = active_parameters(A3B) - embedding - norms
    attention = 6 * 48 * 32 * 128 * 4096
    assert flops_per_token(A3B, 4096) == 6 * matmuls + attention


def layout_of(*options, ranks=8):
    recipe = RECIPES / "qwen3_30b_a3b.toml"
    options = [f"--model.tokenizer_path={DEBUG_TOKENIZER}", *options]
    config = load_config(recipe, options)
    return config, Layout.from_config(config, ranks)


def test_experts_are_sharded_over_tensor_parallel_ranks_and_gathered_whole():
    tp = "--parallelism.tensor_parallel_degree=2"
    (config, alone), (_, split) = layout_of(), layout_of(tp)
    fqn = "layers.0.moe.experts.w2"
    for layout in (alone, split):
        assert largest_shard(layout, fqn, (128, 2048, 768)) == (16, 2048, 768)
        assert least_state_bytes(config, layout) == pytest.approx(4 * 4 * layout.parameters / 8)
    experts = 48 * block_weights(A3B).experts
    others = alone.parameters - experts
    assert alone.gathered_of_rank == alone.parameters
    assert split.gathered_of_rank == others / 2 + experts


def test_a_rank_gathers_its_own_experts_alone():
    ep = "--parallelism.expert_parallel_degree=4"
    (config, alone), (_, split) = layout_of(), layout_of(ep)
    experts = 48 * block_weights(A3B).experts
    assert split.gathered_of_rank == alone.gathered_of_rank - experts * 3 / 4
    assert split.expert_ranks == 8
    for layout in (alone, split):
        assert largest_shard(layout, "layers.0.moe.experts.w2", (128, 2048, 768)) == (16, 2048, 768)
        assert least_state_bytes(config, layout) == pytest.approx(4 * 4 * layout.parameters / 8)


def node_of(operator, *shapes, sizes=(), balanced_rows):
    """A node of a graph that calls the operator."""
    graph = torch.fx.Graph()
    nodes = []
    for number, shape in enumerate(shapes):
        node = graph.placeholder(f"x{number}")
        dtype = torch.int32 if len(shape) == 1 else torch.bfloat16
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        nodes.append(node)
    call = graph.call_function(operator._opoverload, (*nodes, *sizes))
    call.meta["val"] = operator(*(node.meta["val"] for node in nodes), *sizes)
    call.meta["custom"] = {"balanced_rows": balanced_rows}
    return call


def test_a_grouped_matmul_is_priced_by_the_rows_of_an_expert():
    """Few rows leave tiles partly empty, and weights are read whatever the rows."""
    flops = 2.0 * 65536 * 2048 * 768

    def matmuls(rows, room):
        shapes = (room, 2048), (128, 2048, 768), (128,)
        of_weights = (room, 768), (room, 2048), (128,)
        return (
            node_of(grouped_mm, *shapes, sizes=(0,), balanced_rows=rows),
            node_of(grouped_mm_of_weights, *of_weights, balanced_rows=rows),
        )

    peak = flops / H100.flops(torch.bfloat16)
    for node, with_room in zip(matmuls(65536, 65536), matmuls(65536, 500000), strict=True):
        assert flops_of(node) == flops_of(with_room) == (flops, 0.0)
        assert peak < node_seconds(node, H100) < 3 * peak
        # room that stays empty costs nothing
        assert node_seconds(with_room, H100) == node_seconds(node, H100)
    few, _ = matmuls(1024, 1024)
    assert node_seconds(few, H100) > 4 * peak / 64
    assert node_seconds(few, H100) > 2.0 * 128 * 2048 * 768 / 3.35e12


@pytest.mark.slow
def test_a_plan_says_what_a_token_is_computed_with(capsys):
    recipe = str(RECIPES / "qwen3_moe_debug.toml")
    arguments = [recipe, "--hardware", "h100", "--world-size", "2"]
    assert main([*arguments]) == 0
    assert "9,912,128 parameters, 4,603,712 of them for a token" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["parameters"], plan["active_parameters"]) == (9_912_128, 4_603_712)


@pytest.mark.slow
def test_expert_shards_travel_over_fsdp_with_tensor_parallelism(capsys):
    recipe = str(RECIPES / "qwen3_moe_debug.toml")
    options = ["--parallelism.tensor_parallel_degree=2", "--json"]
    assert main([recipe, "--hardware", "h100", "--world-size", "4", *options]) == 0
    sent = json.loads(capsys.readouterr().out)["sent_bytes"]
    assert sent["dp_shard"] > 6 * 4 * block_weights(QWEN3_MOE.flavors["debug"]).experts
    assert sent["tp"] > 0


@pytest.mark.slow
def test_with_expert_parallelism_tokens_travel_in_place_of_experts(capsys):
    recipe = str(RECIPES / "qwen3_moe_debug.toml")
    arguments = [recipe, "--hardware", "h100", "--world-size", "4", "--json"]

    def planned(*options):
        assert main([*arguments, *options]) == 0
        return json.loads(capsys.readouterr().out)

    options = ["--parallelism.expert_parallel_degree=2"]
    whole, split = planned(), planned(*options)
    # with ep = 4 no expert is gathered, by the ranks that also shard the other weights
    all_split = planned("--parallelism.expert_parallel_degree=4")
    assert "ep" not in whole["sent_bytes"]
    assert 0 < all_split["sent_bytes"]["dp_shard"] < split["sent_bytes"]["dp_shard"]
    assert split["sent_bytes"]["dp_shard"] < whole["sent_bytes"]["dp_shard"]
    assert 0 < split["sent_bytes"]["ep"] < all_split["sent_bytes"]["ep"]
    assert split["expert_parallel"] == 2
    # rows that are not computed take memory alone
    little = planned(*options, "--experts.capacity_factor=1")
    assert little["memory"]["peak"] < split["memory"]["peak"]


@pytest.mark.slow
def test_the_rank_with_most_tokens_of_experts_is_planned(capsys):
    recipe = str(RECIPES / "qwen3_30b_a3b.toml")
    options = ["--model.n_layers=4", "--parallelism.expert_parallel_degree=8"]
    arguments = [recipe, "--world-size=8", "--parallelism.fsdp_communication=step", *options]

    def planned(imbalance):
        assert main([*arguments, "--json", f"--expert-imbalance={imbalance}"]) == 0
        return json.loads(capsys.readouterr().out)

    even, uneven = planned(1), planned(1.5)
    more = uneven["parts_seconds"]["compute"] - even["parts_seconds"]["compute"]
    # half as many rows again, of 12 matmuls a block (three, twice in backward, once recomputed)
    rows = 8 * 4 * 4096 * 8 / 8
    matmuls = 12 * 4 * 2.0 * 0.5 * rows * 2048 * 768
    assert more > matmuls / H100.flops(torch.bfloat16)
    assert uneven["memory"]["peak"] == even["memory"]["peak"]


@pytest.mark.parametrize(
    ("options", "recomputes"),
    [
        ([], True),
        # each half of a backward would recompute every block
        (["--compile.no-enable", "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"], False),
    ],
)
def test_a_plan_with_a_capacity_says_how_to_plan_a_step_that_runs_again(options, recomputes):
    recipe = RECIPES / "qwen3_moe_debug.toml"
    keys = [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.expert_parallel_degree=2",
        "--experts.capacity_factor=1.25",
    ]
    config = load_config(recipe, [*keys, *options])
    (line,) = FEATURE.plan_lines(config)
    assert "with more tokens of experts on a rank than 1.25 times the mean runs again" in line
    _, _, written = line.partition("plan it with ")
    changed = load_config(recipe, [*keys, *options, *written.split()])
    assert changed.experts.capacity_factor == 0
    assert (changed.activation_checkpoint.mode == "full") is recomputes


@pytest.mark.slow
def test_a_plan_of_expert_parallelism_has_its_split_and_its_line(capsys):
    recipe = str(RECIPES / "qwen3_moe_debug.toml")
    options = ["--parallelism.expert_parallel_degree=2", "--experts.capacity_factor=1.25"]
    assert main([recipe, "--hardware", "h100", "--world-size", "2", *options]) == 0
    said = capsys.readouterr().out
    assert "times the mean runs again, with more memory: plan it with" in said
    assert "over ep 2" in said
    assert "expert parallelism" in said
