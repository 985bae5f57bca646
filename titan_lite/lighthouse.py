"""Serve as the lighthouse of a run, where replica groups find each other (torchft).

    python -m titan_lite.lighthouse --port 29510 --min-replica-groups 1

It has no state but who is alive: one that is lost is started again, with the same port, and groups
go on. ./run_train.sh starts it for groups on one machine. For groups on several, start it on a
machine that all reach, and name it to each: fault_tolerance.lighthouse = "http://HOST:29510".
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from titan_lite.cli import Parser, at_least_one, command
from titan_lite.config import ConfigError
from titan_lite.environment import SUPERVISOR, set_torchft_variables
from titan_lite.processes import large_imports, signal_when_parent_dies

HEARTBEAT_TIMEOUT = 5.0  # seconds without a sign of life after which a group is lost
JOIN_TIMEOUT = 60.0  # seconds to wait for a living group that does not ask for the next step


@command()
def main(arguments: Sequence[str]) -> int:
    parser = Parser(__doc__, needs_arguments=False)
    parser.add_argument("--host", default="::", help="address to serve (default: all)")
    parser.add_argument("--port", type=at_least_one, default=29510, metavar="N")
    parser.add_argument("--min-replica-groups", type=at_least_one, default=1, metavar="N")
    options = parser.parse_args(list(arguments))
    if supervisor := int(os.environ.get(SUPERVISOR, 0)):
        signal_when_parent_dies(signal.SIGKILL, supervisor)
    set_torchft_variables()
    with large_imports():
        from torchft.coordination import LighthouseServer

    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        server = LighthouseServer(
            bind=f"{host}:{options.port}",
            min_replicas=options.min_replica_groups,
            join_timeout_ms=int(1000 * JOIN_TIMEOUT),
            heartbeat_timeout_ms=int(1000 * HEARTBEAT_TIMEOUT),
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--host {options.host} --port {options.port} cannot be served: {reason}; use another"
            " port, or an address of this machine"
        ) from None
    print(f"lighthouse: {server.address()}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
