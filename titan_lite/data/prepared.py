"""Read a corpus that `titan-lite prepare` has tokenized.

    prepared.json     the format's version, the tokenizer, what was skipped, and size and SHA-256 of every file
    documents/        written by `datasets.Dataset.save_to_disk`; c4, which has a validation split, has train/ and validation/

    prepared = PreparedDocuments(Data(dataset="prepared", path="prepared/books"), split="train")
    prepared.tokens(7)                          # of row 7, memory-mapped

A row is a document, in the order of the files: its name, the bytes that it had in the shuffle
buffer, and its tokens with BOS and EOS, or none if it was bad. Pieces of files are known by their
sizes and numbers of documents. So training reads the same documents in the same order as from the
text, shuffled or not, with the same split.
"""

import bisect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_lite import manifest
from titan_lite.config import ConfigError, Data
from titan_lite.data.corpora import Split
from titan_lite.data.files import Piece

FORMAT = 2
NAME = "prepared.json"
BOTH_SPLITS = "documents"  # the folder of a corpus that is split by the names of documents
MAX_OPEN_BATCHES = 1000  # of a thousand documents; a group that is shuffled has some hundred
_FIX = "use `titan-lite prepare` to prepare it again"


class _Batch(NamedTuple):
    """Rows that are next to each other on disk."""

    first_row: int
    names: Any  # an array of pyarrow
    sizes: list[int]
    begins: list[int]  # of the documents in `tokens`, and the end of the last one
    tokens: np.ndarray


class PreparedDocuments:
    """The documents of a prepared folder, or those of one split, memory-mapped."""

    def __init__(self, data: Data, split: Split):
        import datasets  # which takes a second

        folder = Path(data.path)
        described = read_prepared(folder, data.key("path"))
        parts = described["parts"]
        self.is_from_hub = described["source"]["dataset"] not in ("stdlib", "local")
        self.split_by_name = split not in parts
        name = BOTH_SPLITS if self.split_by_name else split
        self.piece_sizes: list[int] = parts[name]["piece_sizes"]
        self.piece_documents: list[int] = parts[name]["piece_documents"]
        self.amount = f"{parts[name]['documents']:,} documents, {parts[name]['tokens']:,} tokens"
        table = datasets.load_from_disk(str(folder / name)).data
        self._columns = [table.column(column).chunks for column in ("name", "size", "tokens")]
        lengths = [len(chunk) for chunk in self._columns[0]]
        self._first_rows = [0, *itertools.accumulate(lengths)]
        self._batches: dict[int, _Batch] = {}

    def __len__(self) -> int:
        return self._first_rows[-1]

    def name(self, row: int) -> str:
        batch = self._batch(row)
        return batch.names[row - batch.first_row].as_py()

    def size(self, row: int) -> int:
        """Return the bytes that the document had in the shuffle buffer."""
        batch = self._batch(row)
        return batch.sizes[row - batch.first_row]

    def tokens(self, row: int) -> np.ndarray | None:
        """Return the tokens of a document, None if it was bad."""
        batch = self._batch(row)
        position = row - batch.first_row
        begin = batch.begins[position]
        end = batch.begins[position + 1]
        return batch.tokens[begin:end] if begin < end else None

    def _batch(self, row: int) -> _Batch:
        number = bisect.bisect_right(self._first_rows, row) - 1
        if number not in self._batches:
            if len(self._batches) == MAX_OPEN_BATCHES:
                self._batches.clear()
            names, sizes, tokens = (column[number] for column in self._columns)
            self._batches[number] = _Batch(
                self._first_rows[number],
                names,
                sizes.to_numpy().tolist(),
                tokens.offsets.to_numpy().tolist(),
                tokens.values.to_numpy(),
            )
        return self._batches[number]


class PreparedCorpus:
    """Prepared documents in the pieces of the files or shards that they come from."""

    def __init__(self, documents: PreparedDocuments):
        self.documents = documents
        self.split_by_name = documents.split_by_name
        self.amount = documents.amount
        ends = itertools.accumulate(documents.piece_documents)
        pieces = zip(documents.piece_sizes, documents.piece_documents, ends, strict=True)
        self.pieces = [
            Piece("prepared", "", size, start=end - count, end=end) for size, count, end in pieces
        ]

    def read(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """Yield (row, row): a row is the place of a document and, until the document is wanted, all
        that is read of it.
        """
        return ((row, row) for row in range(piece.start, piece.end))

    def name(self, piece: Piece, place: int) -> str:
        return self.documents.name(place)

    def size(self, raw: int) -> int:
        return self.documents.size(raw)

    def document(self, piece: Piece, place: int, raw: int) -> np.ndarray | None:
        return self.documents.tokens(raw)


class PreparedStdlib:
    """The prepared documents of the standard library, by name."""

    def __init__(self, documents: PreparedDocuments):
        self.documents = documents
        self.names = [documents.name(row) for row in range(len(documents))]
        self._rows = {name: row for row, name in enumerate(self.names)}

    def document(self, name: str) -> np.ndarray:
        tokens = self.documents.tokens(self._rows[name])
        assert tokens is not None  # no document of the standard library is bad
        return tokens


def read_prepared(folder: Path, key: str = "data.path", every_byte: bool = False) -> dict[str, Any]:
    """Return the content of prepared.json, after a check of the size of each file, or of every
    byte.

    key: the beginning of errors, which says how the user named the folder. Raises ConfigError.
    """
    where = f'{key} = "{folder}"'
    try:
        described = json.loads((folder / NAME).read_text(encoding="utf-8"))
        made_by = described["format"]
    except OSError as error:
        raise ConfigError(f"{where}: {NAME} cannot be read ({error.strerror}); {_FIX}") from None
    except (ValueError, KeyError):
        raise ConfigError(f"{where}: {NAME} is damaged; {_FIX}") from None
    if made_by != FORMAT:
        raise ConfigError(f"{where}: its format is {made_by}, not {FORMAT}; {_FIX}")
    try:
        if every_byte:
            manifest.check_bytes(folder, described["files"])
        else:
            manifest.check_sizes(folder, described["files"])
    except manifest.CorruptFileError as error:
        raise ConfigError(f"{where}: {error}; {_FIX}") from None
    return described


def check_prepared(data: Data, tokenizer_sha256: str, vocab_size: int) -> None:
    """Raise ConfigError if the folder is damaged, or if another tokenizer made it."""
    described = read_prepared(Path(data.path), data.key("path"))
    if described["tokenizer"] != tokenizer_sha256:
        raise ConfigError(
            f'{data.key("path")} = "{data.path}" was made by another tokenizer (SHA-256'
            f" {described['tokenizer'][:12]}, "
            f"{described['vocab_size']} tokens) than model.tokenizer_path ({tokenizer_sha256[:12]},"
            f" {vocab_size} tokens); "
            "use that tokenizer, or prepare it again"
        )


def prepared_fingerprint(data: Data) -> str:
    """Return the SHA-256 of prepared.json, which covers every byte."""
    read_prepared(Path(data.path), data.key("path"))
    return manifest.digest(Path(data.path, NAME))["sha256"]
