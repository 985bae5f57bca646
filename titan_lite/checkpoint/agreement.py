"""Check that all ranks were started for the same run, before anything depends on it.

    agree(store, rank, world_size, with_machine(run_identity(...)))   # on all ranks

Ranks whose learning rate, seed or corpus differ would train together without a word. So each rank
writes hashes of the parts of its identity to the store of the process group, and rank 0 compares
them. Ranks with the same hashes are a group. If there are several, the first rank of each group
writes its values (of 8 groups at most; the others are counted), and all ranks raise the same error:

    optimizer.lr differs: 0.002 on node0 (rank 0), 0.02 on node1 (rank 1)

The recipe has to be the same in every key but for the names of files whose content is compared: a
node may have its own copy of the corpus or the tokenizer. A difference of the hardware or of
Python alone, such as another processor, is a warning.
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

from titan_lite.checkpoint.manager import SharedConfigError
from titan_lite.checkpoint.resume import FIELDS, leaves_that_differ, short
from titan_lite.checkpoint.run_identity import NUMERIC_VARIABLES, RunIdentity, git_revision
from titan_lite.logging import logger
from titan_lite.resilience.hang_report import name_ranks
from titan_lite.text import first_names

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
MAX_GROUPS = 8  # of ranks, whose values are reported
MAX_NODES = 4  # named for a value
SECONDS_TO_READ = 5.0  # for all ranks to read the verdict, before the store may end with rank 0

Parts = Mapping[str, Any]  # of an identity, by name


@dataclass(frozen=True)
class RankDigests:
    """The hashes of a rank."""

    node: str
    digests: dict[str, str]  # by part


@dataclass(frozen=True)
class RankValues:
    """The values of a group: those of its first rank."""

    ranks: list[int]
    parts: Parts
    git: str


@dataclass(frozen=True)
class Comparison:
    """The groups of all ranks. Errors have groups of their own: other hardware alone makes no group
    by errors, and so hides no difference of the recipe.
    """

    nodes: list[str]  # by rank
    of_errors: list[list[int]]  # the ranks of each group, by PARTS_OF_ERRORS
    of_warnings: list[list[int]]  # by PARTS_OF_WARNINGS

    def asked(self) -> list[int]:
        """Return the ranks whose values are needed: the first one of each reported group."""
        groups = (*_reported(self.of_errors), *_reported(self.of_warnings))
        return sorted({ranks[0] for ranks in groups})


def agree(store: dist.Store, rank: int, world_size: int, identity: RunIdentity) -> None:
    """Raise the same SharedConfigError on all ranks if they were started for different runs.

    Needs no process group. What a rank sends and receives does not grow with the number of ranks,
    except on rank 0: some hundred bytes for each.
    """
    # torchrun's store survives a restart of the ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"agreement/{attempt}", store)
    parts = parts_of(identity)
    _publish_digests(store, rank, parts)
    comparison = _compare_digests(store, world_size) if rank == 0 else None
    asked = json.loads(store.get("asked"))
    if not asked:
        return

    if rank in asked:
        _publish_values(store, rank, parts)
    if comparison is not None:
        _publish_verdict(store, comparison)
    errors, warnings = _read_verdict(store, rank, world_size)
    for line in warnings:
        logger.warning(line)
    if errors:
        raise SharedConfigError(*errors)


def _publish_digests(store: dist.Store, rank: int, parts: Parts) -> None:
    """Write record/RANK, on all ranks."""
    digests = {name: digest_of(part) for name, part in parts.items()}
    store.set(f"record/{rank}", json.dumps(asdict(RankDigests(socket.gethostname(), digests))))


def _compare_digests(store: dist.Store, world_size: int) -> Comparison:
    """Write asked, the ranks whose values are needed, on rank 0."""
    contents = store.multi_get([f"record/{rank}" for rank in range(world_size)])
    records = [RankDigests(**json.loads(content)) for content in contents]
    comparison = Comparison(
        nodes=[record.node for record in records],
        of_errors=_groups(records, PARTS_OF_ERRORS),
        of_warnings=_groups(records, PARTS_OF_WARNINGS),
    )
    store.set("asked", json.dumps(comparison.asked()))
    return comparison


def _publish_values(store: dist.Store, rank: int, parts: Parts) -> None:
    """Write values/RANK, on the ranks that are asked."""
    store.set(f"values/{rank}", json.dumps({"parts": parts, "git": git_revision()}))


def _publish_verdict(store: dist.Store, comparison: Comparison) -> None:
    """Write verdict, the lines of errors and of warnings, on rank 0."""
    nodes = comparison.nodes
    errors = _errors(_values_of(store, comparison.of_errors), nodes)
    warnings = _warnings(_values_of(store, comparison.of_warnings), nodes)
    for lines, groups in ((errors, comparison.of_errors), (warnings, comparison.of_warnings)):
        if lines and len(groups) > MAX_GROUPS:
            lines[-1] += _more(groups[MAX_GROUPS:])
    if errors:
        errors[-1] += "; start all nodes with the same recipe, command line, files and versions"
    store.set("verdict", json.dumps([errors, warnings]))


def _read_verdict(store: dist.Store, rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Return the lines of errors and of warnings, and count the reader in read, on all ranks."""
    errors, warnings = json.loads(store.get("verdict"))
    store.add("read", 1)
    deadline = time.monotonic() + SECONDS_TO_READ
    while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    return errors, warnings


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


