"""Give tests the same surroundings on every machine, before anything else is imported.

What a test may depend on is the checkout as git has it, the installed packages, and the machine.
Everything else is made equal here, for the tests and for the processes that they start:

    variables       those of KEPT and of FIXED; a user's HF_HOME, RANK or NO_COLOR is gone
    home folder     an empty one of the session; compiled code is kept from one session to the next
    current folder  an empty one, which each test has to leave empty: a relative path, as the
                    default of job.dump_folder, leads into no run of the user's
    signals         none is blocked or ignored in a process that a test starts, even under nohup
    umask           022

conftest.py fails a test that left something in either folder; .ci/run, one in the checkout, where a
developer may write while tests run.
"""

import locale
import os
import signal
import site
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What describes the machine: where programs, libraries, packages and temporary files are.
KEPT = {"PATH", "TMPDIR", "TEMP", "TMP", "USER", "LOGNAME", "SHELL", "TERM", "CI", "VIRTUAL_ENV"}
KEPT |= {"CC", "CXX", "CPATH", "LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"}
KEPT |= {"PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE"}
KEPT |= {"CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
KEPT |= {"ROCM_HOME", "ROCM_PATH", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
KEPT_PREFIXES = ("LD_", "DYLD_", "CONDA_", "NIX_", "PYTEST_", "COV_", "COVERAGE_", "NVIDIA_VIS")
FIXED = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}
# As a launcher sets it for ranks: sums do not depend on the number of cores.
FIXED |= {"OMP_NUM_THREADS": "1"}

# The process of a session that is started first hands these to its pytest-xdist workers.
IGNORED_SIGNALS = "PYTEST_TITAN_LITE_IGNORED_SIGNALS"
PASSING = {signal.SIGPIPE, signal.SIGXFSZ}  # which Python ignores, and restores in a child


def _temporary_folder() -> str:
    """Return where tests write: a folder with a short name without spaces, since a message quotes or
    shortens a path.
    """
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(folder) <= 30 and " " not in folder and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return tempfile.gettempdir()


tempfile.tempdir = os.environ["TMPDIR"] = _temporary_folder()
session = tempfile.TemporaryDirectory(prefix="titan_lite-tests-", ignore_cleanup_errors=True)
HOME = Path(session.name, "home")
EMPTY = Path(session.name, "empty")
# Compiled kernels and the list of fonts: half a minute of a session.
CACHES = Path(tempfile.gettempdir(), f"titan_lite-tests-cache-{os.getuid()}")


def isolate() -> None:
    """Make the surroundings of this process equal to those on every other machine."""
    os.umask(0o022)
    HOME.mkdir()
    EMPTY.mkdir()
    _reset_variables()
    _reset_signals()


def _reset_variables() -> None:
    # Packages that were installed with pip's --user are found by the home folder.
    packages = site.getuserbase() if site.ENABLE_USER_SITE else ""
    for name in list(os.environ):
        if name not in KEPT and not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # the package of this checkout
    os.environ.update(FIXED, HOME=str(HOME), PYTHONPATH=os.pathsep.join(filter(None, paths)))
    if packages:
        os.environ["PYTHONUSERBASE"] = packages
    caches = _own_folder(CACHES)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    os.environ["CUDA_CACHE_PATH"] = str(caches / "cuda")
    os.environ["MPLCONFIGDIR"] = str(caches / "matplotlib")
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error:  # no C.UTF-8 here: Python's UTF-8 mode does not need it
        os.environ["LC_ALL"] = "C"
        locale.setlocale(locale.LC_ALL, "C")


def _own_folder(path: Path) -> Path:
    """Return `path`, or a folder of this session if another user has made that."""
    path.mkdir(mode=0o700, exist_ok=True)
    return path if path.stat().st_uid == os.getuid() else Path(session.name, "caches")


def _reset_signals() -> None:
    """Have new processes begin with no signal blocked or ignored.

    This process goes on without those that it was started to ignore (nohup, `&` in a script): a
    handler of its own does nothing, and is not inherited.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ignored = {int(number) for number in os.environ.get(IGNORED_SIGNALS, "").split(",") if number}
    for number in signal.valid_signals() - PASSING:
        if number in ignored or signal.getsignal(number) == signal.SIG_IGN:
            ignored.add(int(number))
            signal.signal(number, _do_nothing if number != signal.SIGCHLD else signal.SIG_DFL)
    os.environ[IGNORED_SIGNALS] = ",".join(map(str, sorted(ignored)))


def _do_nothing(number: int, frame: object) -> None:
    pass


def left_files() -> set[str]:
    """Return what is in the current folder and the home folder of tests."""
    return {str(path) for folder in (EMPTY, HOME) for path in folder.rglob("*")}


isolate()
