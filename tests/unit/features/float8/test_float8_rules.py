"""What float8 matmuls cannot have, on a layout, on this machine and on one that is planned for; and
the line at the start.
"""

import pytest
import torch
from tiny import DEBUG

from titan_lite.config import ConfigError, load_config
from titan_lite.cost.profiles import PROFILES
from titan_lite.distributed.layout import Layout
from titan_lite.features.float8.feature import FEATURE
from titan_lite.rules import check
from titan_lite.rules.machine import mistakes_here


def checked(*options, ranks=2):
    config = load_config(DEBUG, options)
    check(config, Layout.from_config(config, ranks))


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
            [
                "layers.0.feed_forward.w1.weight is 680 x 256",
                '["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]',
            ],
        ),
        (
            ["--parallelism.tensor_parallel_degree=2", "--model.hidden_dim=688"],
            ["w1.weight is 344 x 256", "lower tensor_parallel_degree"],
        ),
        (
            ["--float8.filter_fqns=attention.wkv"],
            ['"attention.wkv", which is no part', 'use such as "attention.wk"'],
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
def test_what_float8_matmuls_cannot_have_is_refused(options, words):
    with pytest.raises(ConfigError) as error:
        checked("--float8.enable", *options)
    for word in words:
        assert word in str(error.value)


def test_layers_that_stay_in_bfloat16_may_have_any_size():
    checked("--float8.enable", "--model.hidden_dim=680", "--float8.filter_fqns=feed_forward")
    checked("--model.hidden_dim=680", "--training.seq_len=40")


@pytest.mark.parametrize(
    ("capability", "options", "words"),
    [
        (
            (8, 0),
            [],
            (
                "float8.enable = true needs compute capability 8.9 or newer, such as H100, and here"
                " is GPU; use false"
            ),
        ),
        (
            (8, 9),
            ["--float8.recipe=rowwise"],
            'float8.recipe = "rowwise" needs compute capability 9.0 or newer',
        ),
        (
            (9, 0),
            ["--float8.recipe=rowwise", "--training.mixed_precision_param=float32"],
            "has results in bfloat16 alone on GPUs",
        ),
        ((8, 9), [], ""),
        (
            (9, 0),
            ["--float8.recipe=rowwise_with_gw_hp", "--training.mixed_precision_param=bfloat16"],
            "",
        ),
    ],
)
def test_float8_needs_a_gpu_that_has_it(monkeypatch, capability, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("titan_lite.rules.machine.device_memory", lambda: 2**40)
    config = load_config(DEBUG, ["--float8.enable", *options])
    mistakes = mistakes_here(config, Layout.from_config(config, 2))
    told = "\n".join(mistake.message(config) for mistake in mistakes)
    assert words in told
    assert bool(words) == bool(told)


@pytest.mark.parametrize(
    ("machine", "options", "words"),
    [
        ("A100", [], ["float8.enable = true: A100 has no peak of float8"]),
        ("H100", ["--float8.recipe=rowwise"], ["float8.recipe", "bfloat16 alone on GPUs"]),
        ("H100", [], []),
    ],
)
def test_a_machine_that_is_planned_for_has_float8(machine, options, words):
    config = load_config(DEBUG, ["--float8.enable", *options])
    mistakes = list(FEATURE.mistakes_on(config, PROFILES[machine]))
    told = "\n".join(mistake.message(config) for mistake in mistakes)
    assert bool(words) == bool(told)
    assert all(word in told for word in words)


def said(*options, ranks=2):
    config = load_config(DEBUG, options)
    return FEATURE.start_lines(config, Layout.from_config(config, ranks))


def test_the_start_says_what_is_in_float8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said("--float8.enable", "--float8.all_gather") == [
        "matmuls of the blocks in float8, tensorwise, gathered in float8, emulated on this CPU: no"
        " faster than float32 ([float8])"
    ]
    (line,) = said("--float8.enable", "--float8.all_gather", ranks=1)
    assert "gathered in float8" not in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert said("--float8.enable") == ["matmuls of the blocks in float8, tensorwise ([float8])"]
