"""Check that all ranks were started for the same run, before anything depends on it.

    agree(store, rank, world_size, with_machine(run_identity(...)))   # on all ranks

Ranks whose learning rate, seed or corpus differ would train together without a word. So rank 0
writes the parts of its identity and their hashes to the store of the process group, each rank
compares its own hashes, and one that differs reads the parts. All ranks then raise the same error,
of the first rank that differs from rank 0:

    optimizer.lr differs: 0.002 on node0 (rank 0), 0.02 on node1 (rank 8)

The recipe has to be the same in every key but for the names of files whose content is compared: a
node may have its own copy of the corpus or the tokenizer. A difference of the hardware or of
Python alone, such as another processor, is a warning.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from titan_lite.checkpoint.manager import SharedConfigError
from titan_lite.checkpoint.resume import FIELDS, leaves_that_differ, short
from titan_lite.checkpoint.run_identity import NUMERIC_VARIABLES, RunIdentity, git_revision
from titan_lite.logging import OF_GROUP, logger

# Fields of RunIdentity that all ranks have alike; the others follow from them
COMPARED = (
    "recipe",
    "model",
    "tokenizer",
    "documents",
    "validation_documents",
    "versions",
    "family_file",
    "sources",
)
VARIABLES = "variables"  # those of `numerics` that the user has set
HARDWARE = "hardware"  # the rest of it
PYTHON = "python"
PARTS_OF_ERRORS = (*COMPARED, VARIABLES)
PARTS_OF_WARNINGS = (HARDWARE, PYTHON)
SECONDS_TO_READ = 5.0  # for all ranks to read the verdict, before the store may end with rank 0


@dataclass(frozen=True)
class Member:
    """The identity of a rank, or of a replica group, and where that runs."""

    place: str  # such as "on node0 (rank 0)"
    parts: Mapping[str, Any]  # of its identity, by name
    git: str


def agree(store: dist.Store, rank: int, world_size: int, identity: RunIdentity) -> None:
    """Raise the same SharedConfigError on all ranks if they were started for different runs.

    Needs no process group. What a rank sends and receives does not grow with the number of ranks.
    """
    # torchrun's store survives a restart of the ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"agreement/{attempt}", store)
    parts = parts_of(identity)
    digests = {name: digest_of(part) for name, part in parts.items()}
    if rank == 0:
        first = Member(_place(rank), parts, identity.git)
        store.set("first", json.dumps(asdict(first)))
        store.set("digests", json.dumps(digests))
    different = _names_that_differ(json.loads(store.get("digests")), digests)
    if different:
        _report(store, rank, Member(_place(rank), parts, git_revision()), different)
    if store.add("compared", 1) == world_size:
        store.set("verdict", json.dumps(_verdict(store)))
    errors = json.loads(store.get("verdict"))
    if errors:
        store.add("read", 1)
        deadline = time.monotonic() + SECONDS_TO_READ
        while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
        raise SharedConfigError(*errors)


def _place(rank: int) -> str:
    return f"on {socket.gethostname()} (rank {rank})"


def _report(store: dist.Store, rank: int, own: Member, different: Collection[str]) -> None:
    """Write the errors of a rank that differs from rank 0. The first one logs its warnings."""
    first = Member(**json.loads(store.get("first")))
    errors = differences(first, own, [part for part in PARTS_OF_ERRORS if part in different])
    if errors:
        number = store.add("errors", 1)
        store.set(f"error/{number}", json.dumps([rank, errors]))
    warnings = list(_warnings(first, own, different))
    if warnings and store.add("warnings", 1) == 1:
        for line in warnings:
            logger.warning(line, extra=OF_GROUP)


def _verdict(store: dist.Store) -> list[str]:
    """Return the errors of the first rank that differs, once all have compared."""
    count = store.add("errors", 0)
    contents = store.multi_get([f"error/{number + 1}" for number in range(count)]) if count else ()
    if not contents:
        return []
    _, errors = min(json.loads(content) for content in contents)
    if count > 1:
        errors[-1] += f"; {count} ranks differ from rank 0"
    errors[-1] += "; start all nodes with the same recipe, command line, files and versions"
    return errors


def parts_of(identity: RunIdentity) -> dict[str, Any]:
    """Return what ranks compare, in JSON types."""
    fields = json.loads(json.dumps(asdict(identity)))
    parts = {name: fields[name] for name in COMPARED}
    for table in (parts["recipe"]["data"], parts["recipe"]["validation"]):
        for corpus in (table, *table["sources"]):
            del corpus["path"]  # `documents` has the content
    del parts["recipe"]["model"]["tokenizer_path"]
    numerics = fields["numerics"]
    parts[VARIABLES] = {name: numerics[name] for name in numerics if name in NUMERIC_VARIABLES}
    hardware = {name: numerics[name] for name in numerics if name not in NUMERIC_VARIABLES}
    parts[PYTHON] = {"version of Python": parts["versions"].pop("python", None)}
    parts[HARDWARE] = {"device": fields["device"], **hardware}
    return parts


def digest_of(part: object) -> str:
    """Return 64 bits of the SHA-256 of a value in JSON types."""
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def _names_that_differ(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in one if one[name] != other[name]]


def differences(first: Member, own: Member, parts: Collection[str]) -> list[str]:
    """Return a line for each key that differs in these parts."""
    lines = []
    for part in parts:
        for path, theirs, ours in leaves_that_differ(first.parts.get(part), own.parts[part]):
            values = [short(theirs), short(ours)]
            if part == "sources" and own.git:
                values = [f"{values[0]} (git {first.git})", f"{values[1]} (git {own.git})"]
            lines.append(
                f"{_name(part, path)} differs: {values[0]} {first.place}, {values[1]} {own.place}"
            )
    return lines


def _warnings(first: Member, own: Member, different: Collection[str]) -> Iterator[str]:
    """Yield a line for each difference of the hardware and of Python."""
    effects = {HARDWARE: "; sums differ by rounding", PYTHON: ""}
    for part in PARTS_OF_WARNINGS:
        if part in different:
            for path, theirs, ours in leaves_that_differ(first.parts[part], own.parts[part]):
                yield (
                    f"ranks differ in {path}: {short(theirs)} {first.place}, {short(ours)}"
                    f" {own.place}{effects[part]}"
                )


def _name(part: str, path: str) -> str:
    """Return what a difference is called, as a resume calls it."""
    if part == VARIABLES:
        return f"the environment variable {path}"
    return path if part == "recipe" else FIELDS[part][0].format(path)
