"""The passes on one forward or backward graph, in their order: bucketing, then reordering, then the receipt of both.

    schedule = Schedule(config.compile, machine=load_machine("H100"), fused=True)
    schedule(graph_module, "forward")          # in place; one more in schedule.receipts

Both backends run it on the same graphs. What ranks do in another order than each other would hang, so every schedule is compared
over ranks (`exchange`) before its graph runs for the first time.
"""

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule

from titan_lite.compiler import bucketing, reordering, wrapping
from titan_lite.compiler.auto import schedule_by_inductor
from titan_lite.compiler.collectives import KINDS, collective_bytes, group_of, parameter_collectives, parameters_of, ranks_of
from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.report import Receipt, count_collectives, list_collectives
from titan_lite.compiler.timeline import lower_bound, simulate
from titan_lite.config import Compile, ConfigError


@dataclass
class Schedule:
    """machine: None for one that is not known, whose times are not estimated. fused: as in `Machine.cost`. exchange: gives this
    rank's hash to all ranks that run the same graph, and returns theirs by rank. dump: a folder for graphs as text."""

    config: Compile
    machine: Machine | None = None
    fused: bool = False
    exchange: Callable[[str], dict[int, str]] | None = None
    dump: Path | None = None
    receipts: list[Receipt] = field(default_factory=list)

    @contextmanager
    def compiling(self, module: GraphModule, name: str) -> Iterator[None]:
        """Runs the passes; within, the graph is compiled, and the receipt then tells how long both took."""
        started, hits = time.perf_counter(), _cache_hits()
        self(module, name)
        yield
        now = _cache_hits()
        cache = "hit" if now["fxgraph_cache_hit"] > hits["fxgraph_cache_hit"] else "miss" if now != hits else ""
        seconds = time.perf_counter() - started
        self.receipts[-1] = dataclasses.replace(self.receipts[-1], compile_seconds=seconds, cache=cache)

    def __call__(self, module: GraphModule, name: str) -> None:
        """Raises ConfigError where the recipe asks for buckets and none were made, and where ranks differ."""
        graph, started = module.graph, time.perf_counter()
        before = count_collectives(graph)
        self.write(graph, name, "0_traced")
        bound = lower_bound(graph, self.machine, fused=self.fused) if self.machine else 0.0
        self.bucket(module, name)
        self.write(graph, name, "1_bucketed")
        moved = 0
        if self.config.reordering and self.config.bucketing != "auto":
            moved = reordering.overlap(graph, self.machine, fused=self.fused)
            self.write(graph, name, "2_reordered")
        module.recompile()
        timeline = simulate(graph, self.machine, name=name, fused=self.fused, bound=bound) if self.machine else None
        self.receipts.append(
            Receipt(
                name,
                before,
                list_collectives(graph, timeline),
                moved,
                self.agreed(schedule_hash(graph), name),
                timeline,
                pass_seconds=time.perf_counter() - started,
            )
        )

    def bucket(self, module: GraphModule, name: str) -> None:
        config, graph, merged = self.config, module.graph, 0
        mergeable = Counter((node.target, group_of(node), node.meta["val"].dtype) for node in parameter_collectives(graph))
        if config.bucketing == "none" or not mergeable:
            return
        if config.bucketing == "block":
            merged = bucketing.merge(graph, wrapping.by_block(graph))
        elif config.bucketing == "plan":
            merged = bucketing.merge(graph, wrapping.by_names(graph, config.buckets))
        elif config.bucketing == "greedy":
            assert self.machine is not None
            memory = None if config.bucket_memory == -1 else int(config.bucket_memory * 2**30)
            merged = bucketing.merge(graph, wrapping.greedy(graph, self.machine, memory=memory, fused=self.fused))
        elif config.bucketing == "auto":
            assert self.machine is not None
            schedule_by_inductor(module, self.machine, fused=self.fused)
            merged = sum(mergeable.values()) - len(parameter_collectives(graph))
        if not merged and max(mergeable.values()) > 1:
            raise ConfigError(
                f'compile.bucketing = "{config.bucketing}" merged none of the {sum(mergeable.values())} collectives of the '
                f'{name} graph; "block" or "none" would work'
            )

    def write(self, graph: Graph, name: str, what: str) -> None:
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / f"{len(self.receipts)}_{name}_{what}.txt").write_text(readable(graph), encoding="utf-8")

    def agreed(self, schedule: str, name: str) -> str:
        """The hash, which is the same on all ranks. Raises ConfigError otherwise."""
        ranks_by_schedule: dict[str, list[int]] = {}
        with unset_fake_temporarily():  # else the exchange would be traced
            schedules = self.exchange(schedule) if self.exchange else {}
        for rank, theirs in sorted(schedules.items()):
            ranks_by_schedule.setdefault(theirs, []).append(rank)
        if len(ranks_by_schedule) > 1:
            found = "; ".join(f"ranks {', '.join(map(str, ranks))} {theirs}" for theirs, ranks in ranks_by_schedule.items())
            raise ConfigError(
                f"ranks would communicate in different orders in the {name} graph, and hang ({found}); the same code, recipe and "
                'compile.machine on all nodes would work, or compile.bucketing = "block"'
            )
        return schedule


def schedule_hash(graph: Graph) -> str:
    """Of all collectives, tensor parallelism's as well, and the waits for them: what, how large, among how many; in order."""
    lines = []
    for node in graph.nodes:
        if node.target in KINDS:
            lines.append(f"{node.target} {parameters_of(node)} {collective_bytes(node)} {len(ranks_of(node))}")
        elif "_c10d_functional" in str(node.target):
            lines.append(str(node.target))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def readable(graph: Graph) -> str:
    """A line a node: name, dtype and shape, operator and arguments."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else ""
        fqns = f"   # {', '.join(parameters_of(node))}" if parameters_of(node) else ""
        what = "" if node.op == "placeholder" else f" = {node.target}{node.args}"
        lines.append(f"{node.name}: {shape}{what}{fqns}")
    return "\n".join(lines) + "\n"


def _cache_hits() -> Counter:
    return Counter({name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")})
