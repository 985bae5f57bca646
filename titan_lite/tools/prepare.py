"""Tokenize a corpus once, for data.dataset = "prepared", which has random access and needs no text.

    titan-lite prepare RECIPE.toml prepared/books --data.dataset local --data.path 'books/*.jsonl'
    ./run_train.sh --data.dataset prepared --data.path prepared/books
    titan-lite prepare --verify prepared/books

RECIPE FOLDER       tokenize the recipe's [data] with its model.tokenizer_path into a new folder
--section.key V     any key of the recipe, as in training

Training on the folder reads the same tokens in the same order, and holds out the same documents, as
training on the text. Of a data mix ([[data.sources]]) each source becomes a folder inside FOLDER,
and so do documents of [validation]. The tables for the recipe are printed.

`datasets` does the work: Dataset.from_generator reads the documents, Dataset.map tokenizes them in
several processes, and save_to_disk writes them. Until everything is on disk, the folder is called
unfinished-FOLDER-*. Meanwhile it needs room for the text, too; nothing is written to the cache of
`datasets`.
"""

import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute

from titan_lite import manifest
from titan_lite.cli import Parser, command
from titan_lite.config import Config, ConfigError, Data, read_config
from titan_lite.config.errors import in_toml
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy
from titan_lite.data.corpora import SPLITS, Corpus, Split
from titan_lite.data.documents import open_corpus
from titan_lite.data.listing import Listing
from titan_lite.data.outputs import PREPARED
from titan_lite.data.prepared import (
    BOTH_SPLITS,
    FORMAT,
    PreparedInfo,
    PreparedPart,
    check_prepared,
    read_prepared,
)
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer, warn_of_lost_text
from titan_lite.environment import usable_cores
from titan_lite.logging import init_logging, logger
from titan_lite.rules import check_keys
from titan_lite.text import without_secrets
from titan_lite.tools.new_folder import new_folder

if TYPE_CHECKING:
    from datasets import Dataset

DOCUMENTS_AT_ONCE = 100  # that a process tokenizes


def prepare(data: Data, tokenizer: Tokenizer, folder: Path, workers: int) -> PreparedInfo:
    """Write the folder, and return the content of its prepared.json. Raises ConfigError."""
    if data.dataset == "prepared":
        raise ConfigError(
            f'{data.key("dataset")} = "prepared": {data.path} is prepared already; use "local",'
            ' "c4" or owner/name'
        )
    with _new_folder(folder) as unfinished:
        return _fill(unfinished, data, tokenizer, workers)


@dataclass(frozen=True)
class Part:
    """One of several corpora of a recipe."""

    folder: str  # its name
    table: str  # of the recipe: "data", "[data.sources]", "validation" or "[validation.sources]"
    data: Data
    weight: float | None = None  # of a source


def parts_of(config: Config) -> list[Part]:
    """Return the corpora of a recipe, those of validation last. Raises ConfigError."""
    tables = {"data": config.data}
    if config.validation.enable and config.validation.has_documents:
        tables["validation"] = config.validation_data
    parts = []
    for table, data in tables.items():
        prefix = "" if table == "data" else "validation-"
        if not data.sources:
            name = "train" if table == "data" else "validation"
            parts.append(Part(name, table, data))
            continue
        for number, (source, (_, part)) in enumerate(
            zip(data.sources, data.mixture(), strict=True), start=1
        ):
            name = f"{prefix}{number}-{_short_name(part)}"
            parts.append(Part(name, f"[{table}.sources]", part, source.weight))
    for data in [part.data for part in parts]:
        if data.dataset == "stdlib":
            raise ConfigError(
                f'{data.key("dataset")} = "stdlib" is small, and not prepared; use "local", "c4" or'
                " owner/name"
            )
    return parts


def prepare_parts(
    parts: Sequence[Part], tokenizer: Tokenizer, folder: Path, workers: int
) -> list[tuple[Path, PreparedInfo | None]]:
    """Prepare each part in a folder inside `folder`.

    Return (folder, content of prepared.json), or (path, None) of one that was prepared before.
    Raises ConfigError.
    """
    folders: list[tuple[Path, PreparedInfo | None]] = []
    with _new_folder(folder) as unfinished:
        for part in parts:
            if part.data.dataset == "prepared":
                info = Listing(part.data).prepared
                check_prepared(part.data, info, tokenizer.sha256, tokenizer.vocab_size)
                folders.append((Path(part.data.path), None))
                continue
            (unfinished / part.folder).mkdir()
            info = _fill(unfinished / part.folder, part.data, tokenizer, workers)
            folders.append((folder / part.folder, info))
    return folders


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Return the context of `new_folder`, in which errors of documents are those of our readers."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with new_folder(folder) as unfinished:
        try:
            yield unfinished
        except datasets.exceptions.DatasetGenerationError as error:
            raise (error.__cause__ or error) from None


