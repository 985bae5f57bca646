"""Train a recipe on this machine's GPUs, or on CPU processes where there are none.

Also on several nodes, once on each.

    titan-lite train llama3_8b --training.steps 100
    python -m titan_lite.launch llama3_8b --training.steps 100      # without an installation
    CONFIG_FILE=llama3_8b ./run_train.sh --training.steps 100      # makes an environment first

It checks the recipe, the environment variables (`titan-lite train --help` lists them), the
tokenizer and the data, counts the GPUs, and calls torchrun in this process. It exits with the code
that the ranks record (resilience/exit_code.py), since torchrun has 1 for every failure.
"""

import _thread
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from titan_lite import recipe, rules
from titan_lite.config import SHIPPED, Config, ConfigError, load_config, read_config
from titan_lite.config.errors import MachineError
from titan_lite.distributed import endpoint
from titan_lite.environment import (
    COPY,
    LAST_PORT,
    LOOPBACK,
    SUPERVISOR,
    address_towards,
    group_number,
    loopback_port,
    resolves,
    usable_cores,
    use_loopback,
)
from titan_lite.logging import Events, print_line
from titan_lite.metrics.run_files import step_reached
from titan_lite.processes import descendants, large_imports, signal_when_parent_dies
from titan_lite.resilience import exit_code
from titan_lite.resilience.signals import AT_ONCE, LAUNCHER, STOPPING, write_line
from titan_lite.rules.fault_tolerance import missing_lighthouse
from titan_lite.rules.mistakes import raise_mistakes

if TYPE_CHECKING:
    from titan_lite.launch_groups import GroupProcesses

# seconds from a signal until ranks that have not ended are killed; a hang ends them before
SAVE_LIMIT = 3600
# Seconds for the launchers of other nodes to answer, once all ranks here have ended
NODES_LIMIT = 20
DEFAULT_PORT = 29400  # torchrun's, of an endpoint without one
RESTART_LIMIT = 600  # where ranks may start again: the time of torchrun, too
RECEIVED = (*STOPPING, signal.SIGQUIT)
VARIABLES = {  # name: (pattern, meaning)
    "OMP_NUM_THREADS": ("[1-9][0-9]{0,5}", "a number of threads, such as OMP_NUM_THREADS=1"),
    "NCOPIES": ("[1-9][0-9]{0,3}", "the number of replica groups, such as NCOPIES=2"),
    "NGPU": ("[1-9][0-9]{0,5}", "the number of processes, at least 1, such as NGPU=2"),
    "NNODES": ("[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?", "the number of nodes, such as NNODES=2"),
    "NODE_RANK": ("[0-9]{1,9}", "0 on one node, and such as 1 on another"),
    "MAX_RESTARTS": ("[0-9]{1,6}", "a number, such as MAX_RESTARTS=0"),
}
GIVEN = (  # variables of the command that goes on with a run
    "NCOPIES",
    "COPY",
    "NGPU",
    "LOG_RANK",
    "NNODES",
    "NODE_RANK",
    "RDZV_ENDPOINT",
    "LOCAL_ADDR",
    "RDZV_ID",
    "MAX_RESTARTS",
)


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    listen()
    if SUPERVISOR in os.environ:
        signal_when_parent_dies(signal.SIGTERM, int(os.environ[SUPERVISOR]))
    os.getcwd()  # raises FileNotFoundError if it was removed; torch would not be loaded
    try:
        if not arguments or {"--help", "-h", "--print-config"} & set(arguments):
            return recipe.main(arguments)
        if SUPERVISOR not in os.environ:
            set_command(arguments)
        arguments = with_groups(arguments)
        if not os.environ.get(COPY) and (groups := groups_here(arguments)):
            return groups.run()
        options = launcher_options(arguments)
        folder = Path(load_config(arguments[0], arguments[1:]).job.dump_folder)
    except ConfigError as error:
        print_line(f"error: {error}")
        return exit_code.WRONG_INPUT
    except (MachineError, endpoint.EndpointError) as error:
        print_line(f"error: {error}")
        return exit_code.FAILED
    may_restart = int(os.environ.get("MAX_RESTARTS") or 0) > 0
    return launch(options, may_restart=may_restart, folder=folder)


