"""Names of other frameworks lead to the keys here."""

import pytest

from titan_lite.config import KEYS, ConfigError
from titan_lite.config.aliases import _CALLED, _KEYS, key_called
from titan_lite.config.recipe import load_config


def test_every_name_leads_to_a_key_and_none_to_two():
    assert set(_KEYS.values()) == _CALLED.keys() <= KEYS.keys()
    names = [name for names in _CALLED.values() for name in names.split()]
    assert len(names) == len(set(names)) > 80


def test_no_name_hides_a_key_of_that_name():
    assert not _KEYS.keys() & {key.partition(".")[2] for key in KEYS}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--optimizer.learning_rate", "1e-3"],
            "unknown option --optimizer.learning_rate; use optimizer.lr: peak",
        ),
        (
            ["--learning-rate=1e-3"],
            "unknown option --learning-rate=1e-3; use optimizer.lr: peak learning rate",
        ),
        (["--training.compile"], "unknown option --training.compile; use compile.enable"),
        (
            ["--max_steps", "5"],
            "unknown option --max_steps; use training.steps: optimizer steps of the run",
        ),
        (["--trainer.n_embd=5"], "unknown option --trainer.n_embd=5; use model.dim"),
        (
            ["--model.converters=float8"],
            "unknown option --model.converters=float8; use float8.enable",
        ),
        (["--powersgd"], "unknown option --powersgd; use parallelism.replicate_compression"),
        (["--enable_cpu_offload"], "unknown option --enable_cpu_offload; use training.offload"),
    ],
)
def test_an_option_of_another_framework_is_told_the_key(arguments, line, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\ntokenizer_path = "t.model"\n')
    with pytest.raises(ConfigError) as error:
        load_config(recipe, arguments)
    assert str(error.value).startswith(f"command line: {line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate = 1e-3", "unknown section [learning_rate]; use optimizer.lr"),
        (
            "[training]\nclip_grad = 1.0",
            "unknown key clip_grad = 1.0 in [training]; use training.max_norm",
        ),
        ("[model]\nNUM_LAYERS = 2", "unknown key NUM_LAYERS = 2 in [model]; use model.n_layers"),
    ],
)
def test_a_recipe_of_another_framework_is_told_the_key(text, words, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(recipe)
    assert f"{recipe}: {words}" in str(error.value)


def test_a_name_that_nobody_has_leads_nowhere():
    assert key_called("zzz") == ""
