"""Shapes of models by a recipe: as the flavor has them, or as keys of [model] say, in all that
reads them.
"""

import dataclasses
import re

import pytest
import torch
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.config import KEYS, Config, ConfigError, Model, load_config
from titan_lite.config.families import LLAMA3, ModelConfig, RopeScaling, find_family
from titan_lite.config.from_weights import keys_of_shape
from titan_lite.distributed.layout import Layout
from titan_lite.metrics.start_lines import start_lines
from titan_lite.models.shapes import shape_of, shape_words
from titan_lite.rules import check
from titan_lite.tools.verify.proxy import proxy_model

OWN = Model(flavor="", dim=96, n_layers=3, n_heads=6, hidden_dim=128, vocab_size=2048)


def test_every_field_of_a_model_has_a_key_which_changes_it_alone():
    others = dict(
        dim=512,
        n_layers=2,
        n_heads=16,
        n_kv_heads=8,
        hidden_dim=100,
        vocab_size=4096,
        rope_theta=1e4,
        norm_eps=1e-6,
        head_dim=64,
        n_experts=6,
        experts_per_token=2,
    )
    others |= dict(max_seq_len=64, tied_embeddings="yes", rope_scaling_factor=4.0)
    fields = {field.name for field in dataclasses.fields(ModelConfig)} - {"family"}  # model.name
    assert {name.removesuffix("_factor") for name in others} == fields
    assert {f"model.{name}" for name in others} <= KEYS.keys()
    for name, value in others.items():
        field = name.removesuffix("_factor")
        expected = {"yes": True, 4.0: RopeScaling(4.0)}.get(value, value)
        changed = {field: expected}
        if name in ("dim", "n_heads"):
            changed["head_dim"] = 0  # which follows
        assert shape_of(Model(**{name: value})) == dataclasses.replace(
            LLAMA3.flavors["debug"], **changed
        )


def test_scaling_keeps_what_the_flavor_says_beside_its_factor_and_1_takes_it_away():
    assert shape_of(Model(flavor="1B", rope_scaling_factor=8.0)) == dataclasses.replace(
        LLAMA3.flavors["1B"], rope_scaling=RopeScaling(factor=8.0)
    )
    assert shape_of(Model(flavor="1B", rope_scaling_factor=1.0)).rope_scaling is None
    assert not shape_of(Model(flavor="1B", tied_embeddings="no")).tied_embeddings


def test_every_field_of_scaling_has_a_key():
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    values = dict(zip(names, (16.0, 2.0, 8.0, 4096), strict=True))
    keys = {f"rope_scaling_{name}": value for name, value in values.items()}
    assert shape_of(Model(**keys)).rope_scaling == RopeScaling(**values)
    for name, value in values.items():
        changed = shape_of(Model(flavor="8B", **{f"rope_scaling_{name}": value})).rope_scaling
        assert changed == dataclasses.replace(LLAMA3.flavors["8B"].rope_scaling, **{name: value})
    assert shape_words(Model(**keys)) == (
        "debug with rope_scaling = 16x with 2.0, 8.0, 4096 (not None)"
    )


def test_a_shape_by_keys_has_the_name_of_the_flavor_that_it_is():
    keys = keys_of_shape(dataclasses.asdict(LLAMA3.flavors["1B"]))
    assert shape_words(Model(flavor="", **keys)) == "1B"
    assert shape_words(Model(flavor="", **keys | {"max_seq_len": 8192})) == "1B"
    assert shape_words(Model(flavor="", **keys | {"dim": 4096})).startswith("custom with dim")


def test_a_shape_without_a_flavor():
    assert shape_of(OWN) == ModelConfig(96, 3, 6, 6, 128, 2048)
    assert shape_of(OWN.replace(n_kv_heads=2, tied_embeddings="yes")).n_kv_heads == 2
    assert (
        shape_words(OWN)
        == "custom with dim = 96, n_layers = 3, n_heads = 6, hidden_dim = 128, vocab_size ="
        " 2048"
    )


