"""A step's state.json: what is written is read, each part under its own name."""

import json

import pytest

from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState, read_state, write_state
from titan_lite.manifest import CorruptFileError


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
