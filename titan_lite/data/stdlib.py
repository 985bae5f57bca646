"""The documents of the running Python: the sources of its standard library, and pydoc's help texts.

library = Stdlib()
library.document("topics/for"), library.document("argparse.py")
"""

import os
import sysconfig
from pathlib import Path

from titan_lite.config import ConfigError

FOLDER = Path(sysconfig.get_path("stdlib"))
OTHER_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
TOPIC = "topics/"  # begins the name of a help text
MIN_DOCUMENTS = 100  # fewer: a Python without sources


class Stdlib:
    """Texts of the standard library, by name."""

    def __init__(self) -> None:
        self.names = _names()

    def document(self, name: str) -> str:
        if name.startswith(TOPIC):
            return _topics()[name.removeprefix(TOPIC)]
        return (FOLDER / name).read_text(encoding="utf-8", errors="replace")


def _names() -> list[str]:
    """Return the sorted names: "topics/NAME", and paths of sources relative to the library.

    Raises ConfigError if there are no sources.
    """
    names = [TOPIC + topic for topic in _topics()]
    for folder, subfolders, files in os.walk(FOLDER):
        subfolders[:] = [name for name in subfolders if name not in OTHER_FOLDERS]
        for file in files:
            path = Path(folder, file)
            if _is_document(path):
                names.append(path.relative_to(FOLDER).as_posix())
    if len(names) < MIN_DOCUMENTS:
        raise ConfigError(
            'data.dataset = "stdlib": this Python has no sources of its standard library'
            f' ({len(names)} documents in {FOLDER}); use a full Python, or data.dataset = "local"'
            " with data.path"
        )
    return sorted(names)


def _is_document(path: Path) -> bool:
    if not path.name.endswith(".py"):
        return False
    if path.name.startswith("_sysconfigdata"):  # which differs between builds of one Python
        return False
    if path.relative_to(FOLDER).as_posix() == "pydoc_data/topics.py":  # listed as topics
        return False
    return path.is_file() and path.stat().st_size > 0


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions have it in another package; most text is in sources
        return {}
    return topics
