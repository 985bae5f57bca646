"""Tokenize a corpus once, for data.dataset = "prepared", which has random access and needs no tokenizer.

    python -m titan_lite.data.prepare train_configs/llama3_8b.toml prepared/books --data.dataset local --data.path 'books/*.jsonl'
    ./run_train.sh --data.dataset prepared --data.path prepared/books
    python -m titan_lite.data.prepare --verify prepared/books

RECIPE FOLDER       tokenize the recipe's [data] with its model.tokenizer_path into a new folder
--section.key V     any key of the recipe, as in training

Of a mixture ([[data.sources]]) each source becomes a folder inside FOLDER, and the tables for the recipe are printed.

A hash of its name decides whether a document belongs to training or, for data.validation_fraction of them, to validation, as in
training on the text itself; each split has its own shards. Documents are in the order of the files: training shuffles them.

The bytes do not depend on the number of workers. Until everything is on disk, the folder is called unfinished-FOLDER, and the
same command continues after its last whole shard.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from titan_lite import manifest
from titan_lite.command import Parser, command, end_with_parent
from titan_lite.config import ConfigError, Data, load_config
from titan_lite.config.errors import in_toml
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy
from titan_lite.data.dataset import NoDocuments, Split, build_source, fingerprint
from titan_lite.data.prepared import (
    DTYPE,
    FORMAT,
    SPLITS,
    WRITTEN,
    check_prepared,
    check_shards,
    read_manifest,
)
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer
from titan_lite.logging import init_logging, logger
from titan_lite.outside import ANY, COUNT, MOST, WORD, Damaged, one_of, read_json
from titan_lite.ranks import usable_cores

PROGRESS = "progress.json"
# keys of [data] without effect here; training leaves out documents that are too short
_NO_MATTER = {
    "path",
    "sources",
    "number",
    "shuffle",
    "shuffle_buffer",
    "min_document_tokens",
    "num_workers",
    "prefetch",
}
_MAY_CHANGE = {
    "on_bad_document",
    "max_bad_documents",
}  # from one start to the next, since whole shards stay valid
_PORTION = 1 << 18  # characters that are encoded at once, in about 0.1 s
_BEGUN: dict[Any, Any] = {
    **WRITTEN,
    "about": {"data": {WORD: ANY}, "dtype": DTYPE, WORD: ANY},
    "left": [one_of(*SPLITS)],
    "next": COUNT,
}


class Portion(NamedTuple):
    next_ordinal: int  # of the document after it
    texts: list[str]
    bad: list[BadDocument]  # skipped


def prepare_mixture(
    data: Data, tokenizer: Tokenizer, folder: Path, **how: Any
) -> list[tuple[Path, dict[str, Any] | None]]:
    """Prepare each of data.sources in a folder inside `folder`. Return (folder, manifest), or (path, None) if prepared before.

    Raises ConfigError.
    """
    parts = [part for _, part in data.mixture()]
    names = [f"{number}-{_name(part)}" for number, part in enumerate(parts, start=1)]
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is overwritten; use a new folder")
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    with _writing(folder, unfinished):
        if foreign := {path.name for path in unfinished.iterdir()} - {
            *names,
            *(f"unfinished-{name}" for name in names),
        }:
            raise ConfigError(
                f"{unfinished} has {min(foreign)}, which this command did not write; use another folder"
            )
        done: list[tuple[Path, dict[str, Any] | None]] = []
        for name, part in zip(names, parts, strict=True):
            if part.dataset == "prepared":
                check_prepared(part, tokenizer.sha256, tokenizer.vocab_size)
                done.append((Path(part.path), None))
                continue
            if not (unfinished / name).exists():
                prepare(part, tokenizer, unfinished / name, **how)
            described = read_manifest(unfinished / name)
            before, now = (
                _flat(described),
                _flat(json.loads(json.dumps(_about(part, tokenizer, how["shard_tokens"])))),
            )
            if other := [key for key in now if before.get(key) != now[key]]:
                made = f"{unfinished / name} was made with other {', '.join(other)}"
                raise ConfigError(f"{made}; use the same to continue, or remove it to start again")
            done.append((folder / name, described))
        manifest.publish(unfinished, folder)
    return done


def _name(data: Data) -> str:
    """Return a source's part of a folder name, such as "books" for books/*.jsonl."""
    parts = [part for part in Path(data.path).parts if not set(part) & set("*?[")] or [data.dataset]
    return re.sub(r"[^\w.-]+", "-", Path(parts[-1]).name.split(".")[0] or data.dataset)[:40]


