"""A mistake in a recipe, the decorators of rules, and words for what to use instead.

@rule_of_keys
def key_needs_other_key(config: Config) -> Iterator[Mistake]:
    if config.section.key and not config.section.other:
        yield Mistake("section.key", config.section.key, "needs section.other", "...")
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from titan_lite.config import KEYS, SECTIONS, Config, ConfigError
from titan_lite.config.errors import shown
from titan_lite.distributed.layout import Layout


@dataclass(frozen=True)
class Mistake:
    """A key whose value cannot be."""

    key: str  # "section.name"
    value: object
    why: str  # what is wrong with it: the words after "section.name = value"
    instead: str  # what to use

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    def message(self, config: Config) -> str:
        """Return its line in an error, with the file or "command line" that has the key."""
        key = self.key.partition("[")[0]
        text = f"{self.key} = {shown(self.value)} {self.why}; use {self.instead}"
        by_a_program = not config.was_set(key) and self.value != KEYS[key].default
        if by_a_program:  # such as the layouts of verify and of plan --search
            return text
        return f"{config.origin(key)}: {text}"


RuleOfKeys = Callable[[Config], Iterator[Mistake]]
Rule = Callable[[Config, Layout], Iterator[Mistake]]
RULES_OF_KEYS: list[RuleOfKeys] = []
RULES: list[Rule] = []
RULES_WITH_TORCH: list[Rule] = []


def rule_of_keys(function: RuleOfKeys) -> RuleOfKeys:
    RULES_OF_KEYS.append(function)
    return function


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def rule_with_torch(function: Rule) -> Rule:
    RULES_WITH_TORCH.append(function)
    return function


def raise_mistakes(config: Config, mistakes: Iterable[Mistake]) -> None:
    """Raise one ConfigError with all mistakes, in the order of their sections, if there are any."""
    sections = list(SECTIONS)
    ordered = sorted(mistakes, key=lambda mistake: sections.index(mistake.section))
    messages = dict.fromkeys(mistake.message(config) for mistake in ordered)  # each once
    if messages:
        raise ConfigError(*messages)


def nearest_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` next to `value`, which is none and above 1."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = max(divisor for divisor in divisors if divisor < value)
    above = [divisor for divisor in divisors if divisor > value]
    return [below, *above[:1]]
