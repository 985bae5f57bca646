"""Read TOML files within bounds, and write values as TOML.

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

MOST_BYTES = 2**20  # in a file
DEEPEST = 32  # nested brackets, and dots of a key
LONGEST_WORD = 1000  # characters of a number or of a key without quotes
# Each alternative matches any text after its first character, up to the end if necessary, so that a scan takes linear time.
_TOKENS = re.compile(
    r"""#[^\n]*|\"{3}(?:[^\\]|\\.?)*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|"(?:[^"\\\n]|\\.?)*"?|'[^'\n]*'?|[\w+-]+|[][{}.,=\n]""",
    re.S,
)


def read_toml(path: Path, what: str = "file") -> dict[str, Any]:
    """Return the tables of a TOML file of at most MOST_BYTES. Raises ConfigError."""
    fix = "use a TOML file such as train_configs/debug_model.toml"
    try:
        # O_NONBLOCK: opening a pipe without a writer does not block
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: cannot be read (not a regular file); {fix}")
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{path}: larger than {MOST_BYTES >> 20} MiB, the most that a {what} may have; {fix}"
            )
        return loads(content.decode("utf-8-sig"))  # an editor may put a byte order mark first
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}{files_beside(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {fix}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"byte {error.object[error.start]:#04x} is not UTF-8 (at line {line})"
        raise ConfigError(f"{path}: not valid TOML: {wrong}; save it as UTF-8") from None
    except ConfigError:
        raise
    except ValueError as error:
        why = one_line(str(error), 300)
        raise ConfigError(
            f"{path}: not valid TOML: {why}; use lines of the form `key = value` under a `[section]`"
        ) from None


def loads(text: str) -> dict[str, Any]:
    """Return the tables of a text. Raises ValueError.

    Brackets, dots and words are checked first: tomllib recurses into brackets, needs time and memory quadratic in the parts of a
    dotted key, and Python cannot print an integer of thousands of digits.
    """
    depth = dots = 0
    for token in _TOKENS.finditer(text):
        first, size = token[0][0], len(token[0])
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth = max(0, depth - 1)  # tomllib reports one too many
        dots = dots + 1 if first == "." else 0 if first in "[]{},=\n" else dots
        long = size > LONGEST_WORD and first not in "#\"'"
        if long or depth > DEEPEST or dots > DEEPEST:
            what = (
                f"a number or key of {size} characters"
                if long
                else f"more than {DEEPEST} levels deep"
            )
            raise ValueError(f"{what} (at line {text.count(chr(10), 0, token.start()) + 1})")
    return tomllib.loads(text)


def files_beside(path: Path) -> str:
    """Return the end of a message about a missing recipe: the recipes in its folder."""
    try:
        found = sorted(
            name
            for name in os.listdir(path.parent)
            if name.endswith(".toml") and name != "pyproject.toml"
        )
    except (OSError, ValueError):  # ValueError: a NUL character
        found = []
    known = (
        f"; {path.parent} has {', '.join(found[:20])}"
        if found
        else "; the shipped recipes are in train_configs/"
    )
    return did_you_mean(path.name, found, within=f"{path.parent}/", otherwise=known)


def did_you_mean(word: str, known: Iterable[str], *, within: str = "", otherwise: str = "") -> str:
    """Return the end of a message about an unknown word: the nearest known one, or `otherwise`."""
    close = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {within}{close[0]}?" if close else otherwise


def parse_value(text: str) -> Any:
    """Return the value of `key = text` in a file. Raises ValueError."""
    tables = loads(f"value = {text}")
    if len(tables) > 1:
        raise ValueError("more than a value")
    return tables["value"]


def shown(value: Any) -> str:
    """Return a value for a message: short, and as in TOML if it has a form there."""
    return one_line(
        in_toml(value) if isinstance(value, str | bool | int | float | tuple) else str(value), 100
    )


def in_toml(value: Any) -> str:
    """Return a value as it is written in a TOML file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML basic string, except for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    if dataclasses.is_dataclass(value):
        return f"{{{', '.join(f'{f.name} = {in_toml(getattr(value, f.name))}' for f in dataclasses.fields(value))}}}"
    return repr(value)
