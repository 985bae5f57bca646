"""Documents become batches, the same ones on any number of ranks.

    1. documents      `Source.documents` (dataset.py) numbers them; row g reads those whose ordinal is g modulo `rows`
    2. tokens         `Tokenizer.encode_document` (tokenizer.py) puts BOS and EOS around them, unless prepare.py has
    3. packed rows    `_PackedRows`, in the loader processes, cuts each row's tokens into windows of seq_len + 1
    4. batches        `Loader`, in the training process, stacks the windows of batch_size rows to (input, label)

    loader = build_loader(data, tokenizer, split="train", rows=8, batch_size=2, seq_len=512, dp_rank=0, dp_degree=2, seed=0)
    input, label = next(loader)                      # (2, 512) each; two of these are this rank's share of a step

The global batch has `rows` rows. Every token of a row is in exactly one window, a long document goes on in the next one. Rank r
owns a contiguous share of the rows and reads only these:

    rows of one step     0 1 2 3 | 4 5 6 7          dp_degree = 2, batch_size = 2
    microbatches         [0 1][2 3] rank 0   [4 5][6 7] rank 1

So the samples of step s belong to the run, not to the rank: another dp_degree, another number of loader processes, or another
split into microbatches gives the same global batch. The state of a row is three numbers: how many windows it has given, the
ordinal of its current document, and how many of that document's tokens are used.

With several sources a row is such a stream of each, and every window is of one of them. The window's number in the run decides
which: so shares hold in tokens, need no state, and may change when a run goes on.
"""

import bisect
import dataclasses
import errno
import hashlib
import itertools
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
from titan_lite.data.dataset import Source, Split, build_source
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import logger

Batch = tuple[torch.Tensor, torch.Tensor]
Place = tuple[int, int]  # of a row in a source: ordinal of its current document, that document's tokens already used
Places = dict[tuple[int, int], Place]  # by (row, source)
# row, source, tokens, place after them; tokens are int32 as bytes, which a pipe takes faster than a tensor in shared memory
Window = tuple[int, int, bytes, Place]
GOLDEN = 0x9E3779B97F4A7C15  # of 2**64 the golden ratio's part: multiples of it, modulo 2**64, are spread as evenly as can be
USELESS = 1000  # documents in a row, from two epochs or more, that give no token


