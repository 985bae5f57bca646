"""`python -m titan_lite verify --processes`: what agrees, what does not and is named, and what cannot be asked."""

import re

import pytest
import torch
from commands import python, run
from tiny import DEBUG, RECIPES

from titan_lite.config import load_config
from titan_lite.distributed.buckets import Bucket
from titan_lite.tools.verify import command as program
from titan_lite.tools.verify.compare import compare
from titan_lite.tools.verify.observe import Observed
from titan_lite.tools.verify.processes import Verification
from titan_lite.tools.verify.proxy import (
    every_layout,
    layout_of,
    name_of,
    parse_layout,
    proxy,
    reference,
)

pytestmark = pytest.mark.ranks(2)


def command(*arguments):
    return run(*python("-m", "titan_lite", "verify", "--processes", *arguments), seconds=900)


def test_a_recipe_that_is_right_exits_with_0():
    result = command(
        DEBUG,
        "--layouts",
        "dp_shard=2",
        "pp=3,tp=3",
        "--steps=1",
    )
    assert result.returncode == 0
    assert re.search(
        r"^dp_shard=2 +2 +\d\.\de[-+]\d\d +\d\.\de-\d\d +[\w.]+ +- +agrees$", result.stdout, re.M
    )
    assert re.search(
        r"^pp=3,tp=3 +9 +not possible: parallelism.tensor_parallel_degree = 3 does not divide",
        result.stdout,
        re.M,
    )
    assert "tolerances, relative: loss 0.0001, gradient 0.0001" in result.stdout


BROKEN = "layers.1.feed_forward.w2.weight"


def one_gradient_is_not_reduced(trainer):
    """On rank 0: its own part only, as if the others had no tokens."""
    rows_of, rank = Bucket.rows_of, trainer.rank

    def broken(bucket, flat):
        gradients = zip(bucket.specs, rows_of(bucket, flat), strict=True)
        return [
            gradient / 2 if plan.fqn == BROKEN and rank == 0 else gradient
            for plan, gradient in gradients
        ]

    Bucket.rows_of = broken


def one_module_is_wrong(trainer):
    """The second rank's part of one module's result is another one."""
    feed_forward = trainer.model.stages[0].model.layers["2"].feed_forward
    if trainer.rank == 1:
        forward = feed_forward.forward
        feed_forward.forward = lambda hidden: forward(hidden) * 1.5


def one_rank_fails(trainer):
    if trainer.rank == 1:
        raise RuntimeError("out of luck")


def verified(prepare, *options, layout="dp_shard=2"):
    config = load_config(DEBUG, options)
    return program.verify(config, [parse_layout(layout)], steps=1, prepare=prepare)


@pytest.mark.slow
def test_a_gradient_that_is_not_reduced_is_named(capfd):
    assert not verified(one_gradient_is_not_reduced)
    (line,) = re.findall(r"^dp_shard=2 .*$", capfd.readouterr().out, re.M)
    assert re.search(rf"  {re.escape(BROKEN)} +- +DIFFERS$", line)


def test_the_first_module_that_is_wrong_is_named(capfd):
    assert not verified(one_module_is_wrong)
    (line,) = re.findall(r"^dp_shard=2 .*$", capfd.readouterr().out, re.M)
    assert re.search(r"  layers\.2\.feed_forward +DIFFERS$", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "verdict"),
    [
        (None, "agrees"),
        pytest.param(one_gradient_is_not_reduced, "DIFFERS", marks=pytest.mark.release),
    ],
)
def test_float8_has_a_reference_and_tolerances_of_its_own(prepare, verdict, capfd):
    assert verified(prepare, "--float8.enable", "--float8.all_gather") == (verdict == "agrees")
    out = capfd.readouterr().out
    assert "float8 tensorwise beside float32" in out
    assert "tolerances, relative: loss 0.001, gradient 0.25, activations 0.02" in out
    assert re.search(rf"^dp_shard=2 .* {verdict}$", out, re.M)
    for dtype in ("bfloat16", "float32"):
        (gradient,) = re.findall(
            rf"^float8 beside {dtype} +\d\.\de-\d\d  (\d\.\de-\d\d) ", out, re.M
        )
        assert 0.05 < float(gradient) < 0.25


def test_a_layout_that_fails_says_why_and_does_not_agree(capfd):
    assert not verified(one_rank_fails)
    assert re.search(r"FAILS\n(.*\n)*.*RuntimeError: out of luck", capfd.readouterr().out)


