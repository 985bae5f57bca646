"""Rules of [compile]: components, chunks, and a profile of the machine."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.errors import alternatives
from titan_lite.distributed.layout import Layout
from titan_lite.rules.mistakes import (
    Mistake,
    nearest_divisors,
    rule_of_keys,
    rule_of_layout,
    told_by,
)


@rule_of_keys
def there_is_something_to_compile(config: Config) -> Iterator[Mistake]:
    compile = config.compile
    if not compile.enable:
        return
    if not compile.components:
        yield Mistake(
            key="compile.components",
            value=compile.components,
            why="leaves nothing to compile, but compile.enable = true",
            instead='components = ["model", "loss"], or compile.enable = false',
        )


@rule_of_layout
def chunks_divide_the_tokens(config: Config, layout: Layout) -> Iterator[Mistake]:
    chunks = config.compile.tensor_parallel_chunks
    tp = layout.degrees["tp"]
    tokens = layout.seq_len // layout.degrees["cp"] // tp
    if tp > 1 and config.compile.compiles("model") and tokens % chunks:
        yield Mistake(
            key="compile.tensor_parallel_chunks",
            value=chunks,
            why=(
                f"does not divide the {tokens:,} tokens of a sequence that a tensor-parallel rank"
                " has"
            ),
            instead=alternatives(nearest_divisors(tokens, chunks)),
        )


@rule_of_layout
def machine_has_a_profile(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.compile.machine:
        from titan_lite.cost.profiles import load_machine

        yield from told_by("compile.machine", load_machine, config.compile.machine)