class _PackedRows(IterableDataset):
    """The windows of one rank's rows without end; of several loader processes each has every n-th row.

    Gives (windows of batch_size rows, documents skipped since the last ones); last of all, where it cannot go on, an error in
    place of windows.
    """

    def __init__(
        self, data: Data, sources: Sequence[Source], tokenizer: Tokenizer, *, rows: int, batch_size: int, seq_len: int, seed: int
    ):
        self.data, self.sources, self.tokenizer = data, sources, tokenizer
        self.rows, self.batch_size, self.seq_len = rows, batch_size, seq_len
        self.shares = list(itertools.accumulate(share for share, _ in data.mixture()))
        self.phase = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")
        self.given: dict[int, int] = {}  # windows, by row
        self.places: Places = {}

    def __iter__(self) -> Iterator[tuple[list[Window] | ConfigError, SkippedDocuments]]:
        worker = get_worker_info()
        own = sorted(self.given)[worker.id :: worker.num_workers] if worker else sorted(self.given)
        self.own = set(own)
        self.given, self.places = dict(self.given), dict(self.places)  # iterated again it begins again
        self.skipped, self.policy = SkippedDocuments(), BadDocumentPolicy(self.data)
        self.documents: dict[int, Iterator[tuple[int, Any]]] = {}  # by source
        # by (row, source): documents read while looking for another row's, and the tokens of the current document
        self.pending: dict[Any, deque[tuple[int, Any]]] = defaultdict(deque)
        self.current: dict[Any, np.ndarray] = {}
        # by source: the first of the last documents that gave no token, and how many they are
        self.useless: dict[int, tuple[int, int]] = {}
        try:
            while True:
                # The rows that are furthest behind: after a whole step, all of them in order. As many from every process, since
                # all have as many: so none gets ahead.
                turn = sorted(own, key=lambda row: (self.given[row], row))[: self.batch_size]
                yield [self._next_window(row) for row in turn], self.skipped
                self.skipped = SkippedDocuments()
        except ConfigError as error:
            # across the process border as itself; raised, it would arrive wrapped in the worker's traceback
            yield error, self.skipped

    def _source_of(self, row: int) -> int:
        """The source of a row's next window: of the run's first n each has its share, but for five at most (of a million)."""
        number = self.given[row] * self.rows + row
        point = (number * GOLDEN + self.phase) % 2**64 / 2**64
        return min(bisect.bisect_right(self.shares, point), len(self.sources) - 1)

    def _next_window(self, row: int) -> Window:
        """The next seq_len + 1 tokens of a row, all of one source."""
        source, filled, size = self._source_of(row), 0, self.seq_len + 1
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
        self.given[row] += 1
        return row, source, window.tobytes(), (ordinal, used)

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

    def __init__(self, dataset: _PackedRows, own: range):
        self._dataset, self._own, self._sources = dataset, own, range(len(dataset.sources))
        asked = dataset.data.num_workers
        self._workers = max((n for n in range(1, asked + 1) if len(own) % n == 0), default=0)
        if self._workers < asked:
            logger.info(f"data.num_workers = {asked}: a rank's {len(own)} sequences a step are divided among {self._workers}")
        self._skipped = SkippedDocuments()
        self._start(dict.fromkeys(own, 0), {(row, source): (row, 0) for row in own for source in self._sources})

    def _start(self, given: dict[int, int], places: Places) -> None:
        """From there on, where each row has given so many windows."""
        self._given, self._places = given, places
        self._ready: dict[int, deque[tuple[np.ndarray, int, Place]]] = {row: deque() for row in self._own}
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        turn, batch = self._next_turn()
        for row in turn:
            _, source, place = self._ready[row].popleft()
            self._places[row, source] = place
            self._given[row] += 1
        return batch

    def peek(self) -> Batch:
        """The batch that `next` will give."""
        return self._next_turn()[1]

    def _next_turn(self) -> tuple[list[int], Batch]:
        """The rows of the next microbatch, and it."""
        turn = sorted(self._own, key=lambda row: (self._given[row], row))[: self._dataset.batch_size]
        while not all(self._ready[row] for row in turn):
            self._receive()
        windows = np.stack([self._ready[row][0][0] for row in turn])
        # by numpy, whose conversions of so little take two thirds of the time of torch's
        input, label = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (windows[:, :-1], windows[:, 1:]))
        return turn, (input.pin_memory(), label.pin_memory()) if torch.cuda.is_available() else (input, label)

    def _receive(self) -> None:
        if self._iterator is None:
            try:
                self._iterator = self._start_processes()
            except OSError as error:
                # of the half made one, whose end would print a traceback (torchdata 0.11)
                _StatefulMultiProcessingDataLoaderIter._shutdown = True
                raise LoaderError(_not_started(self._workers, error)) from error
        try:
            windows, skipped = next(self._iterator)
        except (RuntimeError, OSError) as error:
            ended = [(process.pid, process.exitcode) for process in getattr(self._iterator, "_workers", ()) if process.exitcode]
            if not ended:
                raise
            raise LoaderError(_ended(*ended[0])) from error
        self._skipped.bad += skipped.bad
        self._skipped.short += skipped.short
        if isinstance(windows, ConfigError):
            self._start(self._given, self._places)  # without its processes
            raise windows
        for row, source, tokens, (ordinal, used) in windows:
            self._ready[row].append((np.frombuffer(tokens, dtype=np.int32), source, (ordinal, used)))

    def _start_processes(self) -> Iterator[Any]:
        self._dataset.given, self._dataset.places = self._given, self._places
        # torch's handler raises in the middle of whatever the training process does; `next` finds out by itself
        on_child = signal.getsignal(signal.SIGCHLD)
        with _blocking_signals(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            loader = StatefulDataLoader(
                self._dataset,
                batch_size=None,
                num_workers=self._workers,
                prefetch_factor=self._dataset.data.prefetch if self._workers else None,
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

    def state_dict(self) -> dict[str, Any]:
        """The places of this rank's rows after the last batch that `next` gave: {"rows": {"3": [5, [17, 120]]}, "of": 8}.

        Windows given, then ordinal and tokens used in each source. Small and made of JSON's types. `merge_states` of all ranks is
        a state that another number of ranks can load.
        """
        places = {row: [list(self._places[row, source]) for source in self._sources] for row in self._own}
        return {"rows": {str(row): [self._given[row], *places[row]] for row in self._own}, "of": self._dataset.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by this run or by one of another dp_degree; rows of other ranks are ignored.

        A state of another number of rows or of other sources does not get here: checkpoint/resume.py refuses such a step.
        """
        assert state["of"] == self._dataset.rows, (state["of"], self._dataset.rows)
        given: dict[int, int] = {}
        places: Places = {}
        for row in self._own:
            given[row], *now = state["rows"][str(row)]
            places |= {(row, source): (ordinal, used) for source, (ordinal, used) in zip(self._sources, now, strict=True)}
        self._start(given, places)


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
    """Rank `dp_rank`'s share of global batches of `rows` sequences, `batch_size` of them at a time.

    rows: a multiple of batch_size x dp_degree. Raises ConfigError: the documents cannot be read.
    """
    if split == "validation":
        # Short and seldom: not worth a process, nor filling the shuffle buffer of a stream from afar.
        here = all(part.dataset in ("stdlib", "local", "prepared") for _, part in data.mixture())
        data = dataclasses.replace(data, num_workers=0, shuffle=data.shuffle and here)
    share = rows // dp_degree
    sources = [build_source(part, split=split, seed=seed) for _, part in data.mixture()]
    dataset = _PackedRows(data, sources, tokenizer, rows=rows, batch_size=batch_size, seq_len=seq_len, seed=seed)
    return Loader(dataset, own=range(dp_rank * share, (dp_rank + 1) * share))


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of several ranks as one, which `Loader.load_state_dict` of any rank accepts."""
    return {"rows": {row: place for state in states for row, place in state["rows"].items()}, "of": states[0]["of"]}
