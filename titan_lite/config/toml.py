"""Read TOML files, and write values as TOML.

read_toml(Path("train_configs/debug_model.toml"))["training"]["steps"]        # 100
in_toml(("norm", "output"))                                                   # '["norm", "output"]'
"""

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_lite.config.row import ConfigError, one_line

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib


def read_toml(path: Path, what: str = "file") -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError."""
    try:
        # an editor may put a byte order mark first
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}{files_beside(path)}") from None
    except OSError as error:
        fix = "use a TOML file such as train_configs/debug_model.toml"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {fix}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"byte {error.object[error.start]:#04x} is not UTF-8 (at line {line})"
        raise ConfigError(f"{path}: not valid TOML: {wrong}; save it as UTF-8") from None
    except ValueError as error:
        why = one_line(str(error), 300)
        fix = "use lines of the form `key = value` under a `[section]`"
        raise ConfigError(f"{path}: not valid TOML: {why}; {fix}") from None


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
    tables = tomllib.loads(f"value = {text}")
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
