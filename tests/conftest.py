"""Skip tests that need hardware or a scheduler where it is absent; collect the messages of wrong
input with --messages FILE.
"""

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import hypothesis
import pytest

from titan_lite.config import ConfigError

# The same examples on every run, none kept on disk, and no time limits: a machine may be busy.
hypothesis.settings.register_profile("titan_lite", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("titan_lite")


def pytest_addoption(parser):
    parser.addoption(
        "--messages", metavar="FILE", help="write every ConfigError that the tests provoke"
    )


def pytest_configure(config):
    path, messages = config.getoption("--messages"), defaultdict(dict)
    if not path:
        return
    init = ConfigError.__init__

    def noted(error, *lines):
        init(error, *lines)
        frame = sys._getframe(1)
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if "titan_lite" in frame.f_code.co_filename and len(lines) == 1:
            messages[place].setdefault(
                re.sub(r"/\S*pytest-[^/ ]*/[^/ ]*/[^/ ]*", "FOLDER", str(error))
            )

    ConfigError.__init__ = noted
    # a few of each line that raises, in the order of the sources
    text = lambda: "\n".join(
        f"{place}\n  " + "\n  ".join([*messages[place]][:4]) for place in sorted(messages)
    )
    config.add_cleanup(lambda: Path(path).write_text(text() + "\n", encoding="utf-8"))


def pytest_collection_modifyitems(items):
    absent = {}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch  # a second, so only where it is asked for

        if not torch.cuda.is_available():
            absent["gpu"] = "needs a GPU: torch sees none"
    if shutil.which("sbatch") is None:
        absent["slurm"] = "needs Slurm: no sbatch here"
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def two_ranks(monkeypatch):
    """Every process group has two ranks, so that graphs made by hand need no groups."""
    from handmade_graphs import PARTS_THAT_ASK_FOR_RANKS

    for module in PARTS_THAT_ASK_FOR_RANKS:
        monkeypatch.setattr(module, "ranks_of", lambda node: (0, 1))
