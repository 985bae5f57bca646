"""Recipes: precedence and origins, `extends`, round trips, and a table of mistakes with the message that each one gets."""

import ast
import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_lite import command, logging, recipe, start
from titan_lite.__main__ import PROGRAMS
from titan_lite.config import (
    KEYS,
    SECTIONS,
    ConfigError,
    DataSource,
    batch_ramp,
    gradient_accumulation_steps,
    keys,
    learning,
    row,
    system,
    toml,
)
from titan_lite.config import recipe as reading
from titan_lite.config.recipe import load_config, to_toml
from titan_lite.recipe import HELP, help_text, main

RUN = '__name__ == "__main__"'
ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
TOKENIZER = '[model]\ntokenizer_path = "t.model"\n'  # the one key without a usable default


def write(folder, text, name="recipe.toml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def python_m_recipe(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "titan_lite.recipe", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


# Where a value comes from


def test_command_line_beats_recipe_beats_base_beats_default(tmp_path):
    base = write(
        tmp_path,
        TOKENIZER + "[training]\nsteps = 2\nseq_len = 2\nlocal_batch_size = 2\n",
        "base.toml",
    )
    recipe = write(tmp_path, 'extends = "base.toml"\n[training]\nsteps = 3\nseq_len = 3\n')
    config, origins = load_config(recipe, ["--training.steps", "4"])
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (4, 3, 2)
    assert training.gc_freq == KEYS["training.gc_freq"].default
    assert origins["training.steps"] == "command line"
    assert origins["training.seq_len"] == str(recipe)
    assert origins["training.local_batch_size"] == str(base)
    assert origins["training.gc_freq"] == "default"
    assert origins.keys() == KEYS.keys()


def test_the_last_of_two_options_wins(tmp_path):
    recipe = write(tmp_path, TOKENIZER)
    config, _ = load_config(recipe, ["--training.steps=5", "--training.steps", "6"])
    assert config.training.steps == 6


def test_extends_goes_through_a_chain_each_path_relative_to_its_file(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path, TOKENIZER + "[optimizer]\nlr = 1\nbeta1 = 0.1\n", "a/bottom.toml")
    write(
        tmp_path,
        'extends = "../bottom.toml"\n[optimizer]\nbeta1 = 0.2\nbeta2 = 0.2\n',
        "a/b/middle.toml",
    )
    top = write(tmp_path, 'extends = "a/b/middle.toml"\n[optimizer]\nbeta2 = 0.3\n')
    config, origins = load_config(top)
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (1.0, 0.2, 0.3)
    assert config.model.tokenizer_path == str(tmp_path / "a" / "t.model")
    assert os.path.samefile(origins["optimizer.lr"], tmp_path / "a" / "bottom.toml")


def test_two_recipes_may_extend_the_same_one(tmp_path):
    write(tmp_path, TOKENIZER, "base.toml")
    for name in ("one.toml", "two.toml"):
        load_config(write(tmp_path, 'extends = "base.toml"', name))


def test_the_dump_folder_is_named_after_the_recipe_unless_it_is_given(tmp_path):
    recipe = write(tmp_path, TOKENIZER, "mine.toml")
    assert load_config(recipe)[0].job.dump_folder == "outputs/mine"
    assert load_config(recipe, ["--job.dump_folder=x"])[0].job.dump_folder == "x"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--compile.enable"], True),
        (["--compile.enable", "true"], True),
        (["--compile.enable=True"], True),
        (["--compile.enable=false"], False),
        (["--compile.enable", "false"], False),
        (["--no-compile.enable"], False),
        (["--no-compile.enable", "--compile.enable"], True),
        (["--compile.enable", "--training.steps", "7"], True),
    ],
)
@pytest.mark.parametrize("in_recipe", [True, False])
def test_forms_of_a_boolean(tmp_path, arguments, expected, in_recipe):
    recipe = write(tmp_path, TOKENIZER + f"[compile]\nenable = {str(in_recipe).lower()}\n")
    config, _ = load_config(recipe, arguments)
    assert config.compile.enable is expected
    assert config.training.steps == (7 if "7" in arguments else KEYS["training.steps"].default)


def test_a_word_of_the_command_line_becomes_the_type_of_its_key(tmp_path):
    arguments = [
        "--optimizer.lr",
        "1e-3",
        "--debug.seed=0",
        "--training.global_batch_size",
        "-1",
        "--job.description=a = b",
    ]
    config, _ = load_config(write(tmp_path, TOKENIZER), arguments)
    assert (config.optimizer.lr, config.debug.seed, config.training.global_batch_size) == (
        0.001,
        0,
        -1,
    )
    assert config.job.description == "a = b"


def test_hyphens_serve_for_underscores(tmp_path):
    config, _ = load_config(
        write(tmp_path, TOKENIZER), ["--training.seq-len=16", "--no-data.shuffle"]
    )
    assert config.training.seq_len == 16
    assert config.data.shuffle is False


# A recipe written out and read back


