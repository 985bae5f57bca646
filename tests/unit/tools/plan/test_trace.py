"""Bytes sent and operations of stages, traced with a fake process group, equal closed formulas."""

import dataclasses
from collections import Counter

import pytest
import torch
from tiny import DEBUG

from titan_lite.compile.compile import CompileError
from titan_lite.config import (
    ActivationCheckpoint,
    Compile,
    Config,
    ConfigError,
    Float8,
    Parallelism,
    Training,
    load_config,
)
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.axes import axis_along
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.models.llama3 import ModelConfig, flops_per_token
from titan_lite.tools.plan import summary
from titan_lite.tools.plan.allocator import LARGE_BUFFER
from titan_lite.tools.plan.costs import copies_figures
from titan_lite.tools.plan.memory import memory_of
from titan_lite.tools.plan.simulate import simulate_step
from titan_lite.tools.plan.tape import stage_of
from titan_lite.tools.plan.trace import (
    PlannedLayout,
    depths_to_trace,
    figures_at,
    start_tracing,
    trace_stage,
    traced_by,
)

RANKS, TOKENS, DEPTH = 8, 1024, 6
MODEL = ModelConfig(
    dim=1024,
    n_layers=DEPTH,
    n_heads=16,
    n_kv_heads=8,
    hidden_dim=3072,
    vocab_size=16384,
    max_seq_len=TOKENS,
)
H100 = load_machine("H100")
WHOLE = ("tok_embeddings", "norm", "output")
TABLE = MODEL.vocab_size * MODEL.dim
PRODUCTS = (
    MODEL.dim * 64 * (16 + 8 + 8 + 16) + 3 * MODEL.dim * MODEL.hidden_dim
)  # numbers in a block's matrices
BLOCK = PRODUCTS + 2 * MODEL.dim


def layout(accumulation=1, mode="none", chunk=-1, **parallelism):
    config = Config(
        training=Training(local_batch_size=2, seq_len=TOKENS, loss_chunk_tokens=chunk),
        parallelism=Parallelism(**parallelism),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        compile=Compile(enable=True),
    )
    training = config.training.replace(
        global_batch_size=accumulation * Layout.from_config(config, RANKS, MODEL).sequences_per_step
    )
    config = config.replace(training=training)
    return PlannedLayout(**vars(Layout.from_config(config, RANKS, MODEL)), config=config)


FSDP, TP, RECOMPUTED, CHUNKED = (
    layout(),
    layout(2, tensor_parallel_degree=2),
    layout(mode="full"),
    layout(chunk=256),
)


HOW = dict(replicate_compression="powersgd", replicate_rank=8, replicate_uncompressed_steps=0)
COPIES = layout(4, data_parallel_replicate_degree=2, **HOW)

WANTED = {
    ("fsdp", 5): FSDP,
    ("fsdp", 4): FSDP,
    ("fsdp", 3): FSDP,
    ("tp", 2): TP,
    ("chunks", 3): CHUNKED,
}
WANTED |= {("copies", 3): COPIES}
LONG = {("fsdp", 8): FSDP, ("full", 3): RECOMPUTED}


def trace_all(wanted):
    """{(what, blocks): figures, timelines and tensors}"""
    with start_tracing(RANKS) as processes:
        tasks = {
            key: processes.submit(trace_stage, mine, WHOLE, key[1], [H100])
            for key, mine in wanted.items()
        }
        return {key: task.result() for key, task in tasks.items()}


def figures_of(traces):
    return {key: each.figures[0] for key, each in traces.items()}


@pytest.fixture(scope="module")
def traces():
    return trace_all(WANTED)


@pytest.fixture(scope="module")
def traced(traces):
    return figures_of(traces)


