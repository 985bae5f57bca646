"""Send the state of a copy of the model to another one: tensors as they are, the rest as JSON.

    transfer = StateTransfer(hostname, timeout)       # a torchft CheckpointTransport: a server
    transfer.send_checkpoint([1], step=7, state_dict=state, timeout=timeout)     # on a living copy
    state = transfer.recv_checkpoint(0, metadata, step=7, timeout=timeout)       # on one that joins

Each rank sends its own shards to the rank of the same number. torchft's own transports pickle what
they send; here nothing that arrives is executed. A connection is

    the receiver    token and step, one line of JSON
    the sender      one line of JSON: {"torchft": {...}, "parts": {...}, "tensors": [[name, dtype,
                    shape], ...]}, then the bytes of each tensor in this order
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport

MAX_LINE_BYTES = 2**28  # of JSON: names of tensors, and positions in the data


class TransferError(RuntimeError):
    """An error: a state did not arrive, or is not that of this model."""


@dataclass(frozen=True)
class CopyState:
    """The state of a rank of a copy between two steps."""

    tensors: Mapping[str, Tensor]  # this rank's shards; received ones are on the host
    parts: Mapping[str, Any]  # state_dict() of the other parts, by name, in JSON types


class StateTransfer(CheckpointTransport[dict[str, Any]]):
    """A server of this rank's state, and the client of another rank's.

    host: an address of this machine that other copies know. timeout: of a transfer. device: of the
    tensors that are sent.
    """

    def __init__(self, host: str, timeout: timedelta, device: torch.device):
        self.host = host
        self.device = device
        self.ready: torch.cuda.Event | None = (
            None  # on a GPU: the offered tensors have their values
        )
        self.timeout = timeout.total_seconds()
        self.token = secrets.token_hex(16)
        self.offered: tuple[int, dict[str, Any]] | None = None  # step and state, to be sent now
        self.receivers: set[socket.socket] = set()  # that are being sent to
        self.changed = threading.Condition()  # of the two above
        family = socket.getaddrinfo(host, None)[0][0]
        self.server = socket.create_server(("", 0), family=family)
        threading.Thread(target=self._serve, name="state transfer", daemon=True).start()

    def metadata(self) -> str:
        """Return what a receiver needs."""
        port = self.server.getsockname()[1]
        return json.dumps({"host": self.host, "port": port, "token": self.token})

    # Sending

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state, which does not change until `disallow_checkpoint`. Returns at once."""
        if self.device.type == "cuda":
            self.ready = torch.cuda.default_stream(self.device).record_event()
        with self.changed:
            self.offered = (step, state_dict)
            self.changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Wait until nothing is being sent, since the state is about to change.

        After the time limit of a transfer, connections are ended.
        """
        with self.changed:
            self.offered = None
            self.changed.wait_for(lambda: not self.receivers, self.timeout)
            for connection in self.receivers:
                connection.shutdown(socket.SHUT_RDWR)

    def shutdown(self, wait: bool = True) -> None:
        self.server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self.timeout)
            try:
                asked = json.loads(read_line(connection))
                if secrets.compare_digest(str(asked["token"]), self.token):
                    self._send(connection, asked["step"])
            except (OSError, ValueError, KeyError, TypeError, TransferError):
                return  # the receiver sees the end of the connection

    def _send(self, connection: socket.socket, step: int) -> None:
        """Send the state before `step`, once it is offered."""
        with self.changed:
            is_offered = self.changed.wait_for(
                lambda: self.offered is not None and self.offered[0] == step, self.timeout
            )
            if not is_offered:
                return
            assert self.offered is not None
            content = self.offered[1]
            self.receivers.add(connection)
        try:
            with self._beside_training():
                for block in blocks_of(content):
                    connection.sendall(block)
        finally:
            with self.changed:
                self.receivers.discard(connection)
                self.changed.notify_all()

    def _beside_training(self) -> AbstractContextManager[object]:
        """Return a context whose copies to the host do not wait for a GPU's kernels of training,
        among which is a sum that waits for the receiver.
        """
        if self.ready is None:
            return nullcontext()
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(self.ready)
        return torch.cuda.stream(stream)

    # Receiving

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Return the state of another rank. Raises OSError and TransferError."""
        source = json.loads(metadata)
        deadline = time.monotonic() + timeout.total_seconds()
        with socket.create_connection((source["host"], source["port"]), self.timeout) as connection:
            asked = json.dumps({"token": source["token"], "step": step})
            connection.sendall(asked.encode() + b"\n")
            header = json.loads(read_line(connection))
            tensors = {}
            for name, dtype, shape in header.pop("tensors"):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                read_into(connection, bytes_of(tensor), deadline)
                tensors[name] = tensor
        return {
            "torchft": header["torchft"],
            "user": {"default": CopyState(tensors, header["parts"])},
        }


def blocks_of(content: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """Yield the header, then the bytes of one tensor after another, copied to the host."""
    state: CopyState = content["user"]["default"]
    described = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in state.tensors.items()
    ]
    header = {"torchft": content["torchft"], "parts": state.parts, "tensors": described}
    yield json.dumps(header).encode() + b"\n"
    for tensor in state.tensors.values():
        yield bytes_of(tensor.cpu().contiguous())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_line(connection: socket.socket) -> bytes:
    """Return the bytes before the next newline, which are read one block at a time.

    Raises TransferError if the connection ends.
    """
    line = bytearray()
    while len(line) < MAX_LINE_BYTES:
        # what follows the line is left in the socket
        block = connection.recv(2**16, socket.MSG_PEEK)
        if not block:
            raise TransferError("the sender has ended the connection")
        end = block.find(b"\n")
        line += connection.recv(len(block) if end < 0 else end + 1)
        if end >= 0:
            return bytes(line)
    raise TransferError(f"a line of more than {MAX_LINE_BYTES} bytes")


def read_into(connection: socket.socket, memory: memoryview, deadline: float) -> None:
    """Fill the memory. Raises TransferError if the connection ends, or at the deadline."""
    filled = 0
    while filled < len(memory):
        if time.monotonic() > deadline:
            raise TransferError("the state did not arrive in time")
        received = connection.recv_into(memory[filled:])
        if not received:
            raise TransferError("the sender has ended the connection")
        filled += received
