"""Make batches of documents, the same global batches on any number of ranks.

    documents   `Source.documents` (documents.py) numbers them, the same on every rank
    tokens      `Tokenizer.encode_document` (tokenizer.py) puts BOS and EOS around them
    windows     `WindowPacker` (packing.py) joins them to streams and cuts these, in other processes
    batches     `Loader` stacks windows to (input, label), in the training process

    loader = build_loader(
        data, tokenizer, split="train", streams=16, batch_size=2, seq_len=512, dp_rank=0,
        dp_degree=2, seed=0,
    )
    batch = next(loader)     # batch.input, batch.label: (2, 512); a step of 16 sequences has 4 each

streams.py says which streams a rank reads, and why a state continues on any layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_lite.config import Data
from titan_lite.data.bad_documents import SkippedDocuments
from titan_lite.data.corpora import Split
from titan_lite.data.documents import build_source
from titan_lite.data.listing import Listing, list_sources
from titan_lite.data.packing import Mixture, Packing, Window, WindowPacker
from titan_lite.data.processes import PackingProcesses
from titan_lite.data.source_identity import SourceKey
from titan_lite.data.streams import LoaderState, RankStreams, StreamPosition
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import logger


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of one rank, on the host."""

    input: Tensor  # (batch_size, seq_len) int64
    label: Tensor  # (batch_size, seq_len) int64: of each token the next one
    sources: list[int]  # of each sequence the index of its source in data.sources


