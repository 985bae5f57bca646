"""a replica group receives the state of another bit for bit, at the address that it was given."""

from datetime import timedelta

import pytest
import torch

pytest.importorskip("torchft")

from titan_lite.features.replica_groups.quorum import GroupState, _Transport

LIMIT = timedelta(seconds=300)  # which only a hang exceeds
STATE = GroupState(
    tensors={
        "norm.weight": torch.arange(7, dtype=torch.float32) / 3,
        "wide": torch.arange(400_000).view(1000, 400).t(),  # not contiguous
        "half": torch.randn(3, 5).bfloat16(),
        "none": torch.empty(0, 4),
    },
    parts={"progress": {"step": 7}, "text": "ü\n"},
)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_state_arrives_as_it_was_sent(host, shown):
    sender = _Transport(host, LIMIT)
    assert sender.metadata().startswith(f"http://{shown}:")
    sender.send_checkpoint([1], 7, vars(STATE), LIMIT)
    state = GroupState(**_Transport(host, LIMIT).recv_checkpoint(0, sender.metadata(), 7, LIMIT))
    assert state.parts == STATE.parts
    assert list(state.tensors) == list(STATE.tensors)
    for name, tensor in STATE.tensors.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor), name
