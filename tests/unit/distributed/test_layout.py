"""Batches of a recipe on a number of ranks: those of each step, where the first ones have others."""

import pytest
from tiny import DEBUG, RECIPES

from titan_lite.config import ConfigError, load_config
from titan_lite.distributed.layout import make_layout

RAMP = ["--training.global_batch_size=16", "--training.global_batch_ramp=4 until 3, 8 until 5"]


def layout(*options, ranks=2):
    return make_layout(load_config(DEBUG, options), ranks)


def test_a_step_of_a_ramp_has_its_own_sequences():
    found = layout(*RAMP)
    assert [found.rows_at(step) for step in range(1, 8)] == [4, 4, 4, 8, 8, 16, 16]
    assert [found.accumulation_at(step) for step in range(1, 8)] == [1, 1, 1, 2, 2, 4, 4]
    assert (found.rows, found.most_rows, found.tokens) == (16, 16, 16 * 256)
    assert [found.tokens_until(step) // 256 for step in (0, 1, 3, 4, 6, 100)] == [
        0,
        4,
        12,
        20,
        44,
        44 + 94 * 16,
    ]
    assert found.ramp_in_words == "4 sequences until step 3, 8 sequences until step 5"
    # of two batches the larger one decides whether weights are gathered once a step
    assert layout(
        "--training.global_batch_size=4", "--training.global_batch_ramp=8 until 5"
    ).gathers_once
    assert (
        layout("--training.global_batch_size=4", "--training.global_batch_ramp=8 until 5").most_rows
        == 8
    )


def test_without_a_ramp_all_steps_are_alike():
    found = layout()
    assert {found.rows_at(step) for step in range(1, 100)} == {found.rows} == {found.most_rows}
    assert found.tokens_until(100) == 100 * found.tokens
    assert found.ramp_in_words == ""


@pytest.mark.parametrize(("until", "step"), [(3, 2), (3, 3), (3, 4), (100, 7)])
def test_tokens_until_a_step_are_those_of_its_steps(until, step):
    found = layout(
        "--training.global_batch_size=8",
        f"--training.global_batch_ramp=4 until {until}, 12 until {until + 2}",
    )
    assert (
        found.tokens_until(step)
        == sum(found.rows_at(each) for each in range(1, step + 1)) * found.seq_len
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--training.local_batch_size=1", "--training.seq_len=40"],
            ["a microbatch has 40 tokens", "use another"],
        ),
        (
            [
                "--parallelism.context_parallel_degree=2",
                "--training.local_batch_size=1",
                "--training.seq_len=48",
            ],
            ["has 24 tokens", "multiples of 16"],
        ),
        (
            ["--model.hidden_dim=680"],
            ["layers.0.feed_forward.w1.weight is 680 x 256", '["feed_forward.w1"]'],
        ),
        (
            ["--parallelism.tensor_parallel_degree=2", "--model.hidden_dim=688"],
            ["w1.weight is 344 x 256", "lower tensor_parallel_degree"],
        ),
        (
            ["--float8.filter_fqns=attention.wkv"],
            ['"attention.wkv" is no part', 'use such as "attention.wk"'],
        ),
        (
            ["--float8.all_gather", "--float8.recipe=rowwise"],
            ["float8.all_gather = true", "all_gather = false"],
        ),
        (
            [
                "--parallelism.enable_async_tensor_parallel",
                "--parallelism.tensor_parallel_degree=2",
                "--compile.enable",
            ],
            ["does not overlap", "use false"],
        ),
        (["--float8.filter_fqns=layers"], ["leaves no layer", "use false"]),
    ],
)
def test_what_float8_products_cannot_have_is_refused(options, words):
    with pytest.raises(ConfigError) as error:
        layout("--float8.enable", *options)
    for word in words:
        assert word in str(error.value)


def test_layers_that_stay_in_bfloat16_may_have_any_size():
    layout("--float8.enable", "--model.hidden_dim=680", "--float8.filter_fqns=feed_forward")
    layout("--model.hidden_dim=680", "--training.seq_len=40")


@pytest.mark.parametrize(
    ("recipe", "ranks", "options", "chunk"),
    [
        ("debug_model", 2, "", 0),
        ("debug_model", 2, "--training.loss_chunk_tokens=-1", 0),
        ("debug_model", 2, "--training.loss_chunk_tokens=32", 32),  # of 2 x 256 tokens: 16 chunks
        ("debug_model", 2, "--training.loss_chunk_tokens=511", 511),
        (
            "llama3_8b",
            8,
            "--training.local_batch_size=1",
            1024,
        ),  # 12 bytes x 128,256 x 1,024 tokens are 1.47 GiB
        ("llama3_8b", 8, "", 2048),  # at most 8 chunks
        ("llama3_8b", 8, "--training.loss_chunk_tokens=-1", 0),
        (
            "llama3_8b",
            8,
            "--parallelism.tensor_parallel_degree=2 --training.local_batch_size=2",
            2048,
        ),
        ("llama3_8b", 8, "--parallelism.tensor_parallel_degree=8 --training.local_batch_size=1", 0),
        ("llama3_8b", 8, "--training.loss_chunk_tokens=1024", 1024),
    ],
)
def test_tokens_of_a_chunk_of_the_loss(recipe, ranks, options, chunk):
    found = make_layout(load_config(RECIPES / f"{recipe}.toml", options.split()), ranks)
    assert found.loss_chunk == chunk


@pytest.mark.parametrize(
    ("chunk", "wrong"),
    [
        (
            512,
            (
                "training.loss_chunk_tokens = 512: a rank has 512 tokens of a microbatch, so this"
                " has no effect; use -1, or less "
            ),
        ),
        (
            31,
            (
                "tokens = 31: a rank has 512 tokens of a microbatch, which is more than 16 chunks;"
                " use at least 32"
            ),
        ),
        (-2, r"loss_chunk_tokens = -2"),
    ],
)
def test_a_chunk_of_the_loss_that_cannot_be_is_refused(chunk, wrong):
    with pytest.raises(ConfigError, match=wrong):
        layout(f"--training.loss_chunk_tokens={chunk}")


@pytest.mark.parametrize(("chunks", "use"), [(3, "2 or 4"), (129, "128"), (100, "64 or 128")])
def test_chunks_that_do_not_divide_the_tokens_of_a_rank_are_refused(chunks, use):
    options = [
        "--parallelism.tensor_parallel_degree=2",
        f"--compile.tensor_parallel_chunks={chunks}",
    ]
    with pytest.raises(
        ConfigError, match=rf"chunks = {chunks} does not divide the 128 tokens .*; use {use}$"
    ):
        layout("--compile.enable", *options)
    layout(*options)  # an eager run cuts nothing, and its start says so


def test_shampoo_that_would_never_have_roots_is_refused():
    options = ["--optimizer.name=Shampoo", "--optimizer.start_preconditioning_step=5"]
    layout(*options, "--training.steps=5")
    with pytest.raises(
        ConfigError, match=r"_step = 5 is after the last of training.steps = 4, .*use at most 4"
    ):
        layout(*options, "--training.steps=4")


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
        assert make_layout(config, 2).step_bytes(config) == expected