def exit_code(arguments):
    try:
        return program.main(arguments)
    except SystemExit as stop:  # as argparse ends a program
        return stop.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [DEBUG, "--layouts", "dp=2"],
            (
                r"--layouts dp=2: 'dp=2' is not a degree; use recipe, all, or degrees of pp,"
                r" dp_replicate"
            ),
        ),
        ([DEBUG, "--layouts", "tp=two"], r"'tp=two' is not a degree"),
        ([DEBUG, "--layouts=tp=3"], r"parallelism.tensor_parallel_degree = 3 "),
        ([DEBUG, "--layouts", "tp=3", "tp=5"], r"none of these layouts is possible"),
        ([DEBUG, "--layouts=dp_shard=2,ep=2"], r"ep = 2 has no effect with model.name = .llama3"),
        (
            [RECIPES / "qwen3_moe_debug.toml", "--layouts=ep=2"],
            r"does not divide the 1 ranks of dp_shard x cp x tp",
        ),
        ([DEBUG, "--world-size", "0"], r"argument --world-size: 0: use an integer at least 1"),
        ([DEBUG, "--world-size=4", "--layouts=tp=2"], r"--world-size 4 has no effect with"),
        (
            [DEBUG, "--world-size=3", "--parallelism.tensor_parallel_degree=2"],
            r"multiply to 2, which does not divide 3 ranks",
        ),
    ],
)
def test_wrong_arguments_end_with_one_line_and_exit_code_2(arguments, message, capsys):
    assert exit_code(["--processes", *map(str, arguments)]) == 2
    errors = capsys.readouterr().err  # a line for each mistake
    assert errors.startswith("error: ")
    assert re.search(message, errors)


@pytest.mark.parametrize("option", ["--layouts=tp=2", "--steps=2"])
def test_options_of_processes_have_no_effect_on_graphs(option, capsys):
    assert exit_code([str(DEBUG), option]) == 2
    name = option[: option.index("=")]
    assert f"{name} has no effect without --processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("debug_model", "dp_shard=4"),
        ("llama3_8b", "dp_shard=4"),
        ("llama3_70b", "dp_shard=4,tp=2"),
        ("llama3_405b", "pp=2,dp_shard=2,tp=2"),
        ("llama3_8b_128k", "dp_shard=4,cp=2"),
    ],
)
def test_a_proxy_has_the_kinds_of_its_recipe(recipe, layout):
    config = load_config(RECIPES / f"{recipe}.toml")
    assert layout_of(config) == parse_layout(layout)


@pytest.mark.parametrize(
    ("recipe", "world_size", "layout"),
    [
        ("debug_model", 2, "dp_shard=2"),
        ("debug_model", 4, "dp_shard=4"),
        ("debug_model", 512, "dp_shard=8"),
        ("llama3_70b", 64, "dp_shard=4,tp=2"),
        ("llama3_70b", 8, "dp_shard=2,tp=2"),
    ],
)
def test_a_proxy_is_that_of_the_recipe_on_a_number_of_ranks(recipe, world_size, layout):
    any_size = "--parallelism.data_parallel_shard_degree=-1"
    config = load_config(RECIPES / f"{recipe}.toml", [any_size])
    assert layout_of(config, world_size) == parse_layout(layout)


def test_a_proxy_of_groups_that_may_be_lost_is_one_of_them():
    groups = ["--fault_tolerance.replica_groups=2", "--fault_tolerance.min_replica_groups=2"]
    config = load_config(RECIPES / "debug_model.toml", groups)
    assert proxy(config, parse_layout("dp_shard=2"), steps=1).fault_tolerance.replica_groups == 1


def test_a_proxy_keeps_the_last_of_its_layers_gathered_for_those_that_it_lacks():
    keep = "--parallelism.fsdp_keep_gathered=layers.2.attention,layers.30,layers.31,norm"
    config = load_config(RECIPES / "llama3_8b.toml", [keep])
    small = proxy(config, parse_layout("dp_shard=2"), steps=1)
    assert small.parallelism.fsdp_keep_gathered == ("layers.2.attention", "layers.3", "norm")


@pytest.mark.parametrize(
    ("recipe", "layout", "chunk"),
    [
        ("debug_model", "dp_shard=2", -1),
        ("llama3_8b", "dp_shard=2", 102),  # of 8 sequences of 32 tokens
        ("llama3_8b", "cp=2,pp=2", 12),  # of 2 sequences of 16 tokens
        ("llama3_405b", "dp_shard=2", -1),  # tensor parallelism leaves few logits
    ],
)
def test_a_proxy_computes_its_loss_in_chunks_if_its_recipe_does(recipe, layout, chunk):
    config = load_config(RECIPES / f"{recipe}.toml")
    small = proxy(config, parse_layout(layout), steps=1)
    assert small.training.loss_chunk_tokens == chunk
    assert reference(small).training.loss_chunk_tokens == -1


def test_a_microbatch_of_a_proxy_has_the_tokens_that_matmuls_in_float8_need():
    config = load_config(RECIPES / "llama3_405b_float8.toml")
    small = proxy(config, parse_layout("pp=4,cp=4"), steps=1)
    size = small.parallelism.pipeline_parallel_microbatch_size
    assert size * small.training.seq_len // 4 == 16
    assert small.training.local_batch_size % size == 0


def test_a_proxy_has_the_documents_of_every_machine():
    config = load_config(
        RECIPES / "debug_model.toml", ['--data.sources=[{dataset = "local", path = "web"}, {}]']
    )
    small = proxy(config, parse_layout("dp_shard=2"), steps=1)
    assert (small.data.sources, small.data.dataset) == ((), "stdlib")


