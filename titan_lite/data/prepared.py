"""Read a corpus that `titan-lite prepare` has tokenized.

    prepared.json     format, tokenizer, what was skipped, and size and SHA-256 of every file
    documents/        a table that `datasets.Dataset.save_to_disk` wrote; of c4, which has a
                      validation split of its own, train/ and validation/

    data = Data(dataset="prepared", path="prepared/books")
    prepared = PreparedCorpus(data, read_prepared(Path(data.path)), split="train")
    prepared.document(piece, 7, None)           # tokens of document 7, memory-mapped

A row of the table is a document, in the order of the files: its name, the bytes that it had in the
shuffle buffer, and its tokens with BOS and EOS, or none if it was bad. Pieces of files are known by
their sizes and numbers of documents. So training reads the same documents in the same order as from
the text, shuffled or not, with the same split.
"""

import bisect
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from titan_lite import manifest
from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import error_because_of
from titan_lite.data.corpora import Split
from titan_lite.data.files import Piece
from titan_lite.data.outputs import PREPARED
from titan_lite.manifest import validated
from titan_lite.text import error_line

if TYPE_CHECKING:
    import pyarrow

FORMAT = 3
BOTH_SPLITS = "documents"  # the folder of a corpus that is split by the names of documents
MAX_OPEN_BATCHES = 1000  # of a thousand documents; a group that is shuffled has some hundred
_FIX = "use `titan-lite prepare` to prepare it again"


@dataclass(frozen=True)
class PreparedPart:
    """A table of documents, and the pieces that they come from."""

    documents: NonNegativeInt
    tokens: NonNegativeInt
    piece_sizes: list[NonNegativeInt]  # bytes
    piece_documents: list[NonNegativeInt]


@dataclass(frozen=True)
class PreparedInfo:
    """The content of prepared.json."""

    format: int
    tokenizer: str  # its SHA-256
    vocab_size: PositiveInt
    source: dict[str, str]  # dataset, path and text_field of [data]
    parts: dict[str, PreparedPart]  # by folder
    bad: list[dict[str, str]]  # bad documents, as in bad_documents.jsonl
    files: dict[str, Any]  # size and SHA-256 of every other file

    @classmethod
    def from_json(cls, text: str) -> "PreparedInfo":
        """Raise ValueError, KeyError or TypeError for another content."""
        content = json.loads(text)
        if content["format"] != FORMAT:  # of which nothing else is known
            return cls(content["format"], "", 0, {}, {}, [], {})
        return replace(validated(cls, content), files=manifest.digests_in(content))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class _Batch(NamedTuple):
    """Documents that are next to each other on disk."""

    first: int  # index of the first one
    names: "pyarrow.Array"
    sizes: list[int]
    starts: list[int]  # of the documents in `tokens`, and the end of the last one
    tokens: np.ndarray


class PreparedCorpus:
    """The documents of a prepared folder, or those of one split, memory-mapped; in the pieces of
    the files or shards that they come from.

    A document's position is its index, and nothing of it is read before it is wanted.
    """

    def __init__(self, data: Data, info: PreparedInfo, split: Split):
        """info: content of prepared.json."""
        import datasets  # here, since it takes a second

        folder = Path(data.path)
        self.is_from_hub = info.source["dataset"] != "local"
        self.split_by_name = split not in info.parts
        name = BOTH_SPLITS if self.split_by_name else split
        part = info.parts[name]
        self.amount = f"{part.documents:,} documents, {part.tokens:,} tokens"
        table = datasets.load_from_disk(str(folder / name)).data
        self._columns = [table.column(column).chunks for column in ("name", "size", "tokens")]
        lengths = [len(chunk) for chunk in self._columns[0]]
        self._firsts = [0, *itertools.accumulate(lengths)]  # of each batch, and the end of the last
        if self._firsts[-1] != part.documents:
            raise ConfigError(
                f'{data.key("path")} = "{folder}": {PREPARED} has {part.documents:,} documents, and'
                f" {folder / name} {self._firsts[-1]:,}; {_FIX}"
            )
        self._batches: dict[int, _Batch] = {}
        self.pieces: list[Piece] = []
        start = 0
        for size, count in zip(part.piece_sizes, part.piece_documents, strict=True):
            self.pieces.append(Piece("prepared", "", size, start, start + count))
            start += count

    def read(self, piece: Piece) -> Iterator[tuple[int, None]]:
        return ((index, None) for index in range(piece.start, piece.end))

    def name(self, piece: Piece, position: int) -> str:
        batch = self._batch(position)
        return batch.names[position - batch.first].as_py()

    def size(self, position: int, raw: object) -> int:
        batch = self._batch(position)
        return batch.sizes[position - batch.first]

    def document(self, piece: Piece, position: int, raw: object) -> np.ndarray | None:
        batch = self._batch(position)
        start = batch.starts[position - batch.first]
        end = batch.starts[position - batch.first + 1]
        return batch.tokens[start:end] if start < end else None

    def _batch(self, index: int) -> _Batch:
        """Return the batch of a document."""
        number = bisect.bisect_right(self._firsts, index) - 1
        if number not in self._batches:
            if len(self._batches) == MAX_OPEN_BATCHES:
                self._batches.clear()
            names, sizes, tokens = (column[number] for column in self._columns)
            self._batches[number] = _Batch(
                first=self._firsts[number],
                names=names,
                sizes=sizes.to_numpy().tolist(),
                starts=tokens.offsets.to_numpy().tolist(),
                tokens=tokens.values.to_numpy(),
            )
        return self._batches[number]


def read_prepared(folder: Path, key: str = "data.path", every_byte: bool = False) -> PreparedInfo:
    """Return the content of prepared.json, after a check of the size of each file, or of each byte.

    key: the beginning of errors, which says how the user named the folder. Raises ConfigError.
    """
    where = f'{key} = "{folder}"'
    try:
        info = PreparedInfo.from_json((folder / PREPARED).read_text(encoding="utf-8"))
    except OSError as error:
        why = f"{where}: {PREPARED} cannot be read ({error.strerror}); {_FIX}"
        raise error_because_of(error, why) from None
    except (ValueError, KeyError, TypeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error_line(error)
        raise ConfigError(f"{where}: {PREPARED} is damaged ({why}); {_FIX}") from None
    if info.format != FORMAT:
        raise ConfigError(f"{where}: its format is {info.format}, not {FORMAT}; {_FIX}")
    check = manifest.check_bytes if every_byte else manifest.check_sizes
    try:
        check(folder, info.files)
    except manifest.CorruptFileError as error:
        raise ConfigError(f"{where}: {error}; {_FIX}") from None
    return info


def check_prepared(data: Data, info: PreparedInfo, tokenizer_sha256: str, vocab_size: int) -> None:
    """Raise ConfigError if another tokenizer made the folder. info: content of prepared.json."""
    if info.tokenizer != tokenizer_sha256:
        raise ConfigError(
            f'{data.key("path")} = "{data.path}" was made by another tokenizer (SHA-256'
            f" {info.tokenizer[:12]}, {info.vocab_size} tokens) than model.tokenizer_path"
            f" ({tokenizer_sha256[:12]}, {vocab_size} tokens); use that tokenizer, or prepare it"
            " again"
        )