def test_the_saved_recipe_is_the_same_one_in_another_folder(tmp_path, monkeypatch):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(tmp_path, '[model]\ntokenizer_path = "t.model"\n', "here/base.toml")
    write(
        tmp_path,
        'extends = "base.toml"\n[data]\ndataset = "local"\npath = "../text/*.jsonl"\n',
        "here/recipe.toml",
    )
    config, _ = load_config(
        "recipe.toml", ["--model.tokenizer_path", "other.model", "--optimizer.lr=0.1"]
    )
    assert config.model.tokenizer_path == str(tmp_path / "here" / "other.model")
    assert config.data.path == str(tmp_path / "text" / "*.jsonl")

    saved = write(tmp_path, to_toml(config), "elsewhere/config.toml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(saved)[0] == config


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_print_config_is_a_recipe_that_loads_to_the_same_values(recipe, tmp_path):
    config, origins = load_config(recipe, ["--training.steps=12345"])
    printed = to_toml(config, origins)
    assert "steps = 12345  # command line" in printed
    assert load_config(write(tmp_path, printed))[0] == config


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def values_of(key):
    """Any value that the key admits."""
    field, rule = KEYS[key], KEYS[key].metadata
    if rule["choices"]:
        one = st.sampled_from(rule["choices"])
        return st.lists(one, min_size=1, unique=True).map(tuple) if field.type is tuple else one
    if field.type is bool:
        return st.booleans()
    if field.type is str:
        return TEXT
    if rule["table"] is DataSource:
        return st.sampled_from(
            [
                (),
                (
                    DataSource(),
                    DataSource("local", path='/a "b"', weight=0.1),
                    DataSource("o/n", subset="x"),
                ),
            ]
        )
    if field.type is tuple:
        return st.lists(TEXT).map(tuple)
    low = rule["least"] if rule["least"] is not None else rule["above"]
    high = next(
        (rule[bound] for bound in ("most", "below") if rule[bound] is not None), reading.MOST
    )
    if field.type is int:
        return st.integers(low, high) | st.sampled_from(
            (field.default, field.default if rule["also"] is None else rule["also"])
        )
    open_ends = {"exclude_min": rule["above"] is not None, "exclude_max": rule["below"] is not None}
    also = [] if rule["also"] is None else [float(rule["also"])]
    return st.floats(low, high, allow_nan=False, **open_ends) | st.sampled_from(
        [field.default, *also]
    )


# Keys that mean something together are left as they are, so that every draw is a possible recipe.
TOGETHER = {
    "data.dataset",
    "data.path",
    "data.subset",
    "data.split",
    "data.text_field",
    "data.validation_fraction",
    "model.tokenizer_path",
    "checkpoint.load_step",
    "checkpoint.must_resume",
    "checkpoint.initial_load_path",
    "training.global_batch_size",
    "training.global_batch_ramp",
    "training.steps",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.total_steps",
    "activation_checkpoint.mode",
    "parallelism.fsdp_keep_gathered",
    "parallelism.enable_async_tensor_parallel",
    "parallelism.replicate_compression",
    "compile.machine",
    "compile.enable",
    "compile.components",
    "compile.bucketing",
    "compile.reordering",
    "activation_checkpoint.selective_ac_option",
}


@given(
    values=st.fixed_dictionaries(
        {}, optional={key: values_of(key) for key in KEYS.keys() - TOGETHER}
    )
)
def test_any_recipe_survives_a_round_trip(values, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    config, origins = load_config(write(folder, TOKENIZER))
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: part})
    if not config.job.dump_folder:
        config = dataclasses.replace(config, job=dataclasses.replace(config.job, dump_folder="x"))
    assert load_config(write(folder, to_toml(config)))[0] == config
    assert load_config(write(folder, to_toml(config, origins)))[0] == config


