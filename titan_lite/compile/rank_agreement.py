"""Let the ranks that run the same graph agree on it.

    chosen = first_ranks_choice(choose(graph), settings.ranks)      # where costs may differ
    digest = check_same_order(graph, "forward", settings.ranks)     # before the graph first runs

Ranks that communicate in different orders hang. distributed/stage_ranks.py has the ranks of a
pipeline stage.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph

from titan_lite.config import ConfigError
from titan_lite.graph import KINDS, collective_bytes, parameters_of, ranks_of

T = TypeVar("T")

# What a pass chooses: (number of a node to move, number of a collective). Nodes of one kind are
# counted in graph order. Positions among all nodes would not do: a rank with fewer rows pads them.
Pairs = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PlaceOnNode:
    """This rank's place among the ranks of its node that run the same graphs."""

    index: int = 0
    ranks: int = 1  # their number


class StageRanks(Protocol):
    """The ranks that run the same graphs, those of a pipeline stage. Methods are collectives."""

    @property
    def place_on_node(self) -> PlaceOnNode:
        """This rank's place. It is no collective."""
        ...

    def all_equal(self, text: str) -> bool:
        """Return True if all ranks pass the same text."""
        ...

    def broadcast(self, text: str) -> str:
        """Return the first rank's text."""
        ...

    def all_gather(self, text: str) -> dict[int, str]:
        """Return the texts of all ranks, by global rank.

        Every rank receives all, so that it is only for the details of an error.
        """
        ...


class OneRank:
    """This rank alone, as StageRanks."""

    place_on_node = PlaceOnNode()

    def all_equal(self, text: str) -> bool:
        return True

    def broadcast(self, text: str) -> str:
        return text

    def all_gather(self, text: str) -> dict[int, str]:
        return {0: text}


def first_ranks_choice(choice: T, ranks: StageRanks) -> T:
    """Return the first rank's `choice`, which travels as JSON: tuples become lists.

    Tensor-parallel ranks run the same graph on parts that may differ in size, and so in cost.
    """
    with outside_of_tracing():
        chosen: T = json.loads(ranks.broadcast(json.dumps(choice)))
        return chosen


def check_same_order(graph: Graph, name: str, ranks: StageRanks) -> str:
    """Return a hash of the order of the graph's collectives.

    Raises ConfigError if another rank has another order within a process group. name: of the graph.
    """
    own = hash_by_group(graph)
    digest = _short_hash(json.dumps(list(own.values())))
    # Groups of an axis are at equal distances on all ranks, and usually have the same collectives.
    # Only if not, the texts of all ranks are gathered and compared by group.
    by_distance = [
        ([rank - group_ranks(group)[0] for rank in group_ranks(group)], group_hash)
        for group, group_hash in own.items()
    ]
    with outside_of_tracing():
        if ranks.all_equal(json.dumps(by_distance)):
            return digest
        texts = ranks.all_gather(json.dumps(own))
    hashes = {rank: json.loads(text) for rank, text in texts.items()}
    for group in sorted({group for of_rank in hashes.values() for group in of_rank}):
        by_rank = {rank: hashes[rank].get(group) for rank in group_ranks(group) if rank in hashes}
        first = min(by_rank, default=0)
        different = [rank for rank, value in by_rank.items() if value != by_rank[first]]
        if different:
            raise ConfigError(
                f"ranks {', '.join(map(str, different))} would communicate in another order"
                f" than rank {first} among {group} in the {name} graph, and all would hang; use"
                ' the same code and recipe on all nodes, or bucketing = "block" in [compile]'
            )
    return digest


def hash_by_group(graph: Graph) -> dict[str, str]:
    """Return a hash of the collectives of each process group, which is named by its ranks: "0, 1".

    It is of operators, bytes and parameters, in order.
    """
    lines: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.target in KINDS:
            group = ", ".join(map(str, ranks_of(node)))
            line = f"{node.target} {collective_bytes(node)} {' '.join(parameters_of(node))}"
            lines.setdefault(group, []).append(line)
    return {group: _short_hash("\n".join(of_group)) for group, of_group in lines.items()}


def group_ranks(group: str) -> list[int]:
    """Return the global ranks of a group that `hash_by_group` names."""
    return [int(rank) for rank in group.split(", ")]


def _short_hash(text: str) -> str:
    """Return 12 hexadecimal digits of SHA-256: enough to compare, short enough for a log line."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Return a context for real collectives while a graph is compiled.

    Python's dispatcher would deadlock: it holds the GIL while it waits for gloo, and a worker of
    gloo needs it to free a tensor.
    """
    with unset_fake_temporarily(), no_python_dispatcher():
        yield
