"""Pack the tokens of documents into windows.

    for packed in WindowPacker(packing, streams, state, windows_at_once=8):    # in a loader process
        packed.windows

    a stream's documents      [BOS a b EOS] [BOS c EOS] [BOS d e f g ...
    its windows, seq_len = 4   BOS a b EOS   BOS c EOS   BOS d e f g ...
                              |----- 0 ----------|------- 1 ------|

Every token of a stream is in exactly one window, and a long document continues in the next one.
streams.py says which stream a window is from, and which rank gets it.

With several sources, each window comes from one of them, and a stream stands at a position in each.
The number of the window decides the source: so shares count tokens, need no state, and may change
when a run is resumed.
"""

import bisect
import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import MachineError
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy, SkippedDocuments
from titan_lite.data.corpora import Document
from titan_lite.data.documents import Source
from titan_lite.data.streams import LoaderState, RankStreams, StreamPosition
from titan_lite.data.tokenizer import Tokenizer

# 2**64 / golden ratio: its multiples modulo 2**64 are spread most evenly
GOLDEN_STEP = 0x9E3779B97F4A7C15
MAX_SKIPPED_IN_A_ROW = 1000  # documents, over two epochs, before it is an error


class Window(NamedTuple):
    """seq_len + 1 consecutive tokens of one stream, all from one source."""

    number: int  # among the windows of the run
    source: int  # index in data.sources
    # int32, which pass through a pipe faster than a tensor through shared memory; empty if another
    # rank that reads the same stream keeps the window
    tokens: bytes
    position: StreamPosition  # of the stream in this source, after the window
    skipped: SkippedDocuments | None  # on the way to its tokens


class Packed(NamedTuple):
    """Windows that a loader process hands over together."""

    windows: list[Window]
    error: ConfigError | MachineError | None = None  # in the data; nothing follows
    skipped: SkippedDocuments | None = None  # on the way to the error


class Mixture:
    """Chooses the source of each window."""

    def __init__(self, shares: Sequence[float], seed: int):
        self.ends = list(itertools.accumulate(shares))  # of the sources' intervals in [0, 1)
        hashed = hashlib.sha256(str(seed).encode()).digest()
        self.phase = int.from_bytes(hashed[:8], "big")

    def source_of(self, window: int) -> int:
        """Return the index of the source of a window.

        Of the first n windows (n up to a million) each source has its share within five.
        """
        point = (window * GOLDEN_STEP + self.phase) % 2**64 / 2**64
        return min(bisect.bisect_right(self.ends, point), len(self.ends) - 1)


@dataclass(frozen=True)
class Packing:
    """Documents to pack, and the way from them to windows: the same on all ranks."""

    data: Data
    sources: list[Source]
    mixture: Mixture
    tokenizer: Tokenizer
    seq_len: int


@dataclass
class OpenStream:
    """A stream while its documents are read from one source."""

    position: StreamPosition
    tokens: np.ndarray | None = None  # of the current document, once it is read
    # (ordinal, document) of documents that were read on the way to those of another stream
    waiting: deque[tuple[int, Document]] = field(default_factory=deque)


