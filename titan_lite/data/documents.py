"""Sources of documents: an endless, numbered stream of texts (standard library, local files, hub)
or tokens (prepared).

    source = build_source(Data(dataset="stdlib"), split="train", seed=0)
    for ordinal, text in source.documents(start=0, wanted=lambda ordinal: ordinal % 8 == 3):
        ...                                 # documents 3, 11, 19, ... of the infinite concatenation of epochs

An ordinal is a document's position in that concatenation. It is the same on every rank, so the
loader's state consists of numbers. The seed decides the order of each epoch. A hash of its name
decides whether a document belongs to training or to
validation: the split does not change when documents are added, and ranks need no communication
about it.
"""

import hashlib
import itertools
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy
from titan_lite.data.files import Piece, local_files, local_pieces, read_piece, text_of
from titan_lite.data.prepared import (
    PreparedCorpus,
    PreparedDocuments,
    PreparedStdlib,
    Split,
    prepared_fingerprint,
)

Document = str | np.ndarray | BadDocument  # a text, the tokens of a prepared one, or neither

_STDLIB = Path(sysconfig.get_path("stdlib"))
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# An ordinal of PiecewiseSource is epoch * EPOCH + group * GROUP + position in the group. Both are
# primes, so that modulo any number of rows each group begins with another row, and no row has the
# longer share every time.
EPOCH = 2**61 - 1
GROUP = 2**31 - 1
SHUFFLED_BYTES = 4096  # per document of data.shuffle_buffer


class Library(Protocol):
    """The documents of the standard library, in the order of their names."""

    names: list[str]

    def document(self, name: str) -> str | np.ndarray: ...


