"""Documents -> packed windows of tokens -> microbatches, the same ones on any number of ranks.

    loader = build_loader(data, tokenizer, split="train", rows=8, batch_size=2, seq_len=512, dp_rank=0, dp_degree=2, seed=0)
    input, label = next(loader)                      # (2, 512) each; two of these are this rank's share of a step

The global batch has `rows` rows. Row g is an endless stream of tokens of its own: the documents whose ordinal is g modulo
`rows`, each with BOS and EOS, cut into windows of seq_len + 1. Every token is in exactly one window, a long document goes
on in the next one. Rank r owns a contiguous share of the rows and reads only these:

    rows of one step     0 1 2 3 | 4 5 6 7          dp_degree = 2, batch_size = 2
    microbatches         [0 1][2 3] rank 0   [4 5][6 7] rank 1

So the samples of step s belong to the run, not to the rank: another dp_degree, or another split into microbatches, gives
the same global batch. All there is to save of a row is three numbers: the ordinal of its current document, how many of
that document's tokens are used, and how many windows it has given.
"""

import os
import signal
import threading
import warnings
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_lite.config import ConfigError, Data
from titan_lite.data.dataset import Source, Split, build_source
from titan_lite.data.tokenizer import Tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
Position = tuple[int, int, int]  # ordinal of the current document, its tokens already used, windows given
_Texts = dict[int, deque[str]]  # by row
_Tokens = dict[int, torch.Tensor]  # by row


class _PackedRows(IterableDataset):
    """The microbatches of one rank, without end. Lives in the loader process; its state is that of the last one it made."""

    def __init__(self, source: Source, tokenizer: Tokenizer, rows: int, position: dict[int, Position], batch: int, seq_len: int):
        self.source, self.tokenizer = source, tokenizer
        self.rows, self.position = rows, position
        self.batch_size, self.seq_len = batch, seq_len

    def state_dict(self) -> dict[str, Any]:
        return {"rows": {str(row): list(position) for row, position in self.position.items()}, "of": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """torchdata asks only datasets that have both methods for their state."""
        self.position = {int(row): tuple(position) for row, position in state["rows"].items()}

    def __iter__(self) -> Iterator[Batch | ConfigError]:
        documents = self.source.documents(min(ordinal for ordinal, _, _ in self.position.values()), self._wanted)
        pending: _Texts = defaultdict(deque)  # read on behalf of a row that is not there yet
        current: _Tokens = {}  # of each row's current document
        try:
            while True:
                # The rows that are furthest behind: after a whole step, all of them in order.
                turn = sorted(self.position, key=lambda row: (self.position[row][2], row))[: self.batch_size]
                windows = torch.stack([self._window(row, documents, pending, current) for row in turn])
                yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        except ConfigError as error:
            yield error  # across the process border as itself; raised, it would arrive wrapped in the worker's traceback

    def _wanted(self, ordinal: int) -> bool:
        row = ordinal % self.rows
        return row in self.position and ordinal >= self.position[row][0]

    def _window(self, row: int, documents: Iterator[tuple[int, str]], pending: _Texts, current: _Tokens) -> torch.Tensor:
        """The next seq_len + 1 tokens of a row."""
        ordinal, used, given = self.position[row]
        parts: list[torch.Tensor] = []
        need = self.seq_len + 1
        while need:
            if row not in current:
                while not pending[row]:
                    read, text = next(documents)
                    pending[read % self.rows].append(text)
                ids = array("q", self.tokenizer.encode(pending[row].popleft(), bos=True, eos=True))
                current[row] = torch.frombuffer(ids, dtype=torch.int64)  # three times as fast as torch.tensor(list)
                if used >= len(current[row]):
                    raise ConfigError(
                        f"the loader's state is {used} tokens into document {ordinal}, which has {len(current[row])}: documents, "
                        "[data], model.tokenizer_path or debug.seed changed since; with those of that run it would work"
                    )
            part = current[row][used : used + need]
            parts.append(part)
            need -= len(part)
            used += len(part)
            if used == len(current[row]):
                del current[row]
                ordinal, used = ordinal + self.rows, 0
        self.position[row] = (ordinal, used, given + 1)
        return torch.cat(parts)


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

    SIGTERM ends this one where the training process sent it, which Python's handlers are not told; so a thread waits for it.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo(STOPPING).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class Loader:
    """An endless iterator over (input, label), int64 of (batch_size, seq_len) each, with `state_dict`.

    Reads ahead in a process of its own where `data.num_workers` is 1; it starts at the first batch, runs torch on one
    thread, and ends with the iteration or with its parent, however that ends.
    """

    def __init__(self, data: Data, source: Source, tokenizer: Tokenizer, rows: int, own: range, batch_size: int, seq_len: int):
        self._data, self._rows, self._own = data, rows, own
        self._arguments = (source, tokenizer, rows)
        self._shape = (batch_size, seq_len)
        self._start({row: (row, 0, 0) for row in own})

    def _start(self, position: dict[int, Position]) -> None:
        self._dataset = _PackedRows(*self._arguments, position, *self._shape)
        self._iterator: Iterator[Any] | None = None
        with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                self._dataset,
                batch_size=None,
                num_workers=self._data.num_workers,
                prefetch_factor=self._data.prefetch if self._data.num_workers else None,
                snapshot_every_n_steps=1,
                pin_memory=torch.cuda.is_available(),
                worker_init_fn=_outlive_signals,
            )

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            with _blocking_signals():
                self._iterator = iter(self._loader)
        item = next(self._iterator)
        if isinstance(item, ConfigError):
            raise item
        input, label = item
        return input, label

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's rows stand after the last batch that `next` gave: {"rows": {"3": [17, 120, 5]}, "of": 8}.

        Small and made of JSON's types. `merge_states` of all ranks is what another number of ranks can load.
        """
        if self._iterator is None:
            return self._dataset.state_dict()
        # The state that torchdata keeps of a dataset that is an iterable, at the last batch given, not the last one prefetched.
        state = self._loader.state_dict()
        if self._data.num_workers:
            state = state["_snapshot"]["_worker_snapshots"]["worker_0"]
        return state["dataset_state"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by this run or by one of another dp_degree; rows of other ranks are ignored.

        Raises:
            ConfigError: the state is of another number of rows, or without one of this rank's.
        """
        if state["of"] != self._rows:
            raise ConfigError(
                f"training.global_batch_size = {self._rows}, but the loader's state is of {state['of']} rows; "
                f"global_batch_size = {state['of']} would work"
            )
        missing = [row for row in self._own if str(row) not in state["rows"]]
        if missing:
            raise ConfigError(
                f"the loader's state lacks rows {missing} of {self._rows}; the merged state of all ranks of that run would work"
            )
        self._start({row: tuple(state["rows"][str(row)]) for row in self._own})


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
    at_once = batch_size * dp_degree
    if rows % at_once:
        raise ConfigError(
            f"training.global_batch_size = {rows} is no multiple of training.local_batch_size = {batch_size} x data-parallel "
            f"degree {dp_degree}; global_batch_size = {max(1, rows // at_once) * at_once} would work"
        )
    share = rows // dp_degree
    own = range(dp_rank * share, (dp_rank + 1) * share)
    return Loader(data, build_source(data, split=split, seed=seed), tokenizer, rows, own, batch_size, seq_len)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of several ranks as one, which `Loader.load_state_dict` of any rank accepts."""
    return {"rows": {row: place for state in states for row, place in state["rows"].items()}, "of": states[0]["of"]}
