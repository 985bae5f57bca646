"""Define a row, which is all that is known of a key: `setting` makes one.

    spike_sigmas: float = setting(6.0, "how far above their mean a spike is", "standard deviations > 0")

Standard library only, like everything that reads a recipe.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ConfigError(ValueError):
    """A recipe or command line that cannot be run; each message names the key, the value and a value to use."""

    def __str__(self) -> str:
        # A value may have line breaks and control characters; a list of ours is indented.
        lines = [
            "\n  ".join(one_line(part, 10**6) for part in str(line).split("\n  "))
            for line in self.args
        ]
        return lines[0] if len(lines) == 1 else "\n  ".join(("several things are wrong:", *lines))


class Mistakes(list[str]):
    """Messages about independent mistakes, to be raised together.

    mistakes = Mistakes()
    with mistakes.noted():        # catches a ConfigError
        ...
    mistakes.refuse()             # raises a ConfigError with all of them, if there are any
    """

    MOST = 12

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.extend(error.args)
        if len(self) > self.MOST:
            self.refuse()

    def refuse(self) -> None:
        if self:
            lines = [one_line(message, 1500) for message in dict.fromkeys(self)]
            raise ConfigError(
                *lines[: self.MOST],
                *(["and more; correct these first"] if len(lines) > self.MOST else []),
            )


def one_line(text: str, most: int) -> str:
    """Escape line breaks and other unprintable characters, and cut the middle of a text longer than `most` characters."""
    text = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_BOUNDS = {"least": ">=", "above": ">", "most": "<=", "below": "<", "also": "or"}
_VALUES = re.compile(
    "(?P<unit>.*?)"
    + "".join(rf"( {sign} (?P<{name}>-?[0-9.]+))?" for name, sign in _BOUNDS.items())
)


def setting(
    default: Any,
    doc: str,
    values: str = "",
    *,
    choices: tuple[str, ...] = (),
    or_like: tuple[str, str] = ("", ""),
    path: bool | str = False,
    table: type | None = None,
    gpu: str = "",
    package: str = "",
) -> Any:
    """Return the dataclass field of one key.

    doc: its purpose. values: unit, bounds, and one value admitted outside the bounds, such as "sequences >= 1 or -1". choices:
    the admitted words; or_like: (name, regular expression) of further words. path: the value is a path, relative to the
    recipe's folder in a recipe and to the current folder on the command line; a suffix: only values with this suffix are paths.
    table: the dataclass of each element, for a list of tables.

    gpu: why a value other than the default needs a GPU. package: the Python package that a true value needs.
    """
    kind = (
        "bool"
        if isinstance(default, bool)
        else "name"
        if choices
        else "path"
        if path is True
        else ""
    )
    parsed = _VALUES.fullmatch(values or kind)
    assert parsed is not None, values
    bounds = {name: json.loads(parsed[name]) if parsed[name] else None for name in _BOUNDS}
    row = dict(
        doc=doc,
        unit=parsed["unit"],
        **bounds,
        choices=choices,
        or_like=or_like,
        path=path,
        table=table,
    )
    row |= dict(
        gpu=gpu,
        package=package,
    )
    return dataclasses.field(default=default, metadata=row)