@given(text=st.text())
def test_an_origin_cannot_break_the_line_it_is_written_on(text, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    config, origins = load_config(write(folder, TOKENIZER))
    assert load_config(write(folder, to_toml(config, dict.fromkeys(origins, text))))[0] == config


# Mistakes


class Mistake(NamedTuple):
    """A recipe and a command line; what the message must name; the fix that it must state; and both with that fix."""

    about: str
    recipe: str | bytes
    names: tuple[str, ...]  # key or file, and value
    fix: str
    fixed: str = TOKENIZER
    arguments: tuple[str, ...] = ()
    fixed_arguments: tuple[str, ...] = ()


def a_line(about, section, line, fix, fixed=None):
    """A line that is wrong in itself. fix: what to write instead, if `fixed` does not tell."""
    head = f"{TOKENIZER}[{section}]\n"
    return Mistake(about, head + line, (f"[{section}] {line}",), fix, head + (fixed or fix))


def a_name(about, recipe, names, fix, section, line):
    """A wrong name. section, line: the right ones."""
    return Mistake(about, TOKENIZER + recipe, names, fix, f"{TOKENIZER}[{section}]\n{line}\n")


def an_option(about, arguments, names, fix, *fixed_arguments):
    """A mistake on the command line. fixed_arguments: the right ones; none: they are the fix."""
    return Mistake(
        about, TOKENIZER, names, fix, TOKENIZER, tuple(arguments.split()), fixed_arguments or (fix,)
    )


def together(about, recipe, names, fix, fixed):
    """Values that are wrong only together."""
    return Mistake(about, TOKENIZER + recipe, names, fix, TOKENIZER + fixed)


MISTAKES = [
    # names
    a_name(
        "misspelt section",
        "[trainig]\nsteps = 5",
        ("[trainig]",),
        "did you mean training?",
        "training",
        "steps = 5",
    ),
    a_name(
        "section in capitals",
        "[Training]\nsteps = 5",
        ("[Training]",),
        "did you mean training?",
        "training",
        "steps = 5",
    ),
    a_name(
        "unknown section",
        "[zzz]\nsteps = 5",
        ("[zzz]",),
        "known sections: job, model, training,",
        "training",
        "steps = 5",
    ),
    a_name(
        "key as a section",
        "[beta1]\nx = 0.5",
        ("[beta1]",),
        "beta1 is a key: optimizer.beta1",
        "optimizer",
        "beta1 = 0.5",
    ),
    a_name(
        "misspelt key",
        "[training]\nstepz = 5",
        ("stepz = 5 in [training]",),
        "training.steps?",
        "training",
        "steps = 5",
    ),
    a_name(
        "unknown key",
        "[compile]\nzzz = 5",
        ("zzz = 5 in [compile]",),
        "[compile] has enable,",
        "compile",
        "enable = true",
    ),
    a_name(
        "other section's key",
        "[training]\nlr = 0.1",
        ("lr = 0.1 in [training]",),
        "optimizer.lr?",
        "optimizer",
        "lr = 0.1",
    ),
    a_name(
        "section as a value",
        "[job]\ntraining = 5",
        ("training = 5 in [job]",),
        "[job] has dump_folder",
        "training",
        "steps = 5",
    ),
    Mistake(
        "key without a section",
        "steps = 5",
        ("steps",),
        "training.steps",
        TOKENIZER + "[training]\nsteps = 5",
    ),
    Mistake(
        "section without keys",
        "training = 5",
        ("training = 5",),
        "write [training]",
        TOKENIZER + "[training]\nsteps = 5",
    ),
    Mistake(
        "array of sections",
        "[[training]]\nsteps = 5",
        ("training", "5"),
        "[training]",
        TOKENIZER + "[training]\nsteps = 5",
    ),
    # types
    a_line("string for integer", "training", 'steps = "5"', "steps = 1000"),
    a_line("boolean for integer", "training", "steps = true", "steps = 1000"),
    a_line("float for integer", "training", "steps = 5.0", "steps = 1000"),
    a_line("array for integer", "training", "steps = [5]", "steps = 1000"),
    a_line("table for integer", "training", "steps = {}", "steps = 1000"),
    a_line("date for integer", "training", "steps = 2024-11-01", "steps = 1000"),
    a_line("string for number", "optimizer", 'lr = "high"', "lr = 0.0003"),
    a_line("boolean for number", "optimizer", "lr = true", "lr = 0.0003"),
    a_line("integer for boolean", "compile", "enable = 1", "enable = false"),
    a_line("string for boolean", "compile", 'enable = "yes"', "true or false", "enable = true"),
    a_line("integer for string", "job", "description = 5", 'description = ""'),
    a_line(
        "string for list",
        "parallelism",
        'pipeline_parallel_split_points = "norm"',
        "pipeline_parallel_split_points = []",
    ),
    a_line(
        "list of numbers",
        "parallelism",
        "pipeline_parallel_split_points = [2]",
        "a list of strings",
        "pipeline_parallel_split_points = []",
    ),
    a_line("boolean for choice", "compile", "backend = true", '"inductor"', 'backend = "inductor"'),
    # ranges and choices
    a_line("zero", "training", "steps = 0", "at least 1", "steps = 1"),
    a_line(
        "below, but not -1", "training", "global_batch_size = -2", "or -1", "global_batch_size = -1"
    ),
    a_line("open end", "optimizer", "beta2 = 1.0", "beta2 = 0.95"),
    a_line(
        "above the most",
        "activation_checkpoint",
        "memory_budget = 2.0",
        "at most 1",
        "memory_budget = 0.5",
    ),
    a_line("not a number", "optimizer", "lr = nan", "lr = 0.0003"),
    a_line("infinite", "training", "max_norm = inf", "max_norm = 1.0"),
    Mistake(
        "no float is that large",
        f"[optimizer]\nlr = 1{'0' * 400}",
        ("[optimizer] lr = inf",),
        "such as lr = 0.0003",
    ),
    a_line(
        "no blocks",
        "activation_checkpoint",
        'selective_ac_option = "0"',
        '"op"',
        'selective_ac_option = "op"',
    ),
    a_line(
        "not a word for blocks",
        "activation_checkpoint",
        'selective_ac_option = "two"',
        'such as "2"',
        'selective_ac_option = "2"',
    ),
    a_line(
        "misspelt choice",
        "compile",
        'backend = "induktor"',
        "did you mean inductor?",
        'backend = "inductor"',
    ),
    a_line(
        "misspelt choice in a list",
        "compile",
        'components = ["model", "los"]',
        "did you mean loss?",
        'components = ["loss"]',
    ),
    a_line(
        "unknown choice in a list",
        "compile",
        'components = ["data"]',
        '"optimizer"',
        'components = ["optimizer"]',
    ),
    a_line(
        "unknown choice",
        "training",
        'mixed_precision_param = "fp8"',
        '"bfloat16"',
        'mixed_precision_param = "bfloat16"',
    ),
    # files
    Mistake(
        "invalid TOML",
        "[training\n",
        ("recipe.toml", "line 1"),
        "`key = value` under a `[section]`",
    ),
    Mistake(
        "string without quotes",
        "[model]\nname = llama3\n",
        ("recipe.toml", "line 2"),
        "`key = value`",
    ),
    Mistake("section given twice", TOKENIZER * 2, ("recipe.toml", "model"), "`key = value`"),
    Mistake(
        "not UTF-8", b'[job]\ndescription = "\xff"\n', ("recipe.toml", "0xff"), "not valid TOML"
    ),
    Mistake(
        "extends nothing there",
        'extends = "x/y.toml"',
        ("extends", "x/y.toml"),
        "no such file (looked for",
    ),
    Mistake(
        "extends a near miss",
        'extends = "bace.toml"',
        ('extends = "bace.toml"',),
        "base.toml?",
        'extends = "base.toml"',
    ),
    Mistake("extends a number", "extends = 5", ("extends = 5",), 'extends = "debug_model.toml"'),
    Mistake(
        "extends a list",
        'extends = ["base.toml"]',
        ("extends = ['base.toml']",),
        'extends = "',
        'extends = "base.toml"',
    ),
    Mistake(
        "extends itself",
        'extends = "recipe.toml"',
        ("extends", "recipe.toml"),
        "remove one of these",
    ),
    # the command line
    an_option(
        "misspelt key",
        "--training.stepz 5",
        ("--training.stepz",),
        "training.steps?",
        "--training.steps",
        "5",
    ),
    an_option(
        "key alone",
        "--steps 5",
        ("--steps",),
        "steps is a key: training.steps or validation.steps",
        "--training.steps",
        "5",
    ),
    an_option("section alone", "--training 5", ("--training",), "steps", "--training.steps", "5"),
    an_option(
        "misspelt section",
        "--trainig.steps=5",
        ("--trainig.steps=5",),
        "mean training.steps?",
        "--training.steps=5",
    ),
    an_option(
        "no value", "--training.steps", ("--training.steps has no value",), "--training.steps=1000"
    ),
    an_option(
        "an option for a value",
        "--optimizer.lr --compile.enable",
        ("--optimizer.lr has",),
        "--optimizer.lr=0.0003",
    ),
    an_option(
        "no option", "steps=5", ("'steps=5'",), "--training.steps 100", "--training.steps", "100"
    ),
    an_option(
        "one value too many",
        "--training.steps 5 6",
        ("'6'",),
        "--section.key value",
        "--training.steps",
        "5",
    ),
    an_option(
        "one hyphen",
        "-training.steps=5",
        ("'-training.steps=5'",),
        "--section.key value",
        "--training.steps=5",
    ),
    an_option(
        "--no- of a number",
        "--no-training.steps",
        ("--no-training.steps",),
        "=VALUE",
        "--training.steps=5",
    ),
    an_option(
        "--no- and a value",
        "--no-compile.enable=true",
        ("--no-compile.enable=true",),
        "=VALUE",
        "--compile.enable=true",
    ),
    an_option(
        "word for integer",
        "--training.steps=ten",
        ("--training.steps=ten",),
        "such as 1000",
        "--training.steps=1000",
    ),
    an_option(
        "Arabic digits",
        "--training.steps=٣",
        ("--training.steps=",),
        "such as 1000",
        "--training.steps=1000",
    ),
    an_option(
        "float for integer",
        "--training.steps=1e3",
        ("--training.steps=1e3",),
        "such as 1000",
        "--training.steps=1000",
    ),
    an_option(
        "word for boolean",
        "--compile.enable=on",
        ("--compile.enable=on",),
        "true or false",
        "--compile.enable=true",
    ),
    an_option(
        "out of range", "--debug.seed=-1", ("[debug] seed = -1",), "at least 0", "--debug.seed=0"
    ),
    an_option(
        "infinite",
        "--optimizer.lr=inf",
        ("[optimizer] lr = inf",),
        "lr = 0.0003",
        "--optimizer.lr=0.0003",
    ),
    an_option(
        "unknown choice",
        "--data.dataset=c5",
        ('[data] dataset = "c5"',),
        '"c4"',
        "--data.dataset=c4",
    ),
    an_option(
        "unknown component",
        "--compile.components=model,data",
        ("[compile] components",),
        '"loss"',
        "--compile.components=model,loss",
    ),
    an_option(
        "no steps between roots",
        "--optimizer.precondition_frequency=0",
        ("[optimizer] precondition_frequency = 0",),
        "precondition_frequency = 10",
        "--optimizer.precondition_frequency=10",
    ),
    an_option(
        "not UTF-8",
        "--job.description=\udcff",
        (r'[job] description = "\udcff"',),
        "UTF-8",
        "--job.description=",
    ),
    # combinations
    together(
        "local text from nowhere",
        '[data]\ndataset = "local"',
        ('[data] dataset = "local"',),
        'data.path; use one such as path = "corpus/*.jsonl"',
        '[data]\ndataset = "local"\npath = "corpus/*.jsonl"',
    ),
    together(
        "prepared text from nowhere",
        '[data]\ndataset = "prepared"',
        ('[data] dataset = "prepared"',),
        'data.path; use one such as path = "prepared/books"',
        '[data]\ndataset = "prepared"\npath = "prepared/books"\nvalidation_fraction = 0\n[validation]\nenable = true',
    ),
    together(
        "a path that is not read",
        '[data]\npath = "text"',
        ("[data] path", "text", '"stdlib"'),
        'data.dataset = "local"',
        '[data]\npath = "text"\ndataset = "local"',
    ),
    together(
        "a source from nowhere",
        '[[data.sources]]\ndataset = "local"',
        ('data.sources[1].dataset = "local" needs data.sources[1].path',),
        'use one such as path = "corpus/*.jsonl"',
        '[[data.sources]]\ndataset = "local"\npath = "corpus/*.jsonl"',
    ),
    together(
        "a dataset beside sources",
        '[data]\ndataset = "c4"\n[[data.sources]]\nweight = 2',
        ('[data] dataset = "c4"',),
        "move it into these, or use sources = []",
        '[[data.sources]]\nweight = 2\n[[data.sources]]\ndataset = "c4"',
    ),
    together(
        "a subset of what has none",
        '[data]\nsubset = "en"',
        ('[data] subset = "en"', '"stdlib"'),
        "datasets of the hub (",
        '[data]\ndataset = "owner/name"\nsubset = "en"',
    ),
    Mistake(
        "misspelt key of a source",
        TOKENIZER + "[[data.sources]]\n[[data.sources]]\nweigth = 2",
        ("weigth = 2 in data.sources[2]",),
        "did you mean weight?",
        TOKENIZER + '[[data.sources]]\n[[data.sources]]\nweight = 2\ndataset = "c4"',
    ),
    Mistake(
        "a source twice",
        TOKENIZER + "[[data.sources]]\n[[data.sources]]\nweight = 2",
        ("data.sources[1] and [2] have the same documents",),
        "sum of both weights",
        TOKENIZER + "[[data.sources]]\nweight = 3",
    ),
    Mistake(
        "no weight",
        TOKENIZER + "[[data.sources]]\nweight = 0",
        ("data.sources[1].weight = 0.0",),
        "weight = 1.0",
        TOKENIZER + "[[data.sources]]\nweight = 1.0",
    ),
    Mistake(
        "a name for a source",
        TOKENIZER + '[data]\nsources = ["c4"]',
        ('data.sources[1] = "c4"',),
        "use [[data.sources]]",
        TOKENIZER + '[[data.sources]]\ndataset = "c4"',
    ),
    an_option(
        "sources that are no TOML",
        "--data.sources=[{dataset=c4}]",
        ("--data.sources=[{dataset=c4}]",),
        "a list of tables of dataset, path,",
        '--data.sources=[{dataset="c4"}]',
    ),
    together(
        "validation on nothing",
        "[validation]\nenable = true\n[data]\nvalidation_fraction = 0",
        ("[validation] enable = true",),
        "data.validation_fraction = 0.05",
        "[validation]\nenable = true\n[data]\nvalidation_fraction = 0.05",
    ),
    together(
        "a budget that nobody keeps",
        '[activation_checkpoint]\nmode = "memory_budget"',
        ('[activation_checkpoint] mode = "memory_budget"',),
        "compile.enable = true",
        '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true',
    ),
    together(
        "a budget for a model that is not compiled",
        '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true\ncomponents = ["loss"]',
        ('[activation_checkpoint] mode = "memory_budget"',),
        '"model" in compile.components',
        '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true\ncomponents = ["model"]',
    ),
    together(
        "nothing to compile",
        "[compile]\nenable = true\ncomponents = []",
        ("[compile] components = []",),
        'components = ["model", "loss"]',
        '[compile]\nenable = true\ncomponents = ["model", "loss"]',
    ),
    together(
        "a step to load, from no checkpoint",
        "[checkpoint]\nload_step = 5",
        ("[checkpoint] load_step = 5",),
        "checkpoint.enable = true",
        "[checkpoint]\nload_step = 5\nenable = true",
    ),
    together(
        "to go on from no checkpoint",
        "[checkpoint]\nmust_resume = true",
        ("[checkpoint] must_resume = true",),
        "checkpoint.enable = true",
        "[checkpoint]\nmust_resume = true\nenable = true",
    ),
    together(
        "warm-up longer than the schedule",
        "[lr_scheduler]\nwarmup_steps = 3000\ntotal_steps = 2000",
        ("[lr_scheduler] warmup_steps = 3000", "lr_scheduler.total_steps = 2000"),
        "use warmup_steps = 200",
        "[lr_scheduler]\nwarmup_steps = 200\ntotal_steps = 2000",
    ),
    together(
        "schedule shorter than the run",
        "[lr_scheduler]\ntotal_steps = 500",
        ("[lr_scheduler] total_steps = 500", "training.steps = 1000"),
        "use -1 or at least that many",
        "[lr_scheduler]\ntotal_steps = 1000",
    ),
    together(
        "global batch that cannot be split",
        "[training]\nlocal_batch_size = 4\nglobal_batch_size = 10\n[parallelism]\ndata_parallel_shard_degree = 2",
        ("training.global_batch_size = 10", "4 x 2 = 8"),
        "use 8 or 16",
        "[training]\nlocal_batch_size = 4\nglobal_batch_size = 16\n[parallelism]\ndata_parallel_shard_degree = 2",
    ),
    Mistake("no tokenizer", "", ("[model] tokenizer_path",), '"../assets/tokenizer/debug.model"'),
]


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[f"{'option, ' if m.arguments else ''}{m.about}" for m in MISTAKES]
)
def test_a_mistake_is_named_with_its_fix(mistake, tmp_path):
    write(tmp_path, TOKENIZER, "base.toml")
    recipe = write(tmp_path, mistake.recipe)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, mistake.arguments)
    message = str(caught.value)
    for part in (*mistake.names, mistake.fix):
        assert part in message
    assert "\n" not in message
    if mistake.about not in (
        "global batch that cannot be split",
        "no tokenizer",
    ):  # these are no single line's fault
        assert ("command line: " if mistake.arguments else str(recipe)) in message

    load_config(write(tmp_path, mistake.fixed), mistake.fixed_arguments)