def _groups(records: Sequence[RankDigests], parts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group, which have the same hashes of these parts."""
    by_digests: dict[tuple[str, ...], list[int]] = {}
    for rank, record in enumerate(records):
        digests = tuple(record.digests[part] for part in parts)
        by_digests.setdefault(digests, []).append(rank)
    return list(by_digests.values())


def _values_of(store: dist.Store, groups: Sequence[list[int]]) -> list[RankValues]:
    """Return the values of the reported groups."""
    return [
        RankValues(ranks, **json.loads(store.get(f"values/{ranks[0]}")))
        for ranks in _reported(groups)
    ]


def _reported(groups: Sequence[list[int]]) -> Sequence[list[int]]:
    """Return the first MAX_GROUPS groups, or [] if all ranks agree."""
    return groups[:MAX_GROUPS] if len(groups) > 1 else []


def _more(groups: Sequence[list[int]]) -> str:
    """Return the end of a line, which counts the groups whose values are not in it."""
    ranks = sorted(rank for group in groups for rank in group)
    many = "groups" if len(groups) > 1 else "group"
    return f"; and {len(groups)} more {many} of ranks ({name_ranks(ranks)})"


def _errors(groups: Sequence[RankValues], nodes: Sequence[str]) -> list[str]:
    """Return a line for each key that differs between ranks. nodes: by rank."""
    return [
        f"{_name(part, path)} differs: {_values(groups, part, path, nodes)}"
        for part in PARTS_OF_ERRORS
        for path in _paths_that_differ(groups, part)
    ]


def _warnings(groups: Sequence[RankValues], nodes: Sequence[str]) -> list[str]:
    """Return a line for each difference of the hardware and of Python."""
    effects = {HARDWARE: "; sums differ by rounding", PYTHON: ""}
    return [
        f"ranks differ in {path}: {_values(groups, part, path, nodes)}{effects[part]}"
        for part in PARTS_OF_WARNINGS
        for path in _paths_that_differ(groups, part)
    ]


def _paths_that_differ(groups: Sequence[RankValues], part: str) -> list[str]:
    """Return the dotted paths, "" for the part itself, whose values some ranks have otherwise."""
    paths = [
        path
        for other in groups[1:]
        for path, _, _ in leaves_that_differ(groups[0].parts[part], other.parts[part])
    ]
    return list(dict.fromkeys(paths))


def _name(part: str, path: str) -> str:
    """Return what a difference is called, as a resume calls it."""
    if part == VARIABLES:
        return f"the environment variable {path}"
    return path if part == "recipe" else FIELDS[part][0].format(path)


def _values(groups: Sequence[RankValues], part: str, path: str, nodes: Sequence[str]) -> str:
    """Return each value with its ranks: "1 on node0 (rank 0), 2 on node1 (rank 1)"."""
    by_value: dict[str, list[int]] = {}
    for group in groups:
        value = group.parts[part]
        for key in path.split(".") if path else ():
            value = value.get(key) if value is not None else None
        text = short(value)
        if part == "sources" and group.git:
            text += f" (git {group.git})"
        by_value.setdefault(text, []).extend(group.ranks)
    return ", ".join(f"{text} on {_where(ranks, nodes)}" for text, ranks in by_value.items())


def _where(ranks: Collection[int], nodes: Sequence[str]) -> str:
    """Return ranks with their nodes, as "node0, node1 (ranks 0-15)"."""
    names = list(dict.fromkeys(nodes[rank] for rank in ranks))
    return f"{first_names(names, MAX_NODES)} ({name_ranks(ranks)})"
