"""A rule of replica groups, beside those of [fault_tolerance]: they need torchft."""

import sys
from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.rules.metrics import is_installed
from titan_lite.rules.mistakes import Inputs, Mistake, rule_of_inputs


@rule_of_inputs
def torchft_is_installed(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    groups = config.fault_tolerance.replica_groups
    if groups > 1 and not is_installed("torchft"):
        yield Mistake(
            key="fault_tolerance.replica_groups",
            value=groups,
            why="needs torchft, which is not installed here",
            instead=(
                f"it after {sys.executable} -m pip install 'torchft>=0.2', which is the extra"
                " titan_lite[fault_tolerance], or 1"
            ),
        )
