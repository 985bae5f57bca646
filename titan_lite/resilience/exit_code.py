"""Keep the exit code of a run, which torchrun does not: it restarts whatever exits with another
code than 0, and exits with 1.

    0    trained
    1    failed; another start may help
    2    the recipe, the command line or the data is wrong
    3    the same step failed again after a restart; another start would fail there, too
    75   stopped by a signal: start it again (EX_TEMPFAIL of sysexits.h)

launch.py names a file to the ranks of its node. They record the code there before they exit, and
launch.py exits with it:

    name_record()                 # in launch.py
    if has_ended(): return 0      # in a restarted rank: the attempt before has ended the run
    record(FAILED)                # once there is something to lose: a killed rank records nothing
    record(STOPPED)               # how the run ends
    take_record()                 # in launch.py
"""

import atexit
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

TRAINED = 0
FAILED = 1
WRONG_INPUT = 2
REPEATED = 3
STOPPED = 75
ENDINGS = (WRONG_INPUT, REPEATED, STOPPED)  # after these another attempt would be wrong
VARIABLE = "TITAN_LITE_EXIT_CODE"  # in the environment of ranks: the file


def name_record() -> None:
    """Name a file for the record to the processes that this one starts."""
    name = f"titan_lite-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[VARIABLE] = str(Path(tempfile.gettempdir(), name))


def take_record() -> int | None:
    """Return the code that ranks have recorded, None if there is none, and delete the file."""
    code = recorded()
    Path(os.environ[VARIABLE]).unlink(missing_ok=True)
    return code


def record(code: int) -> None:
    """Write the exit code of this node's ranks; FAILED, if there is none yet.

    Does nothing if launch.py has not started them.
    """
    path = os.environ.get(VARIABLE)
    if path and (code != FAILED or recorded() is None):
        Path(path).write_text(str(code))


def is_first_to_record(code: int) -> bool:
    """Record the code if no rank of this node has recorded one, and return True then: this rank
    prints why the run ends.

    Another could not: torchrun ends all ranks as soon as the first one has exited. Without a
    record, each rank under torchrun prints it, and else the first one of the node.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
    with suppress(FileExistsError), open(path, "x") as file:
        file.write(str(code))
        return True
    return False


def recorded() -> int | None:
    """Return the exit code that a rank of this node has recorded last; None if there is none."""
    with suppress(OSError, ValueError, KeyError):
        return int(Path(os.environ[VARIABLE]).read_text())
    return None


def has_ended() -> bool:
    """Return True if an earlier attempt has ended the run. Else forget how that attempt failed.

    All ranks of a node call it before the first of them can record FAILED, which needs a process
    group of all.
    """
    code = recorded()
    if code == FAILED:
        Path(os.environ[VARIABLE]).unlink(missing_ok=True)
    return code in ENDINGS


def record_and_translate(code: int) -> int:
    """Record the code of a rank, and return the one to exit with.

    torchrun would restart a run that stops with another code than 0.
    """
    record(code)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return TRAINED if under_torchrun and code == STOPPED else code


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main`, and end the process with the code that it returns or exits with.

    This skips the end of the interpreter, in which a closed pipe changes the exit code, and threads
    of a process group without peers may end the process by SIGABRT. Call it before torch is
    imported, so that torch's exit handlers run first.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)
    try:
        codes.append(main())
    except SystemExit as error:
        codes.append(int(error.code or 0))
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """Run as the last exit handler. codes: empty after an exception that nobody caught."""
    if not codes:
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed
        with suppress(OSError):
            stream.flush()
    os._exit(codes[0])
