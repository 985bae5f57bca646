"""Documents become batches, the same ones on any number of ranks.

    1. documents      `Source.documents` (dataset.py) numbers them; row g reads those whose ordinal is g modulo `rows`
    2. tokens         `Tokenizer.encode_document` (tokenizer.py) puts BOS and EOS around them, unless prepare.py has
    3. packed rows    `_PackedRows`, in the loader processes, cuts each row's tokens into windows of seq_len + 1
    4. batches        `Loader`, in the training process, stacks batch_size windows to (input, label)

    loader = build_loader(data, tokenizer, split="train", rows=8, batch_size=2, seq_len=512, dp_rank=0, dp_degree=2, seed=0)
    input, label = next(loader)                      # (2, 512) each; four of these on each rank are a step of 16 sequences

A row is a stream of tokens; a run has as many as at its start, whatever its global batch becomes. Every token of a row is in
exactly one window, a long document goes on in the next one. Window n of a run is the next one of row n modulo `rows`, and a step
takes those that follow the windows of the step before, as many as it has sequences. Rank r has those that are r modulo dp_degree:

    windows of two steps   0 1 2 3 4 5 | 6 7 8 9       rows = 8, dp_degree = 2, batch_size = 1; first 6 sequences, then 4
    their rows             0 1 2 3 4 5 | 6 7 0 1
    rank 0                 0   2   4   | 6   8         and so it reads rows 0, 2, 4, 6 alone

So the samples of a step belong to the run, not to the rank: another dp_degree, another number of loader processes, or another
split into microbatches gives the same global batch; another global batch loses no window and repeats none. Where dp_degree does
not divide `rows`, ranks share rows: each of these reads them whole. The state is how many windows the run has taken and, for each
row, the ordinal of its current document and how many of that document's tokens are used.

With several sources a row is such a stream of each, and every window is of one of them. The window's number in the run decides
which: so shares hold in tokens, need no state, and may change when a run goes on.
"""

import bisect
import dataclasses
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
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

from titan_lite.config import ConfigError, Data
from titan_lite.data.bad_documents import BadDocument, BadDocumentPolicy, SkippedDocuments
from titan_lite.data.dataset import Source, Split, amount, build_source
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import logger

Batch = tuple[torch.Tensor, torch.Tensor]
Place = tuple[int, int]  # of a row in a source: ordinal of its current document, that document's tokens already used
Places = dict[tuple[int, int], Place]  # by (row, source)
# number, source, tokens, place after them; tokens are int32 as bytes, which a pipe takes faster than a tensor in shared memory;
# empty where the window is another rank's
Window = tuple[int, int, bytes, Place]
GOLDEN = 0x9E3779B97F4A7C15  # of 2**64 the golden ratio's part: multiples of it, modulo 2**64, are spread as evenly as can be
USELESS = 1000  # documents in a row, from two epochs or more, that give no token