def prepare(
    data: Data, tokenizer: Tokenizer, folder: Path, *, workers: int, shard_tokens: int = 1 << 28
) -> dict[str, Any]:
    """Write the folder, or the rest of it, and return its manifest. Raises ConfigError."""
    if data.dataset == "prepared":
        raise ConfigError(
            f'{data.key("dataset")} = "prepared": {data.path} is prepared already; use "local", "stdlib" or "c4"'
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is overwritten; use a new folder")
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    about = _about(data, tokenizer, shard_tokens)
    with _writing(folder, unfinished):
        progress = _begun(unfinished, about)
        for split in SPLITS:
            if split in progress["left"]:
                _write_split(split, data, tokenizer, unfinished, progress, workers)
        described = {**about, **{key: progress[key] for key in ("splits", "bad", "files")}}
        manifest.write_sealed(unfinished / manifest.NAME, described)
        (unfinished / PROGRESS).unlink()
        manifest.publish(unfinished, folder)
    return described


def _about(data: Data, tokenizer: Tokenizer, shard_tokens: int) -> dict[str, Any]:
    """Return the settings and inputs that decide the bytes of a prepared folder."""
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        "data": {key: value for key, value in data.model_dump().items() if key not in _NO_MATTER},
        "documents": fingerprint(data),
        "shard_tokens": shard_tokens,
    }


@contextmanager
def _writing(folder: Path, unfinished: Path) -> Iterator[None]:
    """Return a context in which `unfinished`, which becomes `folder`, exists and is locked. Raises ConfigError."""
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(lock)
    except BlockingIOError:
        raise ConfigError(
            f"{unfinished} is being written by another process; wait for it, or use another folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}; use the same command to continue"
        ) from None


