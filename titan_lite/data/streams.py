"""Streams of tokens: which of them a rank reads, where each stands, and what a checkpoint keeps.

A run packs its documents into a number of streams that is fixed when it starts. A document belongs
to the stream of its ordinal modulo their number, and a stream is cut into windows of seq_len + 1
tokens. Window n of a run is the next one of stream n modulo their number. A step takes as many
consecutive windows as it has sequences, and rank r gets the windows n with n = r modulo dp_degree:

    windows of two steps   0 1 2 3 4 5 | 6 7 8 9     8 streams, dp_degree = 2; 6 sequences, then 4
    their streams          0 1 2 3 4 5 | 6 7 0 1
    rank 0                 0   2   4   | 6   8       so rank 0 reads only streams 0, 2, 4, 6

So the sequences of a step do not depend on the layout, and a state that one layout saved continues
on any other:

    streams = RankStreams(num_streams=8, dp_rank=0, dp_degree=2)
    streams.indices                        # range(0, 8, 2)
    streams.windows(6, batch_size=2)       # range(6, 10, 2): of the microbatch after 6 windows
    merge_states([loader.state_dict() for loader in loaders_of_all_ranks])
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from titan_lite.data.source_identity import SourceKey
from titan_lite.manifest import validated


class StreamPosition(NamedTuple):
    """Position of a stream in one source: its current document, and how much of it is used."""

    document: NonNegativeInt  # ordinal in the source (documents.py)
    tokens_used: NonNegativeInt = 0


Positions = dict[int, list[StreamPosition]]  # of a stream: its position in each source


@dataclass(frozen=True)
class RankStreams:
    """The streams that one data-parallel rank reads, and the windows in them.

    If dp_degree does not divide num_streams, some ranks read the same streams, and each of them
    keeps its own windows.
    """

    num_streams: int
    dp_rank: int
    dp_degree: int

    @property
    def num_groups(self) -> int:
        """Number of groups of ranks; ranks of one group read the same streams."""
        return math.gcd(self.num_streams, self.dp_degree)

    @property
    def indices(self) -> range:
        return range(self.dp_rank % self.num_groups, self.num_streams, self.num_groups)

    @property
    def is_first_of_group(self) -> bool:
        """True on one rank of each group."""
        return self.dp_rank < self.num_groups

    def windows(self, windows_taken: int, batch_size: int) -> range:
        """Return the numbers of the windows from these streams in the next microbatch of all ranks.

        windows_taken: number of windows that all ranks have taken together.
        """
        first = windows_taken + (self.dp_rank - windows_taken) % self.num_groups
        return range(first, windows_taken + batch_size * self.dp_degree, self.num_groups)

    def keeps(self, window: int) -> bool:
        """Return False if the window is for another rank that reads the same streams."""
        return window % self.dp_degree == self.dp_rank


@dataclass
class LoaderState:
    """The state of a loader: that of one rank, or that of all ranks, which any layout can load."""

    windows_taken: int  # by all ranks together
    num_streams: int  # of the run
    positions: Positions  # of the streams of this rank, or of all
    # those of the run, then those that it no longer reads, in the order of each stream's positions;
    # None: a state from before 0.2
    sources: list[SourceKey] | None = None

    def positions_in(self, sources: Sequence[SourceKey]) -> "LoaderState":
        """Return the state with the positions of these sources, and after them those of others that
        it has. A source that it does not have begins at its first document.

        Raises ValueError if the state does not say its sources, and has another number of them.
        """
        known = self.sources or list(sources)
        hashes = {key.sha256: index for index, key in enumerate(known)}
        ours = {key.sha256 for key in sources}
        others = [key for key in known if key.sha256 not in ours]
        positions: Positions = {}
        for stream, by_source in self.positions.items():
            if len(by_source) != len(known):
                raise ValueError(f"a state of {len(by_source)} sources, and not of {len(known)}")
            positions[stream] = [
                by_source[hashes[key.sha256]] if key.sha256 in hashes else StreamPosition(stream)
                for key in (*sources, *others)
            ]
        return LoaderState(self.windows_taken, self.num_streams, positions, [*sources, *others])

    def to_dict(self) -> dict[str, Any]:
        """Return {"windows_taken": 40, "streams": 8, "sources": [["web", "5d41..."]], "positions":
        {"3": [[17, 120]]}}, for JSON.
        """
        positions = {
            str(stream): [list(position) for position in by_source]
            for stream, by_source in self.positions.items()
        }
        sources = {"sources": [list(key) for key in self.sources]} if self.sources else {}
        return {
            "windows_taken": self.windows_taken,
            "streams": self.num_streams,
            **sources,
            "positions": positions,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "LoaderState":
        """Return what `to_dict` has made of a state. Raises KeyError and ValueError."""
        return cls(
            validated(NonNegativeInt, state, "windows_taken"),
            validated(PositiveInt, state, "streams"),
            validated(Positions, state, "positions"),
            validated(list[SourceKey], state, "sources") if "sources" in state else None,
        )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the `state_dict`s of the loaders of all ranks into one, which any layout can load."""
    positions = {
        stream: by_source for state in states for stream, by_source in state["positions"].items()
    }
    return {**states[0], "positions": positions}
