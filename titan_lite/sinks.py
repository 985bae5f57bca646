"""Sinks: the objects that take the results of an operator in a graph, by the FQN of its module.

    LOADS = Sinks[Load]("titan_lite::choose_experts")
    LOADS[fqn] = load                     # before the graph runs
    LOADS[fqn](...)                       # within the operator

An operator in a graph has tensors and plain values as arguments, no objects. So it has an FQN, and
finds here who takes its results.
"""

from typing import Any, TypeVar

T = TypeVar("T")

OPERATORS: dict[str, "Sinks[Any]"] = {}  # those of this process that have sinks, by their names


class Sinks(dict[str, T]):
    """The sinks of an operator by FQN."""

    def __init__(self, operator: str):
        super().__init__()
        OPERATORS[operator] = self


def close() -> None:
    """Drop all sinks: those of a run that was in this process before."""
    for sinks in OPERATORS.values():
        sinks.clear()
