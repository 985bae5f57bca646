"""Tell the other ranks of an error that ends this one, or hear of theirs.

    with share_errors(CheckpointError): ...

A rank that fails leaves the others with a lost connection. They find its error in the store of the
process group, under the key CAUSE.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from titan_lite import progress
from titan_lite.distributed.process_group import first_line, is_communication_error
from titan_lite.resilience import TrainingError

CAUSE = "cause"
# Seconds for the store to answer
GRACE = 10.0
# Seconds to wait for what others tell after a lost connection, which all have when a rank dies
GRACE_AFTER_LOST_CONNECTION = 3.0
T = TypeVar("T")


@contextmanager
def share_errors(*explained: type[Exception]) -> Iterator[None]:
    """Return a context that sends an error of this rank to the others, or receives theirs. The
    phase of the run has no limit afterwards.

    explained: errors whose message is sufficient. These, and the failure of another rank, are
    raised as TrainingError.
    """
    try:
        yield
    except Exception as error:
        cause = _share(error)
        if cause:
            raise TrainingError(f"stopped, since {cause}") from error
        if isinstance(error, explained):
            everywhere = getattr(error, "everywhere", False)
            raise TrainingError(str(error), everywhere=everywhere) from error
        raise
    finally:
        progress.end_phases()


def _share(error: Exception) -> str | None:
    """Send the error to the other ranks, unless they have it, too. For an error of communication,
    return the failure of the rank that caused it, if that has sent one.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or getattr(error, "everywhere", False):
        return None
    limit = GRACE_AFTER_LOST_CONNECTION
    if not is_communication_error(error):
        failure = f"rank {os.environ['RANK']} failed: {type(error).__name__}: {first_line(error)}"
        call_within(limit, lambda: connect(limit).compare_set(CAUSE, "", failure))
        return None
    cause = call_within(2 * GRACE, lambda: wait_for(connect(limit), CAUSE, limit))
    if not cause:
        progress.lost_rank(error)
    return cause


def connect(seconds: float) -> dist.Store:
    """Return a connection to the store of the process group, for this attempt of the ranks:
    torchrun's store survives a restart of them. seconds: limit of the wait for a store.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"errors/{attempt}", store)


def wait_for(store: dist.Store, key: str, seconds: float) -> str:
    """Return the text that another rank writes under this key, or "" after this time.

    The store's own wait would print warnings at its time limit.
    """
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.1)
    return store.get(key).decode()


def call_within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of a function, or None if it fails or takes longer."""
    results: list[T] = []

    def run() -> None:
        with suppress(dist.DistError):
            results.append(function())

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
