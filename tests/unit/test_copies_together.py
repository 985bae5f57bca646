"""A copy of the model: with which others it can train, and when it stops without them."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchft")

from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.copies import IDENTITY as NAME_OF_IDENTITY
from titan_lite.copies import MAX_UNDONE, Copies, identity_of
from titan_lite.logging import events
from titan_lite.resilience.quorum import CopyState

SETTINGS = {"copies": 2, "lighthouse": "http://node0:29510"}
IDENTITY = RunIdentity(
    recipe={"optimizer": {"lr": 1e-3}, "fault_tolerance": SETTINGS, "job": {"dump_folder": "a"}},
    sequences=16,
    device="CPU",
)


def changed(section, **values):
    return {**IDENTITY.recipe, section: {**IDENTITY.recipe[section], **values}}


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": changed("optimizer", lr=2e-3)},
        {"recipe": changed("fault_tolerance", copies=3)},
        {"sequences": 24},
        {"device": "NVIDIA H100"},
        {"documents": "another hash"},
        {"sources": "another hash"},
        {"mesh": {"tp": 2}},
    ],
    ids=lambda change: "-".join(change),
)
def test_copies_that_would_part_have_another_identity(change):
    assert identity_of(dataclasses.replace(IDENTITY, **change)) != identity_of(IDENTITY)


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": changed("job", dump_folder="b")},
        {"recipe": changed("fault_tolerance", lighthouse="http://10.0.0.1:29510")},
        {"git": "only the first rank knows it"},
    ],
    ids=["folder", "lighthouse", "git"],
)
def test_what_does_not_matter_to_training_may_differ(change):
    assert identity_of(dataclasses.replace(IDENTITY, **change)) == identity_of(IDENTITY)


@pytest.mark.parametrize(("undone", "stops"), [(MAX_UNDONE, False), (MAX_UNDONE + 1, True)])
def test_a_signal_is_heard_where_no_step_counts(undone, stops):
    """Else the sums of a step tell it to all copies."""
    copies = object.__new__(Copies)
    asked = []
    copies.undone = undone
    copies.trainer = SimpleNamespace(
        is_finished=False,
        stop=SimpleNamespace(requested=False, poll=lambda: asked.append("poll") or True),
    )
    copies.stop_alone = lambda: asked.append("stop")
    copies.parts = lambda: pytest.fail("goes on") if stops else (_ for _ in ()).throw(EOFError)
    if stops:
        assert copies.agree() is False
        assert asked == ["poll", "stop"]
    else:
        with pytest.raises(EOFError):  # it begins another step
            copies.agree()
        assert asked == []


def test_what_another_copy_sends_is_taken_whole(monkeypatch):
    """Its tensors, and the counts and the position in the data beside them."""
    monkeypatch.setattr(events, "step", 0)
    taken = {}
    weight = torch.zeros(3)
    parts = ("progress", "loader")
    copies = object.__new__(Copies)
    copies.identity = identity_of(IDENTITY)
    copies.trainer = SimpleNamespace(
        step=7,
        tensors=lambda: {"weight": weight},
        stateful={
            name: SimpleNamespace(load_state_dict=functools.partial(taken.__setitem__, name))
            for name in parts
        },
        model=SimpleNamespace(parameters_have_changed=lambda: taken.update(weight=weight.tolist())),
    )
    sent = {name: {"of": name} for name in parts}
    copies.load(CopyState({"weight": torch.ones(3)}, {NAME_OF_IDENTITY: copies.identity, **sent}))
    assert taken == {**sent, "weight": [1.0, 1.0, 1.0]}
    assert events.step == 7
