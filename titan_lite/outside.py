"""Read JSON files that a run or another program wrote: what is wrong with one is told in one line
with the file's name.

state = read_object(folder / "state.json")                 # raises CorruptFileError
with fields_of("state.json"):                              # a missing key, or a value of a wrong type, raises CorruptFileError
    step = state["step"]
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_lite.config.errors import ConfigError


class CorruptFileError(ConfigError):
    """An error: a file or step is not as it was saved. The message begins with the file's name."""


def in_short(error: BaseException) -> str:
    """Return a short line for an error that may quote a complete file."""
    words = " ".join(str(error).split())
    return words if len(words) < 300 else f"{words[:200]} ... {words[-80:]}"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that has an object. Raises CorruptFileError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFileError(f"{path.name} is missing") from None
    except OSError as error:
        raise CorruptFileError(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path.name} is not JSON: {in_short(error)}") from None
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path.name} is not a JSON object")
    return content


@contextmanager
def fields_of(name: str) -> Iterator[None]:
    """Return a context that reads values of a file: one that is missing or of a wrong type raises
    CorruptFileError. name: the file's.
    """
    try:
        yield
    except ConfigError:
        raise
    except KeyError as error:
        raise CorruptFileError(f"{name} has no {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptFileError(f"{name} is not as it was written: {in_short(error)}") from None
