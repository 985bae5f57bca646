"""Give tests the surroundings of hermetic.py and a limit of time; skip those that need hardware or a
scheduler where it is absent; collect the messages of wrong input with --messages FILE.
"""

import hermetic  # isort: split

import faulthandler
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import cores
import hypothesis
import pytest
from descendants import descendants, end_descendants

from titan_lite.config import ConfigError

# The same examples on every run, none kept on disk, and no time limits: a machine may be busy.
hypothesis.settings.register_profile("titan_lite", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("titan_lite")
# Not `.hypothesis` in the current folder: what it notes about the sources of the package
hypothesis.configuration.set_hypothesis_home_dir(hermetic.CACHES / "hypothesis")

RELEASE_LIMIT = 2400  # seconds of a test marked release; pyproject.toml has the limit of the others
# Seconds after the limit until a test that is stuck outside of Python ends the process
PATIENCE = 60
RUNNING_BEFORE = pytest.StashKey[set[int]]()
STDERR = pytest.StashKey[int]()
CORES = "PYTEST_TITAN_LITE_CORES"  # the folder by which workers share cores


def pytest_addoption(parser):
    parser.addoption(
        "--messages",
        metavar="FILE",
        help="write every ConfigError that the tests provoke (with -n 0)",
    )


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # before a test's is captured
    config.add_cleanup(hermetic.session.cleanup)  # a worker of pytest-xdist ends without atexit
    if getattr(
        config.option, "numprocesses", None
    ):  # this process starts workers, which inherit it
        folder = os.environ[CORES] = tempfile.mkdtemp(prefix="titan_lite-cores-")
        config.add_cleanup(lambda: shutil.rmtree(folder))
    elif folder := os.environ.pop(CORES, None):
        cores.share(Path(folder))
    path, messages = config.getoption("--messages"), defaultdict(dict)
    if path and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--messages is for tests in one process: add -n 0")
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
        if item.get_closest_marker("release") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(RELEASE_LIMIT))
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # a test's time begins when it has its cores
def pytest_runtest_protocol(item):
    ranks = item.get_closest_marker("ranks")
    with cores.taken(ranks.args[0] if ranks else 1), ends_when_stuck(item):
        return (yield)


@contextmanager
def ends_when_stuck(item):
    """End the process with the stacks of all threads where pytest-timeout, which raises an exception
    in the main thread, has not ended a test: a library waits, and does not return to Python.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(limit + PATIENCE, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """End the processes of a test that failed, as one that took too long."""
    report = yield
    if report.failed:
        end_descendants(item.stash.get(RUNNING_BEFORE, set()), item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Have a report in UTF-8, in which a worker of pytest-xdist sends it: a test may print a name that
    is not.
    """
    return encodable((yield))


def encodable(value):
    """Return a value of strings, numbers and containers, with strings that UTF-8 can encode."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: encodable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(encodable, value))
    return value


@pytest.fixture(scope="session", autouse=True)
def empty_folder():
    """Run all in an empty folder: a relative path leads into none of the user's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(hermetic.EMPTY)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing(request, monkeypatch):
    """Fail a test that leaves a file in the current folder or in the home folder."""
    monkeypatch.chdir(hermetic.EMPTY)
    request.node.stash[RUNNING_BEFORE] = descendants()
    before = hermetic.left_files()
    yield
    if left := sorted(hermetic.left_files() - before):
        pytest.fail(f"left outside of tmp_path: {', '.join(left)}", pytrace=False)


@pytest.fixture
def two_ranks(monkeypatch):
    """Every process group has two ranks, so that graphs made by hand need no groups."""
    from handmade_graphs import PARTS_THAT_ASK_FOR_RANKS

    for module in PARTS_THAT_ASK_FOR_RANKS:
        monkeypatch.setattr(module, "ranks_of", lambda node: (0, 1))


@pytest.fixture
def world_of_one():
    """A process group of this process alone."""
    import torch.distributed as dist  # a second, so only where it is asked for

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def served(monkeypatch):
    """A server at http:// for the test; served.py says what it has."""
    from fsspec.registry import _registry  # here, since few tests need it
    from served import Served

    monkeypatch.setitem(_registry, "http", Served)
    monkeypatch.setattr(Served, "files", {})
    monkeypatch.setattr(Served, "headers", {})
    monkeypatch.setattr(Served, "failure", staticmethod(lambda call: None))
    return Served


@pytest.fixture
def clock(monkeypatch):
    """The clock by which servers are asked again: `now` in seconds, and the `waits` so far."""
    from titan_lite.data import servers

    class Clock:
        now = 0.0

        def __init__(self):
            self.waits = []

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.waits.append(seconds)
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(servers, "time", clock)
    return clock