class _PackedRows(IterableDataset):
    """The windows of some rows without end, in the order of their numbers; of several loader processes each has every n-th row.

    Gives (about batch_size windows, documents skipped since the last ones); last of all, where it cannot go on, an error in place
    of windows.
    """

    def __init__(self, data: Data, sources: Sequence[Source], tokenizer: Tokenizer, *, batch_size: int, seq_len: int, seed: int):
        self.data, self.sources, self.tokenizer = data, sources, tokenizer
        self.batch_size, self.seq_len = batch_size, seq_len
        self.shares = list(itertools.accumulate(share for share, _ in data.mixture()))
        self.phase = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")

    def begin(self, own: range, rows: int, windows: int, places: Places, rank: int, ranks: int) -> None:
        """Set the place to begin at: the rows `own` of `rows` in all, at these places, after so many windows of the run."""
        self.own, self.rows, self.windows, self.places, self.rank, self.ranks = own, rows, windows, places, rank, ranks

    def __iter__(self) -> Iterator[tuple[list[Window] | ConfigError, SkippedDocuments]]:
        if worker := get_worker_info():
            self.own = self.own[worker.id :: worker.num_workers]
        self.places = dict(self.places)  # iterated again it begins again
        self.skipped, self.policy = SkippedDocuments(), BadDocumentPolicy(self.data)
        self.documents: dict[int, Iterator[tuple[int, Any]]] = {}  # by source
        # by (row, source): documents read while looking for another row's, and the tokens of the current document
        self.pending: dict[Any, deque[tuple[int, Any]]] = defaultdict(deque)
        self.current: dict[Any, np.ndarray] = {}
        # by source: the first of the last documents that gave no token, and how many they are
        self.useless: dict[int, tuple[int, int]] = {}
        first = sorted(self.windows + (row - self.windows) % self.rows for row in self.own)
        numbers = (number + more for more in itertools.count(0, self.rows) for number in first)
        try:
            while True:
                # As many from every process, since all have as many rows: so none gets ahead.
                yield (
                    [self._window(number) for number in itertools.islice(numbers, min(self.batch_size, len(first)))],
                    self.skipped,
                )
                self.skipped = SkippedDocuments()
        except ConfigError as error:
            # across the process border as itself; raised, it would arrive wrapped in the worker's traceback
            yield error, self.skipped

    def _source_of(self, number: int) -> int:
        """The source of a window: of the run's first n each has its share, but for five at most (of a million)."""
        point = (number * GOLDEN + self.phase) % 2**64 / 2**64
        return min(bisect.bisect_right(self.shares, point), len(self.sources) - 1)

    def _window(self, number: int) -> Window:
        """The next seq_len + 1 tokens of a row, all of one source."""
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
        return number, source, window.tobytes() if number % self.ranks == self.rank else b"", (ordinal, used)

    def _next_document(self, row: int, source: int, at: int, used: int) -> tuple[int, np.ndarray]:
        """(ordinal, tokens) of the row's first document from ordinal `at` on that has any; of that very one, if it is in use."""
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
                there = f"has {len(tokens)}" if ordinal == at and tokens is not None else "is not there"
                raise ConfigError(
                    f"the loader's state is {used} tokens into document {at}, which {there}: documents, "
                    "[data], model.tokenizer_path or debug.seed changed since; with those of that run it would work"
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
                    f"source {source + 1}: {count} documents in a row, of two epochs, are bad"
                    + (f" or shorter than data.min_document_tokens = {few}" if few else "")
                    + (f", such as {self.policy.last}" if self.policy.last else "")
                    + (f"; {'less, or ' if few else ''}other documents would work")
                )

    def _documents(self, source: int) -> Iterator[tuple[int, Any]]:
        """The documents of a source for this process's rows, from where these stand now."""
        rows, begins = self.rows, {row: self.places[row, source][0] for row in self.own}
        first = min(begins.values())
        return self.sources[source].documents(first, lambda at: (begin := begins.get(at % rows)) is not None and at >= begin)

    def _tokens(self, document: str | np.ndarray | BadDocument, least: int) -> np.ndarray | None:
        """The tokens of a text or of a document tokenized before; None where it is skipped, as bad or shorter than `least`."""
        if isinstance(document, BadDocument):
            self.policy.skip(document)
            self.skipped.bad.append(document)
            return None
        tokens = self.tokenizer.encode_document(document) if isinstance(document, str) else document
        if len(tokens) - 2 < least:
            self.skipped.short += 1
            return None
        return tokens