def _fill(folder: Path, data: Data, tokenizer: Tokenizer, workers: int) -> PreparedInfo:
    """Write the tables and prepared.json, and return the content of that."""
    preparation = _Preparation(data, tokenizer, workers)
    parts: dict[str, PreparedPart] = {}
    if data.dataset == "c4":
        for split in SPLITS if data.validation_fraction < 1 else SPLITS[1:]:
            parts[split] = preparation.write(split, folder / split)
    else:
        parts[BOTH_SPLITS] = preparation.write("train", folder / BOTH_SPLITS)
    source = {
        "dataset": data.dataset,
        "path": without_secrets(data.path),
        "text_field": data.text_field,
    }
    skipped = preparation.policy.skipped
    if skipped.empty:
        logger.info(f"{skipped.empty:,} empty texts are left out")
    return write_info(folder, tokenizer, parts, source, skipped.bad)


class _Preparation:
    """Tokenizes a corpus."""

    def __init__(self, data: Data, tokenizer: Tokenizer, workers: int):
        self.data = data
        self.tokenizer = tokenizer
        self.workers = workers
        self.policy = BadDocumentPolicy(data)

    def write(self, split: Split, folder: Path) -> PreparedPart:
        """Write the table of a split, or of both if documents are split by name."""
        import datasets

        corpus = open_corpus(self.data, split, Listing(self.data))
        scratch = folder.with_name("scratch")
        texts = datasets.Dataset.from_generator(
            lambda: self._rows(corpus),
            features=datasets.Features(
                piece=datasets.Value("int64"),
                name=datasets.Value("string"),
                size=datasets.Value("int64"),
                text=datasets.Value("large_string"),
            ),
            cache_dir=str(scratch),
            fingerprint="texts",
        )
        table = self._tokenized(texts, scratch / "tokens.arrow")
        pieces = corpus.pieces
        piece_of_row = np.concatenate([part.to_numpy() for part in table.data["piece"].chunks])
        documents = np.bincount(piece_of_row, minlength=len(pieces))[: len(pieces)]
        part = write_table(
            table.remove_columns("piece"),
            folder,
            piece_sizes=[piece.size for piece in pieces],
            piece_documents=documents.tolist(),
        )
        shutil.rmtree(scratch)
        return part

    def _rows(self, corpus: Corpus) -> Iterator[dict[str, Any]]:
        """Yield the documents in order, with the number of their piece.

        A bad one that may be skipped has an empty text.
        """
        has_readable = False
        for number, piece in enumerate(corpus.pieces):
            for position, raw in corpus.read(piece):
                text = corpus.document(piece, position, raw)
                if isinstance(text, BadDocument):
                    self.policy.skip(text)
                    text = ""
                has_readable = has_readable or text != ""
                yield {
                    "piece": number,
                    "name": corpus.name(piece, position),
                    "size": corpus.size(position, raw),
                    "text": text,
                }
        if not has_readable:
            raise ConfigError(
                f'{self.data.key("path")} = "{self.data.path}" has no document that can be read;'
                " use other documents"
            )

    def _tokenized(self, texts: "Dataset", file: Path) -> "Dataset":
        """Return a table with tokens in place of texts, which lies in `file`."""
        import datasets

        tokenizer = self.tokenizer
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        features = texts.features.copy()
        del features["text"]
        features["tokens"] = datasets.LargeList(datasets.Value(dtype))

        def tokenize(batch: dict[str, list]) -> dict[str, list]:
            none = np.array([], dtype=dtype)
            tokens = [
                tokenizer.encode_document(text).astype(dtype) if text else none
                for text in batch["text"]
            ]
            return {"tokens": tokens}

        try:
            return texts.map(
                tokenize,
                batched=True,
                batch_size=DOCUMENTS_AT_ONCE,
                num_proc=min(self.workers, len(texts)) or None,
                remove_columns="text",
                features=features,
                load_from_cache_file=False,
                cache_file_name=str(file),
                new_fingerprint="tokens",
                desc="Tokenizing",
            )
        except Exception as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None  # datasets raises a TimeoutError in its place
            if not isinstance(error, RuntimeError):  # datasets' own of a process that was killed
                raise
            raise ConfigError(
                f"--workers {self.workers}: a process that tokenizes ended ({error}); use fewer"
                " workers"
            ) from error


