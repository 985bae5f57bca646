"""Files that are read as TOML: whatever they are, they give tables or one line, in little memory and time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lite.config import ConfigError
from titan_lite.config.toml import MOST_BYTES, loads, read_toml, shown

ROOT = Path(__file__).parents[3]
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
from titan_lite.recipe import main
sys.exit(main(sys.argv[1:]))
"""


def limited(*arguments):
    """titan_lite.recipe with 512 MiB of memory and 20 seconds of a processor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LIMITED, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def refused(path):
    with pytest.raises(ConfigError) as error:
        read_toml(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


LONG = "a." * 200_000
BOMBS = {  # content -> what is said of it
    "arrays": ("x = 1\ny = " + "[" * 100_000, "more than 32 levels deep (at line 2)"),
    "inline tables": ("x = " + "{a = " * 5_000, "more than 32 levels deep (at line 1)"),
    "a dotted key": (f"[x]\n\n{LONG}a = 1", "more than 32 levels deep (at line 3)"),
    "a dotted header": (f"[{LONG}a]", "more than 32 levels deep (at line 1)"),
    "a dotted key with quotes": (
        '"a b" . ' * 20_000 + "a = 1",
        "more than 32 levels deep (at line 1)",
    ),
    "a dotted key with quotes and escapes": (
        '"\\"" . ' * 20_000 + "a = 1",
        "more than 32 levels deep (at line 1)",
    ),
    "a dotted key in an array": (
        'x = [\n"a.b", {' + LONG + "a = 1}]",
        "more than 32 levels deep (at line 2)",
    ),
    "digits": ("\nx = " + "9" * 5_000, "a number or key of 5000 characters (at line 2)"),
    "digits apart": (
        "\nx = " + "9_" * 5_000 + "9",
        "a number or key of 10001 characters (at line 2)",
    ),
    "hexadecimal": ("x = 0x" + "f" * 500_000, "a number or key of 500002 characters (at line 1)"),
    "quotes that are not closed": (
        'x = "' + '\\"' * 400_000,
        "not valid TOML: Unterminated string",
    ),
    "escaped quotes of several lines": ('x = """' + '\\"""' * 200_000 + "\\", "not valid TOML"),
    "quotes that begin and end": ("x = " + "'\"" * 400_000, "not valid TOML"),
    "NUL": ("x = 1\n\0 = 2", "not valid TOML: Invalid statement (at line 2, column 1)"),
    "NUL in a string": ('x = "\0"', "not valid TOML: Illegal character '\\x00'"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_text_that_would_cost_much_is_one_line_that_names_the_line(case, tmp_path):
    content, words = BOMBS[case]
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    result = limited(path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1000
    assert f"{path}: " in result.stderr
    assert words in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "[[[",
        "[" * 100_000,
        '[{path = "' + "x" * 100_000,
        "[{a" + ".a" * 50_000 + "=1}]",
        "9" * 5_000,
        "[\n]\nb = 1",
        "\0",
    ],
)
def test_sources_on_the_command_line_are_as_bounded(text, capsys):
    from titan_lite.recipe import main

    assert main([str(ROOT / "train_configs/debug_model.toml"), "--data.sources", text]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: command line: --data.sources=")
    assert message.count("\n") == 1
    assert len(message) < 500


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe").startswith(
        "cannot be read (not a regular file); use a TOML file"
    )
    assert refused(Path("/dev/zero")).startswith("cannot be read (not a regular file)")
    assert refused(tmp_path).startswith("cannot be read (Is a directory)")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    assert "symbolic links" in refused(tmp_path / "loop.toml")
    assert "File name too long" in refused(tmp_path / ("a" * 300))
    assert "no such file" in refused(tmp_path / "x.toml")
    with pytest.raises(ConfigError, match="null"):
        read_toml(Path("a\0b"))


def test_a_file_larger_than_any_recipe_is_not_read(tmp_path):
    with open(tmp_path / "large.toml", "wb") as file:
        file.truncate(2**30)  # a hole
    result = limited(tmp_path / "large.toml")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "large.toml: larger than 1 MiB, the most that a recipe may have" in result.stderr
    path = tmp_path / "just.toml"
    path.write_bytes(b"x = 1\n" + b"#" * (MOST_BYTES - 6))
    assert read_toml(path) == {"x": 1}


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_byte_order_mark_is_read_over(newline, tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf" + newline.join([b"[a]", b'b = "\xc3\xa9"']))
    assert read_toml(path) == {"a": {"b": "é"}}


@pytest.mark.parametrize(
    ("content", "words"),
    [("é".encode("utf-16"), "byte 0xff"), (b"a = 1\nb = '\xe9'\n", "byte 0xe9")],
)
def test_another_encoding_is_told_with_its_line(content, words, tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    line = content.count(b"\n") or 1
    assert (
        refused(path) == f"not valid TOML: {words} is not UTF-8 (at line {line}); save it as UTF-8"
    )


def test_what_looks_deep_and_is_not_is_read():
    dots = ".".join("a" * 100)
    quotes = (
        '""',
        "''",
        '"\\"."',
        "'''a\n\"'''",
        f'"{dots}"',
        f"'''{dots}'''",
        f'"""{dots}\n{"[" * 100}"""',
    )
    text = f"# {'[' * 100} {dots} {'9' * 2000}\nx = [{', '.join(quotes)}]\n" + "".join(
        f"[a.b{n}]\nc.d = 1.5\n" for n in range(100)
    )
    assert loads(text)["a"]["b99"] == {"c": {"d": 1.5}}
    assert loads(text)["x"][4] == dots


def test_a_value_in_a_message_is_short_and_in_one_line():
    assert shown("a\nb") == '"a\\nb"'
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown("x" * 500) == f'"{"x" * 49} ... {"x" * 49}"'
    assert shown(True) == "true"