def with_groups(arguments: Sequence[str]) -> list[str]:
    """Return the command line with the number of groups that NCOPIES sets. Raises ConfigError if
    the recipe or the command line has another one.
    """
    groups = os.environ.get("NCOPIES")
    if not groups:
        return list(arguments)
    check_number("NCOPIES")
    path, *keys = arguments
    config, _ = read_config(path, keys)  # what else is wrong is told later
    key = "fault_tolerance.replica_groups"
    if config.was_set(key) and config.fault_tolerance.replica_groups != int(groups):
        raise ConfigError(
            f"NCOPIES={groups}, and {config.origin(key)}: {key} ="
            f" {config.fault_tolerance.replica_groups}; use one of them, or the same number in both"
        )
    return [*arguments, f"--{key}", groups]


def groups_here(arguments: Sequence[str]) -> "GroupProcesses | None":
    """Return the processes of all replica groups, which share this machine; None if the recipe
    has no fault tolerance. Raises ConfigError.
    """
    path, *keys = arguments
    config, wrong = read_config(path, keys)
    groups = config.fault_tolerance.replica_groups
    if groups == 1:
        return None
    check_variables()
    tell_before_torch(config, wrong, "1")
    if (os.environ.get("NNODES") or "1") != "1":
        raise ConfigError(
            f"NNODES={os.environ['NNODES']}: a replica group on several nodes is started alone;"
            " use COPY=0 on the nodes of the first, COPY=1 on those of the next, and"
            " fault_tolerance.lighthouse"
        )
    from titan_lite.launch_groups import GroupProcesses

    gpus = count_gpus()
    processes = int(os.environ.get("NGPU") or gpus // groups or 2)
    if 0 < gpus < groups * processes:
        raise ConfigError(
            f"NGPU={processes} for each of {groups} groups is more than the {gpus} GPUs here; use"
            f" NGPU={max(1, gpus // groups)}, or fewer groups"
        )
    recipe.check_world(config, processes)
    os.environ.pop("NCOPIES", None)  # it is in the arguments
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = names or [str(index) for index in range(gpus)]
    devices = [names[processes * group : processes * (group + 1)] for group in range(groups)]
    os.environ["NGPU"] = str(processes)
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // (groups * processes)))
    line = f"titan_lite: {groups} replica groups, of {processes} processes each: {path}"
    print_line(line, sys.stdout)  # as the lines of the ranks
    return GroupProcesses(arguments, config, devices if gpus else [()] * groups)


def launcher_options(arguments: Sequence[str]) -> list[str]:
    """Return torchrun's arguments, and set the environment of its processes. Raises ConfigError."""
    path, *keys = arguments
    config, wrong = read_config(path, keys)
    of_lone_group = config.fault_tolerance.replica_groups > 1 and SUPERVISOR not in os.environ
    lone_address = LOOPBACK
    group_number(config.fault_tolerance)  # raises ConfigError
    if config.fault_tolerance.replica_groups == 1 and os.environ.get(COPY):
        write_line(f"titan_lite: COPY={os.environ[COPY]} has no effect: the run has no groups")
    if of_lone_group:  # others reach its store
        raise_mistakes(config, missing_lighthouse(config))
        lone_address = address_towards(config.fault_tolerance.address)
    nodes, rendezvous = check_variables(lone_address)
    tell_before_torch(config, wrong, nodes)
    address = split_endpoint(os.environ["RDZV_ENDPOINT"]) if nodes != "1" else None
    gpus = count_gpus()
    processes = int(os.environ.get("NGPU") or gpus or 2)
    if 0 < gpus < processes:
        fix = f"use NGPU={gpus}, or CUDA_VISIBLE_DEVICES= for CPU processes"
        raise ConfigError(f"NGPU={processes} is more than the {gpus} GPUs here; {fix}")
    world_size = int(nodes.rpartition(":")[2]) * processes
    if ":" not in nodes:
        recipe.check_world(config, world_size)
    restarts = os.environ.get("MAX_RESTARTS") or "0"
    set_environment(gpus, processes)
    if restarts != "0" or nodes != "1":
        # Otherwise all attempts share one store, where processes find addresses of the attempt
        # before and wait for them until the time limit (torch 2.11 to 2.13;
        # https://github.com/pytorch/pytorch/issues/135712).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    kind = "GPU" if gpus else "CPU"
    noun = "process" if processes == 1 else "processes"
    of_group = f"group {os.environ[COPY]}: " if SUPERVISOR in os.environ else ""
    line = f"titan_lite: {of_group}starting {processes} {kind} {noun}: {path}"
    if nodes != "1":
        line += f"; waiting for {nodes} nodes at {os.environ['RDZV_ENDPOINT']}"
    print_line(line, sys.stdout)  # as the lines of the ranks
    if address is not None:
        check_endpoint(*address, os.environ.get("NODE_RANK", ""))
    elif lone_address == LOOPBACK:
        loopback_port()
        use_loopback()
    return [
        *("--nnodes", nodes),
        *("--nproc-per-node", str(processes)),
        *("--max-restarts", restarts),
        *rendezvous,
        *("-m", "titan_lite.train"),
        *arguments,
    ]


def tell_before_torch(config: Config, wrong: Sequence[str], nodes: str) -> None:
    """Raise ConfigError with all mistakes if there is one in the recipe's keys: torch, which counts
    GPUs, takes seconds to import. nodes: NNODES.
    """
    if not wrong and not rules.mistakes_in_keys(config):
        return
    processes = int(os.environ.get("NGPU") or (0 if has_gpus() else 2))
    is_known = processes > 0 and ":" not in nodes
    recipe.check_world(config, int(nodes) * processes if is_known else None, wrong)


def check_variables(lone_address: str = LOOPBACK) -> tuple[str, list[str]]:
    """Return (NNODES, the launcher's options for the rendezvous). Raises ConfigError.

    lone_address: of this node, where it is the only one.
    """
    environment = {name: os.environ[name] for name in os.environ if os.environ[name]}
    for name in VARIABLES:
        check_number(name)
    nodes = environment.get("NNODES", "1")
    fewest, _, most = nodes.partition(":")
    if most and int(most) < int(fewest):
        raise ConfigError(
            f"NNODES={nodes}: expected the fewest nodes before the most, such as"
            f" NNODES={most}:{fewest}"
        )
    alone = f"{LOOPBACK}:0"  # port 0: a free one
    address = alone if nodes == "1" else environment.get("RDZV_ENDPOINT", "")
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    options += ["--rdzv-id", environment.get("RDZV_ID", "titan_lite")]
    if nodes == "1":  # otherwise ranks look up this node's name, which need not be known
        options += ["--local-addr", lone_address]
    else:
        if not address:
            raise ConfigError(
                f"NNODES={nodes} needs RDZV_ENDPOINT=HOST:PORT of a node, such as node0:29500"
            )
        if "LOCAL_ADDR" in environment:
            options += ["--local-addr", environment["LOCAL_ADDR"]]
        if "NODE_RANK" in environment:
            is_host = "true" if int(environment["NODE_RANK"]) == 0 else "false"
            options += ["--rdzv-conf", f"is_host={is_host}"]
    return nodes, options


def check_number(name: str) -> None:
    """Raise ConfigError if the variable is set, and its value is not as in VARIABLES."""
    pattern, meaning = VARIABLES[name]
    text = os.environ.get(name)
    if text and not re.fullmatch(pattern, text):
        raise ConfigError(f"{name}={text}: expected {meaning}")


def split_endpoint(address: str) -> tuple[str, int]:
    """Return the host and the port of RDZV_ENDPOINT. Raises ConfigError if this node does not know
    the host.
    """
    match = re.fullmatch(r"(\[.+\]|[^:]+)(?::([0-9]{1,5}))?", address)
    if not match or int(match[2] or 1) not in range(1, LAST_PORT + 1):
        raise ConfigError(f"RDZV_ENDPOINT={address}: expected HOST:PORT, such as node0:29500")
    host = match[1].strip("[]")
    if not resolves(host):
        wrong = f"RDZV_ENDPOINT={address}: this node knows no host {host}"
        raise ConfigError(f"{wrong}; use a name or an address that it knows")
    return host, int(match[2] or DEFAULT_PORT)


def check_endpoint(host: str, port: int, node_rank: str) -> None:
    """Check that this node can serve the rendezvous, or that its server answers.

    Raises EndpointError.
    """
    name = f"RDZV_ENDPOINT={host}:{port}"
    if node_rank and int(node_rank) == 0:
        endpoint.check_port(name, port)
    elif node_rank or not endpoint.port_is_free(port) or not endpoint.is_here(host):
        endpoint.check_store(name, host, port, endpoint.CONNECT_LIMIT)


def count_gpus() -> int:
    """Return the number of GPUs to train on; 0 if there are none or CUDA_VISIBLE_DEVICES hides
    them.

    Raises ConfigError if the node has GPUs that torch cannot use.
    """
    if not has_gpus():
        return 0
    import torch

    if gpus := torch.cuda.device_count():
        return gpus
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPUs"
    raise ConfigError(
        f"torch {torch.__version__}, built for {built}, cannot use the GPUs of this node; install a"
        " torch built for its driver, or set CUDA_VISIBLE_DEVICES= for CPU processes"
    )


def has_gpus() -> bool:
    """Return True if this node has GPUs that are not hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible[:1] in ("", "-", ","):
        return False
    with suppress(OSError):  # there is no such program
        if subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0:
            return True
    return os.path.exists("/dev/kfd")  # AMD's driver


def set_environment(gpus: int, processes: int) -> None:
    """Set what the processes read from the environment, where the user has not."""
    if not os.environ.get("OMP_NUM_THREADS"):  # the processes of a node share its cores
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // processes))
    if gpus and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        # Without fixed segments less memory is lost to gaps.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if gpus:  # a collective's kernel does not wait behind those of a computation
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    os.environ["PYTHONSAFEPATH"] = "1"  # no module of the current folder
    os.environ["PYTHONUTF8"] = "1"  # torch reads files by the locale
    root = str(Path(__file__).parents[1])
    if str(SHIPPED.parent) == root:  # a checkout, which need not be installed
        paths = [root, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("LOG_RANK", "0")


def set_command(arguments: Sequence[str]) -> None:
    """Set the command that a run which stops prints, to resume it. ./run_train.sh sets its own."""
    command = os.environ.get("TITAN_LITE_COMMAND") or shlex.join(
        ["titan-lite", "train", *arguments]
    )
    given = [f"{name}={shlex.quote(os.environ[name])}" for name in GIVEN if os.environ.get(name)]
    os.environ["TITAN_LITE_COMMAND"] = " ".join([*given, command])


def listen() -> None:
    """Receive signals in a thread: the first ends this process or, once torchrun runs, is passed
    on. After it SIGINT, and SIGQUIT always, end this process with all that it has started; others
    change nothing.

    A further signal would end torchrun while it waits for its ranks, and leave them behind. Ranks
    inherit that signals are blocked, until they listen to them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, RECEIVED)
    for number in STOPPING:  # until torchrun starts ranks, and sets handlers of its own
        signal.signal(number, lambda number, frame: os._exit(exit_code.STOPPED))
    threading.Thread(target=pass_signal_on, name="signals", daemon=True).start()


