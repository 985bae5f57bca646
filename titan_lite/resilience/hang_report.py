"""Make a verdict in words from the records of ranks when a run hung.

    verdict(records, world_size=4)
    # "rank 3 did not enter all_gather #214 (layers.4); ranks 0-2 wait there
    #  rank 3 is in forward (titan_lite/models/llama3.py:131)"

A record has JSON types: the place of a rank's Python code, and the collectives of every process
group in its flight recorder. These are plain functions; the threads are in watchdog.py.
"""

import itertools
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

Record = dict[str, Any]
Note = tuple[
    int, str, str
]  # a collective about to start: (clock in nanoseconds, group, parameters)
OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "send",
    "recv",
)
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MOST = 20  # most collectives of a group in a record
NAMED = 4  # most parameters of a bucket that are all named


class Waiting(NamedTuple):
    """A collective that some rank has entered and not left."""

    group: str
    number: int
    operation: str
    parameters: str
    point_to_point: bool  # a pipeline's send or receive
    created: int  # clock in nanoseconds

    def __str__(self) -> str:
        of = f" ({self.parameters})" if self.parameters else ""
        return (
            f"{self.operation}{of}"
            if self.point_to_point
            else f"{self.operation} #{self.number}{of}"
        )


def groups_of(
    trace: Mapping[str, Any], members: Mapping[str, Sequence[int]], notes: Iterable[Note]
) -> dict[str, dict[str, Any]]:
    """Return a flight recorder's entries by process group: "ranks", "entered" (number of the last
    collective entered), "waiting" (at most MOST collectives not left, oldest first). members:
    {group: global ranks}.
    """
    groups: dict[str, dict[str, Any]] = {}
    notes = list(notes)
    for entry in trace.get("entries", []):
        name = entry["process_group"][0]
        group = groups.setdefault(
            name, {"ranks": list(members.get(name, ())), "entered": 0, "waiting": []}
        )
        # A pipeline's sends and receives have their own numbers, which may differ between the two
        # ends.
        if not entry["is_p2p"]:
            group["entered"] = max(group["entered"], entry["collective_seq_id"])
        if not entry["retired"] and entry["state"] != "completed" and len(group["waiting"]) < MOST:
            number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            operation, created = _operation(entry["profiling_name"]), entry["time_created_ns"]
            # From the last note of this group before it, unless that is more than 1 s old.
            before = [
                parameters
                for time, noted, parameters in notes
                if noted == name and 0 <= created - time < 10**9
            ]
            parameters = abbreviated(before[-1]) if before else ""
            group["waiting"].append(
                Waiting(name, number, operation, parameters, entry["is_p2p"], created)
            )
    return groups


def _operation(name: str) -> str:
    """Return the plain name of an operation, such as all_gather for gloo:all_gather and
    nccl:_all_gather_base.
    """
    plain = name.rpartition(":")[2]
    if plain.split()[0] in ("send", "recv"):  # "nccl:send 0->1"
        return plain
    return next((operation for operation in OPERATIONS if operation in plain), plain)


def abbreviated(parameters: str) -> str:
    """Shorten the parameters of a bucket to the module that has them all, or to the first and the
    last.
    """
    names = parameters.split()
    shared = os.path.commonpath([name.replace(".", "/") for name in names] or [""])
    if shared:
        return shared.replace("/", ".")
    return " ".join(names) if len(names) <= NAMED else f"{names[0]} to {names[-1]}"


def place(frame: FrameType | None) -> str:
    """Return the innermost Python function of a thread, and the innermost one of this package that
    called it.
    """
    own = frame
    while own is not None and not own.f_code.co_filename.startswith(PACKAGE + os.sep):
        own = own.f_back
    return ", called by ".join(
        _function(at) for at in dict.fromkeys((frame, own)) if at is not None
    )


