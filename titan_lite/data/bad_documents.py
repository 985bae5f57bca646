"""Documents that the loaders of all ranks have left out: told, counted, listed in `bad_documents.jsonl`, and not too many.

    left_out = LeftOutDocuments(config.data, dump_folder, dp_rank)
    values = left_out.gather(loader.take_left_out())     # all ranks together, every so many steps; ConfigError on all of them

A line of the file is one document: {"file": "a.jsonl", "place": "line 34", "reason": "not JSON (...)"}. It is listed once, in
however many epochs and by however many ranks it is read, and a run that goes on counts on from there.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from titan_lite.config import ConfigError, Data
from titan_lite.data.loader import LeftOut
from titan_lite.logging import logger
from titan_lite.metrics.records import read_lines
from titan_lite.ranks import gather_objects


class LeftOutDocuments:
    """bad: different ones, over the whole run. short: documents shorter than data.min_document_tokens, since this start."""

    def __init__(self, data: Data, dump_folder: Path, dp_rank: int):
        self.data, self.dp_rank = data, dp_rank
        self.path = dump_folder / "bad_documents.jsonl"
        self.bad = self.short = 0
        entries = [entry for _, entry in read_lines(self.path) if entry] if dist.get_rank() == 0 and self.path.exists() else []
        self.known = {(entry.get("file"), entry.get("place")) for entry in entries}

    def gather(self, left_out: Sequence[LeftOut]) -> dict[str, float]:
        """The counts under their names in metrics.jsonl, where the recipe lets documents be left out.

        left_out: of each loader of this rank. Raises ConfigError on all ranks, where there are more than data.max_bad_documents.
        """
        skips, shortens = self.data.on_bad_document == "skip", self.data.min_document_tokens > 0
        if not skips and not shortens:
            return {}
        own = (self.dp_rank, sum(some.short for some in left_out), [bad for some in left_out for bad in some.bad])
        everyone = gather_objects(own)
        # Ranks that work on the same sequences have read the same documents.
        self.short += sum({dp_rank: short for dp_rank, short, _ in everyone}.values())
        total = [0]
        if dist.get_rank() == 0:
            self._list([document for _, _, bad in everyone for document in bad])
            total[0] = len(self.known)
        dist.broadcast_object_list(total, src=0)
        self.bad = total[0]
        if self.bad > self.data.max_bad_documents:
            raise ConfigError(
                f"data.max_bad_documents = {self.data.max_bad_documents}: {self.bad} bad documents, listed in {self.path}; "
                "a higher one, or other documents, would work"
            )
        return {**({"bad_documents": self.bad} if skips else {}), **({"short_documents": self.short} if shortens else {})}

    def list_alone(self, left_out: LeftOut) -> None:
        """Of a rank that cannot go on, and so does not meet the others again: what it has left out is listed all the same."""
        if self.path.exists():
            self.known |= {(entry.get("file"), entry.get("place")) for _, entry in read_lines(self.path) if entry}
        self._list(left_out.bad)

    def summary(self) -> str:
        """For the end of a run; empty where nothing was left out."""
        bad = f", {_documents(self.bad)} left out, listed in {self.path}" if self.bad else ""
        least = self.data.min_document_tokens
        return bad + (f", {self.short} times a document left out that is shorter than {least} tokens" if self.short else "")

    def _list(self, documents: Sequence[dict[str, str]]) -> None:
        new = {(document["file"], document["place"]): document for document in documents}
        new = {place: document for place, document in new.items() if place not in self.known}
        if not new:
            return
        self.known |= new.keys()
        first = next(iter(new.values()))
        logger.warning(
            f"{_documents(len(new))} left out, {len(self.known)} in all; {first['file']}, {first['place']}: {first['reason']}"
            + (f"; all are listed in {self.path}" if len(new) > 1 else "")
        )
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(document) + "\n" for document in new.values())
        except OSError as error:  # a list is not worth the run
            logger.warning(f"{self.path} cannot be written, and lacks these: {error.strerror}")


def _documents(count: int) -> str:
    return f"{count} bad document{'s' * (count != 1)}"
