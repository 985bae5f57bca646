"""The row of a key: `setting`, with all that is known of the key, and the words and conditions that rows are made of.

    spike_sigmas: float = setting(6.0, "how far above their mean a spike is", "standard deviations > 0", needs=(SPIKES,))

Standard library only, as all that reads a recipe.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A recipe or command line that cannot be run; each message names the key, the value and what would work."""

    def __str__(self) -> str:
        # A value may have line breaks and control characters; a list of ours is indented.
        lines = ["\n  ".join(one_line(part, 10**6) for part in str(line).split("\n  ")) for line in self.args]
        return lines[0] if len(lines) == 1 else "\n  ".join(("several things are wrong:", *lines))


class Mistakes(list[str]):
    """Messages about things that are wrong independently of each other, to be told together.

    mistakes = Mistakes()
    with mistakes.noted():        # of a ConfigError
        ...
    mistakes.refuse()             # ConfigError, if there are any
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
            told = [one_line(message, 1500) for message in dict.fromkeys(self)]
            raise ConfigError(*told[: self.MOST], *(["and more, told when these are mended"] if len(told) > self.MOST else []))


def one_line(text: str, most: int) -> str:
    """Without line breaks and other characters that cannot be seen, and cut in its middle where it is longer than `most`."""
    text = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# Consequences of a change for a run that goes on from a saved step.
CANNOT = "it cannot work"
PLACE = "the data cannot go on where it was"
FRESH = "the optimizer starts anew"
DATA = "the data goes on at the same token, in sequences of another length"
LEARNING = "training changes"
ROUNDING = "numbers change by rounding"
NOTHING = "training does not depend on it"
WORST_FIRST = (CANNOT, PLACE, FRESH, DATA, LEARNING, ROUNDING, NOTHING)


@dataclass(frozen=True)
class Need:
    """A condition on the value of another key, without which a key has no effect.

    holds: takes any value that a saved recipe may have. fix: a setting with which it holds. why_not: filled in with
    key and value.
    """

    key: str
    holds: Callable[[Any], bool]
    fix: str = ""
    why_not: str = "{key} = {value}"

    def unmet(self, recipe: Mapping[str, Any]) -> str:
        """Why it does not hold in {section: {name: value}}; empty: it does, or this recipe has no such key.

        Where each of data.sources has its own value, it is enough that one of these holds.
        """
        section, _, name = self.key.partition(".")
        table = recipe.get(section, {})
        sources = [source for source in table.get("sources") or () if name in source]
        values = [part[name] for part in sources or [table] if name in part]
        if not values or any(map(self.holds, values)):
            return ""
        key = f"{section}.sources: {name}" if sources else self.key
        return self.why_not.format(key=key, value=" and ".join(dict.fromkeys(map(json.dumps, values))))


_BOUNDS = {"least": ">=", "above": ">", "most": "<=", "below": "<", "also": "or"}
_VALUES = re.compile("(?P<unit>.*?)" + "".join(rf"( {sign} (?P<{name}>-?[0-9.]+))?" for name, sign in _BOUNDS.items()))


def setting(
    default: Any,
    doc: str,
    values: str = "",
    *,
    choices: tuple[str, ...] = (),
    or_like: tuple[str, str] = ("", ""),
    path: bool | str = False,
    table: type | None = None,
    resume: str = "",
    fact: str = "",
    needs: Need | tuple[Need, ...] = (),
    resume_needs: Need | None = None,
    refused: bool = False,
    gpu: str = "",
    package: str = "",
) -> Any:
    """One key of a recipe: its default, what it is for, and

    values: the unit, bounds, and one value that is admitted beside them, as in "sequences >= 1 or -1". choices: the words that
    are admitted instead; or_like: beside these, words of a form, and the regular expression that tells them. path: a relative
    path in a recipe is taken from that recipe's folder, on the command line from the current one; or the suffix of those values
    that are paths. table: the dataclass of each element of a list of tables.

    resume: the consequence of a change for a run that goes on, if not its section's. fact: the one of FACTS in
    checkpoint/resume.py that decides it; as long as that is the same, the consequence is `resume`, if given, or NOTHING.

    needs: conditions on other keys; without them a value other than the default is told to have no effect, or is `refused`.
    resume_needs: those without which a change does nothing on a resume. gpu, package: why a true value takes a GPU, and which
    Python package.
    """
    kind = "bool" if isinstance(default, bool) else "name" if choices else "path" if path is True else ""
    parsed = _VALUES.fullmatch(values or kind)
    assert parsed is not None, values
    bounds = {name: json.loads(parsed[name]) if parsed[name] else None for name in _BOUNDS}
    row = dict(doc=doc, unit=parsed["unit"], **bounds, choices=choices, or_like=or_like, path=path, table=table)
    row |= dict(resume=resume or (NOTHING if fact else ""), fact=fact, needs=needs if isinstance(needs, tuple) else (needs,))
    row |= dict(resume_needs=(resume_needs,) if resume_needs else (), refused=refused, gpu=gpu, package=package)
    return dataclasses.field(default=default, metadata=row)
