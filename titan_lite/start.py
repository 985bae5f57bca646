"""Train a recipe on this machine's GPUs, or on CPU processes where there are none. Also on several nodes, once on each.

    titan-lite train llama3_8b --training.steps 100
    python -m titan_lite.start llama3_8b --training.steps 100           # the same, without an installation
    CONFIG_FILE=llama3_8b ./run_train.sh --training.steps 100           # the same, after an environment was made

It checks the recipe, the environment variables (`titan-lite train --help` lists them), the tokenizer and the data, counts the
GPUs, and calls the launcher (launch.py). Exit codes are the launcher's. --only-check ends before torch is needed.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_lite import launch, recipe
from titan_lite.config import ConfigError
from titan_lite.config.recipe import SHIPPED, load_config
from titan_lite.faults.signals import WRONG_INPUT, end_with, tell

NUMA_NODES = "/sys/devices/system/node"
VARIABLES = {  # name: (pattern, meaning)
    "OMP_NUM_THREADS": ("[1-9][0-9]{0,5}", "a number of threads, such as OMP_NUM_THREADS=1"),
    "NGPU": ("[1-9][0-9]{0,5}", "the number of processes, at least 1, such as NGPU=2"),
    "NNODES": ("[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?", "the number of nodes, such as NNODES=2"),
    "NODE_RANK": ("[0-9]{1,9}", "0 on one node, and such as 1 on another"),
    "MAX_RESTARTS": ("[0-9]{1,6}", "a number, such as MAX_RESTARTS=0"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    launch.listen()
    try:
        if not arguments or {"--help", "-h", "--print-config"} & set(arguments):
            return recipe.main(arguments)
        options = launcher_options(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    return launch.main(options) if options else 0


def launcher_options(arguments: Sequence[str]) -> list[str]:
    """Return the launcher's arguments, and set the environment of its processes; an empty list if nothing is to be launched.

    Raises ConfigError.
    """
    only_check = arguments[0] == "--only-check"
    path, *keys = arguments[only_check:]
    config, _ = load_config(path, keys)
    nodes, rendezvous = check_variables()
    if only_check:
        return []
    if nodes != "1":  # otherwise every node waits for it, with many warnings
        check_host(os.environ["RDZV_ENDPOINT"])
    gpus = count_gpus()
    processes = int(os.environ.get("NGPU") or gpus or 2)
    if 0 < gpus < processes:
        fix = f"use NGPU={gpus}, or CUDA_VISIBLE_DEVICES= for CPU processes"
        raise ConfigError(f"NGPU={processes} is more than the {gpus} GPUs here; {fix}")
    world_size = int(nodes.rpartition(":")[2]) * processes
    if ":" not in nodes:
        recipe.check_world(config, world_size)
    set_environment(arguments, gpus, processes)
    kind = f"{'GPU' if gpus else 'CPU'} process{'es' * (processes > 1)}"
    meeting = (
        f"; waiting for {nodes} nodes at {os.environ['RDZV_ENDPOINT']}" if nodes != "1" else ""
    )
    tell(f"titan_lite: starting {processes} {kind}: {path}{meeting}")
    node = [
        "--nnodes",
        nodes,
        "--nproc-per-node",
        str(processes),
        "--max-restarts",
        os.environ.get("MAX_RESTARTS") or "0",
    ]
    return [*node, *rendezvous, *numa_options(gpus), "-m", "titan_lite.train", *arguments]


def check_variables() -> tuple[str, list[str]]:
    """Return (NNODES, the launcher's options for the rendezvous). Raises ConfigError."""
    environment = {name: os.environ[name] for name in os.environ if os.environ[name]}
    for name, (pattern, meaning) in VARIABLES.items():
        if name in environment and not re.fullmatch(pattern, environment[name]):
            raise ConfigError(f"{name}={environment[name]}: expected {meaning}")
    nodes = environment.get("NNODES", "1")
    endpoint = environment.get("RDZV_ENDPOINT", "localhost:0")  # port 0: a free one
    options = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        environment.get("RDZV_ID", "titan_lite"),
    ]
    if nodes != "1":
        if "RDZV_ENDPOINT" not in environment:
            raise ConfigError(
                f"NNODES={nodes} needs RDZV_ENDPOINT=HOST:PORT of a node, such as node0:29500"
            )
        if "LOCAL_ADDR" in environment:
            options += ["--local-addr", environment["LOCAL_ADDR"]]
        if "NODE_RANK" in environment:
            options += [
                "--rdzv-conf",
                f"is_host={'false' if int(environment['NODE_RANK']) else 'true'}",
            ]
    return nodes, options