class SourceReader:
    """Joins the documents of one source to streams of tokens, for the streams of one process."""

    def __init__(
        self,
        packing: Packing,
        source: int,
        positions: Mapping[int, StreamPosition],
        num_streams: int,
        policy: BadDocumentPolicy,
    ):
        """source: its index. positions: of the streams, where they begin."""
        self.number = source + 1  # for messages
        self.source = packing.sources[source]
        self.tokenizer = packing.tokenizer
        self.min_tokens = packing.data.min_document_tokens
        self.num_streams = num_streams  # of the run
        self.policy = policy
        self.streams = {index: OpenStream(position) for index, position in positions.items()}
        self.documents = self._read()
        self.skipped_in_a_row = 0  # documents before the next one that has tokens
        self.first_skipped = 0  # ordinal of the first of them

    def fill(self, window: np.ndarray, index: int) -> StreamPosition:
        """Fill the window with the next tokens of a stream, and return the position after them."""
        stream = self.streams[index]
        ordinal, used = stream.position
        filled = 0
        while filled < len(window):
            if stream.tokens is None:
                ordinal, stream.tokens = self._next_document(stream, ordinal, used)
            part = stream.tokens[used : used + len(window) - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            used += len(part)
            if used == len(stream.tokens):
                stream.tokens = None
                ordinal += 1
                used = 0
        stream.position = StreamPosition(ordinal, used)
        return stream.position

    def _read(self) -> Iterator[tuple[int, Document]]:
        """Yield (ordinal, document) of the streams' documents, each from its position on."""
        num_streams = self.num_streams
        starts = {index: stream.position.document for index, stream in self.streams.items()}

        def is_wanted(ordinal: int) -> bool:
            start = starts.get(ordinal % num_streams)
            return start is not None and ordinal >= start

        return self.source.documents(min(starts.values()), is_wanted)

    def _next_document(self, stream: OpenStream, start: int, used: int) -> tuple[int, np.ndarray]:
        """Return (ordinal, tokens) of the stream's next document that has tokens.

        start: first ordinal that it may have. used: tokens of document `start` that are in
        earlier windows; if there are any, the document must be this one.
        """
        while True:
            while not stream.waiting:
                ordinal, document = next(self.documents)
                self.streams[ordinal % self.num_streams].waiting.append((ordinal, document))
            ordinal, document = stream.waiting.popleft()
            tokens = self._tokens_of(document, 0 if used else self.min_tokens)
            if used:
                self._check_resumed(start, used, tokens if ordinal == start else None)
            if tokens is not None:
                self.skipped_in_a_row = 0
                return ordinal, tokens
            self._count_skipped(ordinal)

    def _tokens_of(self, document: Document, min_tokens: int) -> np.ndarray | None:
        """Return the tokens of a document, or None for one that is bad or too short."""
        if isinstance(document, BadDocument):
            self.policy.skip(document)
            return None
        if isinstance(document, str):
            tokens = self.tokenizer.encode_document(document)
        else:
            tokens = document
        if len(tokens) - 2 < min_tokens:  # without BOS and EOS
            self.policy.skip_short()
            return None
        return tokens

    def _check_resumed(self, ordinal: int, used: int, tokens: np.ndarray | None) -> None:
        """Raise ConfigError if the document of the saved position is missing or too short."""
        if tokens is not None and used < len(tokens):
            return
        what = "is not there" if tokens is None else f"has {len(tokens)}"
        raise ConfigError(
            f"the loader's state is {used} tokens into document {ordinal}, which {what}: documents,"
            " [data], model.tokenizer_path or debug.seed changed since; use those of the saved run"
        )

    def _count_skipped(self, ordinal: int) -> None:
        """Raise ConfigError if the source seems to have no document with tokens."""
        if self.skipped_in_a_row == 0:
            self.first_skipped = ordinal
        epochs = self.source.epoch(ordinal) - self.source.epoch(self.first_skipped)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and epochs >= 2:
            reason = "bad"
            fix = "use other documents"
            if self.min_tokens:
                reason = f"bad or shorter than data.min_document_tokens = {self.min_tokens}"
                fix = "use a smaller value or other documents"
            example = f", such as {self.policy.last_bad}" if self.policy.last_bad else ""
            raise ConfigError(
                f"source {self.number}: {self.skipped_in_a_row} consecutive documents, over two"
                f" epochs, are {reason}{example}; {fix}"
            )
        self.skipped_in_a_row += 1


class WindowPacker(IterableDataset):
    """The endless windows of a rank's streams, in the order of their numbers, as Packed.

    With n loader processes each packs every n-th stream.
    """

    def __init__(
        self, packing: Packing, streams: RankStreams, state: LoaderState, windows_at_once: int
    ):
        self.packing = packing
        self.streams = streams
        self.state = state  # where the windows begin
        self.windows_at_once = windows_at_once

    def __iter__(self) -> Iterator[Packed]:
        streams = self.streams.indices
        if worker := get_worker_info():
            streams = streams[worker.id :: worker.num_workers]
        policy = BadDocumentPolicy(self.packing.data)
        readers = self._readers(streams, policy)
        numbers = self._numbers(streams)
        # The same number from every process, since all have as many streams: none gets ahead.
        windows_at_once = min(self.windows_at_once, len(streams))
        windows: list[Window] = []
        try:
            while True:
                some = itertools.islice(numbers, windows_at_once)
                windows = []
                for number in some:
                    windows.append(self._window(number, readers, policy))
                yield Packed(windows)
        except (ConfigError, MachineError) as error:
            # yielded, since a raised error would arrive wrapped in the worker's traceback
            yield Packed(windows, error, policy.pop_skipped())

    def _readers(self, streams: range, policy: BadDocumentPolicy) -> list[SourceReader]:
        """Return a reader of these streams for each source."""
        num_streams = self.streams.num_streams
        readers = []
        for source in range(len(self.packing.sources)):
            positions = {stream: self.state.positions[stream][source] for stream in streams}
            readers.append(SourceReader(self.packing, source, positions, num_streams, policy))
        return readers

    def _numbers(self, streams: range) -> Iterator[int]:
        """Yield the numbers of the windows of these streams."""
        begin = self.state.windows_taken
        num_streams = self.streams.num_streams
        first_of_each = sorted(begin + (stream - begin) % num_streams for stream in streams)
        for turn in itertools.count():
            for first in first_of_each:
                yield first + turn * num_streams

    def _window(
        self, number: int, readers: Sequence[SourceReader], policy: BadDocumentPolicy
    ) -> Window:
        source = self.packing.mixture.source_of(number)
        tokens = np.empty(self.packing.seq_len + 1, dtype=np.int32)
        position = readers[source].fill(tokens, number % self.streams.num_streams)
        kept = tokens.tobytes() if self.streams.keeps(number) else b""
        skipped = policy.pop_skipped()
        return Window(number, source, kept, position, skipped if skipped else None)
