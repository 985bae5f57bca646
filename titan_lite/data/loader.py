"""Documents -> packed windows of tokens -> microbatches, the same ones on any number of ranks.

    loader = build_loader(data, tokenizer, split="train", rows=8, batch_size=2, seq_len=512, dp_rank=0, dp_degree=2, seed=0)
    input, label = next(loader)                      # (2, 512) each; two of these are this rank's share of a step

The global batch has `rows` rows. Row g is an endless stream of tokens of its own: the documents whose ordinal is g modulo
`rows`, each with BOS and EOS, cut into windows of seq_len + 1. Every token is in exactly one window, a long document goes
on in the next one. Rank r owns a contiguous share of the rows and reads only these:

    rows of one step     0 1 2 3 | 4 5 6 7          dp_degree = 2, batch_size = 2
    microbatches         [0 1][2 3] rank 0   [4 5][6 7] rank 1

So the samples of step s belong to the run, not to the rank: another dp_degree, another number of loader processes, or another
split into microbatches gives the same global batch. All there is to save of a row is three numbers: how many windows it has
given, the ordinal of its current document, and how many of that document's tokens are used.

Where several sources are mixed, a row is such a stream of each, and every window is of one of them. Which one, follows from the
window's number in the run: so shares hold in tokens, need no state, and may change when a run goes on.
"""

import bisect
import dataclasses
import hashlib
import itertools
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from titan_lite.config import ConfigError, Data
from titan_lite.data.dataset import Source, Split, StdlibSource, build_source, refusal
from titan_lite.data.files import BadDocument
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import logger

Batch = tuple[torch.Tensor, torch.Tensor]
Place = tuple[int, int]  # of a row in a source: ordinal of its current document, that document's tokens already used
GOLDEN = 0x9E3779B97F4A7C15  # of 2**64 the golden ratio's part: multiples of it, modulo 2**64, are spread as evenly as can be
USELESS = 1000  # documents in a row, from two epochs or more, that give no token


@dataclass
class LeftOut:
    """Documents that a loader has skipped since it was last asked: bad ones, and how many were too short."""

    bad: list[dict[str, str]] = field(default_factory=list)
    short: int = 0


@dataclass
class _Windows:
    """What a loader process gives at once: of some of its rows one window each, (rows, seq_len + 1)."""

    rows: list[int]
    sources: list[int]
    tokens: bytes  # int32: through a pipe, which is several times as fast as a tensor in shared memory
    places: list[Place]  # where the rows then stand in these sources
    left_out: LeftOut

    def windows(self) -> np.ndarray:
        return np.frombuffer(self.tokens, dtype=np.int32).reshape(len(self.rows), -1)


@dataclass
class _Failed:
    """In place of windows, and the last that comes."""

    error: ConfigError
    left_out: LeftOut


