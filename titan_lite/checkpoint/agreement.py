"""Check that all ranks were started for the same run, before anything depends on it.

    agree(store, rank, world_size, with_machine(run_identity(...)))   # on all ranks

Ranks whose learning rate, seed or corpus differ would train together without a word. So each rank
writes hashes of the parts of its identity to the store of the process group, and rank 0 compares
them. If some differ, one rank of each kind writes the values, and all raise the same error:

    optimizer.lr differs: 0.002 on node0 (rank 0), 0.02 on node1 (rank 1)

The recipe has to be the same in every key but for the names of files whose content is compared: a
node may have its own copy of the corpus or the tokenizer. A difference of the hardware alone, such
as another processor, is a warning.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from titan_lite.checkpoint.identity import NUMERIC_VARIABLES, RunIdentity, git_revision
from titan_lite.checkpoint.manager import SharedConfigError
from titan_lite.checkpoint.resume import FIELDS, differences, short
from titan_lite.logging import logger
from titan_lite.resilience.hang_report import name_ranks

# Fields of RunIdentity that all ranks have alike; the others follow from them
COMPARED = (
    "recipe",
    "model",
    "tokenizer",
    "documents",
    "validation_documents",
    "versions",
    "sources",
)
VARIABLES = "variables"  # those of `numerics` that the user has set
HARDWARE = "hardware"  # the rest of it
MAX_KINDS = 8  # of ranks, whose values are told
MAX_NODES = 4  # named for a value
SECONDS_TO_READ = 5.0  # for all ranks to read the verdict, before the store may end with rank 0

Parts = Mapping[str, Any]  # of an identity, by name


@dataclass(frozen=True)
class RankRecord:
    """The hashes of a rank."""

    node: str
    digests: dict[str, str]  # by part


@dataclass(frozen=True)
class RankValues:
    """The values of the ranks of one kind, which have the same hashes."""

    ranks: list[int]
    parts: Parts
    git: str


def agree(store: dist.Store, rank: int, world_size: int, identity: RunIdentity) -> None:
    """Raise the same SharedConfigError on all ranks if they were started for different runs.

    Needs no process group. What a rank sends and receives does not grow with the number of ranks,
    except on rank 0: some hundred bytes for each.
    """
    # torchrun's store survives a restart of the ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"agreement/{attempt}", store)
    parts = parts_of(identity)
    record = RankRecord(socket.gethostname(), {name: digest_of(parts[name]) for name in parts})
    store.set(f"record/{rank}", json.dumps(asdict(record)))
    records: list[RankRecord] = []
    if rank == 0:
        contents = store.multi_get([f"record/{other}" for other in range(world_size)])
        records = [RankRecord(**json.loads(content)) for content in contents]
        asked = list(_ranks_by_kind(records))
        store.set("asked", json.dumps(asked if len(asked) > 1 else []))

    asked = json.loads(store.get("asked"))
    if not asked:
        return
    if rank in asked:
        store.set(f"values/{rank}", json.dumps({"parts": parts, "git": git_revision()}))
    if rank == 0:
        by_kind = _ranks_by_kind(records)
        kinds = [
            RankValues(by_kind[first], **json.loads(store.get(f"values/{first}")))
            for first in asked
        ]
        nodes = [other.node for other in records]
        store.set("verdict", json.dumps([_errors(kinds, nodes), _warnings(kinds, nodes)]))

    errors, warnings = json.loads(store.get("verdict"))
    store.add("read", 1)
    deadline = time.monotonic() + SECONDS_TO_READ
    while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    for line in warnings:
        logger.warning(line)
    if errors:
        raise SharedConfigError(*errors)


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
    parts[HARDWARE] = {"device": fields["device"], **hardware}
    return parts


def digest_of(part: object) -> str:
    """Return 64 bits of the SHA-256 of a value in JSON types."""
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def _ranks_by_kind(records: Sequence[RankRecord]) -> dict[int, list[int]]:
    """Return the ranks with the same hashes, by the first of them; MAX_KINDS of these."""
    by_digests: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        by_digests.setdefault(json.dumps(record.digests), []).append(rank)
    return {ranks[0]: ranks for ranks in list(by_digests.values())[:MAX_KINDS]}


def _errors(kinds: Sequence[RankValues], nodes: Sequence[str]) -> list[str]:
    """Return a line for each key that differs between ranks. nodes: by rank."""
    lines = [
        f"{_name(part, path)} differs: {_values(kinds, part, path, nodes)}"
        for part in (*COMPARED, VARIABLES)
        for path in _paths_that_differ(kinds, part)
    ]
    if lines:
        lines[-1] += "; start all nodes with the same recipe, command line, files and versions"
    return lines


def _warnings(kinds: Sequence[RankValues], nodes: Sequence[str]) -> list[str]:
    """Return a line for each difference of the hardware."""
    return [
        f"ranks differ in {path}: {_values(kinds, HARDWARE, path, nodes)}; sums differ by rounding"
        for path in _paths_that_differ(kinds, HARDWARE)
    ]


def _paths_that_differ(kinds: Sequence[RankValues], part: str) -> list[str]:
    """Return the dotted paths, "" for the part itself, whose values some ranks have otherwise."""
    first, *others = kinds
    paths = [
        path for other in others for path, _, _ in differences(first.parts[part], other.parts[part])
    ]
    return list(dict.fromkeys(paths))


def _name(part: str, path: str) -> str:
    """Return what a difference is called, as a resume calls it."""
    if part == VARIABLES:
        return f"the environment variable {path}"
    return path if part == "recipe" else FIELDS[part][0].format(path)


def _values(kinds: Sequence[RankValues], part: str, path: str, nodes: Sequence[str]) -> str:
    """Return each value with its ranks: "1 on node0 (rank 0), 2 on node1 (rank 1)"."""
    by_value: dict[str, list[int]] = {}
    for kind in kinds:
        value = kind.parts[part]
        for key in path.split(".") if path else ():
            value = value.get(key) if value is not None else None
        text = short(value)
        if part == "sources" and kind.git:
            text += f" (git {kind.git})"
        by_value.setdefault(text, []).extend(kind.ranks)
    return ", ".join(f"{text} on {_where(ranks, nodes)}" for text, ranks in by_value.items())


def _where(ranks: Collection[int], nodes: Sequence[str]) -> str:
    """Return ranks with their nodes, as "node0, node1 (ranks 0-15)"."""
    names = list(dict.fromkeys(nodes[rank] for rank in ranks))
    more = f" and {len(names) - MAX_NODES} more" if len(names) > MAX_NODES else ""
    return f"{', '.join(names[:MAX_NODES])}{more} ({name_ranks(ranks)})"
