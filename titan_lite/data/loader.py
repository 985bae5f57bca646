"""Make batches of documents, the same global batches on any number of ranks.

    1. documents      `Source.documents` (documents.py) numbers them; row g reads those whose ordinal is g modulo `rows`
    2. tokens         `Tokenizer.encode_document` (tokenizer.py) puts BOS and EOS around them, unless prepare.py did so
    3. packed rows    `_PackedRows`, in the loader processes, cuts each row's tokens into windows of seq_len + 1
    4. batches        `Loader`, in the training process, stacks batch_size windows to (input, label)

    loader = build_loader(data, tokenizer, split="train", streams=8, batch_size=2, seq_len=512, dp_rank=0, dp_degree=2, seed=0)
    batch = next(loader)                      # batch.input, batch.label: (2, 512) each; four of these on each rank are a step of 16 sequences

A row is a stream of tokens. The number of rows is fixed when a run starts, even if its global batch
changes. Every token of a row is in exactly one window; a long document continues in the next one.
Window n of a run is the next one of row n modulo `rows`. A step takes as many consecutive windows
as it has sequences, and rank r gets the windows n with n = r modulo dp_degree:

    windows of two steps   0 1 2 3 4 5 | 6 7 8 9       rows = 8, dp_degree = 2, batch_size = 1; first 6 sequences, then 4
    their rows             0 1 2 3 4 5 | 6 7 0 1
    rank 0                 0   2   4   | 6   8         so rank 0 reads only rows 0, 2, 4, 6

So the samples of a step do not depend on the layout: another dp_degree, number of loader processes
or split into microbatches gives the same global batch. Another global batch size loses no window
and repeats none. If dp_degree does not divide `rows`, ranks share rows, and each of them reads
these rows completely. The state is the number of windows that the run has taken and, for each row,
the ordinal of its current document and the number of that document's tokens already used.

With several sources, a row has such a stream for each, and each window comes from one source. The
number of the window decides which one: so shares count tokens, need no state, and may change when a
run is resumed.
"""