@pytest.fixture(scope="module")
def traces_long(traces):
    return traces | trace_all(LONG)


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_fsdp_sends_every_weight_forward_again_backward_and_every_gradient(traced, blocks):
    figures = traced["fsdp", blocks]
    parameters = blocks * BLOCK + 2 * TABLE + MODEL.dim
    share = (RANKS - 1) / RANKS  # of a ring
    assert figures["held"] * RANKS == parameters
    assert figures["whole"] == parameters
    forward, backward = 2 * parameters, 2 * blocks * BLOCK + 4 * parameters
    assert figures["forward.bytes.dp_shard"] == forward * share
    # Embedding, norm and output are not gathered again; gradients are float32.
    assert figures["backward.bytes.dp_shard"] == backward * share
    assert figures["forward.across.dp_shard"] == 0.0  # one node
    step = simulate_step(FSDP, [figures], H100)
    assert step.sent == {"dp_shard": (forward + backward) * share}  # and nothing else


def test_copies_send_thin_factors_once_a_step_and_keep_errors(traces):
    figures, shard = traces["copies", 3].figures[0], RANKS // 2
    assert not any("dp_replicate" in key for key in figures if not key.startswith("copies."))
    sizes = {
        (1024, 1024): 2,
        (512, 1024): 2,
        (3072, 1024): 2,
        (1024, 3072): 1,
    }  # wq and wo, wk and wv, w1 and w3, w2
    factors = 3 * sum(count * 8 * (n // shard + m) for (n, m), count in sizes.items())
    factors += 2 * 8 * (MODEL.vocab_size // shard + MODEL.dim)
    norms = (3 * 2 + 1) * MODEL.dim // shard
    assert figures["copies.bytes.dp_replicate"] == 4 * (
        factors + norms
    )  # 2 (k - 1) / k of it, for k = 2 copies
    step = simulate_step(COPIES, [figures], H100)
    assert step.sent["dp_replicate"] == 4 * (factors + norms)  # once for four microbatches
    assert step.parts["exposed.dp_replicate"] == figures["copies.exposed.dp_replicate"] > 0
    memory = memory_of(
        COPIES, [stage_of(traces["copies", 3].tensors, 3, pipelined=False)], H100
    ).rows
    shards = 4 * (3 * PRODUCTS + 2 * TABLE) / shard
    assert shards < memory["errors between copies"] < 2.1 * shards


def test_nothing_hides_the_factors_of_all_gradients_and_the_others():
    shard = 4
    blocks = ["tok_embeddings", *(f"layers.{number}" for number in range(4)), "output"]
    sizes = {f"{block}.weight": (1024, (2048,)) for block in blocks} | {"norm.weight": (1024, ())}
    plans = {
        torch.nn.Parameter(torch.empty(0)): ShardSpec(
            fqn=fqn,
            rows=rows,
            own_rows=rows // shard,
            row_shape=row_shape,
            shard_degree=shard,
            shard_group="s",
            sum_groups=(),
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
        )
        for fqn, (rows, row_shape) in sizes.items()
    }
    axes = {(0, shard): "dp_replicate"}
    figures = copies_figures(plans, H100, axes, COPIES.config.parallelism)
    each = (6 * 8 * 1024 / shard, 6 * 8 * 2048, 1024 / shard)  # P, Q, and what is not compressed
    seconds = sum(H100.collective("all_reduce", 4 * numbers, (0, shard)) for numbers in each)
    assert figures["copies.communication.dp_replicate"] == pytest.approx(seconds)
    assert figures["copies.exposed.dp_replicate"] == pytest.approx(seconds)


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_products_and_attention_are_those_of_the_formula(traced, blocks):
    figures = traced["fsdp", blocks]
    tokens = 2 * TOKENS
    assert figures["forward.matmul"] == 2 * tokens * (blocks * PRODUCTS + TABLE)
    assert figures["backward.matmul"] == 2 * figures["forward.matmul"]
    assert (
        figures["forward.attention"] == blocks * 2 * tokens * TOKENS * MODEL.dim
    )  # of two products, half
    assert (
        figures["backward.attention"] == 2.5 * figures["forward.attention"]
    )  # five, one of them a second time
    needed = flops_per_token(dataclasses.replace(MODEL, n_layers=blocks), TOKENS) * tokens
    assert needed == 3 * figures["forward.matmul"] + 3 * figures["forward.attention"]


def check_line(traces, depths, blocks):
    line, full = (
        figures_at({depth: traces["fsdp", depth] for depth in depths}, blocks, 0),
        traces["fsdp", blocks].figures[0],
    )
    assert line.keys() == full.keys()
    for key, value in full.items():
        if any(word in key for word in ("bytes", "matmul", "attention", "held", "whole")):
            assert line[key] == value, key
    for key in ("forward.compute", "backward.compute"):
        assert line[key] == pytest.approx(full[key], rel=0.02), key
    steps = [simulate_step(FSDP, [figures], H100).seconds for figures in (line, full)]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    check_tensors(traces["fsdp", max(depths)], traces["fsdp", blocks], blocks)


def check_tensors(less, full, blocks):
    """A stage with repeated blocks allocates what the traced one does, and keeps as much alive."""
    repeated, traced = (stage_of(each.tensors, blocks, pipelined=False) for each in (less, full))
    assert Counter((weight.held, weight.whole) for weight in repeated.weights) == Counter(
        (weight.held, weight.whole) for weight in traced.weights
    )
    assert kept(repeated) == kept(traced)
    assert len(repeated.tape.elements) == pytest.approx(len(traced.tape.elements), rel=0.1)
    memories = [memory_of(FSDP, [stage], H100) for stage in (repeated, traced)]
    assert memories[0].moment == memories[1].moment
    assert memories[0].peak == pytest.approx(memories[1].peak, rel=0.01)
    assert memories[0].reserved == pytest.approx(memories[1].reserved, abs=3 * LARGE_BUFFER)


def kept(stage):
    """Bytes that forward makes for backward."""
    return sum(
        size
        for size, row in zip(stage.tape.sizes, stage.tape.rows, strict=True)
        if row == "activations"
    )


def test_two_depths_tell_of_a_third(traces):
    assert depths_to_trace(FSDP.config) == (3, 4)
    check_line(traces, (3, 4), 5)


@pytest.mark.slow
def test_two_depths_tell_of_a_deep_one(traces_long):
    check_line(traces_long, (3, 4), 8)


@pytest.mark.slow
def test_a_recomputed_block_computes_its_forward_again(traces_long):
    plain, again = (figures_of(traces_long)[key, 3] for key in ("fsdp", "full"))
    assert again["forward.matmul"] == plain["forward.matmul"]
    most = (
        2 * 2 * TOKENS * 3 * PRODUCTS
    )  # but for a block's last product, whose result no gradient needs
    assert most * 0.7 < again["backward.matmul"] - plain["backward.matmul"] <= most
    saved, less = (
        kept(stage_of(traces_long[key, 3].tensors, 3, pipelined=False)) for key in ("fsdp", "full")
    )
    assert less < 0.3 * saved


def test_a_loss_in_chunks_has_the_same_products_no_logits_and_sums_of_the_projections_gradient(
    traces, traced
):
    whole, chunked = traced["fsdp", 3], traced["chunks", 3]
    assert not any(key.startswith("loss") for key in chunked)
    for figure in ("matmul", "bytes.dp_shard"):
        found, expected = (
            each[f"forward.{figure}"] + each[f"backward.{figure}"] for each in (chunked, whole)
        )
        assert found == expected
    chunks, logits = 2 * TOKENS // 256, 2 * TOKENS * MODEL.vocab_size * 2
    lives = {key: traces[key].tensors.lives.tensors for key in (("fsdp", 3), ("chunks", 3))}
    assert max(life.nbytes for life in lives["fsdp", 3]) == logits
    assert (
        max(life.nbytes for life in lives["chunks", 3]) == 4 * TABLE
    )  # sums of the gradient in float32
    held = [
        life
        for life in lives["chunks", 3]
        if life.nbytes == 4 * TABLE and life.born[0] == "forward"
    ]
    assert len(held) == chunks
    moments = [
        sum(life.born[1] <= moment < life.died[1] for life in held)
        for moment in range(max(life.died[1] for life in held))
    ]
    assert max(moments) == 2  # before and after the addition of a chunk


def test_tensor_parallelism_sends_activations_and_fsdp_once_a_step(traced):
    figures = traced["tp", 2]
    activations = 2 * TOKENS * MODEL.dim * 2  # bytes of (B, T, C) in bfloat16
    # Of a block two all-gathers and two reduce-scatters; the embedding's reduce-scatter, the
    # output's all-gather.
    assert figures["forward.bytes.tp"] == (4 * 2 + 2) * activations / 2
    assert figures["forward.exposed.tp"] == pytest.approx(figures["forward.communication.tp"])
    assert not any("dp_shard" in key for key in figures if key.startswith(("forward", "backward")))
    split, replicated = 2 * PRODUCTS + 2 * TABLE, 5 * MODEL.dim
    parameters = split / 2 + replicated
    assert figures["whole"] == parameters
    assert figures["gather.bytes.dp_shard"] == 2 * parameters * 3 / 4
    assert figures["reduce.bytes.dp_shard"] == 4 * parameters * 3 / 4
    for what in ("gather", "reduce"):  # under the first forward and the last backward
        assert 0 < figures[f"{what}.exposed.dp_shard"] < figures[f"{what}.communication.dp_shard"]
    assert (
        figures["reduce.bytes.tp"] == 2 * 4 * replicated / 4 / 2
    )  # all-reduce of a quarter of the norms


@pytest.mark.parametrize(
    ("sections", "depths"),
    [
        ({}, (3, 4)),
        (dict(activation_checkpoint=ActivationCheckpoint(mode="selective")), (3, 4)),
        (
            dict(
                activation_checkpoint=ActivationCheckpoint(
                    mode="selective", selective_ac_option="3"
                )
            ),
            (3, 6),
        ),
        (dict(parallelism=Parallelism(fsdp_keep_gathered=("layers.5", "output"))), None),
        (
            dict(compile=Compile(enable=True, bucketing="listed", buckets=("layers.0 layers.1",))),
            None,
        ),
        (dict(float8=Float8(enable=True, filter_fqns=("attention.wk", "w2"))), (3, 4)),
        (dict(float8=Float8(enable=True, filter_fqns=("layers.31",))), None),
        (dict(float8=Float8(enable=True, filter_fqns=("31.attention",))), None),
    ],
)
def test_which_depths_lie_on_a_line(sections, depths):
    assert depths_to_trace(Config(**sections)) == depths


def test_every_key_that_changes_a_graph_has_traces_of_its_own():
    def traced(*options):
        config = load_config(DEBUG, options)
        return traced_by(PlannedLayout(**vars(Layout.from_config(config, 2)), config=config))

    alike = [
        [],
        ["--training.global_batch_size=16"],
        ["--optimizer.lr=1", "--training.local_batch_size=2"],
    ]
    others = [
        ["--float8.enable"],
        ["--float8.enable", "--float8.recipe=rowwise"],
        ["--float8.enable", "--float8.filter_fqns=w2"],
    ]
    others += [
        ["--float8.enable", "--float8.all_gather"],
        ["--training.loss_chunk_tokens=64"],
    ]
    others += [["--compile.enable"]]
    assert len({repr(traced(*options)) for options in alike}) == 1
    assert len({repr(traced(*options)) for options in [[], *others]}) == 1 + len(others)


def test_a_collective_of_several_ranks_has_an_axis():
    axes = {(0, 1): "cp", (0, 2): "tp"}
    assert [axis_along(ranks, axes, True) for ranks in ((0, 1), (0, 2), (0,))] == [
        "dp_shard",
        "tp",
        "",
    ]
    with pytest.raises(KeyError):
        axis_along((0, 3), axes, True)


def test_a_stage_that_cannot_be_compiled_is_told_in_words(monkeypatch):
    monkeypatch.setattr(
        summary, "make_plans", lambda *_, **__: iter([CompileError("compile.enable: no graph")])
    )
    with pytest.raises(ConfigError, match="no graph"):
        summary.make_plan(FSDP, [H100])
