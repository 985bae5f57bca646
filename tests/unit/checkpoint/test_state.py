"""A step's state.json: what is written is read, each part under its own name."""

import json
import math

import pytest
import torch

from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState, read_state, write_state
from titan_lite.config import Data, Training
from titan_lite.data.bad_documents import BadDocumentsLog
from titan_lite.manifest import CorruptFileError
from titan_lite.metrics.per_source import PerSource
from titan_lite.resilience.skipped_steps import SkippedSteps
from titan_lite.trainer import Progress


class Counter:
    """A stateful part."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_each_part_is_loaded_from_its_own_name(tmp_path):
    parts = {"one": Counter(1).state_dict(), "two": Counter(2).state_dict()}
    identity = RunIdentity(recipe={"job": {}}, model={"dim": 4}, shares=(0.5, 0.5), git="c0ffee")
    write_state(tmp_path, 50, {"optimizer", "model"}, RunState(identity, parts))
    saved = read_state(tmp_path)
    assert (saved.step, saved.tensors) == (50, ("model", "optimizer"))
    assert saved.identity == RunIdentity(
        recipe={"job": {}}, model={"dim": 4}, shares=[0.5, 0.5], git="c0ffee"
    )
    one, two, skipped = Counter(), Counter(), Counter()
    saved.load_into({"two": two, "one": one})
    assert (one.count, two.count, skipped.count) == (1, 2, 0)


def test_a_part_that_is_missing_or_another_is_named(tmp_path):
    write_state(tmp_path, 1, {"model"}, RunState(parts={"one": {"number": 1}, "two": 5}))
    for name, words in (
        ("one", "one has no 'count'"),
        ("two", "two is not as it was written"),
        ("three", "three has no 'three'"),
    ):
        with pytest.raises(CorruptFileError, match=rf"state\.json: {words}"):
            read_state(tmp_path).load_into({name: Counter()})


def test_a_file_of_another_program_is_named(tmp_path):
    for content, words in (
        ({"parts": {}}, "state.json has no step"),
        ({"step": 1, "parts": {}}, "state.json has no 'identity'"),
        ({"step": 1, "run": {}, "recipe": {}}, "state.json has no 'identity'"),
        ({"step": 1, "identity": {}}, "state.json has no 'parts'"),
        ({"step": 1, "identity": 5, "parts": {}}, "state.json is not as it was written"),
    ):
        (tmp_path / "state.json").write_text(json.dumps(content))
        with pytest.raises(CorruptFileError, match=words):
            read_state(tmp_path)


GOOD = {
    "step": 50,
    "tensors": ["model"],
    "identity": {"recipe": {"job": {}}, "sequences": 8, "shares": [0.5], "mesh": {"pp": 1}},
    "parts": {},
}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["step"], -1, "greater than or equal to 0"),
        (["identity", "sequences"], "8", 'sequences = "8": input should be a valid integer'),
    ],
)
def test_a_value_of_another_type_or_out_of_bounds_is_named(place, value, words, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(GOOD))
    assert read_state(tmp_path).identity.sequences == 8
    content = json.loads(json.dumps(GOOD))
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (tmp_path / "state.json").write_text(json.dumps(content))
    with pytest.raises(CorruptFileError) as error:
        read_state(tmp_path)
    assert str(error.value).startswith("state.json is not as it was written: ")
    assert words in str(error.value)


def parts(tmp_path):
    """(part, the state that it saves) of each part of a run."""
    device = torch.device("cpu")
    data = Data()
    return {
        "progress": (Progress(step=5), Progress(step=5).state_dict()),
        "skipped_steps": (
            SkippedSteps(Training(spike_window=4), 0.1, device),
            {"count": 1, "in_a_row": 0, "accepted": [1.0], "skipped": [{"step": 1, "loss": 2.0}]},
        ),
        "per_source": (PerSource(["a"], None, device), {"tokens": {"a": 4096}}),
        "bad_documents": (BadDocumentsLog(data, tmp_path, True), {"listed": 0}),
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("progress", {"step": -1}),
        ("skipped_steps", {"accepted": [math.inf]}),
        ("per_source", {"tokens": {"a": -4096}}),
        ("bad_documents", {"listed": -1}),
    ],
)
def test_a_number_of_a_part_that_cannot_be_is_named(name, change, tmp_path):
    part, state = parts(tmp_path)[name]
    (tmp_path / "state.json").write_text(json.dumps({**GOOD, "parts": {name: state}}))
    read_state(tmp_path).load_into({name: part})
    (tmp_path / "state.json").write_text(json.dumps({**GOOD, "parts": {name: state | change}}))
    words = rf"state\.json: {name} is not as it was written: "
    with pytest.raises(CorruptFileError, match=words) as error:
        read_state(tmp_path).load_into({name: part})
    assert "\n" not in str(error.value)
