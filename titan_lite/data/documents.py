"""Sources of documents: endless, numbered streams of texts, or of tokens that were prepared.

    source = build_source(Data(dataset="stdlib"), split="train", seed=0)
    for ordinal, text in source.documents(start=0, wanted=lambda ordinal: ordinal % 8 == 3):
        ...                       # documents 3, 11, 19, ... of the infinite concatenation of epochs

An ordinal is a document's position in that concatenation. It is the same on every rank, so the
loader's state consists of numbers. The seed decides the order of each epoch. A hash of its name
decides whether a document belongs to training or to validation: the split does not change when
documents are added, and ranks need no communication about it.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy
from titan_lite.data.corpora import (
    BYTES_PER_DOCUMENT,
    Corpus,
    Document,
    HubCorpus,
    LocalCorpus,
    Split,
    refuse_folder_of_that_name,
)
from titan_lite.data.files import Piece, read_piece, text_of
from titan_lite.data.listing import Listing, list_sources
from titan_lite.data.outputs import PREPARED
from titan_lite.data.prepared import PreparedCorpus
from titan_lite.data.stdlib import Stdlib
from titan_lite.logging import telling_if_slow

# An ordinal of a PiecewiseSource is epoch * EPOCH_STRIDE + group * GROUP_STRIDE + its position in
# the group. Both strides are primes, so consecutive groups start on different streams, however many
# streams there are, and no stream has the longer share every time.
EPOCH_STRIDE = 2**61 - 1
GROUP_STRIDE = 2**31 - 1
MAX_LOOKED_AT = 1000  # documents, before a run, for one that is trained on


class Source(Protocol):
    """The documents of one split, epoch after epoch."""

    amount: str  # its size in words, as far as it is known without reading

    def epoch(self, ordinal: int) -> int:
        """Return the epoch that a document is in."""

    def documents(
        self, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Document]]:
        """Yield (ordinal, document) of the documents from `start` on whose ordinal is wanted.

        Only these are read or parsed. Endless; raises ConfigError if there are none.
        """


class StdlibSource:
    """The standard library, with random access."""

    def __init__(self, data: Data, split: Split, seed: int, library: Stdlib):
        self.library = library
        fraction = data.validation_fraction
        self.names = [name for name in self.library.names if _belongs(name, split, fraction)]
        self.shuffle = data.shuffle
        self.seed = seed
        self.amount = f"{len(self.names):,} documents"
        if not self.names:
            raise _no_document(data, split)

    def epoch(self, ordinal: int) -> int:
        return ordinal // len(self.names)

    def documents(
        self, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Document]]:
        count = len(self.names)
        for epoch in itertools.count(start // count):
            order = list(range(count))
            if self.shuffle:
                random.Random(f"{self.seed} {epoch}").shuffle(order)
            for ordinal in range(max(start, epoch * count), (epoch + 1) * count):
                if wanted(ordinal):
                    yield ordinal, self.library.document(self.names[order[ordinal % count]])


RawDocument = tuple[Piece, int, object]  # piece, position in it, content that is not parsed


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
        self.amount = corpus.amount
        self.shuffle_bytes = BYTES_PER_DOCUMENT * data.shuffle_buffer

    def epoch(self, ordinal: int) -> int:
        return ordinal // EPOCH_STRIDE

    def documents(
        self, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Document]]:
        first_epoch, offset = divmod(start, EPOCH_STRIDE)
        first = self._rest_of_epoch(first_epoch, offset, wanted)
        others = (
            self._rest_of_epoch(epoch, 0, wanted) for epoch in itertools.count(first_epoch + 1)
        )
        # chained, since a generator around these would be resumed for each document
        return itertools.chain(first, itertools.chain.from_iterable(others))

    def _rest_of_epoch(
        self, epoch: int, offset: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Document]]:
        """Yield (ordinal, document) of the wanted documents of an epoch.

        offset: the ordinal within the epoch to begin at. Raises ConfigError at the end of a
        complete epoch that had no document of this split, or none that can be read.
        """
        is_partial = offset > 0
        has_ours = is_partial  # a document of this split was seen, or may lie before the offset
        has_readable = is_partial
        first_bad = ""
        start = epoch * EPOCH_STRIDE + offset
        for ordinal, (piece, position, raw) in self._raw_documents(epoch, offset // GROUP_STRIDE):
            if not isinstance(raw, ValueError):
                has_readable = True
            elif not first_bad:
                first_bad = str(self.corpus.document(piece, position, raw))
            is_wanted = ordinal >= start and wanted(ordinal)
            if has_ours and not is_wanted:
                continue
            if not self._is_ours(piece, position):
                continue
            has_ours = True
            if is_wanted:
                document = self.corpus.document(piece, position, raw)
                if document is not None:
                    yield ordinal, document
        if not has_ours:
            raise _no_document(self.data, self.split)
        if first_bad and not has_readable:  # a further epoch would only repeat this
            raise ConfigError(f"{first_bad}; no other document can be read; use other documents")

    def _raw_documents(self, epoch: int, first_group: int) -> Iterator[tuple[int, RawDocument]]:
        """Return (ordinal, raw document) of both splits, from a group of an epoch on."""
        groups = self._groups(epoch)
        numbered = (
            enumerate(
                self._of_group(groups[number], seed=f"{self.seed} {epoch} {number}"),
                start=epoch * EPOCH_STRIDE + number * GROUP_STRIDE,
            )
            for number in range(first_group, len(groups))
        )
        return itertools.chain.from_iterable(numbered)

    def _groups(self, epoch: int) -> list[list[Piece]]:
        """Return the pieces of an epoch in their order, in groups that fit the shuffle buffer."""
        pieces = list(self.corpus.pieces)
        if self.data.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(pieces)
        groups: list[list[Piece]] = [[]]
        size = 0
        for piece in pieces:
            if groups[-1] and size + piece.size > self.shuffle_bytes:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += piece.size
        return groups

    def _of_group(self, pieces: list[Piece], seed: str) -> Iterator[RawDocument]:
        """Yield the documents of the pieces, in order or shuffled."""
        documents = (
            (piece, position, raw) for piece in pieces for position, raw in self.corpus.read(piece)
        )
        if not self.data.shuffle:
            yield from documents
            return
        for part in itertools.count():
            buffer = self._fill_buffer(documents)
            if not buffer:
                return
            random.Random(f"{seed} {part}").shuffle(buffer)
            yield from buffer

    def _fill_buffer(self, documents: Iterator[RawDocument]) -> list[RawDocument]:
        """Return as many documents as are shuffled at once; none at the end."""
        buffer = []
        size = 0
        for document in documents:
            buffer.append(document)
            _, position, raw = document
            size += self.corpus.size(position, raw)
            if size >= self.shuffle_bytes or len(buffer) == self.data.shuffle_buffer:
                break
        return buffer

    def _is_ours(self, piece: Piece, position: int) -> bool:
        if not self.corpus.split_by_name:
            return True
        if not self.data.validation_fraction:
            return self.split == "train"
        name = self.corpus.name(piece, position)
        return _belongs(name, self.split, self.data.validation_fraction)


def open_corpus(data: Data, split: Split, listing: Listing) -> LocalCorpus | HubCorpus:
    """Open local files, or a dataset of the hub. Raises ConfigError."""
    if data.dataset == "local":
        return LocalCorpus(data, listing.files, listing.pieces)
    return HubCorpus(data, split)


def build_source(data: Data, *, split: Split, seed: int, listing: Listing | None = None) -> Source:
    """Return the source of one split of `data.dataset`. listing: None to list its documents now.

    Of a data mix, `data.mixture()` has a [data] section for each source. Raises ConfigError if
    nothing can be read. That a split has no document is an error only after an epoch has been read.
    """
    listing = listing or Listing(data)
    if data.dataset == "stdlib":
        return StdlibSource(data, split, seed, listing.stdlib)
    if data.dataset != "prepared":
        return PiecewiseSource(data, split, seed, open_corpus(data, split, listing))
    corpus = PreparedCorpus(data, listing.prepared, split)
    if corpus.is_from_hub and split == "validation":
        data = data.replace(shuffle=False)  # as `build_loader` reads the hub
    return PiecewiseSource(data, split, seed, corpus)


def check_data(data: Data, listings: Sequence[Listing] | None = None) -> None:
    """Read one document of each local format before any process starts, and nothing of the hub.

    listings: of the sources; None to list them now. Raises ConfigError.
    """
    policy = BadDocumentPolicy(data)
    for listing in listings or list_sources(data):
        part = listing.data
        if part.dataset == "stdlib":
            _ = listing.stdlib
        elif part.dataset == "local":
            with telling_if_slow(f'reading {part.key("path")} = "{part.path}"'):
                _check_local(listing, policy)
        elif part.dataset != "prepared":
            refuse_folder_of_that_name(part)


def _check_local(listing: Listing, policy: BadDocumentPolicy) -> None:
    data = listing.data
    if Path(data.path, PREPARED).is_file():
        raise ConfigError(
            f'{data.key("path")} = "{data.path}" was written by `titan-lite prepare`; use'
            f' {data.key("dataset")} = "prepared"'
        )
    corpus = LocalCorpus(data, listing.files, listing.pieces)
    pieces = corpus.pieces
    if not any(True for piece in pieces for _ in read_piece(piece, data)):
        raise ConfigError(
            f'{data.key("path")} = "{data.path}" has no document; use files with documents'
        )
    if not _has_training_document(corpus):
        raise _no_document(data, "train")
    first_of_format: dict[str, Piece] = {}
    for piece in pieces:
        first_of_format.setdefault(piece.format, piece)
    for piece in first_of_format.values():
        for position, raw in itertools.islice(read_piece(piece, data), 1):
            document = text_of(raw, piece, position, data)
            if isinstance(document, BadDocument):
                policy.skip(document)


def _has_training_document(corpus: LocalCorpus) -> bool:
    """Return False if every document is held out; True also for a large corpus of whose first
    MAX_LOOKED_AT documents all are.
    """
    fraction = corpus.data.validation_fraction
    if fraction in (0, 1):  # 1: the documents are those of [validation] alone
        return True
    names = (
        corpus.name(piece, position)
        for piece in corpus.pieces
        for position, _ in corpus.read(piece)
    )
    for count, name in enumerate(names):
        if count == MAX_LOOKED_AT or _belongs(name, "train", fraction):
            return True
    return False


def _belongs(name: str, split: Split, validation_fraction: float) -> bool:
    """Return True if a document belongs to the split.

    The hash of its name puts `validation_fraction` of the documents in validation.
    """
    digest = hashlib.sha256(name.encode()).digest()
    hashed = int.from_bytes(digest[:8], "big") / 2**64
    return (hashed < validation_fraction) == (split == "validation")


def _no_document(data: Data, split: Split) -> ConfigError:
    """Return the error for a split without a document."""
    where = f' at {data.key("path")} = "{data.path}"' if data.path else ""
    instead = ""
    if split == "validation" and data.validation_fraction < 1:
        instead = ", files for validation in validation.path, or validation.enable = false"
    if split == "train" and data.validation_fraction > 0.05:
        instead = " or validation_fraction = 0.05"
    elif split == "train" and data.validation_fraction:
        instead = (
            " or data.validation_fraction = 0, with validation.enable = false or documents of its"
            " own in validation.path"
        )
    of_split = f"{split} document with data.validation_fraction = {data.validation_fraction}"
    if data.validation_fraction == 1:  # validation has documents of its own
        of_split = "document"
    return ConfigError(
        f'{data.key("dataset")} = "{data.dataset}"{where} has no {of_split}; use more'
        f" documents{instead}"
    )
