"""What a message about a key that does not exist says to use, above all about keys of torchtitan."""

import json
import re

import pytest
from tiny import DEBUG

from titan_lite.config import KEYS, ConfigError, load_config
from titan_lite.config.nearest import GONE, OF_TORCHTITAN, RENAMED, nearest_key, nearest_section
from titan_lite.config.sections import SECTIONS

# Some of what torchtitan's llama3_8b.toml had at the end of 2025, with float8
RECIPE = """
[job]
print_config = false
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[training]
local_batch_size = 1
compile = true
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def test_a_recipe_of_torchtitan_gets_a_line_for_each_key_with_ours(tmp_path):
    recipe = tmp_path / "llama3_8b.toml"
    recipe.write_text(RECIPE)
    with pytest.raises(ConfigError) as error:
        load_config(recipe)
    tokenizer = "use model.tokenizer_path, the path of a tokenizer.json or tokenizer.model"
    printed = "use the option --print-config; a run has it in config.toml in job.dump_folder"
    assert sorted(line.removeprefix(f"{recipe}: unknown ") for line in error.value.args) == [
        "key compile = true in [training]; use compile.enable",
        f'key hf_assets_path = "./assets/hf/Llama-3.1-8B" in [model]; {tokenizer}',
        f"key print_config = false in [job]; {printed}",
        "section [quantize]; only linear layers in float8: use [float8] with enable, recipe,"
        " all_gather and filter_fqns",
    ]


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--model.hf-assets-path=assets", "; use model.tokenizer_path, the path of a "),
        ("--hf_assets_path=assets", "; use model.tokenizer_path, the path of a "),
        ("--quantize.linear.float8.recipe_name=rowwise", ": use [float8] with enable, recipe,"),
        ("--config=llama3_8b", "CONFIG_FILE=llama3_8b ./run_train.sh"),
        ("--training.dataloader.num_workers=2", "; use data.num_workers and data.prefetch"),
        ("--validator.freq=10", "; did you mean validation.freq?"),
    ],
)
def test_an_option_of_torchtitan_is_told_with_ours(option, fix):
    with pytest.raises(ConfigError) as error:
        load_config("debug_model", [option])
    (line,) = error.value.args
    assert line.startswith(f"command line: unknown option {option}; ")
    assert fix in line


def test_no_row_of_torchtitan_is_a_key_or_section_of_ours():
    assert OF_TORCHTITAN.keys() & {*KEYS, *SECTIONS} == set()


@pytest.mark.parametrize("row", OF_TORCHTITAN)
def test_what_is_to_be_used_for_a_key_of_torchtitan_exists(row):
    fix = f"; {OF_TORCHTITAN[row]}"
    assert nearest_key(row) == fix
    if "." not in row:
        assert nearest_section(row) == fix
    named = re.findall(rf"\b(?:{'|'.join(SECTIONS)})\.\w+", fix.replace("config.toml", ""))
    assert [key for key in named if key not in KEYS] == []
    tables = re.findall(r"\[(\w+)\]", fix)
    assert [table for table in tables if table not in SECTIONS] == []
    assert len(fix) < 200


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("data.dataset_path", "data.path"),
        ("data.tokenizer_path", "model.tokenizer_path"),
        ("validation.initial_load_path", "checkpoint.initial_load_path"),
        ("validation.val_path", "validation.path"),
        ("val.path", "validation.path"),
        ("val.tokenizer_path", "model.tokenizer_path"),
        ("val_path", "validation.path"),
        ("eval_dataset", "validation.dataset"),
        ("validation_path", "validation.path"),
        ("data_path", "data.path"),
        ("training_steps", "training.steps"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("training.learning_rate", "optimizer.lr"),
        ("training.batch_size", "training.local_batch_size or training.global_batch_size"),
    ],
)
def test_a_key_by_another_name_or_without_its_section_is_answered_with_the_key_meant(key, fix):
    assert nearest_key(key) == f"; did you mean {fix}?"


@pytest.mark.parametrize("section", ["validation", "val", "eval", "dev"])
@pytest.mark.parametrize("name", ["dataset_path", "local_batch_size", "num_workers", "seq_len"])
def test_a_key_that_validation_lacks_is_never_one_of_what_is_trained_on(section, name):
    words = nearest_key(f"{section}.{name}")
    assert "validation" in words
    assert not re.search(r"did you mean (data|training)\.", words)


def test_a_section_as_other_programs_call_it_is_named():
    assert nearest_section("eval") == "; did you mean validation?"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_key_of_an_earlier_version_gets_its_name_now(old, new):
    assert new in KEYS
    assert nearest_key(old) == f"; use {new}"


def test_a_recipe_of_an_earlier_version_may_have_keys_that_did_nothing(tmp_path):
    recipe = tmp_path / DEBUG.name
    gone = [(key, default) for key, (defaults, _) in GONE.items() for default in defaults]
    for key, default in gone:
        table, _, name = key.partition(".")
        recipe.write_text(f'extends = "{DEBUG}"\n[{table}]\n{name} = {json.dumps(default)}\n')
        assert load_config(recipe).model_dump() == load_config(DEBUG).model_dump()


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_answered_with_what_is_used_now(key):
    assert key not in KEYS
    assert nearest_key(key) == f"; {GONE[key].instead}"
