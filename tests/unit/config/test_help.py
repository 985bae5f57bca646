"""What a person reads: help, the values that keys accept, a printed recipe, and the command that
does it.
"""

import re
from pathlib import Path

import pytest

from titan_lite import launch as start
from titan_lite.__main__ import TOOLS, USAGE
from titan_lite.config import KEYS, SECTIONS, flatten, load_config, to_toml
from titan_lite.config.help import accepted
from titan_lite.recipe import HELP, help_text, main

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
DEBUG = str(ROOT / "train_configs/debug_model.toml")


def test_every_key_is_described():
    text = help_text()
    unwrapped = " ".join(text.split())
    for key, field in KEYS.items():
        assert re.search(rf"--{re.escape(key)}(, --[\w.]+no-\w+)? \(default ", text)
        description = " ".join(field.description.split())
        assert description.endswith("."), key
        assert description in unwrapped, key
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.steps", "an integer at least 1"),
        ("training.global_batch_size", "an integer at least 1 and at most 1048576, or -1"),
        ("optimizer.beta1", "a number at least 0 and below 1"),
        ("compile.enable", "true or false"),
        ("float8.filter_fqns", "a list of strings"),
        ("optimizer.ns_dtype", 'one of "bfloat16", "float32"'),
        ("data.dataset", 'one of "stdlib", "local", "c4", "prepared", or owner/name'),
        (
            "data.sources",
            "a list of tables of dataset, path, subset, split, text_field, weight",
        ),
        ("job.dump_folder", "a string"),
    ],
)
def test_accepted_values_in_words(key, words):
    assert accepted(KEYS[key]) == words


def test_without_arguments_the_usage_is_short(capsys):
    assert main([]) == 2
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    assert len(text.splitlines()) < 60
    assert all(section in text for section in SECTIONS)


@pytest.mark.parametrize("arguments", [["--help"], ["recipe.toml", "-h"], ["-h", "--x"]])
def test_help(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    assert "--training.steps (default 1000; an integer at least 1)\n" in text
    assert "--compile.enable, --compile.no-enable (default false)\n" in text


@pytest.mark.parametrize(
    "arguments", [["recipe.toml", "--help", "optimizer"], ["-h", "[optimizer]"]]
)
def test_help_on_one_section(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("[optimizer]  The optimizer and its constants.\n")
    assert set(re.findall(r"--(\w+)\.", text)) == {"optimizer"}


def test_help_on_a_section_that_there_is_not(capsys):
    assert main(["recipe.toml", "--help", "optimiser"]) == 2
    told = "error: command line: --help optimiser: no such section; did you mean optimizer?\n"
    assert capsys.readouterr() == ("", told)


def test_the_command_has_every_program_and_help_names_them():
    files = [
        path
        for room in ("tools", "features")
        for path in (ROOT / "titan_lite" / room).rglob("*.py")
        if re.search(r"\n@.*command.*\ndef main", path.read_text())
    ]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    assert set(TOOLS.values()) == modules | {"titan_lite.recipe"}
    for name in ("train", *TOOLS):
        assert re.search(rf"\b{name} ", HELP)
        assert re.search(rf"^  {name} +[a-z]", USAGE, re.MULTILINE)


def test_help_names_the_variables():
    assert [name for name in start.VARIABLES if name not in HELP] == ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_print_config_is_a_recipe_that_loads_to_the_same_values(recipe, tmp_path, capsys):
    assert main([str(recipe), "--print-config", "--training.steps=12345"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert "steps = 12345  # command line" in printed.read_text()
    assert f"flavor = {flavor_of(recipe)}  # " in printed.read_text()
    found, expected = load_config(printed), load_config(recipe, ["--training.steps=12345"])
    assert flatten(found) == flatten(expected)


def flavor_of(recipe):
    return f'"{load_config(recipe).model.flavor}"'


def test_any_text_and_an_origin_with_a_line_break_are_printed_on_their_line(tmp_path):
    text = 'a\nb\t"c" \\ é \x7f'
    config = load_config(
        DEBUG, [f"--job.description={text}", '--data.sources=[{subset = "x\\ny", dataset = "o/n"}]']
    )
    config.set_origins({"job.description": "x\ny = 1"})
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(config, origins=True))
    assert flatten(load_config(printed)) == flatten(config)


# python -m titan_lite recipe


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        ("4", ["--parallelism.pipeline_parallel_degree=3"], "does not divide 4 ranks"),
        ("two", [], "--world-size: two: use an integer at least 1"),
    ],
)
def test_what_the_number_of_ranks_decides_is_reported(ranks, options, words, capsys):
    assert main([DEBUG, "--world-size", ranks, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_what_was_checked_of_a_right_recipe_is_told(monkeypatch, tmp_path, capsys):
    without_ranks = tmp_path / "own.toml"
    text = Path(DEBUG).read_text().replace("# world_size: 2\n", "")
    without_ranks.write_text(text.replace("../assets", str(ROOT / "assets")))
    assert main([str(without_ranks)]) == 0
    assert "its keys are right; --world-size N checks its layout" in capsys.readouterr().out
    assert main(["llama3_405b"]) == 0
    assert "right at world size 512; --world-size 512 checks its tok" in capsys.readouterr().out
    assert main(["llama3_405b", "--parallelism.tensor_parallel_degree=7"]) == 2
    assert "does not divide the 128 attention heads" in capsys.readouterr().err
    monkeypatch.setenv("LOG_RANK", "3")
    assert main(["--world-size", "4", DEBUG]) == 0
    assert "right at world size 4, with tokenizer and data" in capsys.readouterr().out
    assert main([DEBUG, "--world-size", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: LOG_RANK=3: use ranks below 2")