@pytest.mark.parametrize(
    ("layout", "chunks"), [("tp=2", 4), ("dp_shard=2", 4), ("cp=4,tp=2", 4), ("cp=8,tp=2", 2)]
)
def test_a_proxy_cuts_its_few_tokens_into_chunks_too(layout, chunks):
    config = load_config(RECIPES / "llama3_70b.toml", ["--compile.tensor_parallel_chunks=4"])
    assert proxy(config, parse_layout(layout), steps=1).compile.tensor_parallel_chunks == chunks


def test_a_proxy_needs_no_gpu_or_data_of_its_recipe_and_logs_nothing_elsewhere():
    options = [
        "--training.attention_kernel=FA3",
        "--training.mixed_precision_param=bfloat16",
        "--data.min_document_tokens=1000000",
    ]
    config = load_config(DEBUG, [*options, "--metrics.enable_wandb"])
    small = proxy(config, parse_layout("dp_shard=2"), steps=1)
    assert (small.training.attention_kernel, small.data.min_document_tokens) == ("auto", 0)
    assert (small.metrics.enable_wandb, small.metrics.enable_tensorboard) == (False, False)


def test_a_capacity_is_not_in_the_proxy_and_a_line_says_so(capsys):
    options = ["--parallelism.expert_parallel_degree=2", "--experts.capacity_factor=1.5"]
    config = load_config(RECIPES / "qwen3_moe_debug.toml", options)
    layout = layout_of(config, 2)
    assert name_of(layout) == "dp_shard=2,ep=2"
    assert proxy(config, layout, steps=1).experts.capacity_factor == 0
    Verification(config, [layout], steps=1).print_head()
    assert "not in the proxy: experts.capacity_factor = 1.5" in capsys.readouterr().out


def test_all_layouts_are_all_that_eight_processes_can_have():
    names = [name_of(layout) for layout in every_layout()]
    assert len(names) == len(set(names)) == 25
    # ep within those that share the experts of a block
    with_experts = [name_of(layout) for layout in every_layout(experts=True)]
    split = set(with_experts) - set(names)
    assert {"dp_shard=2,ep=2", "pp=2,cp=2,tp=2,ep=2"} <= split
    assert not {"pp=2,ep=2", "dp_replicate=2,ep=2"} & split
    assert {
        "pp=2",
        "dp_shard=2,cp=2",
        "pp=2,dp_shard=2,tp=2",
        "dp_replicate=2,dp_shard=2,tp=2",
    } <= set(names)


def test_a_comparison_sees_what_is_not_finite_and_what_is_missing():
    one = Observed(
        {(0, 1): (2.0, 1.0)},
        {1: 2.0},
        {"w": torch.ones(3)},
        {"a": torch.ones(3), "b": torch.ones(3)},
    )
    assert compare(one, one).agrees
    nan = Observed(
        {(0, 1): (2.0, 1.0)}, {1: 2.0}, {"w": torch.full((3,), torch.nan)}, one.activations
    )
    assert not compare(nan, one).agrees
    assert not compare(
        Observed({(0, 1): (torch.nan, 1.0)}, {1: 2.0}, one.gradients, one.activations), one
    ).agrees
    other_rank = Observed(
        {**one.losses, (1, 1): (-1.0, 1.0)}, one.validation, one.gradients, one.activations
    )
    assert compare(other_rank, one).loss > 1
    missing = Observed(one.losses, one.validation, one.gradients, {"a": torch.ones(3)})
    assert compare(missing, one).module == "b"


@pytest.mark.release
@pytest.mark.parametrize("recipe", ["llama3_1b", "llama3_70b", "llama3_405b", "llama3_8b_128k"])
def test_the_proxy_of_a_shipped_recipe_agrees(recipe):
    assert command(RECIPES / f"{recipe}.toml").returncode == 0


@pytest.mark.release
def test_the_proxy_of_tied_embeddings_agrees_in_a_pipeline():
    result = command(RECIPES / "llama3_1b.toml", "--layouts", "pp=2", "pp=2,tp=2")
    assert result.returncode == 0


@pytest.mark.release
def test_every_composition_agrees():
    assert command(DEBUG, "--layouts", "all").returncode == 0


def test_each_phase_of_a_recipe_is_verified(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "phases.toml"
    phase = "[[phases]]\nbegin = 60\nparallelism.tensor_parallel_degree = 2\n"
    checkpoints = "[checkpoint]\nenable = true\n"
    recipe.write_text(f'extends = "{DEBUG}"\n[training]\nsteps = 100\n{checkpoints}{phase}')
    verified = []

    def verify(config, layouts, steps):
        verified.append((config.phase, layouts[0]["tp"]))
        return len(verified) == 1

    monkeypatch.setattr(program, "verify", verify)
    assert program.main([str(recipe), "--processes"]) == 1
    assert verified == [((1, 0, 100), 1), ((1, 0, 100), 2)]  # each as a recipe without phases
    assert "phase 2 of 2, steps 61 to 100: parallelism.tensor" in capsys.readouterr().out