def pass_signal_on() -> NoReturn:
    number = signal.Signals(signal.sigwait(RECEIVED))
    if number != signal.SIGQUIT:
        write_line(f"titan_lite: {number.name}: stopping; {AT_ONCE}")
        _thread.interrupt_main(number)  # runs the signal's handler in the main thread
    while number != signal.SIGQUIT:
        number = signal.Signals(signal.sigwait(RECEIVED))
        if number == signal.SIGINT:
            break
    write_line(f"titan_lite: {number.name}: ended at once, without a save")
    for process in descendants():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process, signal.SIGKILL)
    if exit_code.VARIABLE in os.environ:
        exit_code.take_record()
    os._exit(exit_code.STOPPED)


def launch(options: Sequence[str], *, may_restart: bool, folder: Path | None = None) -> int:
    """Run torchrun with these arguments, and return the exit code of the run.

    folder: job.dump_folder, whose events.jsonl gets a line for a rank that is killed.
    """
    with large_imports():
        from torch.distributed import DistError, run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    # It logs a line for the rank that failed first; this function prints how all ended.
    failures = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    failures.setLevel(logging.ERROR)
    failures.addFilter(lambda record: keep_kill(record.getMessage(), folder))
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_LIMIT))  # torch >= 2.12
    exit_code.name_record()
    if sys.platform == "linux":
        args = (may_restart,)
        threading.Thread(target=leave_other_nodes, args=args, name="nodes", daemon=True).start()
    handled = ",".join(number.name for number in STOPPING)
    error: Exception | None = None
    try:
        run.main(["--signals-to-handle", handled, *options])
    except (SignalException, ChildFailedError, RendezvousError, DistError) as raised:
        error = raised
    recorded = exit_code.take_record()
    if error is None:
        return recorded if recorded in exit_code.ENDINGS else exit_code.TRAINED
    if isinstance(error, SignalException):  # where nothing is recorded, no rank had come to a step
        return exit_code.STOPPED if recorded is None else recorded
    if recorded in exit_code.ENDINGS:
        return recorded
    if isinstance(error, ChildFailedError):
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if set(codes.values()) == {exit_code.STOPPED}:  # ranks that were starting had a signal
            return exit_code.STOPPED
        write_line(f"error: {describe_failures(codes)}")
    elif isinstance(error, RendezvousTimeoutError):
        variables = ("NNODES", "RDZV_ENDPOINT", "RDZV_ID")
        same = " ".join(f"{name}={os.environ[name]}" for name in variables if name in os.environ)
        write_line(
            f"error: the nodes have not met: one has ended with an error of its own, has not {same}"
            " as this one, or is a second one with NODE_RANK=0"
        )
    else:
        first_line = str(error).partition("\n")[0]
        write_line(f"error: the launchers of the nodes have lost each other: {first_line}")
    return exit_code.FAILED


