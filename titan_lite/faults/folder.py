"""Another process removes a run's folder while the run goes on: noticed before anything is written there, and mended or told.

hold = functools.partial(hold_folder, dump_folder, (checkpointer.hold, metrics.hold), write_recipe)
hold()                                        # on all ranks together, before a save and before a line of metrics
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from titan_lite.config import ConfigError
from titan_lite.logging import logger


def hold_folder(folder: Path, parts: Iterable[Callable[[], bool]], write_recipe: Callable[[], None]) -> None:
    """parts: each makes its files again where they are gone, and returns True then; write_recipe: the same on the first rank.

    Raises what a part does where the folder has become another run's.
    """
    if sum(hold() for hold in parts):  # not any(), which would leave out those after a True
        with suppress(ConfigError):  # not writable, which a part that needs it says
            write_recipe()
        logger.warning(
            f"files of this run were removed from {folder} while it goes on: its lock, config.toml and metrics are made again; "
            "what else was removed with them, such as saved steps and earlier metrics, is gone"
        )
