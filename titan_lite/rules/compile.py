"""Rules of [compile]: a profile of the machine."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.rules.mistakes import Mistake, rule_of_layout, told_by


@rule_of_layout
def machine_has_a_profile(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.compile.machine:
        from titan_lite.cost.profiles import load_machine

        yield from told_by("compile.machine", load_machine, config.compile.machine)