def test_a_mistake_in_the_base_names_the_base(tmp_path):
    base = write(tmp_path, "[training]\nsteps = 0\n", "base.toml")
    with pytest.raises(ConfigError, match=re.escape(str(base))):
        load_config(write(tmp_path, 'extends = "base.toml"'))


def test_a_circle_of_recipes_is_shown(tmp_path):
    first = write(tmp_path, 'extends = "second.toml"', "first.toml")
    second = write(tmp_path, 'extends = "third.toml"', "second.toml")
    third = write(tmp_path, 'extends = "second.toml"', "third.toml")
    with pytest.raises(ConfigError) as caught:
        load_config(first)
    assert f"{second} -> {third} -> {second}" in str(caught.value)


@pytest.mark.parametrize("name", ["none.toml", "./none.toml", "none"])
def test_a_recipe_that_is_not_there_is_called_as_it_was_written(name):
    with pytest.raises(
        ConfigError,
        match=f"^{Path(name)}: no such recipe; use the path of a TOML file, or one of debug_model",
    ):
        load_config(name)


def test_a_second_recipe_is_no_option():
    with pytest.raises(
        ConfigError,
        match=r"'b.toml' is a second recipe; use one, with ./run_train.sh as CONFIG_FILE=b.toml",
    ):
        load_config(ROOT / "train_configs/debug_model.toml", ["b.toml"])