def _function(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    for root in (os.path.dirname(PACKAGE), *sys.path):
        if root and path.startswith(root.rstrip(os.sep) + os.sep):
            path = os.path.relpath(path, root)
            break
    return f"{frame.f_code.co_name} ({path}:{frame.f_lineno})"


def verdict(records: Mapping[int, Record], world_size: int) -> str:
    """Return lines on the ranks that others wait for, the collectives in which these wait, and the
    Python code of some ranks.

    records: those of the ranks that have answered; the others are stopped, dead, or cut off.
    """
    absent = [rank for rank in range(world_size) if rank not in records]
    lines = (
        [f"{_they(absent, 'give')} no sign of life (stopped, dead, or cut off)"] if absent else []
    )
    waiting = {
        rank: first
        for rank, record in records.items()
        if (first := _first_waiting(record)) is not None
    }
    blamed = set(absent)
    for group, number in sorted({(at.group, at.number) for at in waiting.values()}):
        there = {
            rank: at for rank, at in waiting.items() if (at.group, at.number) == (group, number)
        }
        at = max(
            there.values(), key=lambda one: one.parameters
        )  # some ranks may have no note of the parameters
        members = {
            rank
            for record in records.values()
            for rank in record["groups"].get(group, {}).get("ranks", ())
        }
        missing = [
            rank
            for rank in sorted(members)
            if rank not in there and not _has_entered(records.get(rank), at)
        ]
        # A rank that waits elsewhere is not to blame.
        idle, gone = (
            [r for r in missing if r in records and r not in waiting],
            [r for r in missing if r not in records],
        )
        blamed.update(idle)
        if idle:
            lines.append(f"{ranks(idle)} did not enter {at}; {_they(there, 'wait')} there")
        elif gone:
            lines.append(f"{_they(there, 'wait')} in {at}, which {ranks(gone)} did not enter")
        operations = {one.operation: rank for rank, one in sorted(there.items(), reverse=True)}
        if len(operations) > 1 and not at.point_to_point:
            blamed.update(operations.values())
            text = ", ".join(f"rank {rank} {operation}" for operation, rank in operations.items())
            lines.append(f"ranks entered different collectives as #{number} of a group: {text}")
        elif not missing:
            lines.append(
                f"{_they(there, 'wait')} in {at}, which all have entered: suspect the network or a"
                " device"
            )
    if waiting and not lines:
        lines.append("no rank is missing: they wait for each other")
        lines += [f"rank {rank} waits in {at}" for rank, at in sorted(waiting.items())[:NAMED]]
    shown = (
        sorted(blamed & set(records)) or sorted(set(records) - set(waiting)) or sorted(records)[:1]
    )
    lines += [standing(rank, records[rank]) for rank in shown[:NAMED]]
    if len(shown) > NAMED:
        lines.append(f"and {len(shown) - NAMED} more")
    return "\n".join(lines)


def standing(rank: int, record: Record) -> str:
    """Return a line about the place of one rank."""
    at = _first_waiting(record)
    return f"rank {rank}, in {record['phase']}: {record['place']}{f', waits in {at}' if at else ''}"


def _first_waiting(record: Record) -> Waiting | None:
    """Return the oldest collective that a rank has entered and not left."""
    found = [
        Waiting(*waiting) for group in record["groups"].values() for waiting in group["waiting"]
    ]
    return min(found, key=lambda waiting: waiting.created, default=None)


def _has_entered(record: Record | None, at: Waiting) -> bool:
    if record is None or at.point_to_point or at.group not in record["groups"]:
        return False
    return record["groups"][at.group]["entered"] >= at.number


def _they(who: Collection[int], verb: str) -> str:
    """Return ([0, 1], "wait") as "ranks 0-1 wait", and ([0], "wait") as "rank 0 waits"."""
    return f"{ranks(who)} {verb}{'s' * (len(who) == 1)}"


def ranks(numbers: Collection[int]) -> str:
    """Return [0, 1, 2, 5] as "ranks 0-2, 5"."""
    places = enumerate(sorted(numbers))
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(places, lambda place: place[1] - place[0])
    ]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(numbers) > 1)} {text}"
