"""The run's log: plain lines on the ranks named in LOG_RANK (default 0), on standard output.

init_logging(rank=0)
logger.info("step 1")
"""

import logging
import os
import sys

logger = logging.getLogger("titan_lite")


def log_ranks() -> set[int]:
    """The ranks that print. Raises ValueError where LOG_RANK is not a list of numbers."""
    text = os.environ.get("LOG_RANK", "0")
    try:
        return {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ValueError(f"LOG_RANK={text}: expected ranks separated by commas, such as LOG_RANK=0,3") from None


def init_logging(rank: int) -> None:
    """Warnings and errors are shown on every rank, the rest on the ranks of LOG_RANK."""
    handler = logging.StreamHandler(sys.stdout)
    name = "" if log_ranks() == {0} and rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank in log_ranks() else logging.WARNING)