WRONG = [
    (
        dict(flavor="7B"),
        'model.flavor = "7B": use one of debug, 1B, 3B, 8B, 70B, 405B of model.name = "llama3", "from_weights"',
        {},
    ),
    (
        dict(head_dim=7),
        "model.head_dim = 7 is odd, and a head's dimensions rotate in pairs; use model.head_dim = 6"
        " or 8",
        dict(head_dim=6),
    ),
    (
        dict(flavor=""),
        'model.flavor = "" needs model.dim, model.n_layers, model.n_heads, model.hidden_dim, ',
        None,
    ),
    (
        dict(flavor="", dim=96, n_layers=1, n_heads=6, vocab_size=5),
        'model.flavor = "" needs model.hidden_dim; set',
        None,
    ),
    (
        dict(dim=260),
        "model.dim = 260 is not a multiple of 2 x model.n_heads = 8 of the flavor",
        dict(dim=256),
    ),
    (
        dict(n_heads=12),
        "model.dim = 256 is not a multiple of 2 x model.n_heads = 12",
        dict(n_heads=12, dim=264),
    ),
    (
        dict(n_heads=6),
        "model.n_heads = 6 is not a multiple of model.n_kv_heads = 4 of the flavor",
        None,
    ),
    (
        dict(n_kv_heads=3),
        "model.n_heads = 8 is not a multiple of model.n_kv_heads = 3",
        dict(n_kv_heads=1),
    ),
]


def check_shape(model):
    config = Config().replace(model=model.replace(tokenizer_path="t.model"))
    check(config, Layout.from_config(config, 1))


@pytest.mark.parametrize(("keys", "words", "fixed"), WRONG)
def test_what_is_no_model_is_told_with_the_key_that_was_written(keys, words, fixed):
    with pytest.raises(ConfigError) as error:
        check_shape(Model(**keys))
    assert words in str(error.value)
    if fixed is not None:
        check_shape(Model(**fixed))


def test_a_family_that_does_not_exist_is_told_with_those_that_do():
    with pytest.raises(ConfigError, match=r'model.name = "lama": expected one of llama3'):
        load_config(DEBUG, ["--model.name=lama"])
    with pytest.raises(ConfigError, match=r'model.name = "lama": use one of llama3'):
        find_family("lama")


def test_the_proxy_of_a_shape_keeps_its_kinds():
    model = proxy_model(
        shape_of(Model(tied_embeddings="yes", rope_theta=1e4, n_layers=1000)), stages=1
    )
    assert (model.tied_embeddings, model.rope_theta, model.n_layers) == (True, 1e4, 4)


ABSURD = [
    "model.n_layers=1000000",
    "model.dim=1000000000",
    "model.n_heads=-1",
    "model.vocab_size=999999999999",
    "model.norm_eps=1",
]
ABSURD += [
    "model.max_seq_len=1e9",
    "model.rope_theta=0.5",
    "model.rope_theta=nan",
    "model.hidden_dim=9" + "9" * 400,
]
ABSURD += ["model.tied_embeddings=true", "model.n_kv_heads=0.5", "model.rope_scaling_factor=-8"]


@pytest.mark.parametrize("option", ABSURD)
def test_a_size_that_no_model_has_is_refused_before_one_is_built(option):
    with pytest.raises(ConfigError, match=re.escape(option.partition("=")[0].partition(".")[2])):
        load_config(DEBUG, [f"--{option}"])


def test_the_largest_sizes_that_are_admitted_are_laid_out():
    sizes = {"dim": 2**18, "n_heads": 4096, "hidden_dim": 2**20, "vocab_size": 2**22}
    config = load_config(DEBUG, [f"--model.{name}={value}" for name, value in sizes.items()])
    assert Layout.from_config(config, 1).parameters > 10**12


def configured(*options):
    config = load_config(DEBUG, [*options, f"--model.tokenizer_path={DEBUG_TOKENIZER}"])
    layout = Layout.from_config(config, 2)
    check(config, layout)
    return config, layout


CHANGED = ["--model.n_layers=3", "--model.dim=128", "--model.tied_embeddings=yes"]


def test_a_layout_has_the_shape_and_the_start_says_it():
    config, layout = configured(*CHANGED)
    assert layout.model == dataclasses.replace(
        LLAMA3.flavors["debug"],
        n_layers=3,
        dim=128,
        head_dim=16,
        tied_embeddings=True,
        max_seq_len=256,
    )
    lines = start_lines(config, layout, torch.device("cpu"), priced=True, tokens_known=2048)
    words = (
        "debug with dim = 128 (not 256), n_layers = 3 (not 6), tied_embeddings = True (not False)"
    )
    assert any(
        line.startswith(f"model: llama3 {words}, {layout.parameters:,} parameters; torch")
        for line in lines
    )
