"""Find the living replica groups for a step, and sum tensors over them (torchft).

    quorum = Quorum(config.fault_tolerance, number, device, state_of)
    quorum.go_on_from(step=7)
    if not quorum.begin_step(stops): ...  # agrees on who is alive; `received`: the state of another
    quorum.share(8)                       # range(4, 8): the local batches of 8 that this one takes
    quorum.sum(gradients)                 # in place, over groups
    quorum.commit()                       # True: the step counts

Each group is a world of its own, with process groups for all axes of the mesh. Groups meet at a
lighthouse, a small server. Before a step each asks it who is alive: those that ask are the quorum
of the step, in which each has an index, and a process group for each rank number connects them. A
group that is behind takes the state of one that is not, rank by rank.

                    group 0            group 1
    step 7          quorum of 2       quorum of 2
                    batches 0 to 3    batches 4 to 7
                    sum fails         killed                          (starts again)
    step 7 again    quorum of 1
                    batches 0 to 7
    step 8          quorum of 1
    step 9          quorum of 2       quorum of 2: takes the state after step 8

A step whose sums have failed is undone, and taken again by those that are left. Where the sums of
one group have failed and those of another have not, the second is a step ahead, and the first takes
its state. torchft: https://github.com/meta-pytorch/torchft.
"""

import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft.checkpointing.http_transport import HTTPTransport

from titan_lite import progress
from titan_lite.config import FaultTolerance
from titan_lite.distributed.process_group import first_line, max_over_ranks
from titan_lite.environment import address_towards
from titan_lite.logging import OF_GROUP, logger

BUCKET_BYTES = 2**26  # of a sum: few large ones hide the latency of a network
QUORUM_SECONDS = 10  # of a request to the lighthouse, which is repeated
COMMIT_TIMEOUTS = 2  # ranks of a group may notice a failed sum one time limit apart
PAUSE = 1.0  # seconds before a request is repeated
# Of a wait after the last step: the lighthouse does without a group that lives and does not ask
# after 60 s (lighthouse.JOIN_TIMEOUT)
LAST_SECONDS = 70


@dataclass(frozen=True)
class GroupState:
    """The state of a rank of a group between two steps."""

    tensors: Mapping[str, Tensor]  # this rank's shards; received ones are on the host
    parts: Mapping[str, Any]  # state_dict() of the other parts, by name


class _Transport(HTTPTransport[dict[str, Any]]):
    """torchft's transport of states, which are pickled, at an address that other groups know.

    host: of this machine; torchft gives its name, which others may not resolve.
    """

    def __init__(self, host: str, timeout: timedelta):
        self.host = f"[{host}]" if ":" in host else host
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        return f"http://{self.host}:{self._server.server_port}/checkpoint/"