def _begun(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the progress so far, and delete unfinished shards. Raises ConfigError for a foreign folder or other documents."""
    path = folder / PROGRESS
    if path.exists():
        try:
            progress = read_json(path, _BEGUN)
            check_shards({**progress, "dtype": progress["about"]["dtype"]})
            manifest.check_sizes(folder, progress["files"])
        except Damaged as error:
            raise ConfigError(f"{folder}: {error}; remove {folder} to start again") from None
        before, now = _flat(progress["about"]), _flat(json.loads(json.dumps(about)))
        if other := [key for key in now if before.get(key) != now[key]]:
            changed = ", ".join(
                f"{key} ({_short(now[key])}, was {_short(before.get(key))})" for key in other
            )
            raise ConfigError(
                f"{folder} was begun with other {changed}; use the same to continue, or remove it to start again"
            )
        progress["about"] = about
        if progress["files"]:
            logger.info(
                f"{folder} has {len(progress['files']) // 2} whole shards: continuing after them"
            )
    elif any(file.name != f"{PROGRESS}.new" for file in folder.iterdir()):
        raise ConfigError(
            f"{folder} exists, and this command did not write it; move it, or use another folder"
        )
    else:
        progress = {
            "about": about,
            "splits": {split: [] for split in SPLITS},
            "bad": [],
            "files": {},
        }
        progress |= {"left": list(SPLITS), "next": 0}  # splits to write; the next ordinal
        if not about["data"]["validation_fraction"] and about["data"]["dataset"] != "c4":
            progress["left"].remove("validation")
        manifest.write_whole(path, json.dumps(progress))  # marks the folder as ours
    for suffix in ("tokens", "documents"):
        for file in folder.glob(f"*.{suffix}"):
            if file.name not in progress["files"]:
                file.unlink()
    return progress


def _flat(about: dict[str, Any]) -> dict[str, Any]:
    """Return {name: value} of all that must be the same to continue; keys of [data] as "data.name"."""
    data = {f"data.{key}": value for key, value in about["data"].items() if key not in _MAY_CHANGE}
    return {**{key: value for key, value in about.items() if key != "data"}, **data}


def _short(value: Any) -> str:
    """Return a value for a message; of a hash only its first 12 digits."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else f"{json.dumps(value):.60}"


def _write_split(
    split: Split,
    data: Data,
    tokenizer: Tokenizer,
    folder: Path,
    progress: dict[str, Any],
    workers: int,
) -> None:
    """Write the remaining shards of a split. A shard ends with a portion, so that a resumed run cuts the same shards."""
    about, shards = progress["about"], progress["splits"][split]
    policy = BadDocumentPolicy(data, [(bad["file"], bad["place"]) for bad in progress["bad"]])
    in_order, most = data.replace(shuffle=False), min(_PORTION, about["shard_tokens"])
    portions = _portions(in_order, split, progress["next"], most, policy)
    dtype = np.dtype(about["dtype"]).newbyteorder("<")
    shard: _Shard | None = None
    bad: list[BadDocument] = []

    def keep(next_ordinal: int) -> None:
        """Record all that was written as done, and the next ordinal. Raises ConfigError."""
        if shard is not None:
            progress["files"].update(shard.close())
            shards.append(
                {"name": shard.name, "documents": shard.documents, "tokens": shard.tokens}
            )
            logger.info(f"{shard.name}: {shard.documents:,} documents, {shard.tokens:,} tokens")
        progress["bad"] += [document.listed() for document in bad]
        progress["next"] = next_ordinal
        bad.clear()
        if (
            len(text := json.dumps(progress)) > MOST * 2 // 3
        ):  # the lines of a manifest are indented
            raise ConfigError(
                f"--shard-tokens {about['shard_tokens']}: {len(progress['files']):,} files are more than a manifest may list; "
                "use a larger value"
            )
        manifest.write_whole(folder / PROGRESS, text)

    done = sum(shard["tokens"] for shard in shards)
    with (
        logging_redirect_tqdm([logger]),
        tqdm(desc=split, unit=" tokens", unit_scale=True, initial=done, disable=None) as bar,
    ):
        for portion, encoded in _encoded(portions, tokenizer, dtype, workers):
            bad += portion.bad
            if encoded:
                shard = shard or _Shard(folder, f"{split}-{len(shards):05d}")
                shard.write(encoded)
                bar.update(sum(map(len, encoded)))
            if shard is not None and shard.tokens >= about["shard_tokens"]:
                keep(portion.next_ordinal)
                shard = None
    if shard is None and not shards and split == "train":
        raise ConfigError(
            f'{data.key("path")} = "{data.path}" has no document that can be read; use other documents'
        )
    progress["left"].remove(split)
    keep(0)


class _Shard:
    """The two files of a shard, written in parts, with a running SHA-256 of each."""

    def __init__(self, folder: Path, name: str):
        self.name, self.documents, self.tokens = name, 0, 0
        self._files = {
            suffix: (folder / f"{name}.{suffix}").open("wb") for suffix in ("tokens", "documents")
        }
        self._hashes = {suffix: hashlib.sha256() for suffix in self._files}
        self._append("documents", np.zeros(1, dtype="<u8"))

    def write(self, documents: Sequence[np.ndarray]) -> None:
        ends = self.tokens + np.cumsum([len(document) for document in documents])
        self._append("tokens", np.concatenate(documents))
        self._append("documents", ends.astype("<u8"))
        self.documents, self.tokens = self.documents + len(documents), int(ends[-1])

    def _append(self, suffix: str, values: np.ndarray) -> None:
        content = values.tobytes()
        self._files[suffix].write(content)
        self._hashes[suffix].update(content)

    def close(self) -> dict[str, dict[str, Any]]:
        """Sync and close both files, and return {name: {"sha256", "size"}}."""
        written = {}
        for suffix, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            written[f"{self.name}.{suffix}"] = {
                "sha256": self._hashes[suffix].hexdigest(),
                "size": file.tell(),
            }
            file.close()
        return written


def _portions(
    data: Data, split: Split, start: int, most: int, policy: BadDocumentPolicy
) -> Iterator[Portion]:
    """Yield the first epoch from ordinal `start` on, in portions that end with the document that reaches `most` characters."""
    portion, characters = Portion(start, [], []), 0
    try:
        source = build_source(data, split=split, seed=0)
        for ordinal, document in source.documents(start, lambda ordinal: True):
            if source.epoch(ordinal):
                break
            if isinstance(document, BadDocument):
                policy.skip(document)
                portion.bad.append(document)
            else:
                assert isinstance(document, str)
                portion.texts.append(document)
                characters += len(document)
            if characters >= most:
                yield portion._replace(next_ordinal=ordinal + 1)
                portion, characters = Portion(ordinal + 1, [], []), 0
    except NoDocuments:
        if split == "train":  # an empty validation split is no mistake
            raise
    if portion.texts or portion.bad:
        yield portion


def _encoded(
    portions: Iterator[Portion], tokenizer: Tokenizer, dtype: np.dtype, workers: int
) -> Iterator[tuple[Portion, list[np.ndarray]]]:
    """Yield each portion, in order, with the tokens of its documents. Raises ConfigError if a worker dies."""
    if not workers:
        _of_process[:] = [tokenizer, dtype]
        yield from ((portion, _encode(portion.texts)) for portion in portions)
        return
    # spawn: a fork would inherit the locks, but not the threads, of the libraries that read the corpus
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer, dtype)
    )
    ahead: deque[tuple[Portion, Future[list[np.ndarray]]]] = deque()
    try:
        for portion in portions:
            ahead.append((portion._replace(texts=[]), pool.submit(_encode, portion.texts)))
            if len(ahead) > 3 * workers:
                yield ahead[0][0], ahead.popleft()[1].result()
        while ahead:
            yield ahead[0][0], ahead.popleft()[1].result()
    except BrokenProcessPool:
        raise ConfigError(
            f"--workers {workers}: a worker process died, perhaps for lack of memory; use fewer with the same command to continue"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_of_process: list[Any] = []  # tokenizer and dtype, in each process that tokenizes


def _start_worker(tokenizer: Tokenizer, dtype: np.dtype) -> None:
    _of_process[:] = [tokenizer, dtype]
    end_with_parent()


def _encode(texts: list[str]) -> list[np.ndarray]:
    tokenizer, dtype = _of_process
    return [tokenizer.encode_document(text).astype(dtype) for text in texts]


def _summary(described: dict[str, Any]) -> str:
    sums = []
    for split, shards in described["splits"].items():
        documents, tokens = (
            sum(shard[what] for shard in shards) for what in ("documents", "tokens")
        )
        sums.append(f"{split}: {documents:,} documents, {tokens:,} tokens, shards: {len(shards)}")
    if described["bad"]:
        sums.append(f"skipped: {len(described['bad'])} bad documents, which manifest.json lists")
    return "; ".join(sums)


@command
def main(arguments: Sequence[str]) -> None:
    parser = Parser(__doc__)
    add, cores = parser.add_argument, usable_cores()
    working = "processes that tokenize (default: one per core); 0: tokenize in this process"
    add("--workers", type=int, default=cores, metavar="N", help=working)
    ending = "least tokens of a shard (default 268,435,456); a kill loses at most one shard"
    add("--shard-tokens", type=int, default=1 << 28, metavar="N", help=ending)
    comparing = "compare every byte with the SHA-256 in manifest.json, and write nothing"
    add("--verify", type=Path, metavar="FOLDER", help=comparing)
    init_logging()
    options, others = parser.parse_known_args(arguments)
    if options.verify and others:
        raise ConfigError(
            f"--verify {options.verify}: expected nothing else, found {' '.join(others)}; leave that out"
        )
    if options.verify:
        print(
            f"{options.verify}: every byte is as written; {_summary(read_manifest(options.verify, every_byte=True))}"
        )
        return
    if len(others) < 2 or others[0].startswith("-") or others[1].startswith("-"):
        raise ConfigError(
            f"expected RECIPE FOLDER first, found {' '.join(others) or 'neither'}; use --help for an example"
        )
    for name, least in (("workers", 0), ("shard_tokens", 1)):
        if getattr(options, name) < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: expected {least} or more"
            )
    config = load_config(others[0], others[2:])
    folder, tokenizer = Path(others[1]), load_tokenizer(config.model.tokenizer_path)
    how = {"workers": options.workers, "shard_tokens": options.shard_tokens}
    try:
        if not config.data.sources:
            described = prepare(config.data, tokenizer, folder, **how)
            print(
                f"{folder}: {_summary(described)}; --data.dataset prepared --data.path {folder} trains on it"
            )
            return
        done = prepare_mixture(config.data, tokenizer, folder, **how)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped: use the same command to continue after the last whole shard"
        ) from None
    for path, part in done:
        print(f"{path}: {_summary(part) if part else 'was prepared before'}")
    print("\nto train on it, replace [[data.sources]] of the recipe by this:")
    for (path, _), source in zip(done, config.data.sources, strict=True):
        table = {"dataset": "prepared", "path": str(path.absolute()), "weight": source.weight}
        print(
            "\n[[data.sources]]",
            *(f"{key} = {in_toml(value)}" for key, value in table.items()),
            sep="\n",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
