"""Bytes sent and operations of stages, traced with a fake process group, equal closed formulas."""

import dataclasses
import os
from collections import Counter
from multiprocessing import forkserver

import pytest
import torch
from tiny import DEBUG

from titan_lite.collectives import Axis
from titan_lite.compile.errors import CompileError
from titan_lite.config import (
    ActivationCheckpoint,
    Compile,
    Config,
    ConfigError,
    Parallelism,
    Training,
    load_config,
)
from titan_lite.config.families import ModelConfig
from titan_lite.cost.costs import Costs
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.axes import axis_along
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.feature import KeptNumbers
from titan_lite.features.float8.keys import Float8Keys
from titan_lite.features.powersgd.feature import FEATURE
from titan_lite.models.shapes import flops_per_token
from titan_lite.tools.plan import plan
from titan_lite.tools.plan.memory import memory_of
from titan_lite.tools.plan.simulate import simulate_step
from titan_lite.tools.plan.tape import stage_of
from titan_lite.tools.plan.trace import (
    PlannedLayout,
    costs_at,
    depths_to_trace,
    start_tracing,
    trace_key,
    trace_stage,
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
MATMULS = (
    MODEL.dim * 64 * (16 + 8 + 8 + 16) + 3 * MODEL.dim * MODEL.hidden_dim
)  # numbers in a block's matrices
BLOCK = MATMULS + 2 * MODEL.dim


def layout(accumulation=1, chunk=-1, **parallelism):
    config = Config(
        training=Training(local_batch_size=2, seq_len=TOKENS, loss_chunk_tokens=chunk),
        parallelism=Parallelism(**parallelism),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=Compile(enable=True),
    )
    training = config.training.replace(
        global_batch_size=accumulation * Layout.from_config(config, RANKS, MODEL).sequences_per_step
    )
    config = config.replace(training=training)
    return PlannedLayout(**vars(Layout.from_config(config, RANKS, MODEL)), config=config)


FSDP, TP, CHUNKED = layout(), layout(2, tensor_parallel_degree=2), layout(chunk=256)
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
PIPELINE = dict(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble")
HALVES, HALVES_ONCE = (
    layout(**PIPELINE, fsdp_communication=when) for when in ("microbatch", "step")
)
WANTED |= {("halves", blocks): HALVES for blocks in (3, 4, 5)} | {("once", 3): HALVES_ONCE}
WANTED |= {("both", 3): HALVES}
KINDS = {"halves": "I", "once": "I", "both": "BI"}  # of backward
TIED_COPIES = dataclasses.replace(
    layout(4, data_parallel_replicate_degree=2, pipeline_parallel_degree=2, **HOW),
    model=dataclasses.replace(MODEL, tied_embeddings=True),
)
WANTED |= {("last of tied copies", 3): TIED_COPIES}
MODULES = {"last of tied copies": ("norm", "output")}


@pytest.fixture(scope="module")
def traces():
    """{(what, blocks): costs, timelines and tensors}"""
    with start_tracing(RANKS) as processes:
        tasks = {
            key: processes.submit(
                trace_stage,
                mine,
                MODULES.get(key[0], WHOLE),
                frozenset(KINDS.get(key[0], "B")),
                key[1],
                H100,
            )
            for key, mine in WANTED.items()
        }
        return {key: task.result() for key, task in tasks.items()}


def test_the_server_that_traces_sees_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen = []
    start = forkserver.ensure_running
    monkeypatch.setattr(
        forkserver,
        "ensure_running",
        lambda: (seen.append(os.environ["CUDA_VISIBLE_DEVICES"]), start()),
    )
    with start_tracing(RANKS):
        assert seen == [""]


@pytest.fixture(scope="module")
def traced(traces):
    return {key: each.costs for key, each in traces.items()}


@pytest.mark.parametrize("blocks", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_fsdp_sends_every_weight_forward_again_backward_and_every_gradient(traced, blocks):
    costs = traced["fsdp", blocks]
    parameters = blocks * BLOCK + 2 * TABLE + MODEL.dim
    share = (RANKS - 1) / RANKS  # of a ring
    assert costs.shard_elements * RANKS == parameters
    assert costs.full_elements == parameters
    forward, backward = 2 * parameters, 2 * blocks * BLOCK + 4 * parameters
    assert costs.graphs["forward"].sent["dp_shard"] == forward * share
    # Embedding, norm and output are not gathered again; gradients are float32.
    assert costs.graphs["backward"].sent["dp_shard"] == backward * share
    assert costs.graphs["forward"].sent_to_other_nodes["dp_shard"] == 0.0  # one node
    step = simulate_step(FSDP, [costs], H100)
    assert step.sent == {"dp_shard": (forward + backward) * share}  # and nothing else


@pytest.mark.slow
def test_copies_send_thin_factors_once_a_step_and_keep_errors(traces):
    costs, shard = traces["copies", 3].costs, RANKS // 2
    copies = costs.once.pop("after_backward")
    assert not any(
        "dp_replicate" in part.sent for part in (*costs.graphs.values(), *costs.once.values())
    )
    costs.once["after_backward"] = copies
    sizes = {
        (1024, 1024): 2,
        (512, 1024): 2,
        (3072, 1024): 2,
        (1024, 3072): 1,
    }  # wq and wo, wk and wv, w1 and w3, w2
    factors = 3 * sum(count * 8 * (n // shard + m) for (n, m), count in sizes.items())
    factors += 2 * 8 * (MODEL.vocab_size // shard + MODEL.dim)
    norms = (3 * 2 + 1) * MODEL.dim // shard
    assert copies.sent["dp_replicate"] == 4 * (
        factors + norms
    )  # 2 (k - 1) / k of it, for k = 2 copies
    step = simulate_step(COPIES, [costs], H100)
    assert step.sent["dp_replicate"] == 4 * (factors + norms)  # once for four microbatches
    assert step.parts["exposed.dp_replicate"] == copies.exposed["dp_replicate"] > 0
    memory = memory_of(
        COPIES, [stage_of(traces["copies", 3].tensors, 3, pipelined=False)], H100
    ).parts
    shards = 4 * (3 * MATMULS + 2 * TABLE) / shard
    assert shards < memory["kept by features"] < 2.1 * shards


@pytest.mark.slow
def test_the_copy_of_a_tied_table_is_neither_updated_nor_compressed(traces):
    found = traces["last of tied copies", 3]
    weights = found.tensors.weights
    (copy,) = [weight for weight in weights if not weight.updated]
    assert copy.full_elements == TABLE
    assert copy.kept == KeptNumbers()
    compressed = [weight for weight in weights if weight.kept != KeptNumbers()]
    assert compressed
    assert sum(weight.full_elements for weight in weights) == 3 * BLOCK + MODEL.dim + TABLE
    assert found.costs.full_elements == 3 * BLOCK + MODEL.dim + TABLE
    qs = [weight.kept.always - weight.shard_elements for weight in compressed]
    ps = [64 * weight.shard_elements / q for weight, q in zip(compressed, qs, strict=True)]
    factors = sum(qs) + sum(ps)
    as_they_are = sum(
        weight.shard_elements for weight in weights if weight.updated and weight not in compressed
    )
    # all-reduces of two copies
    assert found.costs.once["after_backward"].sent["dp_replicate"] == 4 * (factors + as_they_are)


def test_nothing_hides_the_factors_of_all_gradients_and_the_others():
    shard = 4
    blocks = ["tok_embeddings", *(f"layers.{number}" for number in range(4)), "output"]
    sizes = {f"{block}.weight": (1024, (2048,)) for block in blocks} | {"norm.weight": (1024, ())}
    plans = {
        torch.nn.Parameter(torch.empty(0)): ShardSpec(
            fqn=fqn,
            rows=rows,
            row_shape=row_shape,
            axis=Axis("s", shard),
            sum_groups=(),
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
        )
        for fqn, (rows, row_shape) in sizes.items()
    }
    axes = {(0, shard): "dp_replicate"}
    costs = Costs()
    FEATURE.add_costs_after_backward(COPIES.config, costs, plans, H100, axes)
    each = (6 * 8 * 1024 / shard, 6 * 8 * 2048, 1024 / shard)  # P, Q, and what is not compressed
    seconds = sum(H100.collective("all_reduce", 4 * numbers, (0, shard)) for numbers in each)
    assert costs.communication["dp_replicate"] == pytest.approx(seconds)
    assert costs.exposed["dp_replicate"] == pytest.approx(seconds)


@pytest.mark.parametrize("blocks", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_matmuls_and_attention_are_those_of_the_formula(traced, blocks):
    graphs = traced["fsdp", blocks].graphs
    forward, backward = graphs["forward"], graphs["backward"]
    tokens = 2 * TOKENS
    assert forward.matmul_flops == 2 * tokens * (blocks * MATMULS + TABLE)
    assert backward.matmul_flops == 2 * forward.matmul_flops
    # Of two matmuls, half.
    assert forward.attention_flops == blocks * 2 * tokens * TOKENS * MODEL.dim
    # Five, one of them a second time.
    assert backward.attention_flops == 2.5 * forward.attention_flops
    needed = flops_per_token(dataclasses.replace(MODEL, n_layers=blocks), TOKENS) * tokens
    assert needed == 3 * forward.matmul_flops + 3 * forward.attention_flops


def check_line(traces, depths, blocks, what="fsdp"):
    line, full = (
        costs_at({depth: traces[what, depth] for depth in depths}, blocks),
        traces[what, blocks].costs,
    )
    assert (line.shard_elements, line.full_elements) == (full.shard_elements, full.full_elements)
    assert line.graphs.keys() == full.graphs.keys()
    for name, costs in full.graphs.items():
        for field in ("sent", "sent_to_other_nodes", "matmul_flops", "attention_flops"):
            assert getattr(line.graphs[name], field) == getattr(costs, field), (name, field)
        if not name.startswith("loss"):
            assert line.graphs[name].compute == pytest.approx(costs.compute, rel=0.02)
    steps = [simulate_step(FSDP, [costs], H100).seconds for costs in (line, full)]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    check_tensors(traces[what, max(depths)], traces[what, blocks], blocks)


def check_tensors(less, full, blocks):
    """A stage with repeated blocks allocates what the traced one does, and keeps as much alive."""
    repeated, traced = (stage_of(each.tensors, blocks, pipelined=False) for each in (less, full))
    assert Counter(
        (weight.shard_elements, weight.full_elements) for weight in repeated.weights
    ) == Counter((weight.shard_elements, weight.full_elements) for weight in traced.weights)
    assert kept(repeated) == kept(traced)
    for kind, tape in repeated.tapes.items():
        assert len(tape.elements) == pytest.approx(len(traced.tapes[kind].elements), rel=0.1)
    if "B" not in repeated.tapes:
        return
    memories = [memory_of(FSDP, [stage], H100) for stage in (repeated, traced)]
    assert memories[0].phase == memories[1].phase
    assert memories[0].peak == pytest.approx(memories[1].peak, rel=0.01)


def kept(stage, what="activations"):
    """Bytes that forward makes for backward."""
    (tape,) = stage.tapes.values()
    return sum(size for size, part in zip(tape.sizes, tape.parts, strict=True) if part == what)


def kept_by(graph, tape):
    """Bytes that a graph allocates less those that it frees, without gradients of weights."""
    allocated = [event for event in tape.events[graph] if event >= len(tape.elements)]
    freed = [~event for event in tape.events[graph] if ~event >= len(tape.elements)]
    return sum(tape.sizes[made] for made in allocated) - sum(tape.sizes[gone] for gone in freed)


@pytest.mark.slow
def test_two_depths_tell_of_a_third(traces):
    assert depths_to_trace(FSDP.config) == (4, 8)
    check_line(traces, (3, 4), 5)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["halves", "once"])
def test_a_backward_in_halves_computes_what_a_whole_one_does(traced, what):
    graphs = traced[what, 3].graphs
    forward, inputs, weights = (
        graphs[name] for name in ("forward", "backward_input", "backward_weight")
    )
    assert inputs.matmul_flops == weights.matmul_flops == forward.matmul_flops
    assert (inputs.attention_flops, weights.attention_flops) == (2.5 * forward.attention_flops, 0)
    share = (RANKS // 2 - 1) / (RANKS // 2)  # of a ring of the ranks of a stage
    parameters = 3 * BLOCK + 2 * TABLE + MODEL.dim
    gathered = 2 * 3 * BLOCK * share  # in bfloat16; what forward reads last is kept: the output
    if what == "once":
        assert not inputs.sent
        assert not weights.sent
    else:
        assert inputs.sent["dp_shard"] == pytest.approx(gathered)
        assert weights.sent["dp_shard"] == 4 * parameters * share


@pytest.mark.slow
def test_two_depths_tell_of_a_third_in_halves(traces):
    check_line(traces, (3, 4), 5, "halves")
    repeated, traced = (
        stage_of(traces["halves", blocks].tensors, 5, pipelined=True) for blocks in (4, 5)
    )
    between = "kept for gradients of weights"
    assert kept(repeated, between) == kept(traced, between) > 0
    for graph in ("forward", "backward_input", "backward_weight"):
        found, expected = (kept_by(graph, stage.tapes["I"]) for stage in (repeated, traced))
        assert found == expected, graph


@pytest.mark.slow
def test_a_stage_that_runs_backward_both_ways_has_the_graphs_of_each(traces):
    both, halves = (traces[what, 3] for what in ("both", "halves"))
    costs, of_halves = both.costs, halves.costs
    assert costs.of_action("I") == of_halves.of_action("I")
    assert costs.of_action("W") == of_halves.of_action("W")
    whole = costs.of_action("B")
    apart = [costs.of_action(kind) for kind in "IW"]
    assert whole.matmul_flops == sum(half.matmul_flops for half in apart)
    assert whole.sent == {axis: sum(half.sent[axis] for half in apart) for axis in whole.sent}
    assert whole.compute == pytest.approx(sum(half.compute for half in apart), rel=0.05)
    stage = stage_of(both.tensors, 3, pipelined=True)
    assert stage.tapes["I"] == stage_of(halves.tensors, 3, pipelined=True).tapes["I"]
    forward = [kept_by("forward", tape) for tape in stage.tapes.values()]
    assert forward[0] == forward[1] > 0
    gradients = [Counter(tape.elements) for tape in stage.tapes.values()]
    assert gradients[0] == gradients[1]


@pytest.mark.slow
def test_a_loss_in_chunks_has_the_same_matmuls_no_logits_and_sums_of_the_projections_gradient(
    traces, traced
):
    whole, chunked = traced["fsdp", 3], traced["chunks", 3]
    assert not any(name.startswith("loss") for name in chunked.graphs)
    found, expected = (
        [each.graphs[name] for name in ("forward", "backward")] for each in (chunked, whole)
    )
    flops = [sum(costs.matmul_flops for costs in each) for each in (found, expected)]
    sent = [sum(costs.sent["dp_shard"] for costs in each) for each in (found, expected)]
    assert flops[0] == flops[1]
    assert sent[0] == sent[1]
    chunks, logits = 2 * TOKENS // 256, 2 * TOKENS * MODEL.vocab_size * 2
    lives = {
        key: traces[key].tensors.lifetimes["B"].tensors for key in (("fsdp", 3), ("chunks", 3))
    }
    assert max(life.nbytes for life in lives["fsdp", 3]) == logits
    assert (
        max(life.nbytes for life in lives["chunks", 3]) == 4 * TABLE
    )  # sums of the gradient in float32
    held = [
        life
        for life in lives["chunks", 3]
        if life.nbytes == 4 * TABLE and life.allocated[0] == "forward"
    ]
    assert len(held) == chunks
    moments = [
        sum(life.allocated[1] <= moment < life.freed[1] for life in held)
        for moment in range(max(life.freed[1] for life in held))
    ]
    assert max(moments) == 2  # before and after the addition of a chunk


def test_tensor_parallelism_sends_activations_and_fsdp_once_a_step(traced):
    costs = traced["tp", 2]
    forward = costs.graphs["forward"]
    activations = 2 * TOKENS * MODEL.dim * 2  # bytes of (B, T, C) in bfloat16
    # Of a block two all-gathers and two reduce-scatters; the embedding's reduce-scatter, the
    # output's all-gather; three numbers a token of the loss.
    assert forward.sent["tp"] == (4 * 2 + 2) * activations / 2 + 3 * 4 * 2 * TOKENS
    assert forward.exposed["tp"] == pytest.approx(forward.communication["tp"])
    assert not any("dp_shard" in graph.sent for graph in costs.graphs.values())
    split, replicated = 2 * MATMULS + 2 * TABLE, 5 * MODEL.dim
    parameters = split / 2 + replicated
    assert costs.full_elements == parameters
    assert costs.once["gather"].sent["dp_shard"] == 2 * parameters * 3 / 4
    assert costs.once["reduce"].sent["dp_shard"] == 4 * parameters * 3 / 4
    for what in ("gather", "reduce"):  # under the first forward and the last backward
        once = costs.once[what]
        assert 0 < once.exposed["dp_shard"] < once.communication["dp_shard"]
    assert (
        costs.once["reduce"].sent["tp"] == 2 * 4 * replicated / 4 / 2
    )  # all-reduce of a quarter of the norms


@pytest.mark.parametrize(
    ("sections", "depths"),
    [
        ({}, (4, 8)),
        (dict(activation_checkpoint=ActivationCheckpoint(mode="selective")), (4, 8)),
        (
            dict(
                activation_checkpoint=ActivationCheckpoint(
                    mode="selective", selective_ac_option="3"
                )
            ),
            (6, 12),
        ),
        (dict(parallelism=Parallelism(fsdp_keep_gathered=("layers.5", "output"))), None),
        (dict(compile=Compile(enable=True, bucketing="greedy")), None),
        (dict(compile=Compile(enable=False, bucketing="greedy")), (4, 8)),
        (dict(float8=Float8Keys(enable=True, filter_fqns=("attention.wk", "w2"))), (4, 8)),
        (dict(float8=Float8Keys(enable=True, filter_fqns=("layers.31",))), None),
        (dict(float8=Float8Keys(enable=True, filter_fqns=("31.attention",))), None),
    ],
)
def test_which_depths_lie_on_a_line(sections, depths):
    assert depths_to_trace(Config(**sections)) == depths


def test_every_key_that_changes_a_graph_has_traces_of_its_own():
    def traced(*options):
        config = load_config(DEBUG, options)
        return trace_key(PlannedLayout(**vars(Layout.from_config(config, 2)), config=config))

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
    moe = ["--model.name=qwen3_moe"]
    split = [*moe, "--parallelism.expert_parallel_degree=2"]
    others += [moe, split, [*split, "--experts.capacity_factor=1.5"]]
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
        plan, "make_plans", lambda *_, **__: iter([CompileError("compile.enable: no graph")])
    )
    with pytest.raises(ConfigError, match="no graph"):
        plan.make_plan(FSDP, H100)