class Quorum:
    """The living groups, and this one among them.

    number: of this group. state_of: returns the state of this rank between two steps.
    """

    def __init__(
        self,
        settings: FaultTolerance,
        number: int,
        device: torch.device,
        state_of: Callable[[], GroupState],
    ):
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what matters is logged here
        # of received tensors, which are only read
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        self.settings = settings
        self.living = 0  # groups in this step
        self.index = 0  # of this group among them
        self.received: GroupState | None = None  # of another group, which this one continues
        timeout = timedelta(seconds=settings.timeout_seconds)
        group = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
        host = address_towards(settings.address)
        self.manager = Manager(
            pg=group(timeout=timeout),
            load_state_dict=self._keep,
            state_dict=lambda: vars(state_of()),
            min_replica_size=settings.min_replica_groups,
            use_async_quorum=False,  # the quorum of a step decides who takes which batches
            init_sync=False,  # all groups begin with the same seed, weights or checkpoint
            timeout=timeout,
            quorum_timeout=timedelta(seconds=QUORUM_SECONDS),
            connect_timeout=timeout,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            store_addr=os.environ["MASTER_ADDR"],
            store_port=int(os.environ["MASTER_PORT"]),
            lighthouse_addr=settings.address,
            replica_id=f"copy-{number:04}",
            hostname=host,
            checkpoint_transport=_Transport(host, timeout),
        )

    def _keep(self, state: Mapping[str, Any]) -> None:
        self.received = GroupState(**state)

    def go_on_from(self, step: int) -> None:
        """Take part from the step after `step` on."""
        self.manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin_step(self, stops: Callable[[], bool], *, is_last: bool = False) -> bool:
        """Agree on the groups of the next step, and receive the state of one that is ahead.

        Returns False if there was no quorum before the limit, or before `stops` returned True on a
        rank of this group. is_last: there is no further step, for which any groups are enough; the
        limit is that of a group which lives and does not ask.
        """
        limit = self.settings.wait_seconds
        if is_last:
            limit = min(limit, LAST_SECONDS)
        started = time.monotonic()
        said = ""
        step = self.manager.current_step()
        while True:
            progress.beat()
            lacks = self._ask(1 if is_last else self.settings.min_replica_groups)
            is_over = time.monotonic() - started > limit or stops()
            has_state = self.received is not None
            # Each rank has asked for itself: all of them go on, with a state or without, or none.
            lacks_any, has_any, has_none, is_over_any = max_over_ranks(
                int(bool(lacks)), int(has_state), int(not has_state), int(is_over)
            )
            if not lacks_any and has_any != has_none:
                return True
            self.received = None
            self.go_on_from(step)  # not that of a state which is not taken
            self.refuse(RuntimeError(lacks))
            self.commit()  # False; the next quorum connects again
            if is_over_any:
                return False
            if lacks and lacks != said and not is_last:
                logger.warning(
                    f"waiting for {lacks}, at most {limit} s (fault_tolerance.wait_seconds)",
                    extra=OF_GROUP,
                )
                said = lacks
            time.sleep(PAUSE)

    def _ask(self, least: int) -> str:
        """Ask the lighthouse for a quorum, and receive a state if it is due. Return what is lacking
        for a step of `least` groups; "" if nothing is.
        """
        self.received = None
        try:
            self.manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            self.manager._quorum_future = None  # its error would be raised again
            return self._missing(error)
        self.living = self.manager.num_participants()
        self.index = self.manager.participating_rank() or 0
        if self.living >= least and not self.fault:
            return ""
        if self.living < least:
            return self._other_groups()
        return f"a connection with other groups, which has failed ({self.fault})"

    def _missing(self, error: Exception) -> str:
        """Return what a quorum lacks. error: of the request."""
        if silence := silence_of(self.settings.address):
            return f"the lighthouse {self.settings.address}, which does not answer ({silence})"
        match = re.search('message: "([^"]*)"', str(error))  # of gRPC
        reason = match[1] if match else first_line(error)
        return f"{self._other_groups()}, or an answer of the lighthouse ({reason})"

    def _other_groups(self) -> str:
        needed = self.settings.min_replica_groups
        return f"other groups (fault_tolerance.min_replica_groups = {needed})"

    def share(self, local_batches: int) -> range:
        """Return which of the local batches of a step this group takes."""
        first = local_batches * self.index // self.living
        return range(first, local_batches * (self.index + 1) // self.living)

    def sum(
        self, tensors: Iterable[Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Sum over groups, in place.

        After a failure the values are wrong, further sums do nothing, and `commit` returns False.
        """
        for bucket in buckets_of(tensors):
            progress.beat()
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self.manager.allreduce(flat, reduce_op=op).wait()
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    @property
    def fault(self) -> str:
        """Why the step cannot count, as far as this rank knows; "" if it can."""
        error = self.manager.errored()
        return "" if error is None else first_line(error.original_exception)

    def refuse(self, error: Exception) -> None:
        """Have `commit` return False in this step."""
        self.manager.report_error(error)

    def commit(self) -> bool:
        """Return True if all sums of this step have succeeded on all ranks of this group.

        Raises RuntimeError if another rank of this group does not answer.
        """
        progress.beat()
        limit = timedelta(seconds=COMMIT_TIMEOUTS * self.settings.timeout_seconds)
        return self.manager.should_commit(timeout=limit)

    def leave(self) -> None:
        """Take part in no further step."""
        self.manager.shutdown(wait=False)


def await_lighthouse(settings: FaultTolerance, stops: Callable[[], bool]) -> bool:
    """Wait until the lighthouse answers; return False after the limit, or if `stops` returned True
    on a rank of this group. A collective in this group.
    """
    started = time.monotonic()
    said = False
    is_over = False
    while (silence := silence_of(settings.address)) and not is_over:
        waited = time.monotonic() - started
        is_over = waited > settings.wait_seconds or stops()
        if waited > QUORUM_SECONDS and not said:
            said = True
            logger.warning(
                f"waiting for the lighthouse {settings.address}, which does not answer ({silence}),"
                f" at most {settings.wait_seconds} s (fault_tolerance.wait_seconds)",
                extra=OF_GROUP,
            )
        progress.beat()
        time.sleep(0.2)
    return max_over_ranks(int(is_over)) == [0]


def silence_of(server: str) -> str:
    """Return why a server does not answer; "" if it does."""
    address = urlsplit(server)
    try:
        socket.create_connection((address.hostname, address.port), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def buckets_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype, in order, of at most BUCKET_BYTES unless it is one."""
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or nbytes + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket = []
            nbytes = 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket
