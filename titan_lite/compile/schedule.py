"""Run the passes on a forward or backward graph: bucketing, then reordering.

Record a report of both.

    schedule = Schedule(config.compile, machine=load_machine("H100"), fused=True)
    schedule(graph_module, "forward")          # in place; appends to schedule.reports

Both backends run the passes on the same graphs. Ranks that communicate in different orders would
hang, so `peers` compares schedules between ranks before a graph first runs.
"""

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule

from titan_lite.compile.passes import bucket_plans as wrapping
from titan_lite.compile.passes import bucketing, reordering
from titan_lite.compile.passes import defer_weight_grads as deferring
from titan_lite.compile.passes import token_chunks as chunking
from titan_lite.compile.passes.inductor_overlap import schedule_by_inductor
from titan_lite.compile.rank_agreement import Peers, outside_of_tracing
from titan_lite.compile.report import (
    CompileReport,
    copied_by_buckets,
    count_collectives,
    list_collectives,
)
from titan_lite.config import Compile, ConfigError
from titan_lite.cost.collectives import (
    KINDS,
    activation_collectives,
    collective_bytes,
    group_of,
    merge_waits,
    parameter_collectives,
    parameters_of,
    ranks_of,
    wait_of,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.timeline import lower_bound, simulate


@dataclass
class Schedule:
    """The passes of [compile], with the reports of the graphs that they ran on."""

    config: Compile
    machine: Machine | None = None  # None if unknown; times are then not estimated
    fused: bool = False  # as in `Machine.cost`
    peers: Peers = field(default_factory=Peers)
    dump: Path | None = None  # folder for graphs as text
    async_tensor_parallel: bool = (
        False  # Inductor fuses collectives of tensor parallelism with products
    )
    must_merge: bool = True  # raise if bucketing is enabled and merges nothing
    reports: list[CompileReport] = field(default_factory=list)
    priced_as: str = ""  # for graphs that are priced and not run: as in `compile_model`

    @contextmanager
    def compiling(self, module: GraphModule, name: str) -> Iterator[None]:
        """Run the passes, then time the compilation of the graph within the context."""
        started, hits = time.perf_counter(), _cache_hits()
        self(module, name)
        yield
        now = _cache_hits()
        cache = (
            "hit"
            if now["fxgraph_cache_hit"] > hits["fxgraph_cache_hit"]
            else "miss"
            if now != hits
            else ""
        )
        seconds = time.perf_counter() - started
        self.reports[-1] = dataclasses.replace(
            self.reports[-1], compile_seconds=seconds, cache=cache
        )

    def __call__(self, module: GraphModule, name: str) -> None:
        """Run the passes. Raises ConfigError if bucketing merges nothing or ranks differ."""
        graph, started = module.graph, time.perf_counter()
        merge_waits(graph)
        hidden = self.hide_activations(graph)
        before = count_collectives(graph)
        self.write(graph, name, "0_traced")
        self.bucket(module, name)
        self.write(graph, name, "1_bucketed")
        moved = 0
        if self.config.bucketing == "auto":  # has reordered as well
            moved = sum(node.next is not wait_of(node) for node in parameter_collectives(graph))
        elif self.config.reordering:
            moved = reordering.overlap(graph, self.machine, fused=self.fused)
            self.write(graph, name, "2_reordered")
        module.recompile()
        timeline = None
        if self.machine is not None:
            bound = lower_bound(graph, self.machine, fused=self.fused)
            timeline = simulate(graph, self.machine, name=name, fused=self.fused, bound=bound)
        self.reports.append(
            CompileReport(
                name,
                before,
                list_collectives(graph, timeline),
                moved,
                self.agreed(schedules(graph), name),
                timeline,
                pass_seconds=time.perf_counter() - started,
                **hidden,
                copied=(
                    None
                    if self.config.bucketing == "auto"
                    else copied_by_buckets(graph, self.fused)
                ),
            )
        )

    def hide_activations(self, graph: Graph) -> dict[str, Any]:
        """Hide the collectives of tensor and context parallelism.

        Return counts, by their names in CompileReport.
        """
        found, chunks, how = (
            dict[str, Any](),
            self.config.tensor_parallel_chunks,
            dict(fused=self.fused),
        )
        if self.async_tensor_parallel:
            chunking.mark_fused(graph)
        elif activation_collectives(graph):
            if self.config.defer_weight_grads:
                products = self.first(deferring.choose_products(graph, self.machine, **how))
                found["deferred"] = deferring.defer_weight_grads(graph, products)
            if chunks > 1:
                chosen = self.first(chunking.choose_collectives(graph, chunks, self.machine, **how))
                found["cut"] = chunking.cut_into_chunks(graph, chunks, chosen)
            deferring.start_behind(
                graph, self.first(deferring.choose_order(graph, self.machine, **how))
            )
        return found

    def first(self, mine: Any) -> Any:
        """Return the first rank's value of `mine`, as JSON.

        Parts of tensor-parallel ranks may differ in size, and so in cost.
        """
        with outside_of_tracing():
            return json.loads(self.peers.first(json.dumps(mine)))

    def bucket(self, module: GraphModule, name: str) -> None:
        config, graph, merged = self.config, module.graph, 0
        mergeable = Counter(
            (node.target, group_of(node), node.meta["val"].dtype)
            for node in parameter_collectives(graph)
        )
        if config.bucketing == "none" or not mergeable:
            return
        if config.bucketing == "block":
            merged = bucketing.merge(graph, wrapping.by_block(graph))
        elif config.bucketing == "listed":
            merged = bucketing.merge(graph, wrapping.by_names(graph, config.buckets))
        elif config.bucketing == "greedy":
            plan = wrapping.greedy(graph, self.cost_model(), fused=self.fused)
            merged = bucketing.merge(graph, self.of_first_rank(plan))
        elif config.bucketing == "auto":
            schedule_by_inductor(module, self.cost_model(), fused=self.fused)
            merged = sum(mergeable.values()) - len(parameter_collectives(graph))
        # The buckets of a plan may be in another pipeline stage.
        if (
            self.must_merge
            and not merged
            and config.bucketing != "listed"
            and max(mergeable.values()) > 1
        ):
            why = (
                ", since computation is too short to hide them"
                if config.bucketing == "auto"
                else ""
            )
            raise ConfigError(
                f'compile.bucketing = "{config.bucketing}" merged none of the'
                f' {sum(mergeable.values())} collectives of the {name} graph{why}; use "block" or'
                ' "none"'
            )

    def cost_model(self) -> Machine:
        if self.machine is None:
            raise ConfigError(
                f'compile.bucketing = "{self.config.bucketing}" needs a cost model; use'
                ' compile.machine = "H100"'
            )
        return self.machine

    def write(self, graph: Graph, name: str, what: str) -> None:
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / f"{len(self.reports)}_{name}_{what}.txt").write_text(
                readable(graph), encoding="utf-8"
            )

    def of_first_rank(self, plan: wrapping.Buckets) -> wrapping.Buckets:
        """Return the first rank's plan. Tensor-parallel ranks reduce norms together."""
        names = wrapping.name_all(plan)
        first = self.first({name: str(plan[node]) for node, name in names.items()})
        return {node: first[name] for node, name in names.items()}

    def agreed(self, mine: Mapping[str, str], name: str) -> str:
        """Return a hash of `mine`, this rank's `schedules`.

        Raises ConfigError if they differ from those of another rank.

        Groups of an axis are at equal distances on all ranks, and usually do the same. If not, all
        are compared by group.
        """
        found = _short_hash(json.dumps(list(mine.values())))
        by_distances = [
            ([rank - _ranks(group)[0] for rank in _ranks(group)], schedule)
            for group, schedule in mine.items()
        ]
        with outside_of_tracing():
            if self.peers.alike(json.dumps(by_distances)):
                return found
            everyone = {
                rank: json.loads(word) for rank, word in self.peers.all(json.dumps(mine)).items()
            }
        for group in sorted({group for theirs in everyone.values() for group in theirs}):
            by_rank = {
                rank: everyone[rank].get(group) for rank in _ranks(group) if rank in everyone
            }
            first = min(by_rank, default=0)
            different = [rank for rank, schedule in by_rank.items() if schedule != by_rank[first]]
            if different:
                raise ConfigError(
                    f"ranks {', '.join(map(str, different))} would communicate in another order"
                    f" than rank {first} among {group} in the {name} graph, and all would hang; use"
                    " the same code and recipe on all nodes, with one compile.machine, or"
                    ' bucketing = "block" and reordering = false in [compile]'
                )
        return found


def _ranks(group: str) -> list[int]:
    return [*map(int, group.split(", "))]


def schedules(graph: Graph) -> dict[str, str]:
    """Return a hash by group of ranks, of its collectives in order with their bytes and parameters."""
    lines: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.target in KINDS:
            line = f"{node.target} {collective_bytes(node)} {' '.join(parameters_of(node))}"
            lines.setdefault(", ".join(map(str, ranks_of(node))), []).append(line)
    return {group: _short_hash("\n".join(each)) for group, each in lines.items()}


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def readable(graph: Graph) -> str:
    """Return a line per node: name, dtype, shape, operator and arguments."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if hasattr(value, "dtype")
            else ""
        )
        fqns = f"   # {', '.join(parameters_of(node))}" if parameters_of(node) else ""
        what = "" if node.op == "placeholder" else f" = {node.target}{node.args}"
        lines.append(f"{node.name}: {shape}{what}{fqns}")
    return "\n".join(lines) + "\n"


def _cache_hits() -> Counter:
    return Counter(
        {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    )