class StdlibSource:
    """`pydoc_data.topics` and the sources of the standard library, as texts or prepared, with
    random access.
    """

    def __init__(self, data: Data, split: Split, seed: int, library: Library):
        fraction = data.validation_fraction
        self.names = [name for name in library.names if _belongs(name, split, fraction)]
        self.shuffle = data.shuffle
        self.seed = seed
        self.library = library
        if not self.names:
            raise _empty(data, split)

    @property
    def amount(self) -> str:
        return f"{len(self.names):,} documents"

    def epoch(self, ordinal: int) -> int:
        return ordinal // len(self.names)

    def documents(
        self, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Document]]:
        """Yield (ordinal, document) of the documents from `start` on whose ordinal is wanted; only
        these are read.
        """
        count = len(self.names)
        for epoch in itertools.count(start // count):
            order = list(range(count))
            if self.shuffle:
                random.Random(f"{self.seed} {epoch}").shuffle(order)
            for ordinal in range(max(start, epoch * count), (epoch + 1) * count):
                if wanted(ordinal):
                    yield ordinal, self.library.document(self.names[order[ordinal % count]])


class Corpus(Protocol):
    """Documents in pieces: of files, of the hub, or prepared."""

    pieces: list[Piece]
    split_by_name: bool  # False: it has the documents of one split
    amount: str  # its size in words, as far as it is known without reading

    def read(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield (place, raw) of the documents of a piece.

        `raw` is a ValueError if there is nothing to parse.
        """

    def name(self, piece: Piece, place: int) -> str:
        """Return the name of a document; a hash of it decides the split."""

    def size(self, raw: Any) -> int:
        """Return the bytes of a document in the shuffle buffer."""

    def document(self, piece: Piece, place: int, raw: Any) -> Document | None:
        """Return a document; None if it was bad when it was prepared."""


class LocalCorpus:
    """The files at data.path."""

    def __init__(self, data: Data):
        self.data = data
        self.split_by_name = True
        self.pieces = local_pieces(data)
        files = {piece.file for piece in self.pieces}
        size = sum(piece.size for piece in self.pieces)
        self.amount = f"{_count(len(files), 'file')}, {size / 2**20:,.2f} MiB"

    def read(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        if piece.format == ".txt":  # one document, which `document` reads
            yield 0, None
        else:
            yield from read_piece(piece, self.data)

    def name(self, piece: Piece, place: int) -> str:
        return piece.name if piece.format == ".txt" else f"{piece.name}:{place}"

    def size(self, raw: Any) -> int:
        return len(raw) if isinstance(raw, str | bytes) else 0

    def document(self, piece: Piece, place: int, raw: Any) -> str | BadDocument:
        if piece.format == ".txt":
            place, raw = next(read_piece(piece, self.data))
        return text_of(raw, piece, place, self.data)


class HubCorpus:
    """A dataset of the hub, streamed; a piece is a shard.

    c4 is C4 in English, about 156 billion tokens.
    """

    def __init__(self, data: Data, split: Split):
        self.data = data
        self.split_by_name = data.dataset != "c4"
        self.stream = _open_hub(data, split)
        self.amount = f"{_count(self.stream.num_shards, 'shard')} of the hub"
        # the size is too large for a shard to be shuffled with others
        size = SHUFFLED_BYTES * data.shuffle_buffer
        names = [f"{data.dataset} shard {index}" for index in range(self.stream.num_shards)]
        self.pieces = [Piece(name, name, size, index) for index, name in enumerate(names)]

    def read(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        shard = self.stream.shard(num_shards=len(self.pieces), index=piece.start)
        # Plain iteration would give each loader process only its share.
        for place, batch in enumerate(shard.iter(batch_size=1)):
            yield place, {name: values[0] for name, values in batch.items()}

    def name(self, piece: Piece, place: int) -> str:
        return f"{piece.name}:{place}"

    def size(self, raw: dict[str, Any]) -> int:
        text = raw.get(self.data.text_field)
        return len(text) if isinstance(text, str | bytes) else 0

    def document(self, piece: Piece, place: int, raw: Any) -> str | BadDocument:
        return text_of(raw, piece, place, self.data)


_Raw = tuple[Piece, int, Any]  # (piece, place in it, raw document)


class PiecewiseSource:
    """The documents of a corpus, in order or shuffled.

    An epoch visits groups of pieces, in a new order with `data.shuffle`. The documents of a group
    fit in memory to be shuffled; a larger group, such as a file that cannot be cut, is shuffled in
    parts. The ordinals of a group do not depend on the number of documents before it, so a resumed
    run opens only the files from its group on. Ordinals have gaps at the end of a group and at
    documents of the other split.
    """

    def __init__(self, data: Data, split: Split, seed: int, corpus: Corpus):
        self.data = data
        self.split = split
        self.seed = seed
        self.corpus = corpus
        self.limit = SHUFFLED_BYTES * data.shuffle_buffer

    @property
    def amount(self) -> str:
        return self.corpus.amount

    def epoch(self, ordinal: int) -> int:
        return ordinal // EPOCH

    def documents(
        self, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Document]]:
        """Yield (ordinal, document) of the documents from `start` on with a wanted ordinal; only
        these are parsed.
        """
        beginning, rest = divmod(start, EPOCH)
        for epoch in itertools.count(beginning):
            found = epoch == beginning and rest > 0
            readable = found
            bad = ""
            for number, group in enumerate(self._groups(epoch)):
                if epoch == beginning and number < rest // GROUP:
                    continue
                base = epoch * EPOCH + number * GROUP
                in_order = self._in_order(group, f"{self.seed} {epoch} {number}")
                for ordinal, (piece, place, raw) in enumerate(in_order, start=base):
                    want = ordinal >= start and wanted(ordinal)
                    if not isinstance(raw, ValueError):
                        readable = True
                    else:
                        bad = bad or str(self.corpus.document(piece, place, raw))
                    if (want or not found) and self._is_ours(piece, place):
                        found = True
                        if want:
                            document = self.corpus.document(piece, place, raw)
                            if document is not None:
                                yield ordinal, document
            if not found:
                raise _empty(self.data, self.split)
            if bad and not readable:  # a further epoch would only repeat this
                raise ConfigError(f"{bad}; no other document can be read; use other documents")

    def _groups(self, epoch: int) -> list[list[Piece]]:
        pieces = list(self.corpus.pieces)
        if self.data.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(pieces)
        groups: list[list[Piece]] = [[]]
        size = 0
        for piece in pieces:
            if groups[-1] and size + piece.size > self.limit:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += piece.size
        return groups

    def _in_order(self, group: list[Piece], seed: str) -> Iterator[_Raw]:
        documents = (
            (piece, place, raw) for piece in group for place, raw in self.corpus.read(piece)
        )
        if not self.data.shuffle:
            yield from documents
            return
        for part, some in enumerate(iter(lambda: self._take(documents), [])):
            random.Random(f"{seed} {part}").shuffle(some)
            yield from some

    def _take(self, documents: Iterator[_Raw]) -> list[_Raw]:
        """Return as many documents as are shuffled at once."""
        some = []
        size = 0
        for document in documents:
            some.append(document)
            size += self.corpus.size(document[2])
            if size >= self.limit or len(some) == self.data.shuffle_buffer:
                break
        return some

    def _is_ours(self, piece: Piece, place: int) -> bool:
        if not self.corpus.split_by_name:
            return True
        if not self.data.validation_fraction:
            return self.split == "train"
        name = self.corpus.name(piece, place)
        return _belongs(name, self.split, self.data.validation_fraction)


Source = StdlibSource | PiecewiseSource


def build_source(data: Data, *, split: Split, seed: int) -> Source:
    """Return the source of one split of `data.dataset`; `data.mixture()` has one [data] section for
    each of data.sources.

    Raises ConfigError if nothing can be read. That a split has no document is an error only after
    an epoch has been read.
    """
    if data.dataset == "stdlib":
        return StdlibSource(data, split, seed, Stdlib())
    if data.dataset == "prepared":
        documents = PreparedDocuments(data, split)
        if not documents.piece_sizes:
            return StdlibSource(data, split, seed, PreparedStdlib(documents))
        if documents.is_from_hub and split == "validation":
            data = data.replace(shuffle=False)  # as `build_loader` reads the hub
        return PiecewiseSource(data, split, seed, PreparedCorpus(documents))
    return PiecewiseSource(data, split, seed, open_corpus(data, split))


def open_corpus(data: Data, split: Split) -> Corpus:
    """Open local files, or a dataset of the hub. Raises ConfigError."""
    return LocalCorpus(data) if data.dataset == "local" else HubCorpus(data, split)


def check_data(data: Data) -> None:
    """Read one document of each local format before any process starts, and nothing of the hub.

    Raises ConfigError.
    """
    policy = BadDocumentPolicy(data)
    for _, part in data.mixture():
        if part.dataset == "stdlib":
            source = StdlibSource(part, "train", 0, Stdlib())
            source.library.document(source.names[0])
        elif part.dataset == "local":
            pieces = local_pieces(part)
            if not any(True for piece in pieces for _ in read_piece(piece, part)):
                raise ConfigError(
                    f'{part.key("path")} = "{part.path}" has no document; use files with documents'
                )
            for piece in {piece.format: piece for piece in reversed(pieces)}.values():
                for place, raw in itertools.islice(read_piece(piece, part), 1):
                    document = text_of(raw, piece, place, part)
                    if isinstance(document, BadDocument):
                        policy.skip(document)


def fingerprint(data: Data) -> str:
    """Return a SHA-256 of the documents, without reading them.

    It covers names and sizes of local files and of the standard library, the name of a dataset of
    the hub, and the text field; of prepared data it covers every byte.
    """
    known = [_fingerprint(part) for _, part in data.mixture()]
    return known[0] if len(known) == 1 else _sha256(known)


def _fingerprint(data: Data) -> str:
    match data.dataset:
        case "prepared":
            return prepared_fingerprint(data)
        case "stdlib":
            topics = {f"topics/{name}": len(text) for name, text in _topics().items()}
            return _sha256(
                [
                    (name, topics[name] if name in topics else os.path.getsize(_STDLIB / name))
                    for name in _stdlib_names()
                ]
            )
        case "local":
            return _sha256(
                [
                    "by pieces",
                    data.text_field,
                    *((name, size) for _, name, size in local_files(data)),
                ]
            )
        case name:
            return _sha256([name, data.subset, data.split, data.text_field])


def _sha256(what: list) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _belongs(name: str, split: Split, validation_fraction: float) -> bool:
    """Return whether a document belongs to the split: the hash of its name puts
    `validation_fraction` of them in validation.
    """
    hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return (hashed < validation_fraction) == (split == "validation")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number > 1)}"


def _empty(data: Data, split: Split) -> ConfigError:
    where = f' at {data.key("path")} = "{data.path}"' if data.path else ""
    other = 0.5 if split == "validation" else 0.05
    helps = (
        data.validation_fraction < other
        if split == "validation"
        else data.validation_fraction > other
    )
    instead = f" or validation_fraction = {other}" if helps else ""
    return ConfigError(
        f'{data.key("dataset")} = "{data.dataset}"{where} has no {split} document with'
        f" data.validation_fraction = {data.validation_fraction}; use more documents{instead}"
    )


# The standard library of the running Python


class Stdlib:
    """Texts of the standard library of the running Python."""

    def __init__(self) -> None:
        self.names = _stdlib_names()

    def document(self, name: str) -> str:
        kind, _, topic = name.partition("/")
        if kind == "topics":
            return _topics()[topic]
        return (_STDLIB / name).read_text(encoding="utf-8", errors="replace")


def _stdlib_names() -> list[str]:
    """Return sorted names: "topics/NAME" for pydoc's help texts, and paths of sources, relative to
    the standard library.
    """
    names = [f"topics/{topic}" for topic in _topics()]
    for folder, subfolders, files in os.walk(_STDLIB):
        subfolders[:] = [name for name in subfolders if name not in _NOT_OURS]
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            name = path.relative_to(_STDLIB).as_posix()
            # _sysconfigdata differs between builds of one Python; the topics are listed above.
            unfit = path.name.startswith("_sysconfigdata") or name == "pydoc_data/topics.py"
            if not unfit and path.is_file() and path.stat().st_size:
                names.append(name)
    if len(names) < 100:
        raise ConfigError(
            'data.dataset = "stdlib": this Python has no sources of its standard library'
            f' ({len(names)} documents in {_STDLIB}); use a full Python, or data.dataset = "local"'
            " with data.path"
        )
    return sorted(names)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except (
        ImportError
    ):  # some distributions have it in another package; most of the text is sources
        return {}
    return topics


# The hub. `datasets` takes a second to import, so it is imported only here.


def _open_hub(data: Data, split: Split) -> Any:
    """Open a streamed dataset. Raises ConfigError."""
    import datasets

    name, subset, which = data.dataset, data.subset or None, data.split
    if name == "c4":
        name, subset, which = "allenai/c4", "en", split
    try:
        return datasets.load_dataset(name, subset, split=which, streaming=True)
    except Exception as error:
        raise ConfigError(
            f'{data.key("dataset")} = "{data.dataset}": {name} cannot be opened on the hub'
            f" ({type(error).__name__}: {error}); without network, use {data.key('dataset')} ="
            f' "local" with {data.key("path")}, or "stdlib"'
        ) from error
