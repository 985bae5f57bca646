"""Launch a run like torchrun, with the same options; signals reach the run, and the exit code says how it ended.

    python -m titan_lite.launch --nproc-per-node 8 --max-restarts 3 -m titan_lite.train train_configs/llama3_8b.toml

torchrun dies of SIGUSR1 and leaves its processes behind, kills a run that needs more than 30 s to save after SIGTERM, exits with
1 for every failure, and restarts a run that has stopped on request. This launcher passes SIGTERM, SIGUSR1 and SIGINT on to the
processes of this node, without a time limit, since the sender of the signal has one. A second SIGINT kills them. Exit codes are
those of `faults/signals.py`, and 130 after a second SIGINT. Only a run that failed with 1, or was killed, is restarted. If the
launcher dies, even by SIGKILL, the processes detect it, save and stop.
"""

import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from titan_lite.faults.signals import (
    FAILED,
    NOTHING,
    REPEATED,
    STOPPED,
    STOPPING,
    WRONG_INPUT,
    announce,
    end_with,
    settle,
    tell,
)

ANSWER = 20  # seconds to wait for other nodes, once all processes of this node have ended
MENDED = 600  # the same if a restart is possible when the network is back; torchrun waits for nodes as long


def exit_code(codes: Iterable[int], asked: bool) -> int:
    """Return the launcher's exit code for those of its processes (negative: killed by a signal). asked: it told them to stop."""
    ended = set(codes)
    for code in (
        WRONG_INPUT,
        REPEATED,
    ):  # perhaps from one rank; the others lost their connection to it
        if code in ended:
            return code
    # A process that is already exiting dies of the signal.
    died = {-number for number in STOPPING}
    return STOPPED if ended - died == {STOPPED} or (asked and ended <= died) else FAILED


def listen() -> None:
    """End with STOPPED on a signal, as nothing has been started."""
    for number in STOPPING:
        signal.signal(number, lambda *_: os._exit(STOPPED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # ./run_train.sh has blocked them


def main(arguments: Sequence[str]) -> int:
    listen()
    # Imports that take seconds
    from torch.distributed import run
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher import api as launcher

    asked: list[int] = []

    class Agent(LocalElasticAgent):
        """torchrun's agent, which starts and watches the processes of a node."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.starting, self.looked = False, time.monotonic()
            nodes: Any = self._worker_group.spec.rdzv_handler
            nodes.num_nodes_waiting = functools.partial(self.nodes_waiting, nodes.num_nodes_waiting)
            threading.Thread(target=self.watch, name="watch", daemon=True).start()
            for number in STOPPING:
                signal.signal(number, self.pass_on)

        def pass_on(self, number: int, frame: FrameType | None) -> None:
            again, name = number in asked, signal.Signals(number).name
            asked.append(number)
            if again and number == signal.SIGINT and self.running():
                for pid in self.processes():
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # each process and its loader are a group
                sys.exit(128 + number)
            if len(asked) > 1:
                if len(asked) == 2:
                    tell(f"titan_lite: {name}: already stopping")
                if number != signal.SIGINT:
                    signal.signal(number, NOTHING)
            elif self._worker_group.state == WorkerState.HEALTHY and not self.starting:
                self.signal_processes()
            elif (
                self._worker_group.state in (WorkerState.INIT, WorkerState.STOPPED)
                and not self.starting
            ):
                sys.exit(STOPPED)  # waiting for other nodes

        def processes(self) -> list[int]:
            return list(self._pcontext.pids().values()) if self._pcontext else []

        def codes(self) -> list[int | None]:
            """Return the exit codes of the processes; None for one that runs."""
            handlers = (
                self._pcontext.subprocess_handlers.values()
                if isinstance(self._pcontext, SubprocessContext)
                else ()
            )
            return [handler.proc.poll() for handler in handlers]

        def running(self) -> bool:
            return None in self.codes()

        def signal_processes(self) -> None:
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, asked[0])
            name = signal.Signals(asked[0]).name
            tell(f"titan_lite: {name}: stopping at the end of the step")

        def nodes_waiting(self, ask: Callable[[], int]) -> int:
            """Ask like torchrun for the number of new nodes; if the rendezvous host has died, let the processes save and stop."""
            try:
                return ask()
            except RendezvousError:
                if not asked:
                    tell("titan_lite: the launcher that the nodes meet at does not answer")
                    asked.append(signal.SIGTERM)
                    self.signal_processes()
                return 0

        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            if asked:
                sys.exit(STOPPED)  # between two attempts
            super()._initialize_workers(worker_group)

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self.starting = (
                True  # so that no signal handler raises, which would leave started processes behind
            )
            signal.pthread_sigmask(
                signal.SIG_BLOCK, STOPPING
            )  # inherited by them until they listen
            try:
                return super()._start_workers(worker_group)
            finally:
                self.looked = time.monotonic()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if self.starting:
                self.starting = False
                if asked:
                    self.signal_processes()
            self.looked = time.monotonic()
            result = super()._monitor_workers(worker_group)
            if result.failures:
                self.judge(result.failures)
            return result

        def watch(self) -> NoReturn:
            """End the process if other nodes do not answer. torchrun alone would wait a quarter of an hour."""
            while True:
                time.sleep(1)
                codes = self.codes()
                waited = time.monotonic() - self.looked
                ended = [code for code in codes if code is not None]
                # In other states torchrun waits for nodes with its own limit.
                asking = self._worker_group.state in (
                    WorkerState.HEALTHY,
                    WorkerState.UNHEALTHY,
                    WorkerState.FAILED,
                )
                limit = MENDED if self._remaining_restarts and not asked else ANSWER
                if asking and ended and len(ended) == len(codes) and waited > limit:
                    text = ", ".join(map(str, ended))
                    tell(
                        f"error: the other nodes are not reached for {limit} s; the processes here ended with exit code {text}"
                    )
                    os._exit(exit_code(ended, bool(asked)) if any(ended) else 0)

        def judge(self, failures: dict[int, Any]) -> None:
            code = exit_code((failure.exitcode for failure in failures.values()), bool(asked))
            if asked or code != FAILED:
                self._remaining_restarts = 0
            if code == FAILED:
                rank, first = min(failures.items(), key=lambda failure: failure[1].timestamp)
                how = (
                    f"by {signal.Signals(-first.exitcode).name}"
                    if first.exitcode < 0
                    else f"with exit code {first.exitcode}"
                )
                left = (
                    f"; all are started again, {self._remaining_restarts} times at most"
                    if self._remaining_restarts
                    else ""
                )
                tell(f"error: rank {rank} (process {first.pid}) was the first to end, {how}{left}")

    launcher.LocalElasticAgent = Agent  # type: ignore[misc] # torchrun has no option for it
    # These are logged in any case; `judge` reports failures.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not str(record.msg).startswith(("failed (exitcode", "Sending process"))
    )
    # torchrun handles SIGHUP, and ends all at once, except under nohup.
    hangup = ["SIGHUP"] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    options = run.parse_args([f"--signals-to-handle={','.join(['SIGQUIT', *hangup])}", *arguments])
    if options.max_restarts or options.nnodes != "1":
        # Otherwise all attempts share one store, where processes find addresses of the previous attempt and wait for them until
        # the time limit (torch 2.11 to 2.13; https://github.com/pytorch/pytorch/issues/135712).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with announce():
        try:
            run.run(options)
        except ChildFailedError as error:
            return exit_code((failure.exitcode for failure in error.failures.values()), bool(asked))
        finally:
            settle()
    return 0


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
