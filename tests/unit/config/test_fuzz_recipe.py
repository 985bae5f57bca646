"""Any recipe, command line and environment: a config that can be written out and read back, or a ConfigError of a few lines.

Each test has a few examples by default, and with `-m slow` as many as take minutes.
"""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from titan_lite import recipe
from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.profiles import machine_from
from titan_lite.config import KEYS, SECTIONS, ConfigError, Mistakes
from titan_lite.config.recipe import load_config, to_toml
from titan_lite.config.toml import in_toml, loads, read_toml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
DEBUG = str(ROOT / "train_configs/debug_model.toml")


def often(few, many, *examples, **strategies):
    """The check as a test of few examples, and a slow one of many."""

    def twice(check):
        def test(count):
            made = given(**strategies)(check)
            for each in examples:
                made = example(**each)(made)
            return settings(max_examples=count)(made)

        return test(few), pytest.mark.slow(test(many))

    return twice


def config_or_lines(path, overrides=()):
    """The config, which loads back from what is written of it, or None after a message that is fit to be read."""
    try:
        config, origins = load_config(path, overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert 1 <= len(lines) <= Mistakes.MOST + 2
        assert all(line.isprintable() and 0 < len(line) <= 1600 for line in lines)
        return None
    again = Path(path).with_name("again.toml")
    again.write_text(to_toml(config, origins), encoding="utf-8")
    assert load_config(again)[0] == config
    return config


# What is in a recipe

NUMBERS = [
    "9" * 400,
    "0x" + "f" * 600,
    "1" * 5000,
    "1e999",
    "-1e999",
    "nan",
    "inf",
    "-1",
    "0",
    "-0",
    "2024-01-01",
    "07:32:00",
]
SIGNS = [
    *"[]{}=,.#\"'\n\\\0 -+_:",
    '"""',
    "'''",
    "[[",
    "]]",
    "\r\n",
    "\ufeff",
    "0x",
    "true",
    "extends",
    "[data.sources]",
]
NAMES = [*KEYS, *SECTIONS, *(key.partition(".")[2] for key in KEYS)]
CHOICES = sorted({word for field in KEYS.values() for word in field.metadata["choices"]})
PIECES = st.sampled_from([*NUMBERS, *SIGNS, *NAMES])
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)
VALUES = st.recursive(
    st.one_of(
        st.integers().map(str),
        st.sampled_from([*NUMBERS, "true"]),
        st.floats().map(repr),
        st.text(max_size=8).map(lambda text: f"'{text}'"),
        st.sampled_from(CHOICES).map(lambda word: f'"{word}"'),
        st.sampled_from(["/", "a" * 5000, "nowhere/*", "/dev/zero", "\\u0000", "\\uFFFF"]).map(
            lambda word: f'"{word}"'
        ),
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda many: f"[{', '.join(many)}]")
        | st.dictionaries(
            st.sampled_from(["dataset", "path", "weight", "split", "x"]), inner, max_size=4
        ).map(
            lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
        )
    ),
    max_leaves=6,
)


NUMERIC = [key for key, field in KEYS.items() if field.type in (int, float)]
ADMITTED = {
    name: in_toml(field.default)
    for key, field in KEYS.items()
    for name in (key, key.partition(".")[2])
}


@st.composite
def recipes(draw):
    """Sections and keys that there are, mostly, with any values, and some that are admitted."""
    lines = [
        draw(st.sampled_from(["", "extends = 'base.toml'\n", "extends = " + draw(VALUES) + "\n"]))
    ]
    for section in draw(
        st.lists(st.sampled_from([*SECTIONS, "x", "data.sources"]), unique=True, max_size=4)
    ):
        names = list(
            getattr(SECTIONS.get(section), "__dataclass_fields__", ["weight", "path", "dataset"])
        )
        chosen = draw(
            st.lists(st.sampled_from([*names, "learning_rate", "zz"]), unique=True, max_size=4)
        )
        lines.append(f"[{section}]" if section != "data.sources" else "[[data.sources]]")
        lines += [
            f"{name} = {draw(VALUES | st.just(ADMITTED.get(name, 'true')) | st.sampled_from(NUMBERS))}"
            for name in chosen
        ]
    return "\n".join(lines)


@st.composite
def damaged(draw):
    """A shipped recipe in which some bytes are others."""
    content = bytearray(draw(st.sampled_from([path.read_bytes() for path in SHIPPED])))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(content) - 1))
        content[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(content)


ENCODED = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"])
FILES = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda text, how: text.encode(how, "replace"), TEXTS | recipes(), ENCODED),
    damaged(),
)


