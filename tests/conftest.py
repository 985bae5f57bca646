"""Skip tests that need hardware or a scheduler where it is absent; collect the messages of wrong
input with --messages FILE.
"""

import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import cores
import hypothesis
import pytest

from titan_lite.config import ConfigError

# The same examples on every run, none kept on disk, and no time limits: a machine may be busy.
hypothesis.settings.register_profile("titan_lite", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("titan_lite")


CORES = "TITAN_LITE_TEST_CORES"  # the folder by which workers share cores


def pytest_addoption(parser):
    parser.addoption(
        "--messages", metavar="FILE", help="write every ConfigError that the tests provoke"
    )


def pytest_configure(config):
    if getattr(
        config.option, "numprocesses", None
    ):  # this process starts workers, which inherit it
        folder = os.environ[CORES] = tempfile.mkdtemp(prefix="titan_lite-cores-")
        config.add_cleanup(lambda: shutil.rmtree(folder))
    elif folder := os.environ.pop(CORES, None):
        cores.share(Path(folder))
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    ranks = item.get_closest_marker("ranks")
    with cores.taken(ranks.args[0] if ranks else 1):
        return (yield)


def pytest_collection_finish(session):
    """Start the server of ranks early, if a test may want it: it imports while others run."""
    ranks = sys.modules.get("ranks")
    if ranks is not None and session.items and not session.config.option.collectonly:
        ranks.start_server()


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