class Loader(Iterator[Batch]):
    """The endless batches of this rank's streams, with a state that any layout loads.

    Windows are packed ahead in `data.num_workers` processes, or in the largest number below that
    divides the number of streams. They start at the first batch.
    """

    def __init__(
        self,
        packing: Packing,
        keys: Sequence[SourceKey],
        *,
        streams: int,
        batch_size: int,
        dp_rank: int,
        dp_degree: int,
    ):
        """keys: of the sources of `packing`."""
        self.packing = packing
        self.keys = list(keys)  # in the order of each stream's positions
        self.batch_size = batch_size
        self.streams = RankStreams(streams, dp_rank, dp_degree)
        self.windows_taken = 0  # by all ranks together
        self.positions = {
            stream: [StreamPosition(stream)] * len(packing.sources)
            for stream in self.streams.indices
        }
        self.processes: PackingProcesses | None = None
        self.received: dict[int, Window] = {}  # by number: those that are in no batch yet
        self.skipped = SkippedDocuments()  # since `pop_skipped`

    def __next__(self) -> Batch:
        batch = self.peek()
        self._take()
        return batch

    def skip(self) -> None:
        """Leave out the next batch, which is of another replica group."""
        self._await_windows()
        self._take()

    def _take(self) -> None:
        """Count the windows of the next batch as taken."""
        for number in self.streams.windows(self.windows_taken, self.batch_size):
            window = self.received.pop(number)
            self.positions[number % self.streams.num_streams][window.source] = window.position
            self._count_skipped(window.skipped)
        self.windows_taken += self.batch_size * self.streams.dp_degree

    def peek(self) -> Batch:
        """Return the batch that `next` will return.

        Raises ConfigError for wrong documents, MachineError and LoaderError.
        """
        numbers = self._await_windows()
        windows = [self.received[number] for number in numbers if self.streams.keeps(number)]
        tokens = np.stack([np.frombuffer(window.tokens, dtype=np.int32) for window in windows])
        # numpy converts such small arrays in two thirds of torch's time
        input = torch.from_numpy(tokens[:, :-1].astype(np.int64, order="C"))
        label = torch.from_numpy(tokens[:, 1:].astype(np.int64, order="C"))
        if torch.cuda.is_available():
            input = input.pin_memory()
            label = label.pin_memory()
        return Batch(input, label, [window.source for window in windows])

    def _await_windows(self) -> range:
        """Receive the windows of the next batch from these streams, and return their numbers."""
        numbers = self.streams.windows(self.windows_taken, self.batch_size)
        while not all(number in self.received for number in numbers):
            self._receive()
        return numbers

    def _receive(self) -> None:
        """Receive some windows. Raises ConfigError, MachineError and LoaderError."""
        if self.processes is None:
            self.processes = self._start_processes()
        packed = next(self.processes)
        if packed.error:
            for window in (*self.received.values(), *packed.windows):
                self._count_skipped(window.skipped)
            self._count_skipped(packed.skipped)
            self._end_processes()
            raise packed.error
        for window in packed.windows:
            self.received[window.number] = window

    def _count_skipped(self, skipped: SkippedDocuments | None) -> None:
        if skipped and self.streams.is_first_of_group:  # the others skip the same documents
            self.skipped.add(skipped)

    def _start_processes(self) -> PackingProcesses:
        data = self.packing.data
        streams = len(self.streams.indices)
        num_workers = data.num_workers
        while num_workers and streams % num_workers:
            num_workers -= 1
        if num_workers < data.num_workers:
            logger.info(
                f"data.num_workers = {data.num_workers}: a rank's {streams} streams of sequences"
                f" are divided among {num_workers}"
            )
        packer = WindowPacker(self.packing, self.streams, self._state(), self.batch_size)
        return PackingProcesses(packer, num_workers, data.prefetch)

    def _end_processes(self) -> None:
        """Forget what was packed ahead; the next batch starts new processes."""
        self.processes = None
        self.received = {}

    def pop_skipped(self) -> SkippedDocuments:
        """Return the documents skipped since the last call, before the tokens of batches so far."""
        skipped = self.skipped
        self.skipped = SkippedDocuments()
        return skipped

    def times_read(self) -> list[int]:
        """Return for each source how often one of its documents was read at most."""
        times = []
        for index, source in enumerate(self.packing.sources):
            last = 0
            for by_source in self.positions.values():
                ordinal, used = by_source[index]
                last = max(last, ordinal if used else ordinal - 1)
            times.append(source.epoch(last) + 1)
        return times

    def source_lines(self) -> list[str]:
        """Describe each source: its share of the data mix, and its size as far as it is known."""
        data = self.packing.data
        sources = self.packing.sources
        table = data.key("dataset").partition(".")[0]  # data or validation
        if not data.sources:
            path = f" ({data.path})" if data.path else ""
            return [f"{table}: {data.dataset}{path}, {sources[0].amount}"]
        of = "validation source" if table == "validation" else "source"
        return [
            f"{of} {name}: {100 * share:.3g}% of the tokens; {source.amount}"
            for name, (share, _), source in zip(
                data.source_names(), data.mixture(), sources, strict=True
            )
        ]

    def _state(self) -> LoaderState:
        positions = {stream: list(by_source) for stream, by_source in self.positions.items()}
        return LoaderState(self.windows_taken, self.streams.num_streams, positions, self.keys)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch of `next`, small and of JSON types.

        It has this rank's streams. A checkpoint has one state, merged from those of all ranks
        (streams.merge_states).
        """
        return self._state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of this rank, or from the merged one of all ranks, which may be
        of another dp_degree, batch size, sequence length, or of other sources.

        The number of streams is that of the state. A source goes on at its position, a new one
        begins, and the position of one that is gone stays in the state.
        """
        saved = LoaderState.from_dict(state).positions_in(self.keys[: len(self.packing.sources)])
        streams = RankStreams(saved.num_streams, self.streams.dp_rank, self.streams.dp_degree)
        positions = {stream: saved.positions[stream] for stream in streams.indices}
        self._end_processes()
        self.keys = saved.sources or self.keys
        self.streams = streams
        self.windows_taken = saved.windows_taken
        self.positions = positions


def build_loader(  # noqa: PLR0913  batch and rank as plain integers
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
    listings: Sequence[Listing] | None = None,
    keys: Sequence[SourceKey] = (),
) -> Loader:
    """Return rank `dp_rank`'s loader over the windows of `streams` streams.

    batch_size: sequences of a rank's batch. listings: of the sources; None to list them now. keys:
    of the sources; (): their numbers, in a state that no run with other sources loads.

    Raises ConfigError if the documents cannot be read.
    """
    listings = listings or list_sources(data)
    if split == "validation":
        # Validation is short and rare: a process, or a filled shuffle buffer of a remote stream,
        # does not pay.
        is_remote = any(
            part.dataset not in ("stdlib", "local", "prepared") for _, part in data.mixture()
        )
        data = data.replace(num_workers=0, shuffle=data.shuffle and not is_remote)
    sources = [
        build_source(part, split=split, seed=seed, listing=listing)
        for (_, part), listing in zip(data.mixture(), listings, strict=True)
    ]
    mixture = Mixture([share for share, _ in data.mixture()], seed)
    packing = Packing(data, sources, mixture, tokenizer, seq_len)
    keys = keys or [SourceKey(str(number), str(number)) for number in range(len(sources))]
    return Loader(
        packing,
        keys,
        streams=streams,
        batch_size=batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
