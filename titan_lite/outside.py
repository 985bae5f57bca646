"""Read files that somebody else may have written: only regular files, of a bounded size, and JSON of a given form.

    state = read_json(folder / "state.json", {"step": COUNT, "tensors": [WORD], "from": maybe(WORD)})    # raises Damaged
    size = size_of(folder, "train-00000.tokens")               # raises Damaged for a link that leads out of this folder

A form is a `Form` for one value, [form] for a list, {"key": form} for an object (a Form as a key applies to all other keys), or a
tuple of forms, one of which must hold. With `optional(form)` a key may be absent, with `maybe(form)` it may be null, too.
"""

import itertools
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from titan_lite.config.errors import ConfigError

MOST = 1 << 25  # bytes of a JSON file, which may take 25 times as much in memory
DEEPEST = 16  # nested objects and lists


class Damaged(ConfigError):
    """An error: a file or step is not as it was saved. The message begins with the file's name."""


@dataclass(frozen=True)
class Form:
    """A condition on a value."""

    words: str  # such as "a string"
    holds: Callable[[Any], bool]  # takes any value of JSON or TOML


def one_of(*values: Any) -> Form:
    return Form(
        " or ".join(map(repr, values)),
        lambda value: any(type(value) is type(known) and value == known for known in values),
    )


class _Absent:
    def __repr__(self) -> str:
        return "None"


_ABSENT = _Absent()


def optional(form: Any) -> Any:
    return (form, Form("nothing", lambda value: value is _ABSENT))


def maybe(form: Any) -> Any:
    return (form, Form("null", lambda value: value is None or value is _ABSENT))


def _is_file_name(value: Any) -> bool:
    return (
        type(value) is str
        and value.isprintable()
        and value not in ("", ".", "..")
        and "/" not in value
        and len(value) < 256
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


ANY = Form("anything", lambda value: True)
WORD = Form("a string", lambda value: type(value) is str)
FLAG = Form("true or false", lambda value: type(value) is bool)
COUNT = Form(
    "a whole number from 0 to 2**96", lambda value: type(value) is int and 0 <= value < 1 << 96
)
BYTES = Form(
    "a whole number from 0 to 2**62", lambda value: type(value) is int and 0 <= value < 1 << 62
)
# torch can represent the product of two of these
SIZE = Form(
    "a whole number above 0 and below 2**30",
    lambda value: type(value) is int and 0 < value < 1 << 30,
)
POSITIVE = Form(
    "a number above 0 and below 1e18", lambda value: _is_number(value) and 0 < value < 1e18
)  # not nan
NUMBER = Form(
    "a number from -1e300 to 1e300", lambda value: _is_number(value) and -1e300 < value < 1e300
)
HASH = Form(
    "a SHA-256",
    lambda value: type(value) is str and re.fullmatch("[0-9a-f]{64}", value) is not None,
)
NO_OTHER = Form("no other key", lambda value: False)
FILE = Form("the name of a file in this folder", _is_file_name)
LIST, OBJECT = (
    Form("a list", lambda value: type(value) is list),
    Form("an object", lambda value: type(value) is dict),
)
TOKENS = (COUNT, [COUNT])  # one, or several

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: Any) -> str:
    """Return the value in few characters."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # thousands of digits
        return "a very long number"


def in_short(error: BaseException) -> str:
    """Return a short line for an error that may quote a complete file."""
    words = " ".join(str(error).split())
    return words if len(words) < 300 else f"{words[:200]} ... {words[-80:]}"


def faults(value: Any, form: Any, place: str = "") -> Iterator[str]:
    """Yield a line for every value without its form. place: that of the value, such as "splits.train[3].documents"."""
    if isinstance(form, tuple):
        first, *rest = (list(itertools.islice(faults(value, each, place), 5)) for each in form)
        yield from first if all(rest) else ()
        return
    own: Form = LIST if isinstance(form, list) else OBJECT if isinstance(form, dict) else form
    if not own.holds(value):
        yield f"{place or 'its content'} = {shown(value)}: expected {own.words}"
    elif isinstance(form, list):
        for number, each in enumerate(value):
            yield from faults(each, form[0], f"{place}[{number}]")
    elif isinstance(form, dict):
        others = next((key for key in form if isinstance(key, Form)), None)
        for name in dict.fromkeys(
            (*(key for key in form if key is not others), *(value if others else ()))
        ):
            known = name if name.isprintable() and len(name) < 60 else shown(name)
            if name not in form and others and not others.holds(name):
                yield f"{place or 'its content'} has {shown(name)}: expected {others.words}"
            inside = f"{place}.{known}" if place else known
            yield from faults(value.get(name, _ABSENT), form.get(name, form.get(others)), inside)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises Damaged for any other, without blocking."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # a pipe without a writer would block
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(
            f"{path.name}: {error.strerror if isinstance(error, OSError) else error}"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is not a file")
    return os.fdopen(descriptor, "rb")


def size_of(folder: Path, name: str) -> int:
    """Return the bytes of a file of this folder. Raises Damaged for a link that leads out of it.

    In a snapshot of the hub's cache, links may also lead to the cache's blobs.
    """
    home, path = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    blobs = [above.parent / "blobs" for above in (home, *home.parents) if above.name == "snapshots"]
    if not any(path.is_relative_to(each) for each in (home, *blobs)):
        raise Damaged(f"{name} is a link that leads out of this folder; use a copy of the file")
    with open_regular(folder / name) as file:
        return os.fstat(file.fileno()).st_size


def read_text(path: Path, most: int = MOST) -> str:
    """Return the text of a file. Raises Damaged if it is not regular, has more than `most` bytes, or is not UTF-8."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise Damaged(f"{path.name} is larger than {most / 2**20:g} MiB")
        return content.decode("utf-8")
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"{path.name} is not UTF-8: {error}") from None


def parse_json(text: str, name: str) -> Any:
    """Parse JSON. Raises Damaged if it is invalid or nested too deeply. name: the beginning of errors."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON: {error}") from None
    level = [value]
    for _ in range(DEEPEST):
        inner = (
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        )
        level = list(itertools.chain.from_iterable(inner))
    if level:
        raise Damaged(f"{name} is nested deeper than {DEEPEST} objects and lists")
    return value


def check_form(value: Any, form: Any, name: str) -> Any:
    """Return the value. Raises Damaged with the first faults."""
    if wrong := list(itertools.islice(faults(value, form), 5)):
        raise Damaged(f"{name}: {'; '.join(wrong)}")
    return value


def read_json(path: Path, form: Any = OBJECT) -> Any:
    """Read a JSON file. Raises Damaged if its content does not have this form."""
    return check_form(parse_json(read_text(path), path.name), form, path.name)
