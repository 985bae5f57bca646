"""The policy for bad documents: raise an error, or skip, count and list them up to a limit.

    policy = BadDocumentPolicy(data)
    policy.skip(BadDocument("a.jsonl", "line 34", "not JSON (...)"))     # may raise ConfigError, with file and line

    log = BadDocumentsLog(config.data, dump_folder, reads_alone=True)
    values = log.gather([loader.pop_skipped()])     # a collective; raises ConfigError on all ranks

A line of `bad_documents.jsonl` is one document: {"file": "a.jsonl", "place": "line 34", "reason":
"not JSON (...)"}. Each one is listed once, however many epochs and ranks read it. A resumed run
continues the list and its count.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_lite.config import ConfigError, Data
from titan_lite.logging import logger
from titan_lite.metrics.run_files import read_lines


class BadDocument(NamedTuple):
    """A document without a text, and the reason."""

    file: str
    place: str  # such as "line 34"
    reason: str
    instead: str = ""  # a setting with which it has a text

    def __str__(self) -> str:
        return f"{self.file}, {self.place}: {self.reason}"

    def listed(self) -> dict[str, str]:
        return {"file": self.file, "place": self.place, "reason": self.reason}


@dataclass
class SkippedDocuments:
    """Documents that a loader has skipped since its last report."""

    bad: list[BadDocument] = field(default_factory=list)
    short: int = 0  # number of documents below data.min_document_tokens


class BadDocumentPolicy:
    """Apply data.on_bad_document and data.max_bad_documents.

    known: (file, place) of every bad document so far.
    """

    last: BadDocument | None = None  # the last one skipped

    def __init__(self, data: Data, known: Iterable[tuple[str, str]] = ()):
        self.data = data
        self.known = set(known)

    def skip(self, bad: BadDocument) -> None:
        """Count a bad document.

        Raises ConfigError if bad documents are errors, or if this is one too many.
        """
        if self.data.on_bad_document == "error":
            skip = 'data.on_bad_document = "skip"'
            fix = f"repair or remove it, or use {skip}"
            if bad.instead:
                fix = f"use {bad.instead}, or {skip} if other documents need the present setting"
            raise ConfigError(f"{bad}; {fix}")
        self.last = bad
        self.known.add(bad[:2])
        self.check(len(self.known), f"the last one {bad}", bad.instead)

    def check(self, count: int, which: str, instead: str = "") -> None:
        """Raise ConfigError if there are more different bad documents than data.max_bad_documents."""
        if count > self.data.max_bad_documents:
            raise ConfigError(
                f"data.max_bad_documents = {self.data.max_bad_documents}: there are {count},"
                f" {which}; use {instead or 'a higher value or other documents'}"
            )


class BadDocumentsLog:
    """Count and list the skipped documents of all ranks.

    bad: different bad documents of the run, resumed parts included. short: documents below
    data.min_document_tokens, since this start. reads_alone: False on a rank whose sequences another
    one has, too, which counts its short documents.
    """

    def __init__(self, data: Data, dump_folder: Path, reads_alone: bool):
        self.data = data
        self.reads_alone = reads_alone
        self.path = dump_folder / "bad_documents.jsonl"
        self.listed = self._read()
        self.policy = BadDocumentPolicy(data, map(_place, self.listed))
        self.bad = 0
        self.short = 0

    def gather(self, skipped: Sequence[SkippedDocuments]) -> dict[str, float]:
        """Return the counts by their names in metrics.jsonl; {} if the recipe skips no documents.

        A collective.

        skipped: of each loader of this rank. Raises ConfigError on all ranks if there are more than
        data.max_bad_documents.
        """
        # here, since prepare's processes need the policy but not torch
        import torch.distributed as dist

        from titan_lite.distributed.process_group import gather_on_first, reduce_numbers

        counts_bad = self.data.on_bad_document == "skip"
        counts_short = self.data.min_document_tokens > 0
        if not counts_bad and not counts_short:
            return {}
        short = sum(some.short for some in skipped) if self.reads_alone else 0
        bad = [document for some in skipped for document in some.bad]
        short_everywhere, bad_everywhere = reduce_numbers(short, len(bad), total=True)
        self.short += short_everywhere
        if bad_everywhere:
            # the first rank has those of all ranks, the others none
            self._list([document for theirs in gather_on_first(bad) for document in theirs])
        (self.bad,) = reduce_numbers(0 if dist.get_rank() else len(self.policy.known))
        self.policy.check(self.bad, f"listed in {self.path}")
        counts: dict[str, float] = {}
        if counts_bad:
            counts["bad_documents"] = self.bad
        if counts_short:
            counts["short_documents"] = self.short
        return counts

    @contextmanager
    def listing(self, loaders: Iterable[Any]) -> Iterator[None]:
        """Return a context that lists what this rank has skipped if an error in the data ends the
        run.

        `gather` is not called again then.
        """
        try:
            yield
        except ConfigError:
            self.policy.known.update(map(_place, self._read()))
            for loader in loaders:
                self._list(loader.pop_skipped().bad)
            raise

    def summary(self) -> str:
        """Return the number of skipped documents in words, for the end of a run; "" if none was
        skipped.
        """
        words = ""
        if self.bad:
            words += f", {_documents(self.bad)} left out, listed in {self.path}"
        if self.short:
            least = self.data.min_document_tokens
            words += f", {self.short} times a document left out that is shorter than {least} tokens"
        return words

    def _read(self) -> list[dict]:
        if not self.path.exists():
            return []
        # a kill may leave half a line, which is None
        return [entry for _, entry in read_lines(self.path) if entry is not None]

    def _list(self, documents: Sequence[BadDocument]) -> None:
        known = self.policy.known
        new = {document[:2]: document for document in documents if document[:2] not in known}
        if not new:
            return
        known.update(new)
        first = next(iter(new.values()))
        words = f"{_documents(len(new))} left out, {len(known)} in all; {first}"
        if len(new) > 1:
            words += f"; all are listed in {self.path}"
        logger.warning(words)
        entries = [document.listed() for document in new.values()]
        self.listed += entries
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                if not file.tell():  # a new file has all
                    entries = self.listed
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        except OSError as error:  # no reason to end the run
            logger.warning(f"{self.path} cannot be written, and lacks these: {error.strerror}")


def _place(entry: dict) -> tuple[str, str]:
    return entry.get("file", ""), entry.get("place", "")


def _documents(count: int) -> str:
    return f"{count} bad document{'s' * (count != 1)}"