class _PackedRows(IterableDataset):
    """The windows of one rank's rows without end; of several loader processes each has every n-th row."""

    def __init__(self, data: Data, sources: Sequence[Source], tokenizer: Tokenizer, rows: int, seq_len: int, seed: int):
        self.data, self.sources, self.tokenizer = data, sources, tokenizer
        self.rows, self.seq_len = rows, seq_len
        self.shares = list(itertools.accumulate(share for share, _ in data.mixture()))
        self.phase = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")
        self.at_once = 1
        self.places: dict[int, list[Place]] = {}  # by row
        self.given: dict[int, int] = {}  # windows, by row

    def __iter__(self) -> Iterator[_Windows | _Failed]:
        worker = get_worker_info()
        own = sorted(self.places)[worker.id :: worker.num_workers] if worker else sorted(self.places)
        self.own = set(own)
        self.places, self.given = dict(self.places), dict(self.given)  # iterated again it begins again
        self.left_out, self.known_bad = LeftOut(), set[tuple[str, str]]()
        self.last_bad: BadDocument | None = None
        self.documents: dict[int, Iterator[tuple[int, Any]]] = {}  # by source
        # by source and row: what was read while looking for another row's, and the tokens of the document that it is in
        self.pending: dict[Any, deque[tuple[int, Any]]] = defaultdict(deque)
        self.current: dict[Any, np.ndarray] = {}
        # by source: the first of the last documents that gave no token, and how many they are
        self.useless: dict[int, tuple[int, int]] = {}
        try:
            while True:
                # The rows that are furthest behind: after a whole step, all of them in order.
                turn = sorted(own, key=lambda row: (self.given[row], row))[: self.at_once]
                sources = [self._source_of(row) for row in turn]
                tokens = np.empty((len(turn), self.seq_len + 1), dtype=np.int32)
                for row, source, window in zip(turn, sources, tokens, strict=True):
                    self._fill(window, row, source)
                places = [self.places[row][source] for row, source in zip(turn, sources, strict=True)]
                yield _Windows(turn, sources, tokens.tobytes(), places, self.left_out)
                self.left_out = LeftOut()
        except ConfigError as error:
            # across the process border as itself; raised, it would arrive wrapped in the worker's traceback
            yield _Failed(error, self.left_out)

    def _source_of(self, row: int) -> int:
        """The source of a row's next window: of the run's first n each has its share, but for five at most (of a million)."""
        number = self.given[row] * self.rows + row
        point = (number * GOLDEN + self.phase) % 2**64 / 2**64
        return min(bisect.bisect_right(self.shares, point), len(self.sources) - 1)

    def _fill(self, window: np.ndarray, row: int, source: int) -> None:
        """The next seq_len + 1 tokens of a row."""
        ordinal, used = self.places[row][source]
        filled, size = 0, len(window)
        while filled < size:
            tokens = self.current.get((source, row))
            if tokens is None:
                ordinal, tokens = self._next_document(row, source, ordinal, used)
                self.current[source, row] = tokens
            part = tokens[used : used + size - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            used += len(part)
            if used == len(tokens):
                del self.current[source, row]
                ordinal, used = ordinal + 1, 0
        self.places[row] = [*self.places[row][:source], (ordinal, used), *self.places[row][source + 1 :]]
        self.given[row] += 1

    def _next_document(self, row: int, source: int, at: int, used: int) -> tuple[int, np.ndarray]:
        """(ordinal, tokens) of the row's first document from ordinal `at` on that has any; of that very one, if it is in use."""
        if source not in self.documents:
            self.documents[source] = self._documents(source)
        pending = self.pending[source, row]
        while True:
            while not pending:
                ordinal, document = next(self.documents[source])
                self.pending[source, ordinal % self.rows].append((ordinal, document))
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
                    + (f", such as {self.last_bad}" if self.last_bad else "")
                    + (f"; {'less, or ' if few else ''}other documents would work")
                )

    def _documents(self, source: int) -> Iterator[tuple[int, Any]]:
        """Those of its own rows, from where these stand now."""
        rows, begins = self.rows, {row: self.places[row][source][0] for row in self.own}
        first = min(begins.values())
        return self.sources[source].documents(first, lambda at: (begin := begins.get(at % rows)) is not None and at >= begin)

    def _tokens(self, document: str | np.ndarray | BadDocument, least: int) -> np.ndarray | None:
        """Of a text, or of what has been tokenized; nothing of a document that is left out, bad or shorter than `least`."""
        if isinstance(document, BadDocument):
            self._leave_out(document)
            return None
        tokens = self.tokenizer.encode_document(document) if isinstance(document, str) else document
        if len(tokens) - 2 < least:
            self.left_out.short += 1
            return None
        return tokens

    def _leave_out(self, document: BadDocument) -> None:
        if self.data.on_bad_document == "error":
            raise refusal(document)
        self.left_out.bad.append({"file": document.file, "place": document.place, "reason": document.reason})
        self.known_bad.add((document.file, document.place))
        self.last_bad = document
        if len(self.known_bad) > self.data.max_bad_documents:
            raise ConfigError(
                f"data.max_bad_documents = {self.data.max_bad_documents}: there are more, the last one {document}; "
                "a higher one, or other documents, would work"
            )


