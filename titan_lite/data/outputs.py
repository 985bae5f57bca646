"""Leave out of a corpus what titan_lite itself has written below it: it is no document.

    refuse_folder_of_run("/corpus", "*.jsonl", run_folder, 'data.path = "/corpus/**/*.jsonl"')
    documents = without_outputs(files, "/corpus", run_folder, 'data.path = "/corpus/**/*.jsonl"')

A pattern such as /corpus/**/*.jsonl matches the events.jsonl of a run whose folder is in /corpus,
and each event has a text.

corpus, here: the absolute path of the folder that the files are in. run_folder: that of the run
that reads them, or "". where: the key and its value, for messages.
"""

import functools
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from titan_lite import manifest
from titan_lite.config import ConfigError
from titan_lite.logging import logger
from titan_lite.text import first_names

WRITTEN_BY_RUN = ("events.jsonl", "metrics.jsonl")  # which a pattern of documents may match
PREPARED = "prepared.json"

# a folder of the kind has one file of each tuple
RUN = (("config.toml", "lock"), WRITTEN_BY_RUN)
CHECKPOINT = ((manifest.NAME,), ("state.json",))
PREPARED_DOCUMENTS = ((PREPARED,),)


def refuse_folder_of_run(corpus: str, pattern: str, run_folder: str, where: str) -> None:
    """Raise ConfigError if the corpus is the folder of a run, and a file's pattern matches what
    runs write there.
    """
    is_own = bool(run_folder) and os.path.realpath(corpus) == os.path.realpath(run_folder)
    if not is_own and not _has(corpus, RUN):
        return
    if not any(fnmatch(name, pattern) for name in WRITTEN_BY_RUN):
        return
    names = " and ".join(WRITTEN_BY_RUN)
    if is_own:
        raise ConfigError(
            f"{where}: the run itself writes {names} to this folder, since job.dump_folder ="
            f' "{run_folder}"; use another folder for the run'
        )
    raise ConfigError(
        f"{where}: a run has written {names} to this folder; use the folder of the documents, or a"
        " pattern that matches them alone"
    )


def without_outputs(files: Iterable[str], corpus: str, run_folder: str, where: str) -> list[str]:
    """Return the files that do not lie in a run's folder, a checkpoint or prepared documents.

    The corpus itself may lie in one.
    """
    own = os.path.realpath(run_folder) if run_folder else ""
    if own and Path(os.path.realpath(corpus)).is_relative_to(own):
        own = ""  # the corpus has a folder of its own within that of the run

    @functools.cache
    def written(folder: str) -> str:
        """Return the written folder that a folder is or lies in; "" if there is none."""
        parent = os.path.dirname(folder)
        if folder == corpus or parent == folder:
            return ""
        if around := written(parent):
            return around
        is_own = own and Path(os.path.realpath(folder)).is_relative_to(own)
        is_one = any(_has(folder, kind) for kind in (RUN, CHECKPOINT, PREPARED_DOCUMENTS))
        return folder if is_own or is_one else ""

    by_root: dict[str, list[str]] = {"": []}
    for file in files:
        by_root.setdefault(written(os.path.dirname(file)), []).append(file)
    documents = by_root.pop("")
    if by_root:
        count = sum(map(len, by_root.values()))
        logger.info(
            f"{where}: {count} files that titan_lite has written are left out"
            f" ({first_names(sorted(by_root), 3)})"
        )
    return documents


def _has(folder: str, required: tuple[tuple[str, ...], ...]) -> bool:
    """Return True if the folder has one file of each tuple in `required`."""
    return all(
        any(os.path.isfile(os.path.join(folder, name)) for name in names) for names in required
    )
