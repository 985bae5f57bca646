"""Rules across keys and layout: what is refused, with which words, and that the way out works."""

import dataclasses
import re

import pytest
from tiny import DEBUG

from titan_lite.config import Config, ConfigError, load_config, read_config
from titan_lite.config.errors import MachineError, nearest_multiples
from titan_lite.config.families import LLAMA3
from titan_lite.distributed.layout import Layout
from titan_lite.features.replica_groups import rules as rules_of_groups
from titan_lite.rules import check, check_all, check_recipe
from titan_lite.rules.job import dump_folder_cannot_be_written
from titan_lite.rules.mistakes import (
    RULES_OF_INPUTS,
    RULES_OF_KEYS,
    RULES_OF_LAYOUT,
    RULES_OF_MACHINE,
    Mistake,
    nearest_divisors,
)


def checked(*options, ranks=2):
    config = load_config(DEBUG, options)
    check(config, Layout.from_config(config, ranks))


def test_all_mistakes_are_told_at_once_each_with_its_origin():
    options = ["--model.n_heads=6", "--model.dim=100", "--training.loss_chunk_tokens=512"]
    with pytest.raises(ConfigError) as error:
        checked(*options)
    assert len(error.value.args) == 3
    assert all(message.startswith("command line: ") for message in error.value.args)


def told_before_a_run(*options, ranks=2):
    config, wrong = read_config(DEBUG, options)
    with pytest.raises(ConfigError) as error:
        check_all(config, ranks, wrong)
    return [re.sub(rf"^(command line|{DEBUG}): ", "", line) for line in error.value.args]


def test_mistakes_of_all_kinds_are_told_at_once(tmp_path):
    """A value, an option, keys that contradict, a layout, a folder, documents and a tokenizer."""
    (tmp_path / "file").touch()
    lines = told_before_a_run(
        "--training.max_norm=0",
        "--compile.enabled",
        "--checkpoint.must_resume",
        "--checkpoint.no-enable",
        "--parallelism.tensor_parallel_degree=3",
        f"--job.dump_folder={tmp_path}/file",
        f"--data.sources=[{{dataset='local', path='{tmp_path}/a'}}, {{dataset='local', path='b'}}]",
        f"--model.tokenizer_path={tmp_path}/none.model",
        "--metrics.enable_wandb",
    )
    assert [line.partition(" ")[0] for line in lines] == [
        "training.max_norm",
        "unknown",
        "job.dump_folder",
        "model.tokenizer_path",
        "parallelism.tensor_parallel_degree",
        "checkpoint.must_resume",
        "data.sources[1].path",
        "data.sources[2].path",
        "metrics.enable_wandb",
    ]


def test_a_rank_that_was_started_alone_tells_inputs_beside_other_mistakes(tmp_path):
    options = [f"--data.sources=[{{dataset='local', path='{tmp_path}/a'}}]"]
    check_recipe(load_config(DEBUG, options), 2)  # its inputs are read later, with torch
    config, wrong = read_config(DEBUG, [*options, "--training.max_norm=0"])
    with pytest.raises(ConfigError) as error:
        check_recipe(config, 2, wrong)
    assert ["max_norm" in line for line in error.value.args] == [True, False]


def test_an_input_is_checked_beside_a_layout_that_cannot_be(tmp_path):
    lines = told_before_a_run("--parallelism.tensor_parallel_degree=3", "--model.vocab_size=300")
    assert [line.partition(" ")[0] for line in lines] == [
        "model.tokenizer_path",
        "parallelism.tensor_parallel_degree",
    ]


def test_a_mistake_is_told_although_the_machine_fails(monkeypatch):
    def away(*_):
        raise MachineError("the disk is away")

    monkeypatch.setattr("titan_lite.data.documents.check_data", away)
    (line,) = told_before_a_run("--training.max_norm=0")
    assert line.startswith("training.max_norm = 0.0: ")
    with pytest.raises(MachineError, match="the disk is away"):
        check_all(load_config(DEBUG), 2)


def test_a_mistake_is_told_in_the_words_of_a_recipe():
    key = "parallelism.fsdp_keep_gathered"
    mistake = Mistake(key, ("norm",), "frees the output", 'such as ["output"]')
    assert mistake.message(Config()) == f'{key} = ["norm"] frees the output; use such as ["output"]'


def test_rules_have_names_of_their_own():
    rules = [*RULES_OF_KEYS, *RULES_OF_LAYOUT, *RULES_OF_INPUTS, *RULES_OF_MACHINE]
    assert len({rule.__name__ for rule in rules}) == len(rules) > 40