def document_begins(tokens: torch.Tensor, bos_id: int) -> torch.Tensor:
    """(B, T) tokens -> (B, T) int64: the position in its row at which each token's document begins; 0 where that was before."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens == bos_id, positions, 0).cummax(dim=1).values


def document_counts(tokens: torch.Tensor, bos_id: int) -> torch.Tensor:
    """(B, T) tokens -> (B, 2) int64: how many documents a row has, cut ones too, and how many tokens of the longest."""
    begins, positions = document_begins(tokens, bos_id), torch.arange(tokens.shape[1], device=tokens.device)
    return torch.stack(((begins == positions).sum(dim=1), (positions - begins).amax(dim=1) + 1), dim=1)


class LoaderError(RuntimeError):
    """Processes of a loader that cannot be started, or have ended; the message says why and what would work."""


STOPPING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}


@contextmanager
def _blocking_signals() -> Iterator[None]:
    """Within: a process that is started, and whatever threads its libraries start at once, let the signals of STOPPING wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING if hasattr(signal, "sigtimedwait") else ())  # not on macOS
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outlive_signals(worker: int) -> None:
    """In the loader process: a signal to stop that all processes get is for the training process, which still wants batches.

    SIGTERM ends this one where the training process sent it, which Python's handlers are not told; so a thread waits for it. And
    for the end of the training process, after which this one would try to hand over what it has read for ever.
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
    """An endless iterator over (input, label), int64 of (batch_size, seq_len) each, with `state_dict`.

    Reads ahead in `data.num_workers` processes of torchdata's StatefulDataLoader, or as many as its rows can be divided among;
    they start at the first batch, run torch on one thread, and end with the iteration or with their parent, however that ends.

    The state is of rows and not that of StatefulDataLoader, which is of its processes: only as many of them could load it, and
    it stands after the windows received, not after the batches given, of which one may have windows of several processes.
    """

    def __init__(self, dataset: _PackedRows, rows: int, dp_rank: int, dp_degree: int):
        self._dataset, self._rank, self._ranks, self._sources = dataset, dp_rank, dp_degree, range(len(dataset.sources))
        self._skipped = SkippedDocuments()
        self._begin(rows, 0)
        self._places: Places = {(row, source): (row, 0) for row in self._own for source in self._sources}

    def _begin(self, rows: int, windows: int) -> None:
        """From there on, where the run has taken so many windows of `rows` rows."""
        self._rows, self._windows = rows, windows
        self._apart = math.gcd(rows, self._ranks)  # ranks that have rows of their own
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
        self.sources = [source for number, _, source, _ in taken if self._is_own(number)]
        return batch

    def peek(self) -> Batch:
        """The batch that `next` will give."""
        numbers = self._upcoming()
        while not all(number in self._ready for number in numbers):
            self._receive()
        windows = np.stack([self._ready[number][0] for number in numbers if self._is_own(number)])
        # by numpy, whose conversions of so little take two thirds of the time of torch's
        input, label = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (windows[:, :-1], windows[:, 1:]))
        return (input.pin_memory(), label.pin_memory()) if torch.cuda.is_available() else (input, label)

    def _upcoming(self) -> range:
        """The windows of this rank's rows that all ranks together take in the next microbatch."""
        first = self._windows + (self._rank - self._windows) % self._apart
        return range(first, self._windows + self._dataset.batch_size * self._ranks, self._apart)

    def _is_own(self, number: int) -> bool:
        """False for the window of a rank with which this one shares rows."""
        return number % self._ranks == self._rank

    def _receive(self) -> None:
        if self._iterator is None:
            try:
                self._iterator = self._start_processes()
            except OSError as error:
                # of the half made one, whose end would print a traceback (torchdata 0.11)
                _StatefulMultiProcessingDataLoaderIter._shutdown = True
                raise LoaderError(_not_started(self._dataset.data.num_workers, error)) from error
        try:
            windows, skipped = next(self._iterator)
        except (RuntimeError, OSError) as error:
            ended = [(process.pid, process.exitcode) for process in getattr(self._iterator, "_workers", ()) if process.exitcode]
            if not ended:
                raise
            raise LoaderError(_ended(*ended[0])) from error
        if self._rank < self._apart:  # of ranks that share rows, which skip the same, one counts
            self._skipped.short += skipped.short
        self._skipped.bad += skipped.bad
        if isinstance(windows, ConfigError):
            self._begin(self._rows, self._windows)  # without its processes
            raise windows
        for number, source, tokens, place in windows:
            self._ready[number] = np.frombuffer(tokens, dtype=np.int32), source, place

    def _start_processes(self) -> Iterator[Any]:
        asked = self._dataset.data.num_workers
        workers = max((n for n in range(1, asked + 1) if len(self._own) % n == 0), default=0)
        if workers < asked:
            logger.info(f"data.num_workers = {asked}: a rank's {len(self._own)} streams of sequences are divided among {workers}")
        self._dataset.begin(self._own, self._rows, self._windows, self._places, self._rank, self._ranks)
        # torch's handler raises in the middle of whatever the training process does; `next` finds out by itself
        on_child = signal.getsignal(signal.SIGCHLD)
        with _blocking_signals(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            loader = StatefulDataLoader(
                self._dataset,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=self._dataset.data.prefetch if workers else None,
                generator=torch.Generator(),  # torch's own would draw from that of the training process
                worker_init_fn=_outlive_signals,
                snapshot_every_n_steps=None,  # never: each would cost a tenth of a millisecond
            )
            iterator = iter(loader)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, on_child)
        return iterator

    def take_skipped(self) -> SkippedDocuments:
        """The documents skipped since this was last called, those read ahead included."""
        taken, self._skipped = self._skipped, SkippedDocuments()
        return taken

    def source_lines(self) -> list[str]:
        """Each source of a mixture, its share and its documents, in words; none where there is one alone."""
        data, sources = self._dataset.data, self._dataset.sources
        told = zip(data.source_names(), data.mixture(), sources, strict=False)
        return [f"source {name}: {100 * share:.3g}% of the tokens; {amount(source)}" for name, (share, _), source in told]

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that `next` gave: {"windows": 40, "rows": {"3": [5, [17, 120]]}, "of": 8}.

        windows: taken by all ranks. rows: of this rank's, the windows taken, then ordinal and tokens used in each source; of: how
        many there are in all. Small and made of JSON's types. `merge_states` of all ranks is a state that another number of ranks
        can load.
        """
        rows = {}
        for row in self._own:
            places = [list(self._places[row, source]) for source in self._sources]
            rows[str(row)] = [len(range(row, self._windows, self._rows)), *places]
        return {"windows": self._windows, "rows": rows, "of": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with its rows, by this run or by one of another dp_degree; others' rows are ignored.

        A state of other sources does not get here: checkpoint/resume.py refuses such a step.
        """
        # earlier versions said how many windows each row had given, and no more: the states of whole steps
        self._begin(state["of"], state.get("windows", sum(given for given, *_ in state["rows"].values())))
        self._places = {
            (row, source): (ordinal, used)
            for row in self._own
            for source, (ordinal, used) in zip(self._sources, state["rows"][str(row)][1:], strict=True)
        }


