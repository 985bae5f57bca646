"""Check all environment variables that a run reads, before torch is imported.

    rank, world_size = check_environment()

Launchers set those of WORLD. A process without them runs alone, and sets them as a launcher would.
"""

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from titan_lite.config import ConfigError, FaultTolerance
from titan_lite.config.errors import MachineError, error_because_of, is_of_machine
from titan_lite.logging import log_ranks

SUPERVISOR = "TITAN_LITE_SUPERVISOR"  # process id of launch_groups.py, in its processes
COPY = "COPY"  # number of this replica group, with fault_tolerance.replica_groups
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
WORLD = (*ALONE, "MASTER_ADDR", "MASTER_PORT")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
LAST_PORT = 2**16 - 1
LOOPBACK = "127.0.0.1"
LOOPBACK_LIMIT = 10.0  # seconds for a connection to it


def number(name: str, default: int) -> int:
    """Return one variable as a number. Raises ConfigError."""
    text = os.environ.get(name) or str(default)
    if not _is_number(text):
        raise ConfigError(
            f"environment: {name}={text}: expected an integer at least 0, such as {name}={default}"
        )
    return int(text)


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", text) is not None


def check_environment() -> tuple[int, int]:
    """Return (rank, number of ranks) of this process.

    Raises ConfigError with every wrong variable and its value.
    """
    missing = [name for name in WORLD if not os.environ.get(name)]
    if missing and all(os.environ.get(name) in (None, "", value) for name, value in ALONE.items()):
        _run_alone()
        missing = []
    wrong = []
    if missing:
        there = " ".join(f"{name}={os.environ[name]}" for name in WORLD if name not in missing)
        wrong.append(
            f"{there} without {', '.join(missing)}: use torchrun or ./run_train.sh, which set all,"
            " or set none"
        )
    values: dict[str, int] = {}
    for name in (*ALONE, "MASTER_PORT", *RESTARTS):
        text = os.environ.get(name) or "0"
        if _is_number(text):
            values[name] = int(text)
        else:
            wrong.append(f"{name}={text}: expected an integer at least 0")
    wrong = wrong or _contradictions(values)
    if values.get("WORLD_SIZE"):
        try:
            log_ranks(values["WORLD_SIZE"])
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(f"environment: {'; '.join(wrong)}")
    if not resolves(os.environ["MASTER_ADDR"]):
        raise ConfigError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']}: this node knows no such host; use a name or"
            " an address of rank 0's node that all nodes know (LOCAL_ADDR, where the launcher sets"
            " MASTER_ADDR)"
        )
    return values["RANK"], values["WORLD_SIZE"]


def group_number(settings: FaultTolerance) -> int:
    """Return the number of this replica group; 0 without fault tolerance.

    Raises ConfigError.
    """
    if settings.replica_groups == 1:
        return 0
    group = number(COPY, 0)
    if group >= settings.replica_groups:
        raise ConfigError(
            f"environment: {COPY}={group}: fault_tolerance.replica_groups ="
            f" {settings.replica_groups}; use 0 to {settings.replica_groups - 1}"
        )
    return group


def folder_of_group(run_folder: Path, group: int) -> Path:
    """Return the folder for what each replica group writes, such as profiles: the run's, or a
    folder in it for groups after the first.
    """
    return run_folder / f"copy-{group}" if group else run_folder


def set_torchft_variables() -> None:
    """Set what torchft reads when it is imported, where the user has not."""
    os.environ.setdefault("RUST_LOG", "error")  # else it writes some lines a step
    # It ends a process in which its own thread has not run for 30 s, such as a group that was
    # stopped and goes on. For a hang there is the watchdog.
    os.environ.setdefault("TORCHFT_WATCHDOG_TIMEOUT_SEC", "86400")


def address_towards(url: str) -> str:
    """Return the address by which this machine reaches a server, and the server this machine.

    LOCAL_ADDR, if it is set. Raises ConfigError if this machine knows no way to the server.
    """
    if address := os.environ.get("LOCAL_ADDR"):
        return address
    parts = urlsplit(url)
    try:
        family, kind, *_, server = socket.getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as connection:
            connection.connect(server)  # of UDP: nothing is sent
            name: str = connection.getsockname()[0]
            return name
    except (OSError, UnicodeError) as error:
        raise error_because_of(
            error,
            f"{url}: this machine knows no way to it ({error}); use a name or an address that it"
            " knows, or LOCAL_ADDR",
        ) from None


def resolves(host: str) -> bool:
    """Return True if this node knows the address of a host. Raises MachineError if what knows the
    names of hosts does not answer.
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        if is_of_machine(error):
            raise MachineError(f"the address of {host} cannot be looked up: {error}") from None
        return False
    return True


def loopback_port() -> int:
    """Return a free port of 127.0.0.1, by which the ranks of one node meet. Raises ConfigError."""
    try:
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))  # also where the interface is down
            free.listen(1)
            port = free.getsockname()[1]
            socket.create_connection((LOOPBACK, port), LOOPBACK_LIMIT).close()
            return port
    except OSError as error:
        raise error_because_of(
            error,
            f"this machine has no loopback: {LOOPBACK} cannot be used ({error.strerror or error}),"
            " by which the ranks of one node meet; set it up (`ip link set lo up`), or start the"
            " container with a network",
        ) from None


def _run_alone() -> None:
    """Set the variables of a process that no launcher has started, with a free port."""
    port = loopback_port()
    os.environ.update(ALONE, MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))


def _contradictions(values: dict[str, int]) -> list[str]:
    """Return what is wrong with numbers that are each in range."""
    wrong = []
    world_size = values["WORLD_SIZE"]
    local_rank = values["LOCAL_RANK"]
    local_size = values["LOCAL_WORLD_SIZE"]
    if not values["RANK"] < world_size:
        wrong.append(f"RANK={values['RANK']}: expected less than WORLD_SIZE={world_size}")
    if not local_rank < local_size <= world_size:
        wrong.append(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}: expected a rank below the"
            f" number of ranks of this node, which is at most WORLD_SIZE={world_size}"
        )
    if not 0 < values["MASTER_PORT"] <= LAST_PORT:
        wrong.append(f"MASTER_PORT={values['MASTER_PORT']}: expected a port from 1 to {LAST_PORT}")
    return wrong


def use_loopback() -> None:
    """Have gloo connect the ranks of one node without looking up its name."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
