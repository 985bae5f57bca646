"""Documents: an endless, numbered stream of texts from the running Python, from local files or from the hub, or of tokens.

    source = build_source(Data(dataset="stdlib"), split="train", seed=0)
    for ordinal, text in source.documents(start=0, wanted=lambda ordinal: ordinal % 8 == 3):
        ...                                 # documents 3, 11, 19, ... of the infinite concatenation of epochs

An ordinal is a document's place in that concatenation; it is the same on every rank, so that the loader's whole state is
numbers. Each epoch has a new order, which follows from the seed. A document belongs to training or to validation by a
hash of its name: the split stays when documents are added, and no rank needs to be told of it.
"""

import hashlib
import itertools
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy
from titan_lite.data.files import Piece, local_files, local_pieces, read_piece, text_of
from titan_lite.data.prepared import PreparedSource, Split, prepared_fingerprint

_STDLIB = Path(sysconfig.get_path("stdlib"))
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# A piecewise source's ordinal is epoch * EPOCH + group * GROUP + place in the group. Primes, so that modulo any number of rows
# each group begins with another row, and none has the longer share every time.
EPOCH, GROUP = 2**61 - 1, 2**31 - 1
SHUFFLED_BYTES = 4096  # for each document of data.shuffle_buffer


class StdlibSource:
    """`pydoc_data.topics` and the sources of the standard library; any document can be read at once."""

    def __init__(self, data: Data, split: Split, seed: int):
        self.names = [name for name in _stdlib_names() if _belongs(name, split, data.validation_fraction)]
        self.shuffle, self.seed = data.shuffle, seed
        if not self.names:
            raise _empty(data, split)

    def epoch(self, ordinal: int) -> int:
        return ordinal // len(self.names)

    def documents(self, start: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str]]:
        """(ordinal, text) of the documents from `start` on whose ordinal is wanted; only these are read."""
        count = len(self.names)
        for epoch in itertools.count(start // count):
            order = list(range(count))
            if self.shuffle:
                random.Random(f"{self.seed} {epoch}").shuffle(order)
            for ordinal in range(max(start, epoch * count), (epoch + 1) * count):
                if wanted(ordinal):
                    yield ordinal, _stdlib_text(self.names[order[ordinal % count]])


_Raw = tuple[Piece, int, Any]  # its piece, its place there, what `read_piece` gives (nothing yet of a txt file)


class PiecewiseSource:
    """Documents that lie in pieces: of local files, or the shards of a dataset of the hub.

    An epoch goes through groups of pieces, with `data.shuffle` in a new order. A group has so many bytes that its documents can
    be shuffled in memory; one that has more, as a file that cannot be cut, is shuffled in parts. Where a group begins nobody
    needs to know how many documents were before it, so a run that goes on opens only files from there on. Ordinals have gaps:
    where a group ends, and where documents are of the other split.
    """

    def __init__(self, data: Data, split: Split, seed: int):
        self.data, self.split, self.seed = data, split, seed
        self.stream: Any = None if data.dataset == "local" else _open_hub(data, split)
        self.pieces = local_pieces(data) if self.stream is None else _shards(self.stream, data)
        self.limit = SHUFFLED_BYTES * data.shuffle_buffer

    def epoch(self, ordinal: int) -> int:
        return ordinal // EPOCH

    def documents(self, start: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str | BadDocument]]:
        """(ordinal, text) of the documents from `start` on whose ordinal is wanted; only these are parsed. Or what is wrong."""
        beginning, rest = divmod(start, EPOCH)
        for epoch in itertools.count(beginning):
            found = epoch == beginning and rest > 0
            readable, bad = found, ""
            for number, group in enumerate(self._groups(epoch)):
                if epoch == beginning and number < rest // GROUP:
                    continue
                base = epoch * EPOCH + number * GROUP
                for ordinal, (piece, place, raw) in enumerate(self._in_order(group, f"{self.seed} {epoch} {number}"), start=base):
                    want = ordinal >= start and wanted(ordinal)
                    if not isinstance(raw, ValueError):
                        readable = True
                    else:
                        bad = bad or str(self._text(piece, place, raw))
                    if (want or not found) and self._is_ours(piece, place):
                        found = True
                        if want:
                            yield ordinal, self._text(piece, place, raw)
            if not found:
                raise _empty(self.data, self.split)
            if bad and not readable:  # another epoch would take as long: what is too large is decompressed to its end
                raise ConfigError(f"{bad}; nothing else is there that could be read; other documents would work")

    def _groups(self, epoch: int) -> list[list[Piece]]:
        pieces = list(self.pieces)
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
        documents = ((piece, place, raw) for piece in group for place, raw in self._read(piece))
        if not self.data.shuffle:
            yield from documents
            return
        for part, some in enumerate(iter(lambda: self._take(documents), [])):
            random.Random(f"{seed} {part}").shuffle(some)
            yield from some

    def _take(self, documents: Iterator[_Raw]) -> list[_Raw]:
        """As many as are shuffled at once."""
        some, size = [], 0
        for document in documents:
            some.append(document)
            raw = document[2]
            text = raw.get(self.data.text_field) if isinstance(raw, dict) else raw
            size += len(text) if isinstance(text, str | bytes) else 0
            if size >= self.limit or len(some) == self.data.shuffle_buffer:
                break
        return some

    def _read(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        if piece.format == ".txt":  # one document, whoever wants it will read it
            yield 0, None
            return
        if self.stream is None:
            yield from read_piece(piece, self.data)
            return
        shard = self.stream.shard(num_shards=len(self.pieces), index=piece.start)
        # Plain iteration would give a loader process its share alone.
        for place, batch in enumerate(shard.iter(batch_size=1)):
            yield place, {name: values[0] for name, values in batch.items()}

    def _is_ours(self, piece: Piece, place: int) -> bool:
        if self.data.dataset == "c4":  # it has been split already
            return True
        name = piece.name if piece.format == ".txt" else f"{piece.name}:{place}"
        return _belongs(name, self.split, self.data.validation_fraction)

    def _text(self, piece: Piece, place: int, raw: Any) -> str | BadDocument:
        if piece.format == ".txt":
            place, raw = next(read_piece(piece, self.data))
        return text_of(raw, piece, place, self.data)


Source = StdlibSource | PiecewiseSource | PreparedSource


def build_source(data: Data, *, split: Split, seed: int) -> Source:
    """The documents of one split of `data.dataset`; data.sources are several such, from `data.mixture()`.

    Raises ConfigError: nothing to read, or not readable; where the split has no document, only once an epoch has been read.
    """
    if data.dataset == "prepared":
        return PreparedSource(data, split, seed)
    return (StdlibSource if data.dataset == "stdlib" else PiecewiseSource)(data, split, seed)


def amount(source: Source) -> str:
    """Describe the size of a source, as far as it is known without reading: documents, files and MiB, or shards."""
    if isinstance(source, PreparedSource):
        return f"{source.firsts[-1]:,} documents, tokenized"
    if isinstance(source, StdlibSource):
        return f"{len(source.names):,} documents"
    if source.stream is not None:
        return f"{len(source.pieces):,} shard{'s' * (len(source.pieces) > 1)} of the hub"
    files = {piece.file for piece in source.pieces}
    size = sum(piece.size for piece in source.pieces)
    return f"{len(files):,} file{'s' * (len(files) > 1)}, {size / 2**20:,.2f} MiB"


def check_data(data: Data) -> None:
    """Raises ConfigError before any process starts, as reading would: reads one document of each format, nothing of the hub."""
    policy = BadDocumentPolicy(data)
    for _, part in data.mixture():
        if part.dataset == "stdlib":
            _stdlib_text(StdlibSource(part, "train", seed=0).names[0])
        elif part.dataset == "local":
            pieces = local_pieces(part)
            if not any(True for piece in pieces for _ in read_piece(piece, part)):
                raise ConfigError(f'{part.key("path")} = "{part.path}" has no document in it; files with some would work')
            for piece in {piece.format: piece for piece in reversed(pieces)}.values():
                for place, raw in itertools.islice(read_piece(piece, part), 1):
                    if isinstance(text := text_of(raw, piece, place, part), BadDocument):
                        policy.skip(text)


def fingerprint(data: Data) -> str:
    """SHA-256 of the documents there are, as far as can be told without reading them.

    Names and sizes of local files and the standard library, the name of a dataset of the hub, and which field has the text;
    every byte of prepared data.
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
                [(name, topics[name] if name in topics else os.path.getsize(_STDLIB / name)) for name in _stdlib_names()]
            )
        case "local":
            return _sha256(["by pieces", data.text_field, *((name, size) for _, name, size in local_files(data))])
        case name:
            return _sha256([name, data.subset, data.split, data.text_field])


def _sha256(what: list) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _belongs(name: str, split: Split, validation_fraction: float) -> bool:
    """A document is in validation or training by the hash of its name; over all names, validation has its fraction of them."""
    hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return (hashed < validation_fraction) == (split == "validation")


class NoDocuments(ConfigError):
    """A split is empty."""


def _empty(data: Data, split: Split) -> NoDocuments:
    where = f' at {data.key("path")} = "{data.path}"' if data.path else ""
    other = 0.5 if split == "validation" else 0.05
    helps = data.validation_fraction < other if split == "validation" else data.validation_fraction > other
    instead = f" or validation_fraction = {other}" if helps else ""
    return NoDocuments(
        f'{data.key("dataset")} = "{data.dataset}"{where} has no {split} document with data.validation_fraction = '
        f"{data.validation_fraction}; more documents{instead} would work"
    )


# The standard library of the running Python


def _stdlib_names() -> list[str]:
    """Sorted names: "topics/NAME" of pydoc's help texts, paths relative to the standard library of its sources."""
    names = [f"topics/{topic}" for topic in _topics()]
    for folder, subfolders, files in os.walk(_STDLIB):
        subfolders[:] = [name for name in subfolders if name not in _NOT_OURS]
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            name = path.relative_to(_STDLIB).as_posix()
            # _sysconfigdata differs between builds of one Python, and the topics are in already.
            unfit = path.name.startswith("_sysconfigdata") or name == "pydoc_data/topics.py"
            if not unfit and path.is_file() and path.stat().st_size:
                names.append(name)
    if len(names) < 100:
        raise ConfigError(
            f'data.dataset = "stdlib": this Python comes without the sources of its standard library ({len(names)} documents, '
            f'looked in {_STDLIB}); a full Python, or data.dataset = "local" with data.path, would work'
        )
    return sorted(names)


def _stdlib_text(name: str) -> str:
    kind, _, topic = name.partition("/")
    if kind == "topics":
        return _topics()[topic]
    return (_STDLIB / name).read_text(encoding="utf-8", errors="replace")


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship it in another package; the sources are most of the text
        return {}
    return topics


# The hub. `datasets` takes a second to import, so only where it is used.


def _open_hub(data: Data, split: Split) -> Any:
    """A streamed dataset. c4 is C4 in English, about 156 billion tokens of Llama 3, with a validation split of its own."""
    import datasets

    name, subset, which = data.dataset, data.subset or None, data.split
    if name == "c4":
        name, subset, which = "allenai/c4", "en", split
    try:
        return datasets.load_dataset(name, subset, split=which, streaming=True)
    except Exception as error:
        raise ConfigError(
            f'{data.key("dataset")} = "{data.dataset}": {name} cannot be opened on the hub ({type(error).__name__}: {error}); '
            f'without a way there, {data.key("dataset")} = "local" with {data.key("path")}, or "stdlib", would work'
        ) from error


def _shards(stream: Any, data: Data) -> list[Piece]:
    """The files of a streamed dataset, each too large to be shuffled with others."""
    size = SHUFFLED_BYTES * data.shuffle_buffer
    names = [f"{data.dataset} shard {index}" for index in range(stream.num_shards)]
    return [Piece(name, name, size, index) for index, name in enumerate(names)]