def test_neighbours_of_a_wrong_number():
    assert nearest_multiples(250, 4) == [248, 252]
    assert nearest_multiples(1, 4) == [4]
    assert nearest_divisors(128, 3) == [2, 4]
    assert nearest_divisors(128, 129) == [128]


MODEL = dataclasses.replace(
    LLAMA3.flavors["8B"], n_heads=32, n_kv_heads=8, hidden_dim=14336, vocab_size=128_256
)


def check_tensor_parallel(tp, seq_len=8192, **model):
    config = Config().replace(
        model=Config().model.replace(flavor="8B", tokenizer_path="t.model"),
        parallelism=Config().parallelism.replace(tensor_parallel_degree=tp),
        training=Config().training.replace(seq_len=seq_len),
    )
    check(config, Layout.from_config(config, tp, dataclasses.replace(MODEL, **model)))


def test_a_sequence_is_no_longer_than_the_rotary_tables():
    with pytest.raises(
        ConfigError,
        match=r"training.seq_len = 200000 is more than the model's max_seq_len; use at most 131072",
    ):
        checked("--training.seq_len=200000")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_degrees_that_fit(tp):
    check_tensor_parallel(tp)
    check_tensor_parallel(tp, vocab_size=128_257, hidden_dim=14335)  # these are split unevenly


@pytest.mark.parametrize(
    ("tp", "model", "words"),
    [
        (3, {}, ["does not divide the 32 attention heads and the 8 key/value heads", "; use 1"]),
        (16, {}, ["does not divide the 8 key/value heads; use 1 or 2 or 4 or 8"]),
        (8, dict(seq_len=4), ["does not divide the 4 tokens of training.seq_len; use 1 or 2 or 4"]),
        (2, dict(seq_len=4095), ["does not divide the 4095 tokens of training.seq_len; use 1"]),
        (
            8,
            dict(vocab_size=9),
            ["leaves a rank without any of the 9 tokens of the vocabulary", "a lower degree"],
        ),
        (
            4,
            dict(hidden_dim=5),
            ["leaves a rank without any of the 5 hidden units", "a lower degree"],
        ),
    ],
)
def test_tensor_parallel_degrees_that_do_not(tp, model, words):
    with pytest.raises(ConfigError) as error:
        check_tensor_parallel(tp, **model)
    assert f"parallelism.tensor_parallel_degree = {tp} " in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("chunks", "use"), [(3, "2 or 4"), (129, "128"), (100, "64 or 128")])
def test_chunks_that_do_not_divide_the_tokens_of_a_rank_are_refused(chunks, use):
    options = [
        "--parallelism.tensor_parallel_degree=2",
        f"--compile.tensor_parallel_chunks={chunks}",
    ]
    with pytest.raises(
        ConfigError, match=rf"chunks = {chunks} does not divide the 128 tokens .*; use {use}$"
    ):
        checked("--compile.enable", *options)
    checked(*options)  # an eager run cuts nothing, and its start says so


