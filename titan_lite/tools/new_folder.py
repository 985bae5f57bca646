"""Write a folder that is complete, or not there.

with new_folder(Path("exported")) as unfinished:
    (unfinished / "config.json").write_text("{}")
"""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from titan_lite import manifest
from titan_lite.config import ConfigError
from titan_lite.config.errors import error_because_of


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Return a context with a folder to fill.

    It gets its name when its files are on disk, and is removed after an error. Until then it has a
    unique name, so that only what was made here is deleted. Raises ConfigError, and MachineError if
    the disk fails.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is overwritten; use a new folder")
    unfinished = folder.with_name(f"unfinished-{folder.name}-{secrets.token_hex(8)}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in unfinished.rglob("*"):
            if path.is_file():
                manifest.sync(path)
        manifest.publish(unfinished, folder)
    except (OSError, SafetensorError) as error:
        why = f"{folder} cannot be written: {error}; use another folder"
        raise error_because_of(error, why) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
