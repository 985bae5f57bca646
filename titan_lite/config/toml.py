"""TOML files, in and out. Standard library only, as config.py.

read_toml(Path("train_configs/debug_model.toml"))["training"]["steps"]        # 100
in_toml(("norm", "output"))                                                   # '["norm", "output"]'
"""

import dataclasses
import difflib
import json
import sys
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
    close = difflib.get_close_matches(path.name, found, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {path.parent / close[0]}?"
    return f"; {path.parent} has {', '.join(found)}" if found else "; the shipped recipes are in train_configs/"


def parse_value(text: str) -> Any:
    """What `key = text` would be in a file. Raises ValueError."""
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
