"""Files that somebody else may have written: regular, of a bounded size, and JSON of the form that its reader relies on.

    state = read_json(folder / "state.json", {"step": COUNT, "tensors": [WORD], "from": maybe(WORD)})    # raises Damaged
    size = size_of(folder, "train-00000.tokens")               # of a file of this folder, which no link leads out of

A form is a `Form` of one value; [form of each] of a list; {"key": form of its value} of an object, where a Form as key is that of
all other keys; and of several forms in a tuple one is enough. `optional(form)` is of a key that may be absent, `maybe(form)` of
one that may be null, too.
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

from titan_lite.config.row import ConfigError

MOST = 1 << 25  # bytes of a JSON file, which may take 25 times as much in memory
DEEPEST = 16  # objects and lists within each other


class Damaged(ConfigError):
    """A file or step that is not what was saved; the message begins with the file's name."""


@dataclass(frozen=True)
class Form:
    """words: such as "a string"; holds: takes any value of JSON or TOML."""

    words: str
    holds: Callable[[Any], bool]


def one_of(*values: Any) -> Form:
    return Form(
        " or ".join(map(repr, values)), lambda value: any(type(value) is type(known) and value == known for known in values)
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
    return type(value) is str and value.isprintable() and value not in ("", ".", "..") and "/" not in value and len(value) < 256


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


ANY = Form("anything", lambda value: True)
WORD = Form("a string", lambda value: type(value) is str)
FLAG = Form("true or false", lambda value: type(value) is bool)
COUNT = Form("a whole number from 0 to 2**96", lambda value: type(value) is int and 0 <= value < 1 << 96)
BYTES = Form("a whole number from 0 to 2**62", lambda value: type(value) is int and 0 <= value < 1 << 62)
# a product of two is one that torch can count
SIZE = Form("a whole number above 0 and below 2**30", lambda value: type(value) is int and 0 < value < 1 << 30)
POSITIVE = Form("a number above 0 and below 1e18", lambda value: _is_number(value) and 0 < value < 1e18)  # nan is neither
NUMBER = Form("a number from -1e300 to 1e300", lambda value: _is_number(value) and -1e300 < value < 1e300)
HASH = Form("a SHA-256", lambda value: type(value) is str and re.fullmatch("[0-9a-f]{64}", value) is not None)
NO_OTHER = Form("no other key", lambda value: False)
FILE = Form("the name of a file in this folder", _is_file_name)
LIST, OBJECT = Form("a list", lambda value: type(value) is list), Form("an object", lambda value: type(value) is dict)
TOKENS = (COUNT, [COUNT])  # one, or several

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: Any) -> str:
    """The value in few characters."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # of thousands of digits
        return "a very long number"


def in_short(error: BaseException) -> str:
    """One line of an error that may quote a whole file."""
    words = " ".join(str(error).split())
    return words if len(words) < 300 else f"{words[:200]} ... {words[-80:]}"


def faults(value: Any, form: Any, place: str = "") -> Iterator[str]:
    """A line for every value that does not have its form, with its place, such as "splits.train[3].documents"."""
    if isinstance(form, tuple):
        first, *rest = (list(itertools.islice(faults(value, each, place), 5)) for each in form)
        yield from first if all(rest) else ()
        return
    own: Form = LIST if isinstance(form, list) else OBJECT if isinstance(form, dict) else form
    if not own.holds(value):
        yield f"{place or 'the whole'} = {shown(value)}, where {own.words} is what works"
    elif isinstance(form, list):
        for number, each in enumerate(value):
            yield from faults(each, form[0], f"{place}[{number}]")
    elif isinstance(form, dict):
        others = next((key for key in form if isinstance(key, Form)), None)
        for name in dict.fromkeys((*(key for key in form if key is not others), *(value if others else ()))):
            known = name if name.isprintable() and len(name) < 60 else shown(name)
            if name not in form and others and not others.holds(name):
                yield f"{place or 'the whole'} has {shown(name)}, where {others.words} is what works"
            inside = f"{place}.{known}" if place else known
            yield from faults(value.get(name, _ABSENT), form.get(name, form.get(others)), inside)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; one that is no regular file is not waited for. Raises Damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or a pipe waits for somebody who writes
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.name}: {error.strerror if isinstance(error, OSError) else error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path.name} is no file")
    return os.fdopen(descriptor, "rb")


def size_of(folder: Path, name: str) -> int:
    """Bytes of a file of this folder. A link may lead within it and, in a snapshot of the hub's cache, to that cache's blobs.

    Raises Damaged.
    """
    home, path = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    blobs = [above.parent / "blobs" for above in (home, *home.parents) if above.name == "snapshots"]
    if not any(path.is_relative_to(each) for each in (home, *blobs)):
        raise Damaged(f"{name} is a link that leads out of this folder; the file itself would work")
    with open_regular(folder / name) as file:
        return os.fstat(file.fileno()).st_size


def read_text(path: Path, most: int = MOST) -> str:
    """Raises Damaged: no regular file, more than `most` bytes, or no UTF-8."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise Damaged(f"{path.name} has more than {most / 2**20:g} MiB, and is not read")
        return content.decode("utf-8")
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"{path.name} is no UTF-8: {error}") from None


def parse_json(text: str, name: str) -> Any:
    """Raises Damaged: no JSON, or nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is no JSON: {error}") from None
    level = [value]
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = list(itertools.chain.from_iterable(inner))
    if level:
        raise Damaged(f"{name} is nested deeper than {DEEPEST} objects and lists")
    return value


def check_form(value: Any, form: Any, name: str) -> Any:
    """The value. Raises Damaged with the first faults."""
    if wrong := list(itertools.islice(faults(value, form), 5)):
        raise Damaged(f"{name}: {'; '.join(wrong)}")
    return value


def read_json(path: Path, form: Any = OBJECT) -> Any:
    """Read a JSON file whose content has this form. Raises Damaged."""
    return check_form(parse_json(read_text(path), path.name), form, path.name)
