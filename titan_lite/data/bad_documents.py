"""The policy for bad documents: raise an error, or skip, count and list them up to a limit.

    policy = BadDocumentPolicy(data)
    policy.skip(BadDocument("a.jsonl", "line 34", "not JSON (...)"))     # or raises ConfigError

    log = BadDocumentsLog(config.data, dump_folder, counts=True)
    metrics = log.gather([loader.pop_skipped()])     # a collective; raises ConfigError on all ranks

An empty text is nothing broken, and common in corpora of code and web pages: it is left out and
counted, whatever the recipe says of bad documents.

Bad documents are counted since the data of the run began, also over a resume, and appended to
`bad_documents.jsonl`: one that is read in two epochs is counted and listed twice.

    {"file": "a.jsonl", "location": "line 34", "reason": "not JSON (...)"}
"""

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

EMPTY = "empty"  # the reason of an empty text


class BadDocument(NamedTuple):
    """A document without a text, and the reason."""

    file: str
    location: str  # in the file, such as "line 34"
    reason: str
    instead: str = ""  # a setting with which it has a text

    def __str__(self) -> str:
        return f"{self.file}, {self.location}: {self.reason}"

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

    def add(self, other: "SkippedDocuments") -> None:
        self.bad += other.bad
        self.short += other.short
        self.empty += other.empty


class BadDocumentPolicy:
    """Applies data.on_bad_document and data.max_bad_documents, and collects what is skipped."""

    def __init__(self, data: Data):
        self.data = data
        self.bad = 0
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
        self.bad += 1
        self.check(self.bad, f"the last one {bad}", bad.instead)
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
        """Raise ConfigError if there are more bad documents than the recipe allows."""
        if count > self.data.max_bad_documents:
            raise ConfigError(
                f"data.max_bad_documents = {self.data.max_bad_documents}: there are {count}, over"
                f" all epochs, {which}; use {instead or 'a higher value or other documents'}"
            )


class BadDocumentsLog:
    """Counts and lists the skipped documents of all ranks."""

    def __init__(self, data: Data, dump_folder: Path, counts: bool):
        """counts: False on a rank whose documents another rank reads, too, and counts."""
        self.policy = BadDocumentPolicy(data)
        self.data = data
        self.counts = counts
        self.writes = True  # the file; False in a replica group that is not the first
        self.path = dump_folder / "bad_documents.jsonl"
        self.bad = 0  # since the data began
        self.short = 0  # documents below data.min_document_tokens, since this start
        self.empty = 0  # empty texts, since this start
        datasets = {part.dataset for _, part in data.mixture()}
        self.may_have_empty = not datasets <= {"stdlib", "prepared"}

    def state_dict(self) -> dict[str, int]:
        return {"listed": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bad = validated(NonNegativeInt, state, "listed")

    def gather(self, skipped: Sequence[SkippedDocuments]) -> dict[str, float]:
        """Return the counts by their names in metrics.jsonl; {} if the recipe skips no documents.

        A collective. skipped: of each loader of this rank. Raises ConfigError on all ranks if there
        are more than data.max_bad_documents.
        """
        # here, since prepare's processes need the policy but not torch
        from titan_lite.distributed.process_group import gather_to_rank_0, sum_over_ranks

        skips_bad = self.data.on_bad_document == "skip"
        skips_short = self.data.min_document_tokens > 0
        if not skips_bad and not skips_short and not self.may_have_empty:
            return {}
        own = SkippedDocuments()
        for some in skipped if self.counts else ():
            own.add(some)
        short_everywhere, empty_everywhere, bad_everywhere = sum_over_ranks(
            own.short, own.empty, len(own.bad)
        )
        self.short += short_everywhere
        if empty_everywhere and not self.empty:
            logger.info("empty texts are left out; the metric empty_documents counts them")
        self.empty += empty_everywhere
        self.bad += bad_everywhere
        if bad_everywhere:
            # the first rank has those of all ranks, the others none
            self._list([document for of_rank in gather_to_rank_0(own.bad) for document in of_rank])
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
            for loader in loaders if self.counts else ():
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

    def _list(self, documents: Sequence[BadDocument]) -> None:
        """Log documents, and append them to the file."""
        if not documents:
            return
        words = f"{_count(len(documents))} left out; {documents[0]}"
        if len(documents) > 1:
            words += f"; all are listed in {self.path}"
        logger.warning(words)
        if not self.writes:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(document.to_dict()) + "\n" for document in documents)
        except OSError as error:  # no reason to end the run
            logger.warning(f"{self.path} cannot be written, and lacks these: {error.strerror}")


def _count(documents: int) -> str:
    return "1 bad document" if documents == 1 else f"{documents} bad documents"