# The folder of a run


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("file", "{0}/file is no folder"),
        ("file/run", "{0}/file is no folder"),
        ("loop", "{0}/loop: Too many levels of symbolic links"),
        ("loop/run", "{0}/loop/run: Too many levels of symbolic links"),
        ("dangling", "{0}/dangling is a link to nowhere, which is not there"),
        ("dangling/run", "{0}/dangling is a link to nowhere, which is not there"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_by_its_own_key(folder, why, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    config = load_config(DEBUG, ["--job.dump_folder", str(tmp_path / folder)])
    with pytest.raises(ConfigError) as refused:
        check_all(config, 1)
    line = str(refused.value)
    assert line.startswith("command line: job.dump_folder = ")
    assert line.endswith("; use a folder that can be created and written")
    assert why.format(tmp_path) in line
    assert "\n" not in line


def test_a_folder_that_can_be_made_is_not_refused(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    config = load_config(DEBUG, ["--job.dump_folder", str(tmp_path / "link/new/run")])
    check_all(config, 1)


def test_a_recipe_in_the_folder_of_the_run_is_not_replaced(tmp_path):
    recipe = tmp_path / "config.toml"
    recipe.write_text(f'extends = "{DEBUG}"\n')
    config = load_config(recipe, ["--job.dump_folder", str(tmp_path)])
    with pytest.raises(ConfigError) as refused:
        check_all(config, 1)
    assert str(refused.value) == (
        f'command line: job.dump_folder = "{tmp_path}" has {recipe}, which no run has written and'
        " this one would replace; use another folder, or rename this file"
    )
    (tmp_path / "lock").touch()  # of a run, which goes on with its own recipe
    check_all(config, 1)


# What a run needs beside its recipe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint.load_step=9"], r"checkpoint.load_step = 9: there is no such checkpoint"),
    ],
)
def test_an_input_that_is_not_there_is_named(options, message, tmp_path):
    config = load_config(DEBUG, [f"--job.dump_folder={tmp_path}", *options])
    with pytest.raises(ConfigError, match=message):
        check_all(config, 1)


# Mixtures of experts

MOE = ("--model.name=qwen3_moe",)
EP = "--parallelism.expert_parallel_degree=2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--model.n_experts=4"],
            'model.n_experts = 4 has no effect with model.name = "llama3", a dense family; use'
            ' model.name = "qwen3_moe", or remove it',
        ),
        (["--experts.balance=bias"], 'experts.balance = "bias" has no effect with model.name'),
        (
            [*MOE, "--model.hidden_dim=92", "--training.mixed_precision_param=bfloat16"],
            "model.hidden_dim = 92 is not a multiple of 8, as grouped GEMMs in bfloat16 need it;"
            " use 88 or 96",
        ),
        (
            [*MOE, "--experts.balance=none", "--experts.balance_coefficient=0.1"],
            'experts.balance_coefficient = 0.1 has no effect with experts.balance = "none"; use'
            ' experts.balance = "step" or "sequence", or remove it',
        ),
        (
            [*MOE, "--float8.enable", "--float8.filter_fqns", "moe.experts"],
            'has "moe.experts", which is no part of the name of a linear layer in a block',
        ),
        ([*MOE, "--model.flavor=", "--model.dim=64"], "model.n_experts, model.experts_per_token"),
        (
            [*MOE, EP, "--experts.capacity_factor=0.5"],
            "experts.capacity_factor = 0.5: expected a number at least 1, or 0",
        ),
        (
            [*MOE, "--experts.balance=microbatch"],
            'experts.balance = "microbatch": expected one of "step", "sequence", "bias", "none"',
        ),
    ],
)
def test_a_mixture_of_experts_that_cannot_be(options, words):
    with pytest.raises(ConfigError) as error:
        checked(*options)
    assert words in str(error.value)


def test_a_mixture_of_experts_that_can_be():
    checked(*MOE, "--model.n_experts=3", "--experts.balance=sequence")
    checked(*MOE, EP, "--experts.capacity_factor=1.5", ranks=4)


def test_expert_parallelism_divides_experts_and_ranks():
    """The values that fit are those that divide both."""
    with pytest.raises(ConfigError) as error:
        checked(*MOE, "--model.n_experts=6", "--parallelism.expert_parallel_degree=4", ranks=4)
    assert "does not divide the 6 experts; use 1 or 2" in str(error.value)
    checked(*MOE, "--model.n_experts=6", EP, "--parallelism.tensor_parallel_degree=4", ranks=4)
    with pytest.raises(ConfigError, match="the 1 ranks of dp_shard x cp x tp; use 1"):
        checked(*MOE, EP, "--parallelism.data_parallel_replicate_degree=4", ranks=4)


GROUPS = "--fault_tolerance.replica_groups=2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--fault_tolerance.min_replica_groups=2"],
            "command line: fault_tolerance.min_replica_groups = 2 has no effect with fault_tolerance.replica_groups"
            " = 1; use fault_tolerance.replica_groups = 2 or more, or remove it",
        ),
        (
            [GROUPS, "--fault_tolerance.lighthouse=node0:29510"],
            'command line: fault_tolerance.lighthouse = "node0:29510" is not of the form'
            " http://HOST:PORT; use such as http://node0:29510",
        ),
    ],
)
def test_what_does_not_go_with_groups_that_may_be_lost(options, message):
    with pytest.raises(ConfigError) as error:
        checked(*options)
    assert error.value.args == (message,)


def test_a_package_for_groups_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(rules_of_groups, "is_installed", lambda name: name != "torchft")
    config = load_config(DEBUG, [GROUPS])
    with pytest.raises(ConfigError, match=r"groups = 2 needs torchft, .*titan_lite\[fault_tol"):
        check_all(config, 2)


def test_groups_share_the_local_batches_of_a_step():
    """Without a batch size each has one; a batch size is that of the run."""
    config = load_config(DEBUG, [GROUPS])
    assert Layout.from_config(config, 2).accumulation == 2
    sequences = 8 * config.training.local_batch_size
    config = load_config(DEBUG, [GROUPS, f"--training.global_batch_size={sequences}"])
    layout = Layout.from_config(config, 2)
    assert (layout.accumulation, layout.sequences_per_step) == (4, sequences)


def test_a_check_leaves_the_folder_of_a_run_as_it_was(tmp_path):
    before = tmp_path.stat().st_mtime_ns
    config = load_config(DEBUG, [f"--job.dump_folder={tmp_path}"])
    assert list(dump_folder_cannot_be_written(config)) == []
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mtime_ns == before
