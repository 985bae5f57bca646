"""Identify documents, so that a run knows whether those of another run, rank or node are the same.

    sources = [listing.identity for listing in list_sources(config.data)]     # listing.py
    digest_of(sources)                            # one SHA-256
    differences_in_words(of_step, sources)        # ["2 files changed (a.jsonl, b.jsonl)"]

The identity of a file is its name in the corpus, its size and a hash of samples of its content
(manifest.sampled_sha256). So a copy of a corpus is the same corpus, wherever it lies and whenever
it was written. Of a dataset of the hub the name, the subset and the split are known.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import NonNegativeInt

from titan_lite.manifest import validated
from titan_lite.text import first_names

MAX_NAMES = 3  # of files in a message


class FileContent(NamedTuple):
    """The content of a file, whatever its path is."""

    size: NonNegativeInt  # bytes; of a help text of Python characters
    sha256: str


class SourceKey(NamedTuple):
    """What a source is known by in a checkpoint: its position belongs to the hash. The name says
    whether another hash is another source, or the same one with other documents.
    """

    name: str
    sha256: str


@dataclass(frozen=True)
class SourceIdentity:
    """The documents of one source."""

    settings: Mapping[str, str]  # of [data]: those that decide which documents these are
    files: Mapping[str, FileContent] = field(default_factory=dict)  # by name, in order
    name: str = field(default="", compare=False)  # Data.name; a checkpoint has it elsewhere

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SourceIdentity":
        """Raise KeyError, TypeError or ValueError for another content."""
        return cls(
            validated(dict[str, str], content, "settings"),
            validated(dict[str, FileContent], content, "files"),
        )

    def to_json(self) -> dict[str, Any]:
        return {"settings": dict(self.settings), "files": dict(self.files)}

    def documents(self) -> dict[str, str]:
        """Return {content: name} of its documents: sources that share a content share documents.

        A content is size and hash of a file that is not empty. A dataset of the hub has one entry,
        its name with subset and split; c4 has none, since it has a split for validation.
        """
        dataset = self.settings["dataset"]
        if dataset == "c4":
            return {}
        if not self.files:
            names = (dataset, self.settings["subset"], self.settings["split"])
            name = " ".join(filter(None, names))
            return {name: name}
        found: dict[str, str] = {}
        for name, file in self.files.items():
            describes = dataset == "prepared" and name.endswith(".json")  # and has no documents
            if file.size and not describes:
                found.setdefault(f"{file.size} {file.sha256}", name)
        return found


def digest_of(sources: Sequence[SourceIdentity]) -> str:
    """Return a SHA-256 of the documents of all sources."""
    values = [(sorted(each.settings.items()), [*each.files.items()]) for each in sources]
    return hashlib.sha256(repr(values).encode()).hexdigest()


def source_keys(sources: Sequence[SourceIdentity]) -> list[SourceKey]:
    """Return the key of each source of a mixture. Two with the same documents have two keys."""
    keys: list[SourceKey] = []
    for source in sources:
        sha256 = digest_of([source])
        same = sum(key.sha256.partition(" ")[0] == sha256 for key in keys)
        keys.append(SourceKey(source.name, f"{sha256} {same + 1}" if same else sha256))
    return keys


def differences_in_words(was: Sequence[SourceIdentity], now: Sequence[SourceIdentity]) -> list[str]:
    """Return what differs between documents, in words."""
    if len(was) != len(now):
        return [f"there are {len(now)} sources, and were {len(was)}"]
    words = []
    for number, (before, after) in enumerate(zip(was, now, strict=True), start=1):
        of_source = f"source {number}: " if len(now) > 1 else ""
        words += [
            f"{of_source}{difference}" for difference in _differences_of_source(before, after)
        ]
    return words


def _differences_of_source(was: SourceIdentity, now: SourceIdentity) -> list[str]:
    names = dict.fromkeys((*now.settings, *was.settings))
    words = [
        f'{name} is "{now.settings.get(name, "")}", was "{was.settings.get(name, "")}"'
        for name in names
        if now.settings.get(name) != was.settings.get(name)
    ]
    if now.settings["dataset"] != was.settings["dataset"]:
        return words[:1]
    kept = [name for name in now.files if name in was.files]
    by_kind = {
        "changed": [name for name in kept if now.files[name] != was.files[name]],
        "added": [name for name in now.files if name not in was.files],
        "removed": [name for name in was.files if name not in now.files],
    }
    for kind, of_kind in by_kind.items():
        if of_kind:
            files = "1 file was" if len(of_kind) == 1 else f"{len(of_kind):,} files were"
            words.append(f"{files} {kind} ({first_names(of_kind, MAX_NAMES)})")
    if not words and list(now.files) != list(was.files):
        words.append("files are in another order")
    return words