@pytest.mark.parametrize(
    ("name", "fix"),
    [("debug_modle.toml", "debug_model.toml?"), ("zzz", "has debug_model.toml, llama3_")],
)
def test_a_recipe_that_is_not_there(name, fix):
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "train_configs" / name)
    assert name in str(caught.value)
    assert fix in str(caught.value)


def test_a_recipe_in_a_folder_that_is_not_there():
    with pytest.raises(
        ConfigError,
        match=r"nowhere/x.toml: no such recipe; the shipped recipes are in train_configs/",
    ):
        load_config("nowhere/x.toml")


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(
        ConfigError, match=r"cannot be read \(Is a directory\); use a TOML file such as"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(("size", "ranks", "steps"), [(-1, 3, 1), (8, 2, 1), (24, 2, 3)])
def test_gradient_accumulation_steps(size, ranks, steps):
    training = dataclasses.replace(
        SECTIONS["training"](), local_batch_size=4, global_batch_size=size
    )
    assert gradient_accumulation_steps(training, ranks) == [(steps, math.inf)]


def test_a_global_batch_smaller_than_one_microbatch_a_rank():
    training = dataclasses.replace(SECTIONS["training"](), local_batch_size=4, global_batch_size=4)
    with pytest.raises(ConfigError, match=r"global_batch_size = 4 .* 4 x 2 = 8; use 8"):
        gradient_accumulation_steps(training, 2)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (
            [DataSource("local", path="/a/web/*.jsonl.zst"), DataSource("local", path="/a/code")],
            ["web", "code"],
        ),
        (
            [DataSource("local", path="/a/x y.jsonl"), DataSource("prepared", path="/b/x/y")],
            ["x_y", "y"],
        ),
        (
            [
                DataSource("local", path="/a/web"),
                DataSource("local", path="/b/web/**/*"),
                DataSource("c4"),
            ],
            ["web", "web_2", "c4"],
        ),
        (
            [DataSource("o/fine", subset="s-1"), DataSource(), DataSource("local", path="/")],
            ["o_fine_s-1", "stdlib", "local"],
        ),
        (
            [DataSource("local", path="/a/.hidden"), DataSource("local", path="*.txt")],
            ["local", "local_2"],
        ),
        ([], []),
    ],
)
def test_each_source_has_a_short_name_of_its_own(sources, names):
    assert SECTIONS["data"](sources=tuple(sources)).source_names() == names


