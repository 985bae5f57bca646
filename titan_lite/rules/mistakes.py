"""A mistake in a recipe, the four lists of rules, and words for what to use instead.

@rule_of_keys
def key_needs_other_key(config: Config) -> Iterator[Mistake]:
    if config.section.key and not config.section.other:
        yield Mistake("section.key", config.section.key, "needs section.other", "...")
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from titan_lite.config import KEYS, SECTIONS, Config, ConfigError, flatten
from titan_lite.config.errors import shown
from titan_lite.config.section import UnknownValue
from titan_lite.distributed.layout import Layout

if TYPE_CHECKING:
    from titan_lite.checkpoint.run_identity import ListingsOfRun
    from titan_lite.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Mistake:
    """A key whose value cannot be."""

    key: str  # "section.name"
    value: object = None
    why: str = ""  # what is wrong with it: the words after "section.name = value"
    instead: str = ""  # what to use
    line: str = ""  # all of this, where the part that reads the value has words of its own

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    def message(self, config: Config) -> str:
        """Return its line in an error, with the file or "command line" that has the key."""
        if self.line:
            return self.line
        key = self.key.partition("[")[0]
        text = f"{self.key} = {shown(self.value)} {self.why}; use {self.instead}"
        by_a_program = not config.was_set(key) and self.value != KEYS[key].default
        if by_a_program:  # such as the layouts of verify and of plan --search
            return text
        return f"{config.origin(key)}: {text}"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run. One that cannot be had is None, and another mistake tells why."""

    layout: Layout | None
    tokenizer: "Tokenizer | None"
    listings: "ListingsOfRun"


Rule = Callable[..., Iterator[Mistake]]
SomeRule = TypeVar("SomeRule", bound=Rule)
RULES_OF_KEYS: list[Callable[[Config], Iterator[Mistake]]] = []
RULES_OF_LAYOUT: list[Callable[[Config, Layout], Iterator[Mistake]]] = []
RULES_OF_INPUTS: list[Callable[[Config, Inputs], Iterator[Mistake]]] = []
RULES_OF_MACHINE: list[Callable[[Config, Layout], Iterator[Mistake]]] = []


def rule_of_keys(function: SomeRule) -> SomeRule:
    RULES_OF_KEYS.append(function)
    return function


def rule_of_layout(function: SomeRule) -> SomeRule:
    RULES_OF_LAYOUT.append(function)
    return function


def rule_of_inputs(function: SomeRule) -> SomeRule:
    RULES_OF_INPUTS.append(function)
    return function


def rule_of_machine(function: SomeRule) -> SomeRule:
    RULES_OF_MACHINE.append(function)
    return function


def is_first_rank() -> bool:
    """Return True on the first rank, and in a program without ranks."""
    return os.environ.get("RANK", "0") == "0"


def apply(rules: Iterable[Rule], *arguments: object) -> list[Mistake]:
    """Return the mistakes that rules find."""
    found: list[Mistake] = []
    for rule in rules:
        try:
            found.extend(rule(*arguments))
        except ConfigError as error:  # of what the rule needs, such as the shape of the model
            found.extend(told(error))
    return found


def told(error: ConfigError, key: str = "") -> list[Mistake]:
    """Return the lines of an error as mistakes; none of a value that is wrong itself, which
    `read_config` has told.
    """
    lines = () if isinstance(error, UnknownValue) else error.args
    return [Mistake(key, line=str(line)) for line in lines]


def told_by(key: str, read: Callable[..., object], *arguments: object) -> list[Mistake]:
    """Call a function that reads what a key names, and return its ConfigError as mistakes."""
    try:
        read(*arguments)
    except ConfigError as error:
        return told(error, key)
    return []


def raise_mistakes(config: Config, mistakes: Iterable[Mistake], wrong: Sequence[str] = ()) -> None:
    """Raise one ConfigError with all mistakes, in the order of their sections, if there are any.

    wrong: messages of `read_config`, which come first.
    """
    sections = [*SECTIONS, ""]
    ordered = sorted(mistakes, key=lambda mistake: sections.index(mistake.section))
    messages = dict.fromkeys((*wrong, *(mistake.message(config) for mistake in ordered)))
    if messages:
        raise ConfigError(*messages)


def keys_set(config: Config, keys: Iterable[str]) -> dict[str, object]:
    """Return the values of those keys that the recipe sets, to another value than the default."""
    values = flatten(config)
    return {
        key: values[key]
        for key in keys
        if key in values and config.was_set(key) and values[key] != KEYS[key].default
    }


def nearest_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` next to `value`, which is none and above 1."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = max(divisor for divisor in divisors if divisor < value)
    above = [divisor for divisor in divisors if divisor > value]
    return [below, *above[:1]]