def keep_kill(line: str, folder: Path | None) -> bool:
    """Write an event if this line of torchrun says that a rank was killed, which cannot write one.

    Returns False: torchrun does not print the line.
    """
    killed = re.search(r"exitcode: (-[0-9]+)\) local_rank: ([0-9]+)", line)
    # Where no code is recorded, the ranks have not come so far that the folder is theirs.
    if killed and folder is not None and exit_code.recorded() is not None:
        text = describe_failures({int(killed[2]): int(killed[1])})
        if (os.environ.get("NNODES") or "1") != "1":
            text = f"on {os.uname().nodename} local {text}"
        kind = "killed"
        if os.environ.get(COPY):  # the others go on
            text = f"group {os.environ[COPY]}: {text}"
            kind = "copy killed"
        fields = {"msg": text, "event": kind, "levelno": logging.ERROR}
        events = Events()
        events.keep(folder, all_events=True)
        events.step = step_reached(folder)
        events.emit(logging.makeLogRecord(fields))
    return False


def describe_failures(codes: Mapping[int, int]) -> str:
    """Return {0: 1, 1: -9}, exit codes by rank, as "rank 1 was killed by SIGKILL; rank 0 ended with
    exit code 1".
    """
    killed = []
    failed = []
    for rank, code in sorted(codes.items()):
        if code < 0:
            killed.append(f"rank {rank} was killed by {signal.Signals(-code).name}")
        else:
            failed.append(f"rank {rank} ended with exit code {code}")
    return "; ".join(killed + failed)


def leave_other_nodes(may_restart: bool) -> NoReturn:
    """Run in a thread: end this process if its ranks have ended badly, and the launchers of other
    nodes do not answer.

    torchrun would wait for many minutes after a cut cable, and for 300 s for a launcher that was
    killed.
    """
    waited = 0
    started = False
    while True:
        time.sleep(1)
        code = exit_code.recorded()
        running = ranks_run()
        started = started or running
        ranks_have_failed = started and not running and code != exit_code.TRAINED
        if ranks_have_failed:
            waited += 1
        else:
            waited = 0
        limit = RESTART_LIMIT if may_restart and code not in exit_code.ENDINGS else NODES_LIMIT
        if waited > limit:
            break
    if code not in exit_code.ENDINGS:
        write_line(
            f"error: the ranks here have failed, and the other nodes are not reached for {limit} s"
        )
    os._exit(exit_code.take_record() or exit_code.FAILED)


def ranks_run() -> bool:
    """Return True if a process that the main thread has started has not ended.

    torchrun need not have noticed its end.
    """
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(ChildProcessError):
            if os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
    return False


if __name__ == "__main__":
    exit_code.end_with(lambda: main(sys.argv[1:]))