def document_begins(tokens: torch.Tensor, bos_id: int) -> torch.Tensor:
    """(B, T) tokens -> (B, T) int64: the position in its row at which each token's document begins; 0 where that was before."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens == bos_id, positions, 0).cummax(dim=1).values


STOPPING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}


@contextmanager
def _blocking_signals() -> Iterator[None]:
    """Within: a process that is started, and whatever threads its libraries start at once, let the signals of STOPPING wait."""
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
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


def _as_it_is(item: Any) -> Any:
    return item


class Loader:
    """An endless iterator over (input, label), int64 of (batch_size, seq_len) each, with `state_dict`.

    Reads ahead in `data.num_workers` processes, or as many as its rows can be divided among; they start at the first batch, run
    torch on one thread, and end with the iteration or with their parent, however that ends.
    """

    def __init__(self, data: Data, windows: _PackedRows, own: range, batch_size: int):
        self._data, self._dataset, self._own, self._batch_size = data, windows, own, batch_size
        self._workers = max((n for n in range(1, data.num_workers + 1) if len(own) % n == 0), default=0)
        if self._workers < data.num_workers:
            logger.info(
                f"data.num_workers = {data.num_workers}: a rank's {len(own)} sequences a step are divided among {self._workers}"
            )
        self.left_out = LeftOut()
        self._start(dict.fromkeys(own, 0), {row: [(row, 0)] * len(windows.sources) for row in own})

    def _start(self, given: dict[int, int], places: dict[int, list[Place]]) -> None:
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
            self._places[row] = [*self._places[row][:source], place, *self._places[row][source + 1 :]]
            self._given[row] += 1
        return batch

    def peek(self) -> Batch:
        """What `next` will give."""
        return self._next_turn()[1]

    def _next_turn(self) -> tuple[list[int], Batch]:
        """The rows of the next microbatch, and it."""
        turn = sorted(self._own, key=lambda row: (self._given[row], row))[: self._batch_size]
        while not all(self._ready[row] for row in turn):
            self._receive()
        windows = np.stack([self._ready[row][0][0] for row in turn])
        # by numpy, whose conversions of so little take two thirds of the time of torch's
        input, label = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (windows[:, :-1], windows[:, 1:]))
        return turn, (input.pin_memory(), label.pin_memory()) if torch.cuda.is_available() else (input, label)

    def _receive(self) -> None:
        if self._iterator is None:
            self._dataset.given, self._dataset.places = self._given, self._places
            # As many rows from every process at every turn, since all have as many: so none gets ahead.
            self._dataset.at_once = self._batch_size
            with _blocking_signals():
                self._iterator = iter(
                    DataLoader(
                        self._dataset,
                        batch_size=None,
                        num_workers=self._workers,
                        prefetch_factor=self._data.prefetch if self._workers else None,
                        collate_fn=_as_it_is,
                        generator=torch.Generator(),  # torch's own would draw from that of the training process
                        worker_init_fn=_outlive_signals,
                    )
                )
        item = next(self._iterator)
        self.left_out.bad += item.left_out.bad
        self.left_out.short += item.left_out.short
        if isinstance(item, _Failed):
            self._start(self._given, self._places)  # without its processes
            raise item.error
        for row, source, window, place in zip(item.rows, item.sources, item.windows(), item.places, strict=True):
            self._ready[row].append((window, source, place))

    def take_left_out(self) -> LeftOut:
        """What has been skipped since this was last called; what was read ahead counts."""
        taken, self.left_out = self.left_out, LeftOut()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's rows stand after the last batch that `next` gave: {"rows": {"3": [5, [17, 120]]}, "of": 8}.

        Windows given, then ordinal and tokens used in each source. Small and made of JSON's types. `merge_states` of all ranks is
        what another number of ranks can load.
        """
        rows = {str(row): [self._given[row], *map(list, self._places[row])] for row in self._own}
        return {"rows": rows, "of": self._dataset.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by this run or by one of another dp_degree; rows of other ranks are ignored.

        Raises:
            ConfigError: the state is of another number of rows or sources, or without one of this rank's.
        """
        rows = self._dataset.rows
        if state["of"] != rows:
            raise ConfigError(
                f"training.global_batch_size = {rows}, but the loader's state is of {state['of']} rows; "
                f"global_batch_size = {state['of']} would work"
            )
        missing = [row for row in self._own if str(row) not in state["rows"]]
        if missing:
            raise ConfigError(
                f"the loader's state lacks rows {missing} of {rows}; the merged state of all ranks of that run would work"
            )
        given, places = {}, {}
        for row in self._own:
            given[row], *now = self._of_this_version(state["rows"][str(row)])
            places[row] = [(ordinal, used) for ordinal, used in now]
            if len(now) != len(self._dataset.sources):
                raise ConfigError(
                    f"data.sources: {len(self._dataset.sources)}, but the loader's state is of {len(now)}; as many would work"
                )
        self._start(given, places)

    def _of_this_version(self, row: list) -> list:
        """Before sources were mixed a row was [ordinal, used, windows]; ordinals of the standard library are what they were."""
        if isinstance(row[-1], list):
            return row
        if not isinstance(self._dataset.sources[0], StdlibSource):
            raise ConfigError(
                f'data.dataset = "{self._data.dataset}": the loader\'s state is of an older version, whose order was another; '
                "to start from that step's weights, checkpoint.initial_load_path and another job.dump_folder would work"
            )
        ordinal, used, windows = row
        return [windows, [ordinal, used]]


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

    Raises:
        ConfigError: rows cannot be shared out, or the documents cannot be read.
    """
    if split == "validation":
        # Short and seldom: not worth a process, nor filling the shuffle buffer of a stream from afar.
        here = all(part.dataset in ("stdlib", "local", "prepared") for _, part in data.mixture())
        data = dataclasses.replace(data, num_workers=0, shuffle=data.shuffle and here)
    at_once = batch_size * dp_degree
    if rows % at_once:
        raise ConfigError(
            f"training.global_batch_size = {rows} is no multiple of training.local_batch_size = {batch_size} x data-parallel "
            f"degree {dp_degree}; global_batch_size = {max(1, rows // at_once) * at_once} would work"
        )
    share = rows // dp_degree
    own = range(dp_rank * share, (dp_rank + 1) * share)
    sources = [build_source(part, split=split, seed=seed) for _, part in data.mixture()]
    return Loader(data, _PackedRows(data, sources, tokenizer, rows, seq_len, seed), own, batch_size)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of several ranks as one, which `Loader.load_state_dict` of any rank accepts."""
    return {"rows": {row: place for state in states for row, place in state["rows"].items()}, "of": states[0]["of"]}
