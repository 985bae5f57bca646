"""Give a pass what it needs beside the graph that it changes.

    def my_pass(graph: Graph, settings: PassSettings) -> int:       # number of nodes changed
        ...

schedule.py has the list of passes.
"""

from dataclasses import dataclass, field

from titan_lite.compile.rank_agreement import OneRank, StageRanks
from titan_lite.config import Compile, ConfigError
from titan_lite.cost.machine import Machine


@dataclass(frozen=True)
class PassSettings:
    """Settings of the passes on the graphs of a pipeline stage, equal on its ranks."""

    config: Compile = field(default_factory=Compile)  # the recipe's section [compile]
    machine: Machine | None = None  # estimates seconds; None: unknown, so none are estimated
    fused: bool = False  # Inductor fuses pointwise operators into kernels (as in `node_seconds`)
    ranks: StageRanks = field(default_factory=OneRank)  # those that run the same graphs
    # Inductor will fuse collectives of tensor parallelism with their products
    async_tensor_parallel: bool = False
    must_merge: bool = True  # bucketing that merges nothing is an error

    def required_machine(self) -> Machine:
        """Return the machine. Raises ConfigError if it is unknown."""
        if self.machine is None:
            raise ConfigError(
                f'compile.bucketing = "{self.config.bucketing}" needs a cost model; use'
                ' compile.machine = "H100"'
            )
        return self.machine
