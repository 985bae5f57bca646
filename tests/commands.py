"""Start commands as a user does: with the environment that tests want, a limit of time, and what
they print kept.

done = run(*script(tmp_path, *SMALL))              # done.returncode, done.stdout
job = Job(tmp_path / "log", *script(tmp_path))     # goes on meanwhile: job.output, job.logged(3), job.ended()
done = train(2, DEBUG, tmp_path, *SMALL)           # as torchrun, on forked ranks that need not import torch
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cores
from ranks import end_ranks, start_ranks
from tiny import ROOT

SECONDS = 300  # of a command, unless its test says otherwise
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
RUN_TRAIN = ROOT / "run_train.sh"  # which starts two ranks on a CPU
TORCHRUN = "torch.distributed.run"
LAUNCH = """
import os, sys
from pathlib import Path
from titan_lite import launch as start
from titan_lite.resilience.exit_code import end_with
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch.py sets it for restarts
start.listen()
restarts = sys.argv[1 + sys.argv.index("--max-restarts")]
folder = Path(os.environ["EVENTS_OF"]) if "EVENTS_OF" in os.environ else None
end_with(lambda: start.launch(sys.argv[1:], may_restart=restarts != "0", folder=folder))
"""
Done = subprocess.CompletedProcess  # of which stdout has both streams


def run(*command: Any, cwd: Path = ROOT, seconds: float = SECONDS, **environment: Any) -> Done:
    """Run a command to its end. environment: variables besides those of tests; None removes one."""
    ranks = 2 if command[0] == RUN_TRAIN else 1
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with cores.given_to(ranks), _command(command, environment, cwd=cwd, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
    print(f"$ {' '.join(map(str, command))}\n{output}")
    return Done(command, process.returncode, output)


class Job:
    """A command that may be looked at and signalled while it runs.

    Its output, of all its processes, is a file. session: its processes are a session.
    """

    def __init__(
        self,
        log: Path | str,
        *command: Any,
        session: bool = False,
        **environment: Any,
    ):
        self.log = Path(log)
        with open(self.log, "w") as output:
            streams = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
            self.process = _command(
                command, environment, cwd=ROOT, start_new_session=session, **streams
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.process.kill()  # a stopped one as well
        self.process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, pattern: str, seconds: float = 120) -> None:
        """Wait until the output has the pattern.

        Fails where the command ends before it, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.output):
            ended = self.process.poll() is not None and not re.search(pattern, self.output)
            assert not ended, (
                f"exit code {self.process.returncode} before {pattern!r}:\n{self.output}"
            )
            assert time.monotonic() < deadline, f"no {pattern!r} in {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def logged(self, step: int) -> None:
        self.until(rf"step +{step}  loss")

    def ended(self, seconds: float = SECONDS) -> int:
        """Wait for its end, and return the exit code; pytest reports the whole output where a test
        fails.
        """
        with self:
            try:
                return self.process.wait(seconds)
            finally:
                print(f"== {self.log.name}\n{self.output}")


def _command(command: tuple, environment: dict[str, Any], **options: Any) -> subprocess.Popen:
    variables = {**os.environ, **ENVIRONMENT, **environment}
    set_here = {name: str(value) for name, value in variables.items() if value is not None}
    return subprocess.Popen(
        [*map(str, command)], env=set_here, text=True, **{"stderr": subprocess.STDOUT, **options}
    )


def python(*arguments: Any) -> list[Any]:
    """The command that runs this Python with the arguments."""
    return [sys.executable, *arguments]


def script(folder: Any, *options: Any) -> list[Any]:
    """The command that trains the debug recipe in `folder` by ./run_train.sh."""
    return [RUN_TRAIN, "--job.dump_folder", folder, *options]


def launcher(world_size: int, *program: Any, ours: bool = True, restarts: int = 0) -> list[Any]:
    """The command that starts `program` on so many ranks of this machine.

    ours: by launch.py's launch, else by torchrun.
    """
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    options += ["--max-restarts", restarts, "--nproc-per-node", world_size, *program]
    return python("-c", LAUNCH, *options) if ours else python("-m", TORCHRUN, *options)


def train(
    world_size: int, recipe: Any, folder: Any, *options: Any, seconds: float = SECONDS
) -> Done:
    """Train in `folder` as torchrun does, for tests of what is trained: ranks are forked, with
    everything imported.

    The exit code is that of the first rank that has another one than 0; the other ranks have two
    minutes to find out.
    """
    words = [str(word) for word in (recipe, "--job.dump_folder", folder, *options)]
    with tempfile.NamedTemporaryFile(mode="r", suffix=".log") as log:
        with cores.given_to(world_size):
            ranks = start_ranks(world_size, _train, log.name, words, **ENVIRONMENT)
            codes = end_ranks(ranks, seconds, patience=120)
        output = log.read()
    print(
        f"$ titan_lite.train {' '.join(words)}\n{output}\nexit codes of {world_size} forked ranks:"
        f" {codes}"
    )
    assert None not in codes, f"a rank did not end, and was killed: {codes}"
    return Done(words, next((code for code in codes if code), 0), output)


def _train(log: str, words: list[str]) -> None:
    from titan_lite.train import main

    with open(log, "a") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    os.chdir(ROOT)
    sys.exit(main(words))


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Return the ids of the processes that a launcher's main thread has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]
