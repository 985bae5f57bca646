"""TOML files, in and out.

read_toml(Path("train_configs/debug_model.toml"))["training"]["steps"]        # 100
in_toml(("norm", "output"))                                                   # '["norm", "output"]'
"""

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_lite.config import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib


def read_toml(path: Path, what: str = "file") -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}{files_beside(path)}") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a TOML file such as train_configs/debug_model.toml"
        ) from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or an integer of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}; a line reads `key = value` under a `[section]`") from None


def files_beside(path: Path) -> str:
    """For the end of a message about a file that is not there."""
    found = sorted(p.name for p in path.parent.glob("*.toml") if p.name != "pyproject.toml") if path.parent.is_dir() else []
    known = f"; {path.parent} has {', '.join(found)}" if found else "; the shipped recipes are in train_configs/"
    return did_you_mean(path.name, found, within=f"{path.parent}/", otherwise=known)


def did_you_mean(word: str, known: Iterable[str], *, within: str = "", otherwise: str = "") -> str:
    """For the end of a message about a word that is not one of those known: the nearest of them, or `otherwise`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {within}{close[0]}?" if close else otherwise


def parse_value(text: str) -> Any:
    """The value of `key = text` in a file. Raises ValueError."""
    return tomllib.loads(f"value = {text}")["value"]


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