def _not_started(workers: int, error: OSError) -> str:
    """One line about processes that the operating system refuses. Their queues need semaphores, which are files in /dev/shm."""
    why = error.strerror or str(error)
    with suppress(OSError):
        if error.errno == errno.ENOSPC:
            disk = shutil.disk_usage("/dev/shm")
            why += f": /dev/shm, where their semaphores are, has {disk.free >> 20} of {disk.total >> 20} MiB free"
    works = "what fills it can be removed, in a container --shm-size raises it; data.num_workers = 0 works without"
    return f"data.num_workers = {workers}: loader processes cannot be started: {why}; {works}"


def _ended(pid: int, code: int) -> str:
    """One line about a loader process that is gone, with the negative number of a signal or the exit code."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    why = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
    works = "another start goes on; smaller data.num_workers and data.prefetch need less memory, data.num_workers = 0 no process"
    return f"loader process {pid} {how}{why}; {works}"


def build_loader(
    data: Data,
    tokenizer: Tokenizer,
    *,
    split: Split,
    rows: int,
    batch_size: int,
    seq_len: int,
    dp_rank: int,
    dp_degree: int,
    seed: int,
) -> Loader:
    """Rank `dp_rank`'s share of the windows of `rows` rows, `batch_size` of them at a time.

    Raises ConfigError: the documents cannot be read.
    """
    if split == "validation":
        # Short and seldom: not worth a process, nor filling the shuffle buffer of a stream from afar.
        here = all(part.dataset in ("stdlib", "local", "prepared") for _, part in data.mixture())
        data = dataclasses.replace(data, num_workers=0, shuffle=data.shuffle and here)
    sources = [build_source(part, split=split, seed=seed) for _, part in data.mixture()]
    dataset = _PackedRows(data, sources, tokenizer, batch_size=batch_size, seq_len=seq_len, seed=seed)
    return Loader(dataset, rows, dp_rank, dp_degree)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of several ranks as one, which `Loader.load_state_dict` of any rank accepts."""
    return {**states[0], "rows": {row: place for state in states for row, place in state["rows"].items()}}
