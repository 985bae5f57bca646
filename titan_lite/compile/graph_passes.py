"""Run the passes on a forward or backward graph, and report what they did.

    settings = PassSettings(config.compile, machine=load_machine("H100"), fused=True)
    graph_passes = GraphPasses(settings, choose_passes(config))
    graph_passes.run(graph_module, "forward")          # in place; appends to graph_passes.reports

`choose_passes` is the list of passes. To add one, write `my_pass(graph, settings) -> int` in a file
of passes/, and put it into the list; features have others (Feature.passes). Both backends run the
passes on the same graphs. One more pass works elsewhere (joint.py): resharding.py on the joint
graphs of forward and backward.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import Graph, GraphModule

from titan_lite.compile.graph import merge_waits
from titan_lite.compile.passes.bucketing import bucket_by_block
from titan_lite.compile.passes.defer_weight_grads import defer_weight_grads
from titan_lite.compile.passes.order_activations import order_activation_collectives
from titan_lite.compile.passes.reordering import overlap_collectives
from titan_lite.compile.rank_agreement import check_same_order
from titan_lite.compile.report import (
    CompileReport,
    copied_by_buckets,
    count_collectives,
    list_collectives,
)
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Config
from titan_lite.cost.timeline import Timeline, lower_bound, simulate
from titan_lite.feature import features_of
from titan_lite.graph import parameters_of

# Changes a graph in place. Returns a count for the report; each pass says of what.
Pass = Callable[[Graph, PassSettings], int]


def choose_passes(config: Config) -> list[Pass]:
    """Return the passes that the recipe selects, in the order in which they run on each graph.

    It depends on the recipe alone, so it is the same on every rank: passes communicate.

    To add a pass: write it in passes/, and append it here under the key that selects it. Where
    ranks could decide differently, it takes the first rank's choice (rank_agreement.py).
    """
    options = config.compile
    passes: list[Pass] = []

    # Collectives of activations (tensor, context and expert parallelism)
    if options.defer_weight_grads:
        passes.append(defer_weight_grads)
    passes.append(order_activation_collectives)

    # Collectives of parameters (SimpleFSDP)
    if options.bucketing != "none":
        passes.append(bucket_by_block)  # features put other buckets in its place
    if options.reordering:
        passes.append(overlap_collectives)

    for feature in features_of(config):
        passes = feature.passes(config, passes)
    return passes


class GraphPasses:
    """The passes of a recipe, and the reports of the graphs that they ran on."""

    def __init__(
        self,
        settings: PassSettings,
        passes: Sequence[Pass] = (),
        *,
        dump_folder: Path | None = None,
    ):
        self.settings = settings
        self.passes = passes  # in order
        self.dump_folder = dump_folder  # for graphs as text, before and after each pass
        self.reports: list[CompileReport] = []

    @property
    def decomposes(self) -> bool:
        """True if operators are decomposed as Inductor does, before the passes."""
        return self.settings.config.backend == "inductor"

    def tag_joint(self, graph: Graph) -> None:
        """Tag the joint graph of forward and backward, before it is divided (joint.py)."""

    def run(self, module: GraphModule, name: str) -> None:
        """Run the passes on the graph `name`: "forward", "backward", "backward_input",
        "backward_weight" or "inference".

        Raises ConfigError if the order of collectives differs between ranks.
        """
        started = time.perf_counter()
        settings = self.settings
        graph = module.graph
        merge_waits(graph)
        self.dump(graph, f"{name}_0_traced")
        before = count_collectives(graph)
        changed: dict[str, int] = {}
        for number, run_pass in enumerate(self.passes, 1):
            pass_name = run_pass.__name__
            changed[pass_name] = run_pass(graph, settings)
            self.dump(graph, f"{name}_{number}_{pass_name}")
        module.recompile()

        timeline = estimate(graph, name, settings)
        seconds = time.perf_counter() - started
        report = CompileReport(
            graph=name,
            before=before,
            after=list_collectives(graph, timeline),
            passes=changed,
            schedule=check_same_order(graph, name, settings.ranks),
            timeline=timeline,
            pass_seconds=seconds,
            compile_seconds=seconds,
            copied=copied_by_buckets(graph, settings.fused),
        )
        self.reports.append(report)

    def add_compilation(
        self,
        name: str,
        *,
        seconds: float,
        segments: int,
        different_segments: int,
        cached_segments: int,
    ) -> None:
        """Add what a backend tells of the last graph `name`, as in CompileReport."""
        index = max(i for i, report in enumerate(self.reports) if report.graph == name)
        report = self.reports[index]
        self.reports[index] = dataclasses.replace(
            report,
            compile_seconds=report.pass_seconds + seconds,
            segments=segments,
            different_segments=different_segments,
            cached_segments=cached_segments,
        )

    def dump(self, graph: Graph, file_name: str) -> None:
        """Write a graph as text, if the recipe wants it (compile.dump_graphs)."""
        if self.dump_folder is not None:
            self.dump_folder.mkdir(parents=True, exist_ok=True)
            path = self.dump_folder / f"{len(self.reports)}_{file_name}.txt"
            path.write_text(readable(graph), encoding="utf-8")


def estimate(graph: Graph, name: str, settings: PassSettings) -> Timeline | None:
    """Return the simulated graph, or None for an unknown machine."""
    machine = settings.machine
    if machine is None:
        return None
    bound = lower_bound(graph, machine, fused=settings.fused)
    return simulate(graph, machine, name=name, fused=settings.fused, bound=bound)


def readable(graph: Graph) -> str:
    """Return a line per node: name, dtype, shape, operator and arguments."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = ""
        if hasattr(value, "dtype"):
            shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        call = "" if node.op == "placeholder" else f" = {node.target}{node.args}"
        fqns = ", ".join(parameters_of(node))
        comment = f"   # {fqns}" if fqns else ""
        lines.append(f"{node.name}: {shape}{call}{comment}")
    return "\n".join(lines) + "\n"
