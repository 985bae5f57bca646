"""Give a pass what it needs beside the graph that it changes.

    def my_pass(graph: Graph, settings: PassSettings) -> int:       # number of nodes changed
        ...

graph_passes.py has the list of passes.
"""

from dataclasses import dataclass, field

from titan_lite.compile.rank_agreement import OneRank, StageRanks
from titan_lite.config import Compile
from titan_lite.cost.machine import Machine


@dataclass(frozen=True)
class PassSettings:
    """Settings of the passes on the graphs of a pipeline stage, equal on its ranks."""

    config: Compile = field(default_factory=Compile)  # the recipe's section [compile]
    machine: Machine | None = None  # estimates seconds; None: unknown, so none are estimated
    fused: bool = False  # Inductor fuses pointwise operators into kernels (as in `node_seconds`)
    ranks: StageRanks = field(default_factory=OneRank)  # those that run the same graphs
