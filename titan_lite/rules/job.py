"""Rules of [job]: the run's folder, and the files that a run writes there."""

import os
from collections.abc import Iterator
from pathlib import Path

from titan_lite.config import Config
from titan_lite.config.errors import MachineError, is_of_machine, shown
from titan_lite.rules.mistakes import Inputs, Mistake, rule_of_inputs


@rule_of_inputs
def the_run_has_a_folder(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    wrong = list(dump_folder_cannot_be_written(config))
    yield from wrong or recipe_would_be_replaced(config)


def dump_folder_cannot_be_written(config: Config) -> Iterator[Mistake]:
    """Yield a mistake if the run's folder is not there and cannot be made, or is not writable.
    Raises MachineError for a full disk or one that fails.
    """
    folder = Path(config.job.dump_folder).absolute()
    why = ""
    for path in (folder, *folder.parents):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not path.is_symlink():
                continue  # to be made
            why = f"cannot be made: {path} is a link to {os.readlink(path)}, which is not there"
        except OSError as error:  # such as a link that leads to itself
            why = f"cannot be made: {path}: {error.strerror}"
            _raise_if_of_machine(config, why, error)
        else:
            if not path.is_dir():
                why = f"cannot be made: {path} is no folder"
            elif not os.access(path, os.W_OK):
                why = f"cannot be made: {path} may not be written"
        break
    if why:
        instead = "a folder that can be created and written"
        yield Mistake("job.dump_folder", config.job.dump_folder, why, instead)


def _raise_if_of_machine(config: Config, why: str, error: OSError) -> None:
    if is_of_machine(error):
        raise MachineError(f"job.dump_folder = {shown(config.job.dump_folder)} {why}")


def recipe_would_be_replaced(config: Config) -> Iterator[Mistake]:
    """Yield a mistake if the run's folder has a config.toml that no run has written.

    A run replaces it by the resolved recipe. Before that, every run makes the file `lock`.
    """
    recipe = Path(config.job.dump_folder, "config.toml")
    if os.path.lexists(recipe) and not os.path.lexists(recipe.with_name("lock")):
        yield Mistake(
            key="job.dump_folder",
            value=config.job.dump_folder,
            why=f"has {recipe}, which no run has written and this one would replace",
            instead="another folder, or rename this file",
        )
