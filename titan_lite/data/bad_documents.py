"""The policy for bad documents: raise an error, or skip, count and list them up to a limit.

    policy = BadDocumentPolicy(data)
    policy.skip(BadDocument("a.jsonl", "line 34", "not JSON (...)"))     # or raises ConfigError

    log = BadDocumentsLog(config.data, dump_folder, counts_short=True)
    metrics = log.gather([loader.pop_skipped()])     # a collective; raises ConfigError on all ranks

An empty text is nothing broken, and common in corpora of code and web pages: it is left out and
counted, whatever the recipe says of bad documents.

A line of `bad_documents.jsonl` is one document. Each one is listed once, however many epochs and
ranks read it. A resumed run continues the list and its count. A run whose data restarts begins
another list, and keeps the former one as `bad_documents-1.jsonl`.

    {"file": "a.jsonl", "location": "line 34", "reason": "not JSON (...)"}
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import NonNegativeInt

from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import MachineError
from titan_lite.logging import logger
from titan_lite.manifest import validated
from titan_lite.metrics.run_files import read_lines

EMPTY = "empty"  # the reason of an empty text


class BadDocument(NamedTuple):
    """A document without a text, and the reason."""

    file: str
    location: str  # in the file, such as "line 34"
    reason: str
    instead: str = ""  # a setting with which it has a text

    def __str__(self) -> str:
        return f"{self.file}, {self.location}: {self.reason}"

    @property
    def key(self) -> tuple[str, str]:
        """Key by which the documents of a run are compared."""
        return self.file, self.location

    def to_dict(self) -> dict[str, str]:
        return {"file": self.file, "location": self.location, "reason": self.reason}


@dataclass
class SkippedDocuments:
    """Documents that were skipped since the last report."""

    bad: list[BadDocument] = field(default_factory=list)
    short: int = 0  # number of documents below data.min_document_tokens
    empty: int = 0  # number of empty texts

    def __bool__(self) -> bool:
        return bool(self.bad or self.short or self.empty)

    def add(self, other: "SkippedDocuments", *, counts_short: bool = True) -> None:
        self.bad += other.bad
        if counts_short:
            self.short += other.short
            self.empty += other.empty


class BadDocumentPolicy:
    """Applies data.on_bad_document and data.max_bad_documents, and collects what is skipped."""

    def __init__(self, data: Data, known: Iterable[tuple[str, str]] = ()):
        """known: keys of the bad documents of the run so far."""
        self.data = data
        self.known = set(known)
        self.skipped = SkippedDocuments()  # since `pop_skipped`
        self.last_bad: BadDocument | None = None

    def skip(self, bad: BadDocument) -> None:
        """Skip a bad document, or an empty text.

        Raises ConfigError if bad documents are errors, or if this is one too many.
        """
        if bad.reason == EMPTY:
            self.last_bad = bad
            self.skipped.empty += 1
            return
        if self.data.on_bad_document == "error":
            skip = 'data.on_bad_document = "skip"'
            fix = f"repair or remove it, or use {skip}"
            if bad.instead:
                fix = f"use {bad.instead}, or {skip} if other documents need the present setting"
            raise ConfigError(f"{bad}; {fix}")
        self.last_bad = bad
        self.known.add(bad.key)
        self.check(len(self.known), f"the last one {bad}", bad.instead)
        self.skipped.bad.append(bad)

    def skip_short(self) -> None:
        """Skip a document below data.min_document_tokens."""
        self.skipped.short += 1

    def pop_skipped(self) -> SkippedDocuments:
        """Return what was skipped since the last call."""
        skipped = self.skipped
        self.skipped = SkippedDocuments()
        return skipped

    def check(self, count: int, which: str, instead: str = "") -> None:
        """Raise ConfigError if there are more different bad documents than the recipe allows."""
        if count > self.data.max_bad_documents:
            raise ConfigError(
                f"data.max_bad_documents = {self.data.max_bad_documents}: there are {count},"
                f" {which}; use {instead or 'a higher value or other documents'}"
            )


class BadDocumentsLog:
    """Counts and lists the skipped documents of all ranks."""

    def __init__(self, data: Data, dump_folder: Path, counts_short: bool):
        """counts_short: False on a rank whose documents another rank reads, too, and counts."""
        self.data = data
        self.counts_short = counts_short
        self.writes = True  # the file; False in a copy of the model that is not the first
        self.path = dump_folder / "bad_documents.jsonl"
        self.entries = self._read()  # the lines of the file
        self.policy = BadDocumentPolicy(data, map(_key_of, self.entries))
        self.bad = len(self.policy.known)  # different ones of the run, resumed parts included
        self.short = 0  # documents below data.min_document_tokens, since this start
        self.empty = 0  # empty texts, since this start
        datasets = {part.dataset for _, part in data.mixture()}
        self.may_have_empty = not datasets <= {"stdlib", "prepared"}

    def state_dict(self) -> dict[str, int]:
        """Return the length of the list: documents listed later are found again after a resume."""
        return {"listed": self.bad}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Forget what was listed after the step was saved."""
        listed = validated(NonNegativeInt, state, "listed")
        if len(self.entries) < listed:  # the state of another copy of the model
            self.entries = self._read()
        self.entries = self.entries[:listed]
        self.policy.known = set(map(_key_of, self.entries))
        self.bad = len(self.policy.known)

    def restart(self, *, keeps_file: bool) -> None:
        """Begin an empty list, since the data restarts.

        keeps_file: rename the list of the previous start; True on one rank.
        """
        self.entries = []
        self.policy.known = set()
        self.bad = 0
        if not keeps_file or not self.path.exists():
            return
        kept = self._unused_path()
        try:
            self.path.rename(kept)
        except OSError as error:  # no reason to end the run
            logger.warning(f"{self.path} cannot be renamed, and is continued: {error.strerror}")
        else:
            logger.info(f"{self.path} is the list of a previous start, and is kept as {kept.name}")

    def _unused_path(self) -> Path:
        """Return the first free one of bad_documents-1.jsonl, bad_documents-2.jsonl and so on."""
        names = (f"{self.path.stem}-{number}.jsonl" for number in itertools.count(1))
        return next(path for path in map(self.path.with_name, names) if not path.exists())

    def rewrite(self) -> None:
        """Write the list again without what a resume has forgotten, or a kill has cut off."""
        if not self.path.exists():
            return
        unfinished = self.path.with_name(f"unfinished-{self.path.name}")
        try:
            unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))
            unfinished.replace(self.path)
        except OSError as error:  # no reason to end the run
            logger.warning(f"{self.path} cannot be written again: {error.strerror}")

    def gather(self, skipped: Sequence[SkippedDocuments]) -> dict[str, float]:
        """Return the counts by their names in metrics.jsonl; {} if the recipe skips no documents.

        A collective. skipped: of each loader of this rank. Raises ConfigError on all ranks if there
        are more than data.max_bad_documents.
        """
        # here, since prepare's processes need the policy but not torch
        import torch.distributed as dist

        from titan_lite.distributed.process_group import (
            gather_to_rank_0,
            max_over_ranks,
            sum_over_ranks,
        )

        skips_bad = self.data.on_bad_document == "skip"
        skips_short = self.data.min_document_tokens > 0
        if not skips_bad and not skips_short and not self.may_have_empty:
            return {}
        short = sum(some.short for some in skipped) if self.counts_short else 0
        empty = sum(some.empty for some in skipped) if self.counts_short else 0
        bad = [document for some in skipped for document in some.bad]
        short_everywhere, empty_everywhere, bad_everywhere = sum_over_ranks(short, empty, len(bad))
        self.short += short_everywhere
        if empty_everywhere and not self.empty:
            logger.info("empty texts are left out; the metric empty_documents counts them")
        self.empty += empty_everywhere
        if bad_everywhere:
            # the first rank has those of all ranks, the others none
            self._list([document for of_rank in gather_to_rank_0(bad) for document in of_rank])
        (self.bad,) = max_over_ranks(0 if dist.get_rank() else len(self.policy.known))
        self.policy.check(self.bad, f"listed in {self.path}")
        counts: dict[str, float] = {}
        if skips_bad:
            counts["bad_documents"] = self.bad
        if skips_short:
            counts["short_documents"] = self.short
        if self.empty:
            counts["empty_documents"] = self.empty
        return counts

    @contextmanager
    def listing_on_error(self, loaders: Iterable[Any]) -> Iterator[None]:
        """Return a context that lists what this rank has skipped if an error in the data ends it.

        `gather` is not called again then.
        """
        try:
            yield
        except (ConfigError, MachineError):
            self.policy.known.update(map(_key_of, self._read()))
            for loader in loaders:
                self._list(loader.pop_skipped().bad)
            raise

    def summary(self) -> str:
        """Return the number of skipped documents in words, for the end of a run; "" without any."""
        words = ""
        if self.bad:
            words += f", {_count(self.bad)} left out, listed in {self.path}"
        if self.short:
            least = self.data.min_document_tokens
            words += f", {self.short} times a document left out that is shorter than {least} tokens"
        if self.empty:
            words += f", {self.empty} times an empty text left out"
        return words

    def _read(self) -> list[dict]:
        try:
            # a kill may leave half a line, which is None
            return [entry for _, entry in read_lines(self.path) if entry is not None]
        except FileNotFoundError:  # another rank has just renamed it
            return []

    def _list(self, documents: Sequence[BadDocument]) -> None:
        """Log the documents that are new, and append them to the file."""
        known = self.policy.known
        new = {document.key: document for document in documents if document.key not in known}
        if not new:
            return
        known.update(new)
        first = next(iter(new.values()))
        words = f"{_count(len(new))} left out, {len(known)} in all; {first}"
        if len(new) > 1:
            words += f"; all are listed in {self.path}"
        logger.warning(words)
        entries = [document.to_dict() for document in new.values()]
        self.entries += entries
        if not self.writes:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                if not file.tell():  # a new file gets all
                    entries = self.entries
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        except OSError as error:  # no reason to end the run
            logger.warning(f"{self.path} cannot be written, and lacks these: {error.strerror}")


def _key_of(entry: Mapping[str, str]) -> tuple[str, str]:
    """Return the key by which a line is compared with documents."""
    return entry.get("file", ""), entry.get("location", "")


def _count(documents: int) -> str:
    return "1 bad document" if documents == 1 else f"{documents} bad documents"
