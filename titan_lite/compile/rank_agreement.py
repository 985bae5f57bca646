"""The ranks that run the same graph, as the compile stage asks them; distributed/stage_ranks.py has
those of a pipeline stage.

with outside_of_tracing():
    same = peers.alike(schedule)
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily


class Peers:
    """The ranks that run the same graph: here this one alone.

    Methods are collectives of these ranks.
    """

    def alike(self, word: str) -> bool:
        """Return True if all have the same string."""
        return True

    def first(self, word: str) -> str:
        """Return the first one's string."""
        return word

    def all(self, word: str) -> dict[int, str]:
        """Return the strings of all, by rank.

        Every rank receives all, so that it is only for the details of an error.
        """
        return {0: word}


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Return a context for collectives.

    Python's dispatcher would deadlock: it holds the GIL while it waits for gloo, and a worker of
    gloo needs it to free a tensor.
    """
    with unset_fake_temporarily(), no_python_dispatcher():
        yield
