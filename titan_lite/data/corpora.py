"""Corpora: documents in pieces that can be read independently, from local files or the hub.

    corpus = open_corpus(Data(dataset="local", path="corpus/*.jsonl"), "train")    # documents.py
    for piece in corpus.pieces:                              # 1 MiB of a file, a row group, a shard
        for position, raw in corpus.read(piece):
            document = corpus.document(piece, position, raw)       # a text, or a BadDocument

Reading yields raw documents, which are not parsed: a reader of one document in eight parses one in
eight. prepared.py has a corpus of documents that are tokens already.
"""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import MachineError
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.files import LocalFile, Piece, read_piece, size_of, text_of
from titan_lite.data.servers import retried

if TYPE_CHECKING:
    from datasets import IterableDataset

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

Document = str | np.ndarray | BadDocument  # a text, the tokens of a prepared one, or neither

C4 = "allenai/c4"  # name of the dataset "c4" on the hub
BYTES_PER_DOCUMENT = 4096  # of data.shuffle_buffer


class Corpus(Protocol):
    """Documents in pieces: of files, of the hub, or prepared."""

    pieces: list[Piece]
    split_by_name: bool  # False: it has the documents of one split
    amount: str  # its size in words, as far as it is known without reading

    def read(self, piece: Piece) -> Iterator[tuple[int, object]]:
        """Yield (position, raw) of the documents of a piece.

        `raw` is a ValueError if there is nothing to parse.
        """

    def name(self, piece: Piece, position: int) -> str:
        """Return the name of a document; a hash of it decides the split."""

    def size(self, position: int, raw: object) -> int:
        """Return the bytes of a document in the shuffle buffer."""

    def document(self, piece: Piece, position: int, raw: object) -> Document | None:
        """Return a document; None if it was bad when it was prepared."""


class LocalCorpus:
    """The files at data.path. A txt file is one document, which is read when it is wanted.

    Reading raises ConfigError if a file has another size than when it was listed.
    """

    def __init__(self, data: Data, files: Sequence[LocalFile], pieces: list[Piece]):
        """pieces: of these files."""
        self.data = data
        self.split_by_name = True
        self.pieces = pieces
        self.sizes = {file.path: file.size for file in files}
        mib = sum(piece.size for piece in pieces) / 2**20
        count = "1 file" if len(files) == 1 else f"{len(files):,} files"
        self.amount = f"{count}, {mib:,.2f} MiB"

    def read(self, piece: Piece) -> Iterator[tuple[int, object]]:
        if piece.format == ".txt":
            yield 0, None
        else:
            self._check_size(piece.file)
            yield from read_piece(piece, self.data)

    def name(self, piece: Piece, position: int) -> str:
        return piece.name if piece.format == ".txt" else f"{piece.name}:{position}"

    def size(self, position: int, raw: object) -> int:
        return len(raw) if isinstance(raw, str | bytes) else 0

    def document(self, piece: Piece, position: int, raw: object) -> str | BadDocument:
        if piece.format == ".txt":
            self._check_size(piece.file)
            position, raw = next(read_piece(piece, self.data))
        return text_of(raw, piece, position, self.data)

    def _check_size(self, file: str) -> None:
        """Raise ConfigError for a file that has grown or was cut: documents would be others."""
        size = size_of(file)
        if size != self.sizes[file]:
            raise ConfigError(
                f"{file} was changed while the run reads it ({size:,} bytes, and had"
                f" {self.sizes[file]:,}): use the file as it was to resume from the newest"
                " checkpoint, or start with checkpoint.restart_data = true"
            )


class HubCorpus:
    """A dataset of the hub, streamed; a piece is a shard.

    c4 is C4 in English, about 156 billion tokens.
    """

    def __init__(self, data: Data, split: Split):
        self.data = data
        self.split_by_name = data.dataset != "c4"
        self.stream = _open_hub(data, split)
        shards = self.stream.num_shards
        self.amount = "1 shard of the hub" if shards == 1 else f"{shards:,} shards of the hub"
        # so large that each shard is shuffled alone
        size = BYTES_PER_DOCUMENT * data.shuffle_buffer
        self.pieces = []
        for index in range(shards):
            name = f"{data.dataset} shard {index}"
            self.pieces.append(Piece(name, name, size, start=index))

    def read(self, piece: Piece) -> Iterator[tuple[int, object]]:
        shard = self.stream.shard(num_shards=len(self.pieces), index=piece.start)
        # Plain iteration would give each loader process only its share.
        for position, values in enumerate(shard.iter(batch_size=1)):
            yield position, {name: value[0] for name, value in values.items()}

    def name(self, piece: Piece, position: int) -> str:
        return f"{piece.name}:{position}"

    def size(self, position: int, raw: object) -> int:
        text = raw.get(self.data.text_field) if isinstance(raw, dict) else None
        return len(text) if isinstance(text, str | bytes) else 0

    def document(self, piece: Piece, position: int, raw: object) -> str | BadDocument:
        return text_of(raw, piece, position, self.data)


def refuse_folder_of_that_name(data: Data) -> None:
    """Raise ConfigError if `datasets` would read a folder in place of the dataset of the hub."""
    name = C4 if data.dataset == "c4" else data.dataset
    if os.path.exists(name):
        dataset = data.key("dataset")
        raise ConfigError(
            f'{dataset} = "{data.dataset}" is a dataset of the hub, and {name} is in the current'
            f" folder, too, where `datasets` would read it: use {dataset} ="
            f' "local" with {data.key("path")} = "{name}" to read that, or start in another folder'
        )


def _open_hub(data: Data, split: Split) -> "IterableDataset":
    """Open a streamed dataset. Raises ConfigError and MachineError."""
    import datasets  # here, since it takes a second

    refuse_folder_of_that_name(data)
    name = data.dataset
    subset = data.subset or None
    hub_split = data.split
    if data.dataset == "c4":
        name = C4
        subset = "en"
        hub_split = split
    instead = (
        f'without network, use {data.key("dataset")} = "local" with {data.key("path")}, or "stdlib"'
    )
    try:
        return retried(
            lambda: datasets.load_dataset(name, subset, split=hub_split, streaming=True), name
        )
    except MachineError as error:
        raise MachineError(f"{error}; {instead}") from error
    except Exception as error:
        raise ConfigError(
            f'{data.key("dataset")} = "{data.dataset}": {name} cannot be opened on the hub'
            f" ({type(error).__name__}: {error}); {instead}"
        ) from error
