"""Detect that another process has removed a run's folder during the run, and make its files again or raise an error.

hold = functools.partial(hold_folder, dump_folder, (checkpointer.hold, metrics.hold), write_recipe)
hold()                                        # a collective, before a save and before a line of metrics
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from titan_lite.config import ConfigError
from titan_lite.logging import logger


def hold_folder(
    folder: Path, parts: Iterable[Callable[[], bool]], write_recipe: Callable[[], None]
) -> None:
    """Make removed files again, and log a warning if there were any. A collective.

    parts: each makes its files again if they are gone, and then returns True. write_recipe: makes config.toml again on the first
    rank. Raises the error of a part if another run has taken the folder.
    """
    if sum(hold() for hold in parts):  # not any(), which would skip the parts after a True
        with suppress(ConfigError):  # not writable, which another part reports
            write_recipe()
        logger.warning(
            f"files of this run were removed from {folder} during the run: its lock, config.toml and metrics are made again; "
            "other removed files, such as saved steps and earlier metrics, are lost"
        )
