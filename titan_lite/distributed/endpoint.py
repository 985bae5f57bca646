"""Check that a store of torch answers at an address, before torch connects to it.

    check_store(f"RDZV_ENDPOINT={host}:{port}", host, port, CONNECT_LIMIT)    # raises EndpointError

torch's client waits for ever for a program that accepts its connection and sends nothing, and waits
longer and longer between attempts to connect, each with a warning.
"""

import contextlib
import datetime
import socket
import threading
import time

CONNECT_LIMIT = 60.0  # seconds to reach another node's launcher, as torchrun's own
ANSWER_LIMIT = 20.0  # seconds for a store to answer, once it is connected
ATTEMPT_LIMIT = 10.0  # seconds for one attempt to connect
PAUSE = 0.5  # seconds between attempts


class EndpointError(ConnectionError):
    """No store answers at an address. The message names the address and what was tried."""


def check_store(name: str, host: str, port: int, seconds: float) -> None:
    """Wait until a store answers. Raises EndpointError after `seconds` without a connection, or
    ANSWER_LIMIT without an answer.

    name: the beginning of errors.
    """
    _connect(name, host, port, seconds)
    import torch.distributed as dist  # its seconds are not the store's

    answered = threading.Event()

    def ask() -> None:
        limit = datetime.timedelta(seconds=ANSWER_LIMIT)
        with contextlib.suppress(dist.DistError, RuntimeError):
            dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
            answered.set()

    asking = threading.Thread(target=ask, name="endpoint", daemon=True)
    asking.start()
    asking.join(ANSWER_LIMIT)
    if not answered.is_set():
        raise EndpointError(
            f"{name}: a program there accepts connections, but did not answer as a store of torch"
            f" within {ANSWER_LIMIT:g} s; end that program, or use another port"
        )


def _connect(name: str, host: str, port: int, seconds: float) -> None:
    """Connect once, to find whether a program listens. Raises EndpointError."""
    deadline = time.monotonic() + seconds
    while True:
        limit = max(PAUSE, min(ATTEMPT_LIMIT, deadline - time.monotonic()))
        try:
            socket.create_connection((host, port), limit).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise EndpointError(
                f"{name}: tried to connect for {seconds:g} s: {reason}; check that the first node"
                " is started, and that a firewall lets its port through"
            )
        time.sleep(PAUSE)


def is_here(host: str) -> bool:
    """Return True if a name or an address is that of this node."""
    if host == socket.gethostname():
        return True
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as own:
            own.bind(address)
            return True
    return False


def check_port(name: str, port: int) -> None:
    """Raise EndpointError if this node cannot serve a store at a port. name: as in check_store."""
    if not port_is_free(port):
        raise EndpointError(
            f"{name}: tried to listen on port {port} of this node, which another program uses; end"
            " that program, or use another port on all nodes"
        )


def port_is_free(port: int) -> bool:
    """Return True if no program of this node listens on the port."""
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except OSError:
            return False
    return True
