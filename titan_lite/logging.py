"""The run's log: plain lines on the ranks named in LOG_RANK (default 0), on standard output.

init_logging(rank=0, world_size=2)
logger.info("step 1")
"""

import logging
import os
import sys
from typing import TextIO

logger = logging.getLogger("titan_lite")


def log_ranks(world_size: int) -> set[int]:
    """The ranks that print. Raises ValueError where LOG_RANK is not a list of ranks that there are."""
    text = os.environ.get("LOG_RANK", "0")
    ranks = text.replace(" ", "").split(",")
    if not all(rank.isdecimal() and int(rank) < world_size for rank in ranks):
        raise ValueError(f"LOG_RANK={text}: expected ranks below {world_size}, separated by commas, such as LOG_RANK=0")
    return {int(rank) for rank in ranks}


def init_logging(rank: int, world_size: int, stream: TextIO | None = None) -> None:
    """Warnings and errors are shown on every rank, the rest on the ranks of LOG_RANK. Raises ValueError."""
    ranks = log_ranks(world_size)
    handler = logging.StreamHandler(stream or sys.stdout)
    name = "" if ranks == {0} and rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank in ranks else logging.WARNING)