import bisect
import errno
import hashlib
import itertools
import math
import os
import shutil
import signal
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy, SkippedDocuments
from titan_lite.data.documents import Source, Split, build_source
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import logger


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of one rank, on the host."""

    input: torch.Tensor  # (batch_size, seq_len) int64
    label: torch.Tensor  # (batch_size, seq_len) int64: of each token the next one
    sources: list[int]  # of each sequence the index of its source in data.sources


Place = tuple[
    int, int
]  # position of a row in a source: (ordinal of its current document, tokens of it already used)
Places = dict[tuple[int, int], Place]  # by (row, source)
# (number, source, tokens, place after them). Tokens are int32 as bytes, which pass through a pipe
# faster than a tensor through shared memory; empty if the window belongs to another rank.
Window = tuple[int, int, bytes, Place]
GOLDEN = (
    0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples modulo 2**64 are spread most evenly
)
USELESS = 1000  # this many consecutive documents without a token, over two epochs, are an error


class _PackedRows(IterableDataset):
    """The endless windows of some rows, in the order of their numbers; with n loader processes each
    has every n-th row.

    Yields (about batch_size windows, documents skipped since the last yield). After an error in the
    data, the last item has the error in place of windows.
    """

    def __init__(
        self,
        data: Data,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
    ):
        self.data, self.sources, self.tokenizer = data, sources, tokenizer
        self.batch_size, self.seq_len = batch_size, seq_len
        self.shares = list(itertools.accumulate(share for share, _ in data.mixture()))
        self.phase = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")

    def begin(
        self, own: range, rows: int, windows: int, places: Places, rank: int, ranks: int
    ) -> None:
        """Start with the rows `own` of all `rows`, at these places, after `windows` windows of the
        run.
        """
        self.own, self.rows, self.windows, self.places, self.rank, self.ranks = (
            own,
            rows,
            windows,
            places,
            rank,
            ranks,
        )

    def __iter__(self) -> Iterator[tuple[list[Window] | ConfigError, SkippedDocuments]]:
        if worker := get_worker_info():
            self.own = self.own[worker.id :: worker.num_workers]
        self.places = dict(self.places)  # a second iteration begins at the same places
        self.skipped, self.policy = SkippedDocuments(), BadDocumentPolicy(self.data)
        self.documents: dict[int, Iterator[tuple[int, Any]]] = {}  # by source
        # by (row, source): documents read while searching for those of another row, and the tokens
        # of the current document
        self.pending: dict[Any, deque[tuple[int, Any]]] = defaultdict(deque)
        self.current: dict[Any, np.ndarray] = {}
        # by source: ordinal of the first of the latest consecutive documents without a token, and
        # their number
        self.useless: dict[int, tuple[int, int]] = {}
        first = sorted(self.windows + (row - self.windows) % self.rows for row in self.own)
        numbers = (number + more for more in itertools.count(0, self.rows) for number in first)
        try:
            while True:
                # The same number from every process, since all have the same number of rows: no
                # process gets ahead.
                windows = [
                    self._window(number)
                    for number in itertools.islice(numbers, min(self.batch_size, len(first)))
                ]
                yield windows, self.skipped
                self.skipped = SkippedDocuments()
        except ConfigError as error:
            # yielded, since a raised error would arrive wrapped in the worker's traceback
            yield error, self.skipped

    def _source_of(self, number: int) -> int:
        """Return the source of a window.

        Of the first n windows (n up to a million) each source has its share within five.
        """
        point = (number * GOLDEN + self.phase) % 2**64 / 2**64
        return min(bisect.bisect_right(self.shares, point), len(self.sources) - 1)

    def _window(self, number: int) -> Window:
        """Return the next window of a row: seq_len + 1 tokens of one source."""
        row, source, filled, size = number % self.rows, self._source_of(number), 0, self.seq_len + 1
        ordinal, used = self.places[row, source]
        window = np.empty(size, dtype=np.int32)
        while filled < size:
            tokens = self.current.get((row, source))
            if tokens is None:
                ordinal, tokens = self._next_document(row, source, ordinal, used)
                self.current[row, source] = tokens
            part = tokens[used : used + size - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            used += len(part)
            if used == len(tokens):
                del self.current[row, source]
                ordinal, used = ordinal + 1, 0
        self.places[row, source] = ordinal, used
        return (
            number,
            source,
            window.tobytes() if number % self.ranks == self.rank else b"",
            (ordinal, used),
        )

    def _next_document(self, row: int, source: int, at: int, used: int) -> tuple[int, np.ndarray]:
        """Return (ordinal, tokens) of the row's next document with tokens, from ordinal `at` on; if
        `used`, of document `at`.
        """
        if source not in self.documents:
            self.documents[source] = self._documents(source)
        pending = self.pending[row, source]
        while True:
            while not pending:
                ordinal, document = next(self.documents[source])
                self.pending[ordinal % self.rows, source].append((ordinal, document))
            ordinal, document = pending.popleft()
            tokens = self._tokens(document, 0 if used else self.data.min_document_tokens)
            if used and (ordinal != at or tokens is None or used >= len(tokens)):
                there = (
                    f"has {len(tokens)}" if ordinal == at and tokens is not None else "is not there"
                )
                raise ConfigError(
                    f"the loader's state is {used} tokens into document {at}, which {there}:"
                    " documents, [data], model.tokenizer_path or debug.seed changed since; use"
                    " those of the saved run"
                )
            if tokens is not None:
                self.useless.pop(source, None)
                return ordinal, tokens
            first, count = self.useless.get(source, (ordinal, 0))
            self.useless[source] = first, count + 1
            epoch = self.sources[source].epoch
            if count >= USELESS and epoch(ordinal) >= epoch(first) + 2:
                few = self.data.min_document_tokens
                raise ConfigError(
                    f"source {source + 1}: {count} consecutive documents, over two epochs, are bad"
                    + (f" or shorter than data.min_document_tokens = {few}" if few else "")
                    + (f", such as {self.policy.last}" if self.policy.last else "")
                    + f"; use {'a smaller value or ' if few else ''}other documents"
                )

    def _documents(self, source: int) -> Iterator[tuple[int, Any]]:
        """Yield this worker's documents of a source, from each row's current position."""
        rows, begins = self.rows, {row: self.places[row, source][0] for row in self.own}
        first = min(begins.values())
        return self.sources[source].documents(
            first, lambda at: (begin := begins.get(at % rows)) is not None and at >= begin
        )

    def _tokens(self, document: str | np.ndarray | BadDocument, least: int) -> np.ndarray | None:
        """Return the tokens of a text or of a prepared document, or None for a document that is bad
        or shorter than `least`.
        """
        if isinstance(document, BadDocument):
            self.policy.skip(document)
            self.skipped.bad.append(document)
            return None
        tokens = self.tokenizer.encode_document(document) if isinstance(document, str) else document
        if len(tokens) - 2 < least:
            self.skipped.short += 1
            return None
        return tokens


class LoaderError(RuntimeError):
    """Loader processes cannot be started, or have ended; the message says why and what to use."""


STOPPING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}


@contextmanager
def _blocking_signals() -> Iterator[None]:
    """Return a context in which new processes, and the first threads of their libraries, block the
    signals of STOPPING.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, STOPPING if hasattr(signal, "sigtimedwait") else ()
    )  # not on macOS
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outlive_signals(worker: int) -> None:
    """Run in a loader process: ignore stop signals that all processes get, since the training
    process still needs batches.

    A thread waits for SIGTERM from the training process, since Python's handlers do not know the
    sender. It also waits for the end of the training process, after which this process would
    otherwise block for ever.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            if not hasattr(signal, "sigtimedwait"):  # macOS
                time.sleep(1)
            elif (received := signal.sigtimedwait(STOPPING, 1)) and received.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class Loader:
    """An endless iterator over Batches, with `state_dict`.

    It reads ahead in `data.num_workers` processes of torchdata's StatefulDataLoader, or in the
    largest number below that divides its rows. They start at the first batch, run torch on one
    thread, and end with the iteration or with their parent.

    The state is kept by row. That of StatefulDataLoader is kept by process: only the same number of
    processes could load it, and it counts windows received, not batches returned.
    """

    def __init__(self, dataset: _PackedRows, rows: int, dp_rank: int, dp_degree: int):
        self._dataset, self._rank, self._ranks, self._sources = (
            dataset,
            dp_rank,
            dp_degree,
            range(len(dataset.sources)),
        )
        self._skipped = SkippedDocuments()
        self._begin(rows, 0)
        self._places: Places = {
            (row, source): (row, 0) for row in self._own for source in self._sources
        }

    def _begin(self, rows: int, windows: int) -> None:
        """Start after the run has taken `windows` windows of `rows` rows."""
        self._rows, self._windows = rows, windows
        self._apart = math.gcd(rows, self._ranks)  # number of disjoint sets of rows
        self._own = range(self._rank % self._apart, rows, self._apart)
        self._ready: dict[int, tuple[np.ndarray, int, Place]] = {}  # by number
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        batch = self.peek()
        taken = [(number, *self._ready.pop(number)) for number in self._upcoming()]
        self._places |= {(number % self._rows, source): place for number, _, source, place in taken}
        self._windows += self._dataset.batch_size * self._ranks
        return batch

    def peek(self) -> Batch:
        """Return the batch that `next` will return."""
        numbers = self._upcoming()
        while not all(number in self._ready for number in numbers):
            self._receive()
        own = [self._ready[number] for number in numbers if self._is_own(number)]
        windows = np.stack([tokens for tokens, _, _ in own])
        # numpy converts such small arrays in two thirds of torch's time
        input, label = (
            torch.from_numpy(part.astype(np.int64, order="C"))
            for part in (windows[:, :-1], windows[:, 1:])
        )
        if torch.cuda.is_available():
            input, label = input.pin_memory(), label.pin_memory()
        return Batch(input, label, [source for _, source, _ in own])

    def _upcoming(self) -> range:
        """Return the numbers of the windows from this rank's rows in the next microbatch of all
        ranks.
        """
        first = self._windows + (self._rank - self._windows) % self._apart
        return range(first, self._windows + self._dataset.batch_size * self._ranks, self._apart)

    def _is_own(self, number: int) -> bool:
        """Return False if the window belongs to another rank that shares rows with this one."""
        return number % self._ranks == self._rank

    def _receive(self) -> None:
        if self._iterator is None:
            try:
                self._iterator = self._start_processes()
            except OSError as error:
                # the destructor of the incomplete iterator would print a traceback (torchdata 0.11)
                _StatefulMultiProcessingDataLoaderIter._shutdown = True
                raise LoaderError(_not_started(self._dataset.data.num_workers, error)) from error
        try:
            windows, skipped = next(self._iterator)
        except (RuntimeError, OSError) as error:
            ended = [
                (process.pid, process.exitcode)
                for process in getattr(self._iterator, "_workers", ())
                if process.exitcode
            ]
            if not ended:
                raise
            raise LoaderError(_ended(*ended[0])) from error
        if (
            self._rank < self._apart
        ):  # ranks that share rows skip the same documents; one of them counts
            self._skipped.short += skipped.short
        self._skipped.bad += skipped.bad
        if isinstance(windows, ConfigError):
            self._begin(self._rows, self._windows)  # drops the processes
            raise windows
        for number, source, tokens, place in windows:
            self._ready[number] = np.frombuffer(tokens, dtype=np.int32), source, place

    def _start_processes(self) -> Iterator[Any]:
        asked = self._dataset.data.num_workers
        workers = max((n for n in range(1, asked + 1) if len(self._own) % n == 0), default=0)
        if workers < asked:
            logger.info(
                f"data.num_workers = {asked}: a rank's {len(self._own)} streams of sequences are"
                f" divided among {workers}"
            )
        self._dataset.begin(
            self._own, self._rows, self._windows, self._places, self._rank, self._ranks
        )
        # torch's handler would raise anywhere in the training process; `next` detects the end of a
        # worker, too
        on_child = signal.getsignal(signal.SIGCHLD)
        with _blocking_signals(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "'set_vital' is deprecated"
            )  # torchdata 0.11 with torch 2.13
            loader = StatefulDataLoader(
                self._dataset,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=self._dataset.data.prefetch if workers else None,
                # the default would draw from the generator of the training process
                generator=torch.Generator(),
                worker_init_fn=_outlive_signals,
                snapshot_every_n_steps=None,  # never; a snapshot takes 0.1 ms
            )
            iterator = iter(loader)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, on_child)
        return iterator

    def pop_skipped(self) -> SkippedDocuments:
        """Return the documents skipped since the last call, including those read ahead."""
        taken, self._skipped = self._skipped, SkippedDocuments()
        return taken

    def source_lines(self) -> list[str]:
        """Describe each source: its share of a mixture, and its size as far as it is known."""
        data, sources = self._dataset.data, self._dataset.sources
        if not data.sources:
            return [
                f"data: {data.dataset}{f' ({data.path})' if data.path else ''}, {sources[0].amount}"
            ]
        parts = zip(data.source_names(), data.mixture(), sources, strict=True)
        return [
            f"source {name}: {100 * share:.3g}% of the tokens; {source.amount}"
            for name, (share, _), source in parts
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch of `next`: {"windows": 40, "rows": {"3": [5,
        [17, 120]]}, "of": 8}.

        windows: number taken by all ranks. rows: for each row of this rank, the windows taken, then
        (ordinal, tokens used) in each source. of: number of all rows. The state is small and has
        only JSON types. A checkpoint has one state, merged from those of all ranks
        (checkpoint/state.py), which any number of ranks can load.
        """
        rows = {}
        for row in self._own:
            places = [list(self._places[row, source]) for source in self._sources]
            rows[str(row)] = [len(range(row, self._windows, self._rows)), *places]
        return {"windows": self._windows, "rows": rows, "of": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, which may be of another dp_degree; rows of other ranks are
        ignored.

        checkpoint/resume.py refuses the state of other sources before this is called.
        """
        # earlier versions saved only the number of windows of each row
        self._begin(
            state["of"], state.get("windows", sum(given for given, *_ in state["rows"].values()))
        )
        self._places = {
            (row, source): (ordinal, used)
            for row in self._own
            for source, (ordinal, used) in zip(
                self._sources, state["rows"][str(row)][1:], strict=True
            )
        }


def _not_started(workers: int, error: OSError) -> str:
    """Return the message if the operating system refuses processes.

    Their queues need semaphores, which are files in /dev/shm.
    """
    why = error.strerror or str(error)
    with suppress(OSError):
        if error.errno == errno.ENOSPC:
            disk = shutil.disk_usage("/dev/shm")
            why += (
                f": /dev/shm, where their semaphores are, has {disk.free >> 20} of"
                f" {disk.total >> 20} MiB free"
            )
    fix = "free space there (in a container, use a larger --shm-size), or use data.num_workers = 0"
    return f"data.num_workers = {workers}: loader processes cannot be started: {why}; {fix}"


def _ended(pid: int, code: int) -> str:
    """Return the message about a loader process that has ended.

    code: its exit code, or minus the number of a signal.
    """
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    why = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
    fix = (
        "start again to resume; for less memory, use smaller data.num_workers and data.prefetch, or"
        " data.num_workers = 0"
    )
    return f"loader process {pid} {how}{why}; {fix}"


def build_loader(
    data: Data,
    tokenizer: Tokenizer,
    *,
    split: Split,
    streams: int,
    batch_size: int,
    seq_len: int,
    dp_rank: int,
    dp_degree: int,
    seed: int,
) -> Loader:
    """Return rank `dp_rank`'s loader over the windows of `streams` streams, `batch_size` at a time.

    Raises ConfigError if the documents cannot be read.
    """
    if split == "validation":
        # Validation is short and rare: a process or a filled shuffle buffer of a remote stream does
        # not pay.
        here = all(part.dataset in ("stdlib", "local", "prepared") for _, part in data.mixture())
        data = data.replace(num_workers=0, shuffle=data.shuffle and here)
    sources = [build_source(part, split=split, seed=seed) for _, part in data.mixture()]
    dataset = _PackedRows(
        data, sources, tokenizer, batch_size=batch_size, seq_len=seq_len, seed=seed
    )
    return Loader(dataset, streams, dp_rank, dp_degree)