def test_a_ramp_is_the_batches_before_the_global_one():
    ramp = ("16 until 10", "8 until 1000", "24 until 1001")
    training = dataclasses.replace(
        SECTIONS["training"](), local_batch_size=4, global_batch_size=32, global_batch_ramp=ramp
    )
    assert batch_ramp(ramp) == [(16, 10), (8, 1000), (24, 1001)]
    assert gradient_accumulation_steps(training, 2) == [
        (2, 10),
        (1, 1000),
        (3, 1001),
        (4, math.inf),
    ]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("64:1000", 'is not of the form "SEQUENCES until STEP"; use one such as "64 until 1000"'),
        (
            "0 until 1000",
            'is not of the form "SEQUENCES until STEP"; use one such as "64 until 1000"',
        ),
        (
            "64 until -1",
            'is not of the form "SEQUENCES until STEP"; use one such as "64 until 1000"',
        ),
        (
            "8 until 10",
            "does not come after step 20, where the entry before it ends; use a later step",
        ),
        (
            "12 until 30",
            "is not a multiple of training.local_batch_size x data-parallel degree = 2 x 4 = 8; use 8 or 16",
        ),
    ],
)
def test_a_wrong_ramp_names_its_entry(entry, told):
    options = [
        "--training.global_batch_ramp",
        f"8 until 20, {entry}",
        "--training.global_batch_size=16",
    ]
    with pytest.raises(ConfigError) as error:
        load_config(
            ROOT / "train_configs/debug_model.toml",
            [*options, "--parallelism.data_parallel_shard_degree=4"],
        )
    assert str(error.value) == f'training.global_batch_ramp: "{entry}" {told}'


# Every key, every shipped recipe, the module itself


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_described(key):
    field = KEYS[key]
    assert field.type in (bool, int, float, str, tuple)
    assert type(field.default) is field.type
    assert field.metadata["doc"]
    assert field.metadata["unit"]
    text = help_text()
    assert f"--{key} (default" in text
    assert " ".join(field.metadata["doc"].split()) in " ".join(text.split())  # wrapped
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_the_cluster_that_it_is_for(recipe):
    text = recipe.read_text()
    assert text.startswith("# ")
    assert "# For: " in text or ". For: " in text
    sizes = re.findall(r"^# world_size: (\d+)$", text, re.MULTILINE)
    if recipe.stem == "debug_model":
        sizes = sizes or ["1", "2", "4"]  # any machine
    else:
        assert len(sizes) == 1
    config, _ = load_config(recipe)
    degrees = config.parallelism
    model = degrees.pipeline_parallel_degree * degrees.tensor_parallel_degree
    for size in map(int, sizes):
        others = model * degrees.context_parallel_degree * degrees.data_parallel_replicate_degree
        shard = (
            degrees.data_parallel_shard_degree
            if degrees.data_parallel_shard_degree != -1
            else size // others
        )
        assert others * shard == size
        assert gradient_accumulation_steps(
            config.training, degrees.data_parallel_replicate_degree * shard
        )
    assert config.lr_scheduler.warmup_steps < config.training.steps


def test_all_recipes_are_here():
    sizes = {f"llama3_{size}" for size in ("1b", "3b", "8b", "70b", "405b")}
    assert {path.stem for path in SHIPPED} >= sizes | {"debug_model"}


def test_only_the_standard_library_is_imported():
    modules = (command, keys, learning, logging, recipe, reading, row, system, toml)
    nodes = [
        node
        for module in modules
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
    ]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    # layout and inputs: torch where they must, below
    names -= {f"titan_lite.{name}" for name in ("command", "config", "inputs", "layout", "logging")}
    names -= {
        f"titan_lite.config.{name}"
        for name in ("keys", "learning", "recipe", "row", "system", "toml")
    }
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {
        "tomli"
    }  # tomli: before Python 3.11


def test_checking_a_recipe_imports_no_torch():
    code = "import sys, titan_lite.recipe as r; r.main(['train_configs/debug_model.toml']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# python -m titan_lite.recipe


def test_exit_code_0_and_silence_for_a_good_recipe(tmp_path):
    result = python_m_recipe(SHIPPED[0], "--training.steps", "5", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_exit_code_2_and_one_line_for_a_wrong_one(tmp_path):
    result = python_m_recipe(SHIPPED[0], "--training.steps", "many", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: command line: --training.steps=many: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        ("4", ["--parallelism.pipeline_parallel_degree=3"], "does not divide 4 ranks"),
        ("4", ["--parallelism.tensor_parallel_degree=8"], "which does not divide 4 ranks"),
        (
            "4",
            [
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.fsdp_communication=step",
                "--compile.enable",
                "--compile.bucketing=greedy",
            ],
            "nothing to bucket",
        ),
        ("4", ["--model.flavor=7B"], 'model.flavor = "7B"'),
        ("4", ["--training.global_batch_size=6"], "is not a multiple"),
        ("4", ["--model.tokenizer_path=/nowhere/tokenizer.model"], "/nowhere/tokenizer.model"),
        (
            "4",
            ["--data.dataset=local", "--data.path=/nowhere/*.jsonl"],
            'data.path = "/nowhere/*.jsonl"',
        ),
        ("0", [], "--world-size 0: use"),
        ("two", [], "--world-size two: use"),
    ],
)
def test_what_files_and_the_number_of_ranks_decide_is_told_without_torch(
    ranks, options, words, tmp_path
):
    code = "import sys; from titan_lite.recipe import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    arguments = ["--world-size", ranks, str(SHIPPED[0]), *options]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "2 False\n"
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_layout_that_fits_and_ranks_that_print_are_told_nothing(monkeypatch, capsys):
    monkeypatch.setenv("LOG_RANK", "3")
    assert main(["--world-size", "4", str(SHIPPED[0])]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["--world-size", "2", str(SHIPPED[0])]) == 2
    assert capsys.readouterr().err.startswith("error: LOG_RANK=3: use ranks below 2")


