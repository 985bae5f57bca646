"""Recipes: where a value is from, `extends`, the command line, and a table of mistakes with the
message that each one gets.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from titan_lite.config import (
    KEYS,
    ConfigError,
    Data,
    DataSource,
    Training,
    flatten,
    gradient_accumulation_steps,
    load_config,
    read_config,
    to_toml,
)
from titan_lite.config.errors import in_toml, shown
from titan_lite.config.load import option, parse_command_line, read_recipe
from titan_lite.config.sections import kind_of
from titan_lite.rules import check_keys

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
TOKENIZER = '[model]\ntokenizer_path = "t.model"\n'  # the one key without a usable default


def write(folder, text, name="recipe.toml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines_of(*arguments):
    """The messages of a recipe that is wrong."""
    with pytest.raises(ConfigError) as error:
        check_keys(*read_config(*arguments))
    return list(error.value.args)


# Where a value is from


def test_command_line_beats_recipe_beats_base_beats_default(tmp_path):
    text = TOKENIZER + "[training]\nsteps = 2\nseq_len = 2\nlocal_batch_size = 2\n"
    base = write(tmp_path, text, "base.toml")
    recipe = write(tmp_path, 'extends = "base.toml"\n[training]\nsteps = 3\nseq_len = 3\n')
    config = load_config(recipe, ["--training.steps", "4"])
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (4, 3, 2)
    assert training.gc_freq == KEYS["training.gc_freq"].default
    assert config.origin("training.steps") == "command line"
    assert config.origin("training.seq_len") == str(recipe)
    assert config.origin("training.local_batch_size") == str(base)
    assert config.origin("training.gc_freq") == "default"
    set_keys = {key for key in KEYS if config.was_set(key)}
    assert set_keys == {
        "model.tokenizer_path",
        "training.steps",
        "training.seq_len",
        "training.local_batch_size",
    }


def test_extends_goes_through_a_chain_each_path_relative_to_its_file(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    write(tmp_path, TOKENIZER + "[optimizer]\nlr = 1\nbeta1 = 0.1\n", "a/bottom.toml")
    middle = 'extends = "../bottom.toml"\n[optimizer]\nbeta1 = 0.2\nbeta2 = 0.2\n'
    write(tmp_path, middle, "a/b/middle.toml")
    top = write(tmp_path, 'extends = "a/b/middle.toml"\n[optimizer]\nbeta2 = 0.3\n')
    config = load_config(top)
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (1.0, 0.2, 0.3)
    assert config.model.tokenizer_path == str(tmp_path / "a/t.model")
    assert os.path.samefile(config.origin("optimizer.lr"), tmp_path / "a/bottom.toml")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("job.dump_folder", "runs/x"),
        ("checkpoint.folder", "steps"),
        ("checkpoint.initial_load_path", "weights"),
        ("data.path", "corpus/*.jsonl"),
        ("validation.path", "held_out.jsonl"),
        ("model.tokenizer_path", "tokenizer.json"),
        ("model.name", "family.py"),
        ("compile.machine", "machine.toml"),
    ],
)
def test_a_tilde_is_the_home_folder_in_a_recipe_and_on_the_command_line(
    key, name, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    section, _, field = key.partition(".")
    expected = {section: {field: str(tmp_path / name)}}
    recipe = tmp_path / "recipes/mine.toml"
    recipe.parent.mkdir()
    recipe.write_text(f'[{section}]\n{field} = "~/{name}"\n')
    assert read_recipe(recipe)[0] == expected
    assert parse_command_line([f"--{key}=~/{name}"]) == (expected, [])


def test_a_tilde_is_the_home_folder_in_sources_and_extends(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sources = '[{path = "~/a"}, {path = "s3://~/b"}]'
    (tmp_path / "base.toml").write_text(f"[data]\nsources = {sources}\n")
    recipe = tmp_path / "recipes/mine.toml"
    recipe.parent.mkdir()
    recipe.write_text('extends = "~/base.toml"\n')
    expected = {"data": {"sources": ({"path": str(tmp_path / "a")}, {"path": "s3://~/b"})}}
    assert read_recipe(recipe)[0] == expected
    assert parse_command_line(["--data.sources", sources]) == (expected, [])


@pytest.mark.parametrize(
    ("words", "tables"),
    [
        (["--training.steps=3"], {"training": {"steps": 3}}),
        (["--training.steps", "-3"], {"training": {"steps": -3}}),
        (["--training.steps=3", "--training.steps", "4"], {"training": {"steps": 4}}),
        (["--training.steps=a=b"], {"training": {"steps": "a=b"}}),
        (["--training.local-batch-size=3"], {"training": {"local_batch_size": 3}}),
        (["--job.description="], {"job": {"description": ""}}),
        (["--job.description", "-x"], {"job": {"description": "-x"}}),
        (
            ["--compile.enable", "--float8.no-enable"],
            {"compile": {"enable": True}, "float8": {"enable": False}},
        ),
        (["--compile.no_enable"], {"compile": {"enable": False}}),
        (
            ["--parallelism.pipeline_parallel_split_points=layers.1,layers.2", "norm"],
            {"parallelism": {"pipeline_parallel_split_points": ("layers.1", "layers.2", "norm")}},
        ),
        (
            ["--parallelism.pipeline_parallel_split_points"],
            {"parallelism": {"pipeline_parallel_split_points": ()}},
        ),
        (
            ["--data.sources=[{dataset='c4', weight=2}]"],
            {"data": {"sources": ({"dataset": "c4", "weight": 2},)}},
        ),
    ],
)
def test_forms_of_options(words, tables):
    assert parse_command_line(words) == (tables, [])


def test_a_relative_dump_folder_is_below_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipes/mine.toml"
    recipe.parent.mkdir()
    recipe.write_text('[job]\ndump_folder = "runs/x"\n')
    assert load_config(recipe).job.dump_folder == "runs/x"


def test_the_dump_folder_is_named_after_the_recipe_unless_it_is_given(tmp_path):
    recipe = write(tmp_path, TOKENIZER, "mine.toml")
    assert load_config(recipe).job.dump_folder == "outputs/mine"
    assert load_config(recipe, ["--job.dump_folder=x"]).job.dump_folder == "x"


def test_the_saved_recipe_is_the_same_one_in_another_folder(tmp_path, monkeypatch):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(tmp_path, TOKENIZER, "here/base.toml")
    text = 'extends = "base.toml"\n[data]\ndataset = "local"\npath = "../text/*.jsonl"\n'
    write(tmp_path, text, "here/recipe.toml")
    options = ["--model.tokenizer_path", "other.model", "--optimizer.lr=0.1"]
    config = load_config("recipe.toml", options)
    assert config.model.tokenizer_path == str(tmp_path / "here/other.model")
    assert config.data.path == str(tmp_path / "text/*.jsonl")

    saved = write(tmp_path, to_toml(config), "elsewhere/config.toml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert flatten(load_config(saved)) == flatten(config)


def test_sources_are_tables_of_a_recipe_or_one_list_on_the_command_line(tmp_path):
    text = '[[data.sources]]\ndataset = "local"\npath = "a"\nweight = 3\n[[data.sources]]\n'
    recipe = write(tmp_path, TOKENIZER + text)
    config = load_config(recipe, ["--data.text_field", "text", "--data.shuffle_buffer=7"])
    local = DataSource(dataset="local", path=str(tmp_path / "a"), weight=3.0)
    assert config.data.sources == (local, DataSource())
    (share, first), (other_share, other) = config.data.mixture()
    assert (share, other_share) == (0.75, 0.25)
    assert (first.dataset, first.path, first.shuffle_buffer) == ("local", local.path, 7)
    assert first.sources == ()
    assert first.key("path") == "data.sources[1].path"
    assert (other.dataset, other.path) == ("stdlib", "")
    config = load_config(recipe, ["--data.sources", '[{dataset = "local", path = "b c"}]'])
    assert config.data.sources == (DataSource(dataset="local", path=os.path.abspath("b c")),)
    alone = load_config(recipe, ["--data.sources=[]"])
    assert alone.data.mixture() == [(1.0, alone.data)]


def test_sources_of_a_base_are_dropped_by_an_empty_list(tmp_path):
    mixed = '[[data.sources]]\n[[data.sources]]\ndataset = "c4"\n'
    base = write(tmp_path, TOKENIZER + mixed, "base.toml")
    text = 'extends = "base.toml"\n[data]\ndataset = "local"\npath = "a"\n'
    for key, line in zip(("dataset", "path"), lines_of(write(tmp_path, text)), strict=True):
        assert f"data.{key} = " in line
        assert f"is beside data.sources ({base}), which replace it" in line
        assert "or sources = []" in line
    config = load_config(write(tmp_path, text + "sources = []\n"))
    assert (config.data.sources, config.data.dataset) == ((), "local")


# The command line


def test_the_default_of_every_key_can_be_typed(tmp_path):
    recipe = write(tmp_path, TOKENIZER)
    typed = []
    for key, field in KEYS.items():
        default = field.default
        if key == "model.tokenizer_path":
            typed.append(f"--{key}={tmp_path}/t.model")
        elif key in ("data.sources", "validation.sources"):
            typed.append(f"--{key}=[]")
        elif isinstance(default, bool):
            typed.append(option(key, in_toml(default)))
        else:
            typed.append(f"--{key}={','.join(default) if isinstance(default, tuple) else default}")
    config = load_config(recipe, typed)
    assert flatten(config) == flatten(load_config(recipe))
    assert {config.origin(key) for key in KEYS} == {"command line"}


# Mistakes


class Mistake(NamedTuple):
    """A recipe and a command line; what the message must name; the fix that it must state; and both
    with that fix.
    """

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
    return Mistake(about, head + line, (f"{section}.{line}",), fix, head + (fixed or fix))


def a_name(about, recipe, names, fix, section, line):
    """A wrong name. section, line: the right ones."""
    return Mistake(about, TOKENIZER + recipe, names, fix, f"{TOKENIZER}[{section}]\n{line}\n")


def an_option(about, arguments, names, fix, *fixed_arguments):
    """A mistake on the command line."""
    words = tuple(arguments.split())
    return Mistake(about, TOKENIZER, names, fix, TOKENIZER, words, fixed_arguments)


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
    Mistake(
        "key without a section",
        "steps = 5",
        ("steps",),
        "training.steps",
        TOKENIZER + "[training]\nsteps = 5",
    ),
    Mistake(
        "section without keys",
        "training = 5\n" + TOKENIZER,
        ("training = 5",),
        "write [training]",
        TOKENIZER + "[training]\nsteps = 5",
    ),
    # types
    a_line(
        "string for list",
        "parallelism",
        'pipeline_parallel_split_points = "norm"',
        "pipeline_parallel_split_points = []",
    ),
    # ranges and choices
    a_line(
        "below, but not -1", "training", "global_batch_size = -2", "or -1", "global_batch_size = -1"
    ),
    Mistake(
        "no float is that large",
        f"{TOKENIZER}[optimizer]\nlr = 1{'0' * 400}",
        ("optimizer.lr = 1000",),
        "such as lr = 0.0003",
    ),
    a_line(
        "misspelt choice",
        "compile",
        'backend = "induktor"',
        "did you mean inductor?",
        'backend = "inductor"',
    ),
    # files
    Mistake(
        "invalid TOML",
        "[training\n",
        ("recipe.toml", "line 1"),
        "Expected ']'",
    ),
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
    # the command line
    an_option(
        "key alone",
        "--steps 5",
        ("--steps",),
        "steps is a key: training.steps or validation.steps",
        "--training.steps",
        "5",
    ),
    an_option(
        "no value",
        "--training.steps",
        ("--training.steps has no value",),
        "an integer at least 1",
        "--training.steps=1",
    ),
    an_option(
        "no option", "steps=5", ("'steps=5'",), "--training.steps 100", "--training.steps", "100"
    ),
    an_option(
        "one value too many",
        "--training.steps 5 6",
        ("--training.steps has several values: 5 6",),
        "use one: an integer at least 1",
        "--training.steps",
        "5",
    ),
    an_option(
        "a boolean and a value",
        "--compile.enable true",
        ('--compile.enable "true": it takes no value',),
        "--compile.no-enable for false",
        "--compile.enable",
    ),
    an_option(
        "a second recipe",
        "b.toml",
        ("'b.toml' is a second recipe",),
        "CONFIG_FILE=b.toml",
    ),
    an_option(
        "Arabic digits",
        "--training.steps=٣",
        ("training.steps = ",),
        "such as --training.steps 1000",
        "--training.steps=1000",
    ),
    an_option(
        "false in another form",
        "--no-compile.enable",
        ("unknown option --no-compile.enable",),
        "use --compile.no-enable",
        "--compile.no-enable",
    ),
    an_option(
        "not UTF-8",
        "--job.description=\udcff",
        (r'--job.description = "\udcff"',),
        "UTF-8",
        "--job.description=",
    ),
    # combinations
    together(
        "a source from nowhere",
        '[[data.sources]]\ndataset = "local"',
        ('data.sources[1].dataset = "local" needs data.sources[1].path',),
        'use one such as path = "corpus/*.jsonl"',
        '[[data.sources]]\ndataset = "local"\npath = "corpus/*.jsonl"',
    ),
    together(
        "a subset of what has none",
        '[data]\nsubset = "en"',
        ('data.subset = "en"', '"stdlib"'),
        "datasets of the hub (",
        '[data]\ndataset = "owner/name"\nsubset = "en"',
    ),
    Mistake(
        "a source twice",
        TOKENIZER + "[[data.sources]]\n[[data.sources]]\nweight = 2",
        ("has the same documents as data.sources[1]",),
        "sum of both weights",
        TOKENIZER + "[[data.sources]]\nweight = 3",
    ),
    an_option(
        "sources that are no TOML",
        "--data.sources=[{dataset=c4}]",
        ('data.sources = "[{dataset=c4}]"',),
        "a list of tables of dataset, path,",
        '--data.sources=[{dataset="c4"}]',
    ),
    together(
        "validation on nothing",
        "[validation]\nenable = true\n[data]\nvalidation_fraction = 0",
        ("validation.enable = true",),
        "data.validation_fraction = 0.05",
        "[validation]\nenable = true\n[data]\nvalidation_fraction = 0.05",
    ),
    together(
        "a budget that nobody keeps",
        '[activation_checkpoint]\nmode = "memory_budget"',
        ('activation_checkpoint.mode = "memory_budget"',),
        "compile.enable = true",
        '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true',
    ),
    together(
        "a step to load, from no checkpoint",
        "[checkpoint]\nload_step = 5",
        ("checkpoint.load_step = 5",),
        "checkpoint.enable = true",
        "[checkpoint]\nload_step = 5\nenable = true",
    ),
    Mistake("no tokenizer", "", ("model.tokenizer_path",), '"../assets/tokenizer/debug.model"'),
]


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[f"{'option, ' if m.arguments else ''}{m.about}" for m in MISTAKES]
)
def test_a_mistake_is_named_with_its_fix(mistake, tmp_path):
    write(tmp_path, TOKENIZER, "base.toml")
    recipe = write(tmp_path, mistake.recipe)
    (message,) = lines_of(recipe, mistake.arguments)
    for part in (*mistake.names, mistake.fix):
        assert part in message
    assert "\n" not in message
    assert "pydantic" not in message
    if mistake.about != "no tokenizer":  # no line's fault
        assert ("command line: " if mistake.arguments else f"{recipe}: ") in message

    check_keys(load_config(write(tmp_path, mistake.fixed), mistake.fixed_arguments))


def test_all_mistakes_of_a_recipe_of_what_it_extends_and_of_the_command_line_are_told_at_once(
    tmp_path,
):
    base = write(tmp_path, "[training]\nsteps = 0\n", "base.toml")
    text = 'extends = "base.toml"\n[training]\nseq_len = "x"\nstepz = 1\n[optimizr]\nlr = 1\n'
    text += "[data]\nsources = [{weight = 0, x = 1}, 5]"
    recipe = write(tmp_path, text)
    arguments = ["--optimizer.lr=high", "--nonsense", "5", "--optimizer.eps", "--compile.enable"]
    found = lines_of(recipe, [*arguments, "--debug.seed=-1"])
    begins = [
        f"{recipe}: training.seq_len = ",
        f"{base}: training.steps = 0: ",
        f"{recipe}: unknown key stepz = 1 in [training]; ",
        "command line: optimizer.lr = ",
        f"{recipe}: data.sources[1].weight = 0: ",
        f"{recipe}: unknown key x = 1 in data.sources[1]; ",
        f"{recipe}: data.sources[2] = 5: ",
        "command line: debug.seed = -1: ",
        f"{recipe}: unknown section [optimizr]; ",
        "command line: unknown option --nonsense; ",
        "command line: --optimizer.eps has no value; ",
    ]
    assert len(found) == len(begins)
    for line, begin in zip(found, begins, strict=True):
        assert line.startswith(begin), line


def test_impossible_combinations_are_told_together_and_beside_values_that_are_impossible(tmp_path):
    text = (
        "[lr_scheduler]\ndecay_begin = '10%'\ndecay_length = 0\n[data]\npath ="
        " 'x'\n[checkpoint]\nmust_resume = true\n"
    )
    found = lines_of(write(tmp_path, text))
    assert [line.partition(" = ")[0].rpartition(": ")[2] for line in found] == [
        "model.tokenizer_path",
        "lr_scheduler.decay_begin",
        "checkpoint.must_resume",
        "data.path",
    ]  # the order of the sections
    assert lines_of(write(tmp_path, text + "[training]\nmax_norm = 0"))[1:] == found


@pytest.mark.parametrize(
    "text",
    [
        # which may be dataset, or enable
        'extends = "base.toml"\n[data]\ndatset = "local"\npath = "x"',
        'extends = "base.toml"\n[checkpoint]\nenabel = true\nload_step = 5',
        'extends = "base.toml"\n[chekpoint]\nenable = true\n[checkpoint]\nload_step = 5',
        'extends = "base.toml"\n[checkpoint]\nenable = "yes"\nload_step = 5',
        '[model]\nflavor = "from_weights"',
        '[model]\nflavor = "from_weights"\n[checkpoint]\ninitial_load_path = "nowhere"',
    ],
)
def test_nothing_is_told_that_may_follow_from_a_wrong_word_or_value(text, tmp_path):
    write(tmp_path, TOKENIZER, "base.toml")
    recipe = write(tmp_path, text)
    assert len(lines_of(recipe)) == 1


def test_a_word_on_the_command_line_that_is_no_option_leaves_typed_keys_known(tmp_path):
    recipe = write(tmp_path, TOKENIZER)
    config, wrong = read_config(recipe, ["--training.steps=7", "--training.stepz=8"])
    assert [line.partition(";")[0] for line in wrong] == [
        "command line: unknown option --training.stepz=8"
    ]
    assert config.training.steps == 7
    assert config.optimizer.lr == KEYS["optimizer.lr"].default
    with pytest.raises(ConfigError) as error:
        print(config.training.seq_len)
    assert error.value.args == wrong


def test_numbers_that_are_not_finite_are_never_accepted():
    for key, field in KEYS.items():
        if kind_of(field.annotation) is float:
            for word in ("nan", "inf", "-inf"):
                (line,) = lines_of(SHIPPED[0], [f"--{key}={word}"])
                assert line.startswith(f"command line: {key} = {word}: expected")
            assert math.isfinite(field.default)


# Files


def test_a_circle_of_recipes_is_shown(tmp_path):
    first = write(tmp_path, 'extends = "second.toml"', "first.toml")
    second = write(tmp_path, 'extends = "third.toml"', "second.toml")
    third = write(tmp_path, 'extends = "second.toml"', "third.toml")
    (line,) = lines_of(first)
    assert f"{second} -> {third} -> {second}" in line


@pytest.mark.parametrize("name", ["none.toml", "./none.toml", "none"])
def test_a_recipe_that_is_not_there_is_called_as_it_was_written(name):
    (line,) = lines_of(name)
    begin = f"{Path(name)}: no such recipe; use the path of a TOML file, or one of debug_model"
    assert line.startswith(begin)


@pytest.mark.parametrize("name", ["train_configs/debug.toml", "debug_modle"])
def test_a_shipped_recipe_of_a_similar_name_is_suggested(name):
    assert lines_of(name) == [f"{name}: no such recipe; did you mean debug_model?"]


@pytest.mark.parametrize("word", ["--job.config_file", "--config=train_configs/llama3_8b.toml"])
def test_an_option_in_place_of_the_recipe_is_told(word):
    (line,) = lines_of(word, ["llama3_8b"])
    assert line.startswith(f"{word} stands where the recipe is named; use one such as llama3_8b, ")


@pytest.mark.parametrize(
    ("name", "fix"),
    [("debug_modle.toml", "debug_model.toml?"), ("zzz", "has debug_model.toml, llama3_")],
)
def test_a_recipe_that_is_not_there(name, fix):
    (line,) = lines_of(ROOT / "train_configs" / name)
    assert name in line
    assert fix in line


def test_what_is_no_file_is_named(tmp_path):
    assert "cannot be read (Is a directory); use a TOML file" in lines_of(tmp_path)[0]
    told = "nowhere/x.toml: no such recipe; the shipped recipes are in train_configs/"
    assert lines_of("nowhere/x.toml") == [told]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_byte_order_mark_is_read_over(newline, tmp_path):
    lines = [b"\xef\xbb\xbf" + TOKENIZER.strip().encode(), b"[job]", b'description = "\xc3\xa9"']
    assert load_config(write(tmp_path, newline.join(lines))).job.description == "é"


# Parts


def test_a_value_in_a_message_is_short_and_in_one_line():
    assert shown("a\nb") == '"a\\nb"'
    assert shown([1, "a"]) == '[1, "a"]'
    assert shown("x" * 500) == f'"{"x" * 49} ... {"x" * 49}"'
    assert shown(True) == "true"
    assert str(ConfigError("a = /x\nerror: \x1b[31mred")) == r"a = /x\nerror: \x1b[31mred"
    assert str(ConfigError("two things:\n  one\n  two")) == "two things:\n  one\n  two"


def test_a_copy_with_other_values_has_the_keys_of_its_section():
    config = load_config(SHIPPED[0])
    changed = config.replace(training=config.training.replace(steps=7))
    assert (changed.training.steps, changed.training.seq_len) == (7, config.training.seq_len)
    assert changed.origin("training.steps") == config.origin("training.steps")
    with pytest.raises(TypeError, match="Training has no stepz"):
        config.training.replace(stepz=7)


@pytest.mark.parametrize(("size", "ranks", "steps"), [(-1, 3, 1), (8, 2, 1), (24, 2, 3)])
def test_gradient_accumulation_steps(size, ranks, steps):
    training = Training(local_batch_size=4, global_batch_size=size)
    assert gradient_accumulation_steps(training, ranks) == steps


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/web/*.jsonl.zst", "/a/code"], ["web", "code"]),
        (["/a/x y.jsonl", "/b/x/y"], ["x_y", "y"]),
        (["/a/web", "/b/web/**/*", "/c/web"], ["web", "web_2", "web_3"]),
        (["/", "/a/.hidden", "*.txt"], ["local", "local_2", "local_3"]),
        ([], []),
    ],
)
def test_each_source_has_a_short_name_of_its_own(paths, names):
    sources = tuple(DataSource(dataset="local", path=path) for path in paths)
    assert Data(sources=sources).source_names() == names


def test_a_source_without_a_path_is_named_after_its_dataset():
    sources = (DataSource(dataset="o/fine", subset="s-1"), DataSource())
    assert Data(sources=sources).source_names() == ["o_fine_s-1", "stdlib"]


def test_a_wrong_recipe_is_told_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from titan_lite.train import main; print(main(sys.argv[1:]), 'torch' in"
        " sys.modules)"
    )
    command = [sys.executable, "-c", code, SHIPPED[0], "--training.stepz", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert (
        done.stderr
        == "error: command line: unknown option --training.stepz; did you mean training.steps?\n"
    )


def test_a_recipe_that_can_be_read_once_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    extending = write(tmp_path, 'extends = "pipe.toml"\n')
    for recipe in (tmp_path / "pipe.toml", extending, "/dev/zero"):
        (message,) = lines_of(recipe)
        assert "is a pipe or a device, and every rank reads a recipe again" in message