def check_host(endpoint: str) -> None:
    """Raise ConfigError if this node cannot resolve the rendezvous host."""
    host = endpoint.rpartition(":")[0] or endpoint
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError):
        wrong = f"RDZV_ENDPOINT={endpoint}: this node knows no host {host}"
        raise ConfigError(f"{wrong}; use a name or an address that it knows") from None


def count_gpus() -> int:
    """Return the number of GPUs to train on; 0 if there are none or CUDA_VISIBLE_DEVICES hides them.

    Raises ConfigError if the node has GPUs that torch cannot use.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible[:1] in ("", "-", ","):
        return 0
    listed = output_of("nvidia-smi", "-L")
    if listed is None and not os.path.exists("/dev/kfd"):  # AMD's driver
        return 0
    import torch

    if gpus := torch.cuda.device_count():
        return gpus
    driver = (
        output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    ).partition("\n")[0]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    wrong = f"torch cannot use the GPUs of this node ({listed or '/dev/kfd'}): torch {torch.__version__}, {built}, driver {driver}"
    fix = "install a torch built for this driver, or set CUDA_VISIBLE_DEVICES= for CPU processes"
    raise ConfigError(f"{wrong}; CUDA 13 needs driver 580 or newer, CUDA 12 525: {fix}")


def numa_options(gpus: int) -> list[str]:
    """Return the launcher's options that bind each process to the cores beside its GPU, if there are several NUMA nodes."""
    if gpus < 2 or not os.path.exists(f"{NUMA_NODES}/node1"):
        return []
    if output_of("numactl", "--physcpubind=+0", "true") is not None:
        return ["--numa-binding", "node"]
    tell("titan_lite: processes are not bound to the cores beside their GPU: install numactl")
    return []


def output_of(*command: str) -> str | None:
    """Return a command's standard output; None if it fails or does not exist."""
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def set_environment(arguments: Sequence[str], gpus: int, processes: int) -> None:
    """Set what the processes read from the environment, where the user has not."""
    if not os.environ.get("OMP_NUM_THREADS"):  # the processes of a node share its cores
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    if gpus and not os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF"
    ):  # without fixed segments less memory is lost to gaps
        os.environ["PYTORCH_ALLOC_CONF"] = (
            os.environ.get("PYTORCH_ALLOC_CONF") or "expandable_segments:True"
        )
    if gpus:  # a collective's kernel does not wait behind those of a computation
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    os.environ |= {
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
    }  # no module of the current folder; torch reads files by the locale
    root = str(Path(__file__).parents[1])
    if str(SHIPPED.parent) == root:  # a checkout, which need not be installed
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    names = [
        "NGPU",
        "LOG_RANK",
        "NNODES",
        "NODE_RANK",
        "RDZV_ENDPOINT",
        "LOCAL_ADDR",
        "RDZV_ID",
        "MAX_RESTARTS",
    ]
    given = [f"{name}={shlex.quote(os.environ[name])}" for name in names if os.environ.get(name)]
    command = os.environ.get("TITAN_LITE_COMMAND") or shlex.join(
        ["titan-lite", "train", *arguments]
    )  # ./run_train.sh sets it
    os.environ["TITAN_LITE_COMMAND"] = " ".join(
        [*given, command]
    )  # a run that stops prints it, to go on
    os.environ.setdefault("LOG_RANK", "0")


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
