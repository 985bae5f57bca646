"""A store is asked before torch connects to it: one that answers, and programs that are none."""

import datetime
import socket

import pytest
import torch.distributed as dist

from titan_lite.distributed import endpoint, process_group


@pytest.fixture
def silent(monkeypatch):
    """Yield the port of a program that accepts connections and sends nothing."""
    monkeypatch.setattr(endpoint, "ANSWER_LIMIT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_store_answers_and_serves_others_afterwards(monkeypatch):
    monkeypatch.setattr(endpoint, "ANSWER_LIMIT", 300.0)
    seconds = datetime.timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=seconds, wait_for_workers=False)
    for _ in range(3):
        endpoint.check_store("endpoint", "127.0.0.1", store.port, 300)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_silent_program_is_named_with_what_was_tried(silent):
    with pytest.raises(endpoint.EndpointError) as error:
        endpoint.check_store("endpoint", "127.0.0.1", silent, 10)
    assert "endpoint: a program there accepts connections, but did not answer" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rank", "agents_store", "why"),
    [
        (0, True, "a program there"),
        (1, False, "a program there"),
        (0, False, "tried to listen on port"),
    ],
)
def test_a_rank_does_not_wait_for_a_silent_program(rank, agents_store, why, silent, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(silent))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agents_store))
    with pytest.raises(endpoint.EndpointError, match=f"MASTER_PORT={silent}: {why}"):
        process_group.connect_store(600)


def test_addresses_of_this_node():
    assert endpoint.is_here("127.0.0.1")
    assert not endpoint.is_here("192.0.2.1")  # of no node (RFC 5737)
