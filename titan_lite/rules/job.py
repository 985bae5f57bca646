"""Rules of [job]: the run's folder, and the files that a run writes there."""

import os
from collections.abc import Iterator
from pathlib import Path

from titan_lite.config import Config
from titan_lite.config.errors import MachineError, is_of_machine, shown
from titan_lite.rules.mistakes import Inputs, Mistake, rule_of_inputs

# Files that a run writes over, or appends to, in its folder and in the folder of its steps
WRITTEN = (
    "config.toml",
    "*.jsonl",
    "compile.json",
    "experts.json",
    "initial_step.json",
    "restarts.json*",
    "lock",
    "loss.png",
    "timeline.*",
    "wandb_id",
)


@rule_of_inputs
def the_run_has_a_folder(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    for mistakes in (
        dump_folder_cannot_be_written(config),
        links_out_of_the_folder(config),
        recipe_would_be_replaced(config),
    ):
        wrong = list(mistakes)
        yield from wrong
        if wrong:
            return


def links_out_of_the_folder(config: Config) -> Iterator[Mistake]:
    """Yield a mistake for each file of the run that is a link out of its folder: the run would
    write into a file that is not its own. A folder may be a link, as to a disk.
    """
    run_folder = Path(config.job.dump_folder)
    steps = run_folder / config.checkpoint.folder
    for folder in dict.fromkeys((run_folder, steps)):
        for path in files_written(folder):
            if path.is_symlink() and not path.is_dir() and not _is_within(path, run_folder, steps):
                yield Mistake(
                    key="job.dump_folder",
                    value=config.job.dump_folder,
                    why=f"has the link {path} to {os.readlink(path)}, which the run would write to",
                    instead="a folder without it, or remove the link",
                )


def files_written(folder: Path) -> list[Path]:
    """Return the files of the folder that a run would write over, or append to."""
    return sorted(path for pattern in WRITTEN for path in folder.glob(pattern))


def _is_within(path: Path, *folders: Path) -> bool:
    """Return True if what a path leads to lies in one of the folders. A loop of links does not."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return False
    return any(folder.resolve() in target.parents for folder in folders)


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
