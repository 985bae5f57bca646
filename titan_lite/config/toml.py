"""TOML files, in and out.

read_toml(Path("train_configs/debug_model.toml"))["training"]["steps"]        # 100
in_toml(("norm", "output"))                                                   # '["norm", "output"]'
"""

import dataclasses
import difflib
import json
import os
import re
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_lite.config.row import ConfigError, one_line

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib

MOST_BYTES = 2**20  # of a file
DEEPEST = 32  # brackets within each other, dots of a key
LONGEST_WORD = 1000  # characters of a number or of a key without quotes
# Each matches whatever follows, to the end of the text if need be: so looking goes over the text once.
_TOKENS = re.compile(
    r"""#[^\n]*|\"{3}(?:[^\\]|\\.?)*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|"(?:[^"\\\n]|\\.?)*"?|'[^'\n]*'?|[\w+-]+|[][{}.,=\n]""", re.S
)


def read_toml(path: Path, what: str = "file") -> dict[str, Any]:
    """The tables of a TOML file of at most MOST_BYTES. Raises ConfigError."""
    works = "name a TOML file such as train_configs/debug_model.toml"
    try:
        # O_NONBLOCK: a pipe that nobody writes to is opened, and found to be one
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: cannot be read (it is no regular file); {works}")
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES >> 20} MiB, which no {what} has; {works}")
        return loads(content.decode("utf-8-sig"))  # an editor may put a byte order mark first
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}{files_beside(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {works}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"byte {error.object[error.start]:#04x} is not UTF-8 (at line {line})"
        raise ConfigError(f"{path}: not valid TOML: {wrong}; saved as UTF-8 it would work") from None
    except ConfigError:
        raise
    except ValueError as error:
        why = one_line(str(error), 300)
        raise ConfigError(f"{path}: not valid TOML: {why}; a line reads `key = value` under a `[section]`") from None


def loads(text: str) -> dict[str, Any]:
    """The tables of a text. Raises ValueError.

    Looks at brackets, dots and words first: tomllib recurses into brackets, and needs time and memory with the square of a dotted
    key's parts; an integer of thousands of digits cannot be shown.
    """
    depth = dots = 0
    for token in _TOKENS.finditer(text):
        first, size = token[0][0], len(token[0])
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth = max(0, depth - 1)  # one too many is for tomllib to tell
        dots = dots + 1 if first == "." else 0 if first in "[]{},=\n" else dots
        long = size > LONGEST_WORD and first not in "#\"'"
        if long or depth > DEEPEST or dots > DEEPEST:
            what = f"a number or key of {size} characters" if long else f"more than {DEEPEST} levels deep"
            raise ValueError(f"{what} (at line {text.count(chr(10), 0, token.start()) + 1})")
    return tomllib.loads(text)


def files_beside(path: Path) -> str:
    """For the end of a message about a file that is not there."""
    try:
        found = sorted(name for name in os.listdir(path.parent) if name.endswith(".toml") and name != "pyproject.toml")
    except (OSError, ValueError):  # the latter of a NUL character
        found = []
    known = f"; {path.parent} has {', '.join(found[:20])}" if found else "; the shipped recipes are in train_configs/"
    return did_you_mean(path.name, found, within=f"{path.parent}/", otherwise=known)


def did_you_mean(word: str, known: Iterable[str], *, within: str = "", otherwise: str = "") -> str:
    """For the end of a message about a word that is not one of those known: the nearest of them, or `otherwise`."""
    close = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {within}{close[0]}?" if close else otherwise


def parse_value(text: str) -> Any:
    """The value of `key = text` in a file. Raises ValueError."""
    tables = loads(f"value = {text}")
    if len(tables) > 1:
        raise ValueError("more than a value")
    return tables["value"]


def shown(value: Any) -> str:
    """A value in a message: as in TOML, where it can stand in one, and short."""
    return one_line(in_toml(value) if isinstance(value, str | bool | int | float | tuple) else str(value), 100)


def in_toml(value: Any) -> str:
    """A value as it stands in a TOML file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML basic string but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    if dataclasses.is_dataclass(value):
        return f"{{{', '.join(f'{f.name} = {in_toml(getattr(value, f.name))}' for f in dataclasses.fields(value))}}}"
    return repr(value)