def test_print_config_prints_a_recipe(tmp_path, capsys):
    assert main([str(SHIPPED[0]), "--print-config", "--training.steps=5"]) == 0
    config, _ = load_config(write(tmp_path, capsys.readouterr().out))
    assert config == load_config(SHIPPED[0], ["--training.steps=5"])[0]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["recipe.toml", "-h"], 0), (["-h", "--x"], 0)]
)
def test_help(arguments, code, capsys):
    assert main(arguments) == code
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    assert "--training.steps (default 1000; an integer at least 1; steps)" in text
    assert "--compile.enable (default false)\n" in text


def test_without_arguments_the_usage_is_short(capsys):
    assert main([]) == 2
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    assert len(text.splitlines()) < 60
    assert all(section in text for section in SECTIONS)


def test_the_command_has_every_program_and_help_names_them():
    commands = {
        path.relative_to(ROOT)
        for path in (ROOT / "titan_lite").rglob("*.py")
        if RUN in path.read_text()
    }
    names = {".".join(path.with_suffix("").parts[1:]) for path in commands}
    folders = {path.parent.name for path in (ROOT / "titan_lite").glob("*/__main__.py")}
    assert {module for module, _ in PROGRAMS.values()} == (names | folders) - {
        "__main__",
        "launch",
        "train",
    }  # start has both
    assert [name for name in PROGRAMS if not re.search(rf"\b{name} ", HELP)] == []
    assert [name for name in start.VARIABLES if name not in HELP] == ["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    "arguments", [["recipe.toml", "--help", "optimizer"], ["-h", "[optimizer]"]]
)
def test_help_on_one_section(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("[optimizer]  the optimizer and its constants\n")
    assert set(re.findall(r"--(\w+)\.", text)) == {"optimizer"}


def test_help_on_a_section_that_there_is_not(capsys):
    assert main(["recipe.toml", "--help", "optimiser"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        "error: command line: --help optimiser: no such section; did you mean optimizer?\n",
    )


def test_a_pager_that_is_left_is_no_failure():
    with subprocess.Popen(
        [sys.executable, "-m", "titan_lite.recipe", "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_numbers_that_are_not_finite_are_never_admitted():
    for key, field in KEYS.items():
        if field.type is float:
            for word in ("nan", "inf", "-inf"):
                with pytest.raises(ConfigError, match="out of range"):
                    load_config(SHIPPED[0], [f"--{key}={word}"])
            assert math.isfinite(field.default)


def test_sources_in_a_recipe_on_the_command_line_and_of_one(tmp_path):
    recipe = write(
        tmp_path,
        TOKENIZER
        + '[[data.sources]]\ndataset = "local"\npath = "a"\nweight = 3\n[[data.sources]]\n',
    )
    config, _ = load_config(recipe, ["--data.text_field", "text", "--data.shuffle_buffer=7"])
    assert config.data.sources == (
        DataSource("local", path=str(tmp_path / "a"), weight=3.0),
        DataSource(),
    )
    (share, first), (other_share, other) = config.data.mixture()
    assert (share, other_share) == (0.75, 0.25)
    assert (first.dataset, first.path, first.shuffle_buffer, first.sources) == (
        "local",
        str(tmp_path / "a"),
        7,
        (),
    )
    assert (other.dataset, other.path) == ("stdlib", "")
    config, _ = load_config(recipe, ["--data.sources", '[{dataset = "local", path = "b c"}]'])
    assert config.data.sources == (DataSource("local", path=os.path.abspath("b c")),)
    alone, _ = load_config(recipe, ["--data.sources=[]"])
    assert alone.data.mixture() == [(1.0, alone.data)]


def test_a_machine_is_a_name_or_the_path_of_a_file(tmp_path):
    recipe = write(tmp_path, TOKENIZER + '[compile]\nmachine = "mine.toml"\n')
    assert load_config(recipe)[0].compile.machine == str(tmp_path / "mine.toml")
    assert load_config(recipe, ["--compile.machine", "H100"])[0].compile.machine == "H100"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('bucketing = "plan"', r'bucketing = "plan" needs compile.buckets; use buckets ='),
        (
            'bucketing = "auto"\nreordering = false',
            r'reordering = false: compile.bucketing = "auto" orders what it buckets',
        ),
    ],
)
def test_ways_to_bucket_that_cannot_be(keys, message, tmp_path):
    recipe = write(tmp_path, TOKENIZER + f"[compile]\nenable = true\n{keys}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(recipe)


# Several mistakes, mixtures


def lines_of(*arguments):
    with pytest.raises(ConfigError) as error:
        load_config(*arguments)
    return list(error.value.args)


def test_all_mistakes_of_a_recipe_of_what_it_extends_and_of_the_command_line_are_told_at_once(
    tmp_path,
):
    base = write(tmp_path, "[training]\nsteps = 0\n", "base.toml")
    text = 'extends = "base.toml"\n[training]\nseq_len = "x"\nstepz = 1\n[optimizr]\nlr = 1\n'
    text += "[data]\nsources = [{weight = 0, x = 1}, 5]"
    recipe = write(tmp_path, text)
    found = lines_of(
        recipe,
        [
            "--optimizer.lr=high",
            "--nonsense",
            "5",
            "--optimizer.eps",
            "--compile.enable",
            "--debug.seed=-1",
        ],
    )
    begins = [
        f"{base}: [training] steps = 0: ",
        f'{recipe}: [training] seq_len = "x": ',
        f"{recipe}: unknown key stepz = 1 in [training]; ",
        f"{recipe}: unknown section [optimizr]; ",
        f"{recipe}: data.sources[1].weight = 0.0: ",
        f"{recipe}: unknown key x = 1 in data.sources[1]; ",
        f"{recipe}: data.sources[2] = 5: ",
        "command line: unknown option --nonsense; ",
        "command line: --optimizer.eps has no value; ",
        "command line: --optimizer.lr=high: ",
        "command line: [debug] seed = -1: ",
    ]
    assert len(found) == len(begins)
    for line, begin in zip(found, begins, strict=True):
        assert line.startswith(begin), line


def test_impossible_combinations_are_told_together_and_only_where_all_values_are_possible(tmp_path):
    text = "[lr_scheduler]\nwarmup_steps = 3000\ntotal_steps = 2000\n[data]\npath = 'x'\n[checkpoint]\nmust_resume = true\n"
    found = lines_of(write(tmp_path, text))
    keys = (
        "[checkpoint] must_resume",
        "[lr_scheduler] warmup_steps",
        "[model] tokenizer_path",
        "[data] path",
    )
    assert [line.partition(": ")[2].partition(" = ")[0] for line in found] == list(keys)
    assert len(lines_of(write(tmp_path, text + "[training]\nsteps = 0"))) == 1


def test_the_command_prints_a_line_for_each_mistake(tmp_path, capsys):
    recipe = write(tmp_path, "[training]\nsteps = 0\n[optimizer]\nlr = 0")
    assert main([str(recipe)]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "error: several things are wrong:"
    assert [line.partition("] ")[2].partition(":")[0] for line in rest] == ["steps = 0", "lr = 0.0"]


def test_of_very_many_mistakes_the_first_are_told(tmp_path):
    found = lines_of(write(tmp_path, "".join(f"[x{number}]\n" for number in range(100))))
    assert [line.partition("[")[2].partition("]")[0] for line in found[:-1]] == [
        f"x{number}" for number in range(12)
    ]
    assert found[-1] == "and more; correct these first"


MIXED = '[[data.sources]]\n[[data.sources]]\ndataset = "c4"\n'


def test_a_recipe_drops_the_sources_of_the_one_it_extends(tmp_path):
    base = write(tmp_path, TOKENIZER + MIXED, "base.toml")
    text = 'extends = "base.toml"\n[data]\ndataset = "local"\npath = "a"\n'
    for key, line in zip(("dataset", "path"), lines_of(write(tmp_path, text)), strict=True):
        assert f"[data] {key} = " in line
        assert f"is beside data.sources ({base}), which replace it" in line
        assert "or use sources = []" in line
    config, _ = load_config(write(tmp_path, text + "sources = []\n"))
    assert (config.data.sources, config.data.dataset) == ((), "local")


def test_a_recipe_with_sources_drops_the_dataset_of_the_one_it_extends(tmp_path):
    write(tmp_path, TOKENIZER + '[data]\ndataset = "c4"\n', "base.toml")
    found = lines_of(write(tmp_path, 'extends = "base.toml"\n[[data.sources]]\n'))
    assert '; if an extended recipe has it, use dataset = "stdlib"' in found[0]
    config, _ = load_config(
        write(tmp_path, 'extends = "base.toml"\n[data]\ndataset = "stdlib"\n' + MIXED)
    )
    assert [source.dataset for source in config.data.sources] == ["stdlib", "c4"]


def test_a_chain_of_recipes_has_an_end(tmp_path):
    write(tmp_path, TOKENIZER, "r0.toml")
    for number in range(1, 3000):
        write(tmp_path, f'extends = "r{number - 1}.toml"', f"r{number}.toml")
    assert lines_of(tmp_path / "r2999.toml")[0].endswith(
        "extended through more than 16 recipes; extend one of the first"
    )
    load_config(tmp_path / "r16.toml")


@pytest.mark.parametrize("base", ["a" * 300, "."])
def test_a_recipe_extends_files_alone(base, tmp_path):
    (line,) = lines_of(write(tmp_path, f'extends = "{base}"'))
    assert line.isprintable()
    assert len(line) < 800
    assert "no such file" in line or "cannot be read (" in line


@pytest.mark.parametrize(
    "number", ["9" * 400, "-" + "9" * 400, "0x" + "f" * 900, "1000000000000001"]
)
def test_an_integer_that_no_machine_counts_to_is_out_of_range(number, tmp_path):
    for key in (
        "training.steps",
        "data.shuffle_buffer",
        "model.n_layers",
        "comm.init_timeout_seconds",
        "debug.seed",
    ):
        if (key, number) != ("debug.seed", "1000000000000001"):
            section, _, name = key.partition(".")
            (line,) = lines_of(write(tmp_path, f"[{section}]\n{name} = {number}\n"))
            assert f"[{section}] {name} = " in line
            assert "out of range: expected an integer" in line
            assert len(line) < 500
            if not number.startswith("0x"):
                assert (
                    f"[{section}] {name} = "
                    in lines_of(write(tmp_path, TOKENIZER), [f"--{key}={number}"])[0]
                )


def test_a_word_longer_than_a_path_is_refused(tmp_path):
    (line,) = lines_of(write(tmp_path, f'[job]\ndump_folder = "{"a" * 5000}"\n'))
    assert "longer than 4096 characters" in line
    assert len(line) < 400
    (line,) = lines_of(write(tmp_path, f'[data]\ndataset = "local"\npath = "x/{"a" * 256}/y"\n'))
    assert "[data] path = " in line
    assert "more than 255 bytes" in line


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "\udcff.toml"])
def test_a_path_that_no_recipe_has_is_told(path):
    (line,) = lines_of(path)
    assert line.endswith("; use another path")
    assert line.isprintable()
    assert len(line) < 400


def test_a_folder_whose_name_is_not_utf_8_is_told(tmp_path, monkeypatch):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    (line,) = lines_of(write(tmp_path, TOKENIZER), ["--data.dataset=local", "--data.path=a.txt"])
    assert "not valid UTF-8; use another folder" in line
    assert line.isprintable()


@pytest.mark.parametrize("text", ["4 until 5,8 until 9", '["4 until 5", "8 until 9"]'])
def test_a_list_on_the_command_line_may_stand_as_in_a_recipe(text):
    assert load_config(SHIPPED[0], [f"--training.global_batch_ramp={text}"])[
        0
    ].training.global_batch_ramp == (
        "4 until 5",
        "8 until 9",
    )


def test_a_ramp_has_the_bound_of_a_global_batch():
    with pytest.raises(
        ConfigError, match=r'"9999996 until 10" is too large; use at most 1048576 sequences'
    ):
        batch_ramp(["9999996 until 10"])


def test_a_value_cannot_add_a_line_to_a_message():
    assert str(ConfigError("a = /x\nerror: \x1b[31mred")) == r"a = /x\nerror: \x1b[31mred"
    assert str(ConfigError("two things:\n  one\n  two")) == "two things:\n  one\n  two"