def write_table(
    table: "Dataset", folder: Path, *, piece_sizes: list[int], piece_documents: list[int]
) -> PreparedPart:
    """Write a table with the columns name, size and tokens."""
    table.save_to_disk(str(folder))
    tokens = 0
    for chunk in table.data["tokens"].chunks:
        lengths = pyarrow.compute.list_value_length(chunk)
        tokens += pyarrow.compute.sum(lengths).as_py()
    return PreparedPart(len(table), tokens, piece_sizes, piece_documents)


def write_info(
    folder: Path,
    tokenizer: Tokenizer,
    parts: dict[str, PreparedPart],
    source: dict[str, str],
    bad: Sequence[BadDocument] = (),
) -> PreparedInfo:
    """Write prepared.json, with size and SHA-256 of every other file, and return its content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    info = PreparedInfo(
        format=FORMAT,
        tokenizer=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        source=source,
        parts=parts,
        bad=[document.to_dict() for document in bad],
        files={str(path.relative_to(folder)): manifest.digest(path) for path in files},
    )
    manifest.write_text(folder / PREPARED, info.to_json())
    return info


def _short_name(data: Data) -> str:
    """Return a source's part of a folder name, such as "books" for books/*.jsonl."""
    fixed = [part for part in Path(without_secrets(data.path)).parts if not set(part) & set("*?[")]
    name = Path(fixed[-1] if fixed else data.dataset).name.split(".")[0]
    return re.sub(r"[^\w.-]+", "-", name or data.dataset)[:40]


def _summary(info: PreparedInfo) -> str:
    words = [
        f"{'' if name == BOTH_SPLITS else f'{name}: '}{part.documents:,} documents,"
        f" {part.tokens:,} tokens"
        for name, part in info.parts.items()
    ]
    if info.bad:
        words.append(f"{len(info.bad)} bad documents among them, which {PREPARED} lists")
    return "; ".join(words)


@command()
def main(arguments: Sequence[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="processes that tokenize (default: one per core); 0: tokenize in this process",
    )
    parser.add_argument(
        "--verify",
        type=Path,
        metavar="FOLDER",
        help=f"compare every byte with the SHA-256 in {PREPARED}, and write nothing",
    )
    init_logging()
    options, others = parser.parse_known_args(arguments)
    if options.verify:
        _verify(options.verify, others)
    else:
        _prepare(options, others)


def _verify(folder: Path, others: Sequence[str]) -> None:
    if others:
        raise ConfigError(
            f"--verify {folder}: expected nothing else, found {' '.join(others)}; leave that out"
        )
    info = read_prepared(folder, every_byte=True)
    print(f"{folder}: every byte is as written; {_summary(info)}")


def _prepare(options: Namespace, others: Sequence[str]) -> None:
    if len(others) < 2 or others[0].startswith("-") or others[1].startswith("-"):
        raise ConfigError(
            f"expected RECIPE FOLDER first, found {' '.join(others) or 'neither'}; use --help for"
            " an example"
        )
    if options.workers < 0:
        raise ConfigError(f"--workers {options.workers}: expected 0 or more")
    config, wrong = read_config(others[0], others[2:])
    check_keys(config, wrong)
    folder = Path(others[1])
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    warn_of_lost_text(tokenizer, config.model.tokenizer_path)
    parts = parts_of(config)
    if [part.table for part in parts] == ["data"]:
        info = prepare(config.data, tokenizer, folder, options.workers)
        print(f"{folder}: {_summary(info)}")
        print(f"--data.dataset prepared --data.path {folder} trains on it")
        return
    folders = prepare_parts(parts, tokenizer, folder, options.workers)
    for path, source_info in folders:
        print(f"{path}: {_summary(source_info) if source_info else 'was prepared before'}")
    print("\nto train on it, replace the corpora of the recipe by this:")
    for part, (path, _) in zip(parts, folders, strict=True):
        print(f"\n[{part.table}]")
        print(f"dataset = {in_toml('prepared')}")
        print(f"path = {in_toml(str(path.absolute()))}")
        if part.weight is not None:
            print(f"weight = {in_toml(part.weight)}")
