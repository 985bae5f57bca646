"""Rules of [activation_checkpoint]."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.rules.mistakes import Mistake, rule_of_keys


@rule_of_keys
def activation_checkpointing_has_an_option(config: Config) -> Iterator[Mistake]:
    option = config.activation_checkpoint.selective_ac_option
    is_number = option.isascii() and option.isdigit() and int(option) > 0
    if option not in ("op", "op/2") and not is_number:
        yield Mistake(
            key="activation_checkpoint.selective_ac_option",
            value=option,
            why="is not a valid option",
            instead='"op", "op/2", or a number of blocks in quotes, such as "2"',
        )


@rule_of_keys
def memory_budget_is_for_the_compiler(config: Config) -> Iterator[Mistake]:
    mode = config.activation_checkpoint.mode
    if mode == "memory_budget" and not config.compile.enable:
        yield Mistake(
            key="activation_checkpoint.mode",
            value=mode,
            why="lets the compiler choose, and the model is not compiled",
            instead='compile.enable = true, or mode = "selective"',
        )
