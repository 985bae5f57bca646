"""A copy of the model receives the state of another bit for bit, and nothing from strangers."""

import json
import socket
import threading
from datetime import timedelta

import pytest
import torch

pytest.importorskip("torchft")

from titan_lite.resilience.state_transfer import (
    CopyState,
    StateTransfer,
    TransferError,
    read_line,
)

SECOND = timedelta(seconds=1)
LIMIT = 300 * SECOND  # which only a hang exceeds
CPU = torch.device("cpu")
STATE = CopyState(
    tensors={
        "norm.weight": torch.arange(7, dtype=torch.float32) / 3,
        "wide": torch.arange(400_000).view(1000, 400).t(),  # not contiguous, and many blocks
        "half": torch.randn(3, 5).bfloat16(),
        "step": torch.tensor(7),
        "none": torch.empty(0, 4),
    },
    parts={"progress": {"step": 7}, "text": "ü\n"},
)
CONTENT = {"torchft": {"step": 7, "batches_committed": 12}, "user": {"default": STATE}}


@pytest.fixture
def sender():
    transfer = StateTransfer("127.0.0.1", LIMIT, CPU)
    yield transfer
    transfer.shutdown()


@pytest.fixture
def time_is_over(sender, monkeypatch):
    """A function after which the sender waits for nothing, as if its limit of time had passed."""
    over = lambda predicate, timeout: predicate()
    return lambda: monkeypatch.setattr(sender.changed, "wait_for", over)


def receive(sender, step=7, **changes):
    metadata = json.dumps({**json.loads(sender.metadata()), **changes})
    receiver = StateTransfer("127.0.0.1", LIMIT, CPU)
    try:
        return receiver.recv_checkpoint(0, metadata, step, LIMIT)
    finally:
        receiver.shutdown()


def test_a_state_arrives_as_it_was_sent(sender):
    sender.send_checkpoint([1], 7, CONTENT, SECOND)
    received = receive(sender)
    assert received["torchft"] == CONTENT["torchft"]
    state = received["user"]["default"]
    assert state.parts == STATE.parts
    assert list(state.tensors) == list(STATE.tensors)
    for name, tensor in STATE.tensors.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor), name


def test_a_receiver_that_is_early_waits_for_the_state(sender, monkeypatch):
    wait_for = sender.changed.wait_for

    def is_asked(*arguments):
        later = threading.Thread(target=sender.send_checkpoint, args=([1], 7, CONTENT, SECOND))
        later.start()  # it has the state once this thread waits
        return wait_for(*arguments)

    monkeypatch.setattr(sender.changed, "wait_for", is_asked)
    assert receive(sender)["user"]["default"].parts == STATE.parts


@pytest.mark.parametrize(
    "wrong", [{"step": 8}, {"token": "0" * 32}, {"token": None}], ids=["step", "token", "no token"]
)
def test_another_step_or_a_stranger_receives_nothing(sender, wrong, time_is_over):
    sender.send_checkpoint([1], 7, CONTENT, SECOND)
    time_is_over()
    with pytest.raises(TransferError, match="the sender has ended the connection"):
        receive(sender, **wrong)


def test_after_disallow_checkpoint_nothing_is_sent_since_the_state_changes(sender, time_is_over):
    sender.send_checkpoint([1], 7, CONTENT, SECOND)
    sender.disallow_checkpoint()
    time_is_over()
    with pytest.raises(TransferError):
        receive(sender)


def test_disallow_checkpoint_waits_for_a_receiver(sender):
    """One that has read the header has the tensors as they were then."""
    large = CopyState({"large": torch.zeros(2**24)}, {})
    sender.send_checkpoint([1], 7, {**CONTENT, "user": {"default": large}}, SECOND)
    source = json.loads(sender.metadata())
    with socket.create_connection((source["host"], source["port"])) as connection:
        asked = json.dumps({"token": source["token"], "step": 7})
        connection.sendall(asked.encode() + b"\n")
        read_line(connection)
        changed = threading.Event()

        def change():
            sender.disallow_checkpoint()
            large.tensors["large"].fill_(1)
            changed.set()

        threading.Thread(target=change).start()
        assert not changed.wait(0.3)
        left = large.tensors["large"].nbytes
        values = set()
        while left:
            block = connection.recv(min(left, 2**20))
            values |= set(block)
            left -= len(block)
        assert values == {0}
        assert changed.wait(300)


def test_a_receiver_that_is_too_slow_does_not_get_a_state_that_changes(sender, time_is_over):
    large = CopyState({"large": torch.zeros(2**24)}, {})
    sender.send_checkpoint([1], 7, {**CONTENT, "user": {"default": large}}, SECOND)
    source = json.loads(sender.metadata())
    with socket.create_connection((source["host"], source["port"])) as connection:
        asked = json.dumps({"token": source["token"], "step": 7})
        connection.sendall(asked.encode() + b"\n")
        read_line(connection)
        received = bytearray(connection.recv(2**20))  # the sender is in the middle of it
        time_is_over()
        sender.disallow_checkpoint()
        large.tensors["large"].fill_(1)
        while block := connection.recv(2**20):
            received += block
    assert len(received) < large.tensors["large"].nbytes
    assert set(received) == {0}


def test_a_sender_that_dies_is_noticed(sender):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                read_line(connection)
                header = {"torchft": {}, "parts": {}, "tensors": [["w", "float32", [9]]]}
                connection.sendall(json.dumps(header).encode() + b"\n1234")

        threading.Thread(target=answer).start()
        with pytest.raises(TransferError, match="the sender has ended the connection"):
            receive(sender, port=server.getsockname()[1])


def test_a_garbled_request_does_not_end_the_server(sender):
    source = json.loads(sender.metadata())
    for garbage in (b"\n", b"[]\n", b"{}\n", b'{"token": 1}\n', b"\xff\n"):
        with socket.create_connection((source["host"], source["port"])) as connection:
            connection.sendall(garbage)
            assert connection.recv(10) == b""
    sender.send_checkpoint([1], 7, CONTENT, SECOND)
    assert receive(sender)["torchft"] == CONTENT["torchft"]
