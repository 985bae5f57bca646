"""Let ranks meet before they make a process group, so that an error of one rank ends all of them at once.

    meet(seconds)                # this rank is ready: returns when all are ready; raises the error of another rank
    refuse(why, code)            # this rank has an error: tells the others

A rank that is making a process group cannot receive messages: it would wait until the time limit for a rank that has ended. Ranks
meet in the store that the group will use. Its key "verdict" is set once: by the last rank that arrives, by the first one that
refuses, or by one that has received a signal. So all ranks continue, or none.
"""

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from titan_lite.config import ConfigError
from titan_lite.faults import TrainingError, signals
from titan_lite.logging import logger

LINGER = 5.0  # seconds that an ending rank waits for others to read the verdict
PAUSE = 0.05  # seconds between two checks

_store: Any = (
    None  # kept until the process ends: if this rank hosts it, the process group connects to it
)


def meet(seconds: float) -> None:
    """Wait for the other ranks. From here on a signal is only recorded (signals.py).

    Raises ConfigError or TrainingError if a rank refuses or does not come, and SystemExit on all ranks if a signal came first.
    """
    world_size, deadline = int(os.environ["WORLD_SIZE"]), time.monotonic() + seconds
    if _store is not None or world_size == 1:
        signals.started()
        return
    store = _connect(seconds)
    signals.started()
    if store.add("arrived", 1) == world_size:
        _decide(go=True)
    while not store.check(["verdict"]):
        if signals.received():
            _decide(signal=f"{signals.received()}, rank {os.environ['RANK']}")
        elif time.monotonic() > deadline:
            come = store.add("arrived", 0)
            raise TrainingError(
                f"{come} of {world_size} ranks are ready after {seconds:g} s (comm.init_timeout_seconds)"
            )
        time.sleep(PAUSE * max(1, world_size // 64))
    verdict = json.loads(store.get("verdict"))
    if "error" in verdict:
        _leave_together()
        kind = ConfigError if verdict["code"] == signals.WRONG_INPUT else TrainingError
        raise kind(f"[rank {verdict['rank']}] {verdict['error']}")
    if "signal" in verdict:
        if os.environ["RANK"] == "0":
            logger.warning(
                f"{verdict['signal']}: stopped at the start, with nothing to save",
                extra={"event": "stop"},
            )
        signals.settle()
        _leave_together()
        sys.exit(signals.STOPPED)


def refuse(why: str, code: int) -> None:
    """Send an error to the ranks that are or will be in `meet`. code: the exit code."""
    if _store is None and os.environ["WORLD_SIZE"] != "1":
        with contextlib.suppress(
            dist.DistError
        ):  # the host of the store has ended, which ends the others, too
            _connect(LINGER)
            _decide(error=why, rank=int(os.environ["RANK"]), code=code)
            _leave_together()


def _leave_together() -> None:
    """Wait until all ranks have read the verdict, since one of them hosts the store, or for LINGER seconds."""
    read, deadline = _store.add("read", 1), time.monotonic() + LINGER
    with contextlib.suppress(dist.DistError):  # the host has left
        while read < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
            time.sleep(PAUSE)
            read = _store.add("read", 0)


def _connect(seconds: float) -> dist.Store:
    """Connect to the store, which rank 0 hosts if torchrun does not."""
    global _store
    hosts = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port, timeout = (
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timedelta(seconds=seconds),
    )
    store = dist.TCPStore(
        host, port, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )
    _store = dist.PrefixStore(f"meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return _store


def _decide(**verdict: Any) -> None:
    _store.compare_set("verdict", "", json.dumps(verdict))
