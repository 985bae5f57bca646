"""The command `titan-lite`: the programs of titan_lite by name.

    titan-lite train debug_model --training.steps 20
    python -m titan_lite plan llama3_405b          # the same without an installation

A recipe is a file, or the name of a shipped one.
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from titan_lite import launch
from titan_lite.cli import INTERRUPTED, command
from titan_lite.config import SHIPPED, ConfigError
from titan_lite.config.errors import did_you_mean
from titan_lite.processes import signal_when_parent_dies
from titan_lite.resilience import exit_code

# Programs beside `train`. Each is the function `main` of a module, which is imported when it is
# called: some import torch.
TOOLS = {
    "recipe": "titan_lite.recipe",
    "plan": "titan_lite.tools.plan.command",
    "verify": "titan_lite.tools.verify.command",
    "prepare": "titan_lite.tools.prepare",
    "report": "titan_lite.tools.report.page",
    "convert": "titan_lite.tools.convert",
    "average": "titan_lite.tools.average",
    "generate": "titan_lite.tools.generate",
    "evaluate": "titan_lite.features.evaluation.command",
}
_is_interrupted = False  # by a signal
_forking = 0  # process id of the process that forks
USAGE = """\
usage: titan-lite PROGRAM [ARGUMENT ...]      --help after a program's name prints its arguments

  train     train a recipe on this machine's GPUs, or on CPU processes
  recipe    check a recipe, or print it resolved
  plan      predict memory, traffic and time of a recipe, without a GPU
  verify    compare a recipe's layout with one process, on CPUs
  prepare   tokenize documents once, for many runs
  report    make a page of one run, or of several
  convert   convert weights from and to Hugging Face's format
  average   average the weights of several checkpoints
  generate  continue a text with a run's weights
  evaluate  score a checkpoint in tasks of lm-evaluation-harness
"""


@command()
def main(arguments: Sequence[str]) -> int:
    """Run a program with the arguments after its name, and return its exit code."""
    if not arguments or arguments[0] in ("--help", "-h"):
        shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
        print(f"{USAGE}\nrecipes: {shipped}")
        return 0 if arguments else 2
    name = arguments[0]
    if name == "train":
        exit_code.end_with(lambda: launch.main(arguments[1:]))
    if name not in TOOLS:
        programs = ["train", *TOOLS]
        hint = did_you_mean(name, programs, otherwise=f"; use one of {', '.join(programs)}")
        raise ConfigError(f"titan-lite {name}: no such program{hint}")
    own_process()
    return importlib.import_module(TOOLS[name]).main(arguments[1:])


def own_process() -> None:
    """Make SIGTERM and SIGHUP the same as Ctrl-C, and end processes that this one forks with it.

    A tool then removes what is unfinished, and shows what it has. A SIGHUP that is ignored, as
    under nohup, stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again
    os.register_at_fork(before=_note_parent, after_in_child=_end_with_tool)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _is_interrupted
    _is_interrupted = True
    raise KeyboardInterrupt


def _interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """Raise a KeyboardInterrupt again that was raised where Python prints and forgets an exception.

    Such places are the functions that run around a fork (os.register_at_fork) and __del__. A thread
    waits until the main thread has left them. Its signal ends a call in which that waits meanwhile,
    as `_thread.interrupt_main` would not; SIGTERM is never ignored. After an interrupt nothing else
    is printed: a library may have objects that are half made.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        if not _is_interrupted:
            sys.__unraisablehook__(lost)
        return
    main_thread = threading.get_ident()

    def interrupt() -> None:
        time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGTERM)

    threading.Thread(target=interrupt).start()


def _note_parent() -> None:
    global _forking
    _forking = os.getpid()


def _end_with_tool() -> None:
    """Run in a process that a tool has forked: `datasets` has such, which would wait for ever.

    Ctrl-C and SIGHUP reach all processes of a terminal; the tool alone handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_when_parent_dies(signal.SIGKILL, _forking)


def run() -> None:
    """Run the installed command."""
    code = main(sys.argv[1:])
    if code == INTERRUPTED:
        _kill_started()
    sys.exit(code)


def _kill_started() -> None:
    """Kill the processes of libraries, which Python would wait for at its end.

    A Ctrl-C while `datasets` starts its manager leaves a process that nobody else ends.
    """
    for library in ("multiprocessing", "multiprocess"):
        processes = sys.modules.get(f"{library}.process")
        for process in processes.active_children() if processes else ():
            process.kill()


if __name__ == "__main__":
    run()
