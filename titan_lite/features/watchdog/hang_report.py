"""Make a verdict in words from the records of ranks when a run hung.

    verdict(records, world_size=4)
    # "ranks 0-2 wait in all_gather #214 (layers.4) for rank 3
    #  rank 3, in step 7: forward (titan_lite/models/llama3.py:131)"

A record has JSON types: where a rank's Python code is, and the collectives of every process group
in its flight recorder. These are plain functions; the threads are in watchdog.py.
"""

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypedDict

import titan_lite
from titan_lite.text import first_lines, name_ranks

# A collective that was about to start: (clock in nanoseconds, group, names of its parameters)
StartedCollective = tuple[int, str, str]
MAX_START_DELAY = 10**9  # nanoseconds from there to its entry in the flight recorder

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
PACKAGE = os.path.dirname(os.path.abspath(titan_lite.__file__))
MAX_WAITING = 20  # collectives of a group in a record
MAX_NAMED = 4  # ranks, or parameters of a bucket, that are all named


class WaitingCollective(NamedTuple):
    """A collective that a rank has entered and not left."""

    group: str
    number: int
    operation: str
    parameters: str  # names, abbreviated; "": not known
    point_to_point: bool  # a pipeline's send or receive
    created: int  # clock in nanoseconds

    def __str__(self) -> str:
        name = self.operation
        if not self.point_to_point:
            name += f" #{self.number}"
        if self.parameters:
            name += f" ({self.parameters})"
        return name


class GroupRecord(TypedDict):
    """The collectives of a process group on one rank."""

    ranks: list[int]  # global ranks of the group
    entered: int  # number of the last collective entered
    waiting: list[WaitingCollective]  # at most MAX_WAITING, oldest first


class RankRecord(TypedDict):
    """The position of one rank in the code."""

    phase: str  # of the run, such as "step 7"
    code: str  # position of its Python code
    groups: dict[str, GroupRecord]


def collectives_by_group(
    entries: Iterable[Mapping[str, Any]],
    members: Mapping[str, Sequence[int]],
    started: Iterable[StartedCollective],
) -> dict[str, GroupRecord]:
    """Return the entries of a flight recorder by process group.

    members: {group: global ranks}. started: the names of parameters, which a flight recorder does
    not have.
    """
    groups: dict[str, GroupRecord] = {}
    previous: dict[str, int] = {}  # when the entry before was created, by group
    started = list(started)
    for entry in entries:
        name = entry["process_group"][0]
        if name not in groups:
            groups[name] = {"ranks": list(members.get(name, ())), "entered": 0, "waiting": []}
        group = groups[name]
        # A pipeline's sends and receives have their own numbers, which may differ between the two
        # ends.
        if not entry["is_p2p"]:
            group["entered"] = max(group["entered"], entry["collective_seq_id"])
        is_waiting = not entry["retired"] and entry["state"] != "completed"
        if is_waiting and len(group["waiting"]) < MAX_WAITING:
            parameters = _parameters(name, entry, previous.get(name, 0), started)
            group["waiting"].append(_waiting_collective(name, entry, parameters))
        previous[name] = entry["time_created_ns"]
    return groups


def _parameters(
    group: str, entry: Mapping[str, Any], previous: int, started: Iterable[StartedCollective]
) -> str:
    """Return the names of the parameters that an entry communicates, or "".

    A start belongs to the first entry of its group after it.
    """
    created = entry["time_created_ns"]
    earliest = max(previous, created - MAX_START_DELAY)
    for time, other_group, names in started:
        if other_group == group and earliest < time <= created:
            return names
    return ""


def _waiting_collective(group: str, entry: Mapping[str, Any], parameters: str) -> WaitingCollective:
    return WaitingCollective(
        group=group,
        number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        operation=_operation(entry["profiling_name"]),
        parameters=abbreviate(parameters),
        point_to_point=entry["is_p2p"],
        created=entry["time_created_ns"],
    )


def _operation(name: str) -> str:
    """Return the plain name of an operation, such as all_gather for gloo:all_gather and
    nccl:_all_gather_base.
    """
    plain = name.rpartition(":")[2]
    if plain.split()[0] in ("send", "recv"):  # "nccl:send 0->1"
        return plain
    return next((operation for operation in OPERATIONS if operation in plain), plain)


