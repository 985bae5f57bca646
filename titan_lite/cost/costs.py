"""Seconds, bytes and FLOPs by mesh axis.

They add up over graphs, and are linear in the number of blocks of a pipeline stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_lite.cost.machine import Machine

ByAxis = dict[str, float]


@dataclass
class Costs:
    """The costs of a graph, or of several, on one rank."""

    # Seconds of all operators except collectives, slower beside those of parameters.
    compute: float = 0.0
    # Seconds in which nothing computes, by the axis whose collectives are waited for; on a CPU all
    # of a collective, since the transport takes the cores. "host": waits for the host.
    exposed: ByAxis = field(default_factory=dict)
    communication: ByAxis = field(default_factory=dict)  # seconds of collectives
    sent: ByAxis = field(default_factory=dict)  # bytes
    sent_to_other_nodes: ByAxis = field(default_factory=dict)  # averaged over a group's ranks
    matmul_flops: float = 0.0
    attention_flops: float = 0.0

    @property
    def seconds(self) -> float:
        return sum([self.compute, *self.exposed.values()])

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    def add(self, other: "Costs", times: float = 1) -> None:
        """Add `times` the costs of another graph."""
        self.compute += times * other.compute
        self.matmul_flops += times * other.matmul_flops
        self.attention_flops += times * other.attention_flops
        _add_by_axis(self.exposed, other.exposed, times)
        _add_by_axis(self.communication, other.communication, times)
        _add_by_axis(self.sent, other.sent, times)
        _add_by_axis(self.sent_to_other_nodes, other.sent_to_other_nodes, times)

    def add_collective(
        self,
        axis: str,
        kind: str,
        nbytes: float,
        ranks: Sequence[int],
        machine: Machine,
        exposed: float | None = None,
    ) -> None:
        """Add a collective. exposed: its seconds that nothing hides; None: all of them."""
        seconds = machine.collective(kind, nbytes, ranks)
        nodes = machine.nodes(ranks)
        rounds = 2 if kind == "all_reduce" else 1
        sent = rounds * nbytes * (len(ranks) - 1) / len(ranks)
        across = sent * nodes / len(ranks) if nodes > 1 else 0.0  # a hop of the ring per node
        _add_by_axis(self.communication, {axis: seconds})
        _add_by_axis(self.exposed, {axis: seconds if exposed is None else exposed})
        _add_by_axis(self.sent, {axis: sent})
        _add_by_axis(self.sent_to_other_nodes, {axis: across})

    def extrapolated(self, other: "Costs", share: float) -> "Costs":
        """Return the costs on the line from these (share 0) through the other's (share 1), none of
        them below zero.
        """
        return Costs(
            compute=on_line(self.compute, other.compute, share),
            exposed=_on_line_by_axis(self.exposed, other.exposed, share),
            communication=_on_line_by_axis(self.communication, other.communication, share),
            sent=_on_line_by_axis(self.sent, other.sent, share),
            sent_to_other_nodes=_on_line_by_axis(
                self.sent_to_other_nodes, other.sent_to_other_nodes, share
            ),
            matmul_flops=on_line(self.matmul_flops, other.matmul_flops, share),
            attention_flops=on_line(self.attention_flops, other.attention_flops, share),
        )


def _add_by_axis(total: ByAxis, added: Mapping[str, float], times: float = 1) -> None:
    for axis, value in added.items():
        total[axis] = total.get(axis, 0.0) + times * value


def on_line(low: float, high: float, share: float) -> float:
    """Return the number on the line from low (share 0) through high (share 1), none below 0."""
    return max(0.0, low + share * (high - low))


def _on_line_by_axis(low: ByAxis, high: ByAxis, share: float) -> ByAxis:
    return {
        axis: on_line(low.get(axis, 0.0), high.get(axis, 0.0), share) for axis in {**low, **high}
    }
