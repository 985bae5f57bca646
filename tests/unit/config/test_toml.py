"""Files that are read as TOML give tables or one line."""

import pytest

from titan_lite.config import ConfigError
from titan_lite.config.toml import read_toml, shown


def refused(path):
    with pytest.raises(ConfigError) as error:
        read_toml(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_what_is_no_file_is_named(tmp_path):
    assert refused(tmp_path).startswith("cannot be read (Is a directory)")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    assert "symbolic links" in refused(tmp_path / "loop.toml")
    assert "no such file" in refused(tmp_path / "x.toml")


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


def test_a_value_in_a_message_is_short_and_in_one_line():
    assert shown("a\nb") == '"a\\nb"'
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown("x" * 500) == f'"{"x" * 49} ... {"x" * 49}"'
    assert shown(True) == "true"