def abbreviate(parameters: str) -> str:
    """Return the module that has all parameters of a bucket, or all names, or the first and the
    last.
    """
    names = parameters.split()
    shared = os.path.commonpath([name.replace(".", "/") for name in names] or [""])
    if shared:
        return shared.replace("/", ".")
    return " ".join(names) if len(names) <= MAX_NAMED else f"{names[0]} to {names[-1]}"


def describe_frame(frame: FrameType | None) -> str:
    """Return the innermost Python function of a thread, and the innermost one of this package that
    called it.
    """
    own = frame
    while own is not None and not own.f_code.co_filename.startswith(PACKAGE + os.sep):
        own = own.f_back
    frames = [one for one in dict.fromkeys((frame, own)) if one is not None]
    return ", called by ".join(_describe_function(one) for one in frames)


def _describe_function(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    for root in (os.path.dirname(PACKAGE), *sys.path):
        if root and path.startswith(root.rstrip(os.sep) + os.sep):
            path = os.path.relpath(path, root)
            break
    return f"{frame.f_code.co_name} ({path}:{frame.f_lineno})"


def verdict(records: Mapping[int, RankRecord], world_size: int) -> str:
    """Return lines on the ranks that have not answered, on who waits in which collective for whom,
    and on where the ranks are that others wait for.

    records: those of the ranks that have answered; the others are stopped, dead, or cut off.
    """
    waiting = {
        rank: oldest
        for rank, record in records.items()
        if (oldest := _oldest_waiting(record)) is not None
    }
    lines = []
    if absent := [rank for rank in range(world_size) if rank not in records]:
        lines.append(f"{_clause(absent, 'give')} no sign of life (stopped, dead, or cut off)")

    waited_for: set[int] = set()
    for key in sorted({(one.group, one.number) for one in waiting.values()}):
        there = {rank: one for rank, one in waiting.items() if (one.group, one.number) == key}
        collective = next(iter(there.values()))
        outside = [
            rank
            for rank in sorted(_members(records, collective.group))
            if rank not in there and not _has_entered(records.get(rank), collective)
        ]
        late = [rank for rank in outside if rank not in waiting]
        if outside and not late:
            continue  # they wait elsewhere themselves
        waited_for.update(late)
        # some ranks may not know the parameters, and ranks may differ in the operation
        by_parameters = sorted(there.values(), key=lambda one: one.parameters)
        names = {one.operation: str(one) for one in by_parameters}
        whom = f" for {name_ranks(late)}" if late else ", which all have entered"
        lines.append(f"{_clause(there, 'wait')} in {' or '.join(names.values())}{whom}")
    if waiting and not lines:
        lines.append("the ranks wait for each other")

    not_waiting = sorted(set(records) - set(waiting))
    described = sorted(waited_for & set(records)) or not_waiting or sorted(records)
    descriptions = [describe_rank(rank, records[rank]) for rank in described]
    lines += first_lines(descriptions, MAX_NAMED)
    return "\n".join(lines)


def _members(records: Mapping[int, RankRecord], group: str) -> set[int]:
    """Return the ranks of a process group, as any rank knows them."""
    members: set[int] = set()
    for record in records.values():
        if group in record["groups"]:
            members.update(record["groups"][group]["ranks"])
    return members


def describe_rank(rank: int, record: RankRecord) -> str:
    """Return a line about where one rank is."""
    line = f"rank {rank}, in {record['phase']}: {record['code']}"
    oldest = _oldest_waiting(record)
    return line if oldest is None else f"{line}, waits in {oldest}"


def _oldest_waiting(record: RankRecord) -> WaitingCollective | None:
    """Return the oldest collective that a rank has entered and not left."""
    collectives = [
        WaitingCollective(*fields)  # JSON has made lists of them
        for group in record["groups"].values()
        for fields in group["waiting"]
    ]
    return min(collectives, key=lambda collective: collective.created, default=None)


def _has_entered(record: RankRecord | None, collective: WaitingCollective) -> bool:
    if record is None or collective.point_to_point or collective.group not in record["groups"]:
        return False
    return record["groups"][collective.group]["entered"] >= collective.number


def _clause(ranks: Collection[int], verb: str) -> str:
    """Return ([0, 1], "wait") as "ranks 0-1 wait", and ([0], "wait") as "rank 0 waits"."""
    ending = "s" if len(ranks) == 1 else ""
    return f"{name_ranks(ranks)} {verb}{ending}"