@often(
    150,
    2_000,
    dict(content=b"[training]\nsteps = " + b"9" * 400),
    dict(content=b"[[data.sources]]\n" * 3000),
    dict(content="".join(f"[x{n}]\n" for n in range(20_000)).encode()),
    dict(content="[training]\n{}".format("".join(f"x{n} = 1\n" for n in range(20_000))).encode()),
    dict(content=b"[data]\nsources = [" + b"{weight = 1e308}," * 3000 + b"]"),
    content=FILES,
)
def _any_file(content, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / "base.toml").write_text('[model]\ntokenizer_path = "t.model"\n')
    (folder / "recipe.toml").write_bytes(content)
    config_or_lines(folder / "recipe.toml")


test_any_file_is_a_recipe_or_a_few_lines, test_many_files_are = _any_file


# What is on the command line

WORDS = st.one_of(
    TEXTS,
    st.text(
        st.characters(), max_size=10
    ),  # surrogates, too, as which bytes come that are not UTF-8
    st.builds(
        lambda key, value: f"--{key}={value}",
        st.sampled_from([*KEYS, "x.y"]),
        VALUES | TEXTS | st.text(max_size=8),
    ),
    st.sampled_from(
        [
            *(f"--{key}" for key in KEYS),
            *(f"--no-{key}" for key in KEYS),
            "--",
            "-",
            "--=",
            "--no-",
            "--no_",
            "--.",
        ]
    ),
    st.builds(
        lambda key, value: f"--{key}={value}", st.sampled_from(NUMERIC), st.sampled_from(NUMBERS)
    ),
    st.sampled_from([f"--{key}={ADMITTED[key]}" for key in NUMERIC]),
)


@often(
    150,
    2_000,
    dict(words=["--training.steps", "9" * 400]),
    dict(words=["--optimizer.lr", "1e999"]),
    dict(words=["--job.dump_folder", "\udcff"]),
    dict(words=["--x" * 50_000]),
    dict(words=[f"--x{n}" for n in range(5_000)]),
    words=st.lists(WORDS, max_size=6),
)
def _any_words(words, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "debug.toml"
    path.write_text(Path(DEBUG).read_text().replace("../assets", "assets"))
    config_or_lines(path, words)


test_any_command_line_is_a_config_or_a_few_lines, test_many_command_lines_are = _any_words


@often(
    50,
    500,
    words=st.lists(
        WORDS | st.sampled_from(["--help", "-h", "--print-config", DEBUG, *SECTIONS]), max_size=5
    ),
)
def _any_command(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = recipe.main(words)
    assert code in (0, 2)
    assert err.getvalue().count("\n") <= Mistakes.MOST + 2
    assert "Traceback" not in err.getvalue()


test_the_command_ends_with_0_or_2, test_the_command_ends_so_very_often = _any_command


# What is in the environment

VARIABLES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "CONFIG_FILE",
    "NGPU",
    "LOG_RANK",
    "NO_COLOR",
    "COLUMNS",
    "HOME",
    "TERM",
    "LANG",
]


@often(
    50,
    500,
    environment=st.dictionaries(
        st.sampled_from(VARIABLES), st.text(st.characters(exclude_characters="\0", codec="utf-8"))
    ),
)
def _any_environment(environment):
    with mock.patch.dict(os.environ, environment):
        assert load_config(DEBUG) == EXPECTED


EXPECTED = load_config(DEBUG)
test_no_environment_changes_a_config, test_none_of_many_environments_does = _any_environment


@pytest.mark.parametrize(
    ("environment", "code"),
    [({"PYTHONIOENCODING": "ascii"}, 2), ({"PYTHONIOENCODING": "utf-8"}, 0), ({"LC_ALL": "C"}, 0)],
)
def test_a_console_that_cannot_show_a_recipe_is_told(environment, code, tmp_path):
    command = [
        sys.executable,
        "-m",
        "titan_lite.recipe",
        DEBUG,
        "--job.description",
        "é",
        "--print-config",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path)
    assert result.returncode == code
    told = b"error: standard output is ascii, which has no '\\xe9'; use PYTHONIOENCODING=utf-8\n"
    assert result.stderr == (told if code else b"")


# What is in the file of a machine

FIELDS = [*Machine.__dataclass_fields__, "like", "zz"]
MACHINES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6).map(
    lambda table: "\n".join(f"{key} = {value}" for key, value in table.items())
)


@often(
    100,
    1_000,
    text=MACHINES | MACHINES.map(lambda text: f'like = "H100"\n{text}') | TEXTS,
)
def _any_machine(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "machine.toml"
    path.write_text(text, encoding="utf-8", newline="")
    with contextlib.suppress(ConfigError):
        assert isinstance(machine_from(read_toml(path), str(path)), Machine)


test_any_file_is_a_machine_or_wrong, test_many_files_are_machines_or_wrong = _any_machine


def test_what_is_generated_is_often_a_config():
    """Else the tests above would only look at what is refused early."""
    found = []

    @settings(max_examples=100)
    @given(text=recipes())
    def look(text):
        with contextlib.suppress(ValueError):
            found.append(loads(text))

    look()
    assert len(found) > 20
