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


FLAT = {
    "step": 6,
    "tokens_seen": 1536,
    "skipped_steps": 1,
    "skipped_in_a_row": 0,
    "spikes": {"accepted": [8.5, 8.25], "skipped": [{"step": 3, "loss": 9.0, "limit": 8.6}]},
    "tokens_by_source": {"web": 1024, "code": 512},
    "loader": {"windows": 48, "rows": {"0": [6, [12, 40]]}, "of": 8},
    "validation_due": False,
    "recipe": {"optimizer": {"name": "AdamW"}},
    "run": {"model": {"dim": 256}, "rows": 8, "between": {"rank": 4}, "world_size": 2},
    "tensors": ["model", "optimizer"],
}


def test_the_form_before_is_read(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(FLAT))
    saved = read_state(tmp_path)
    assert (saved.step, saved.tensors) == (6, ("model", "optimizer"))
    assert saved.identity == RunIdentity(
        recipe={"optimizer": {"name": "AdamW"}},
        model={"dim": 256},
        sequences=8,
        compression={"rank": 4},
        world_size=2,
    )
    assert saved.parts == {
        "progress": {"step": 6, "tokens_seen": 1536, "validation_due": False},
        "skipped_steps": {
            "count": 1,
            "in_a_row": 0,
            "accepted": [8.5, 8.25],
            "skipped": [{"step": 3, "loss": 9.0, "limit": 8.6}],
        },
        "per_source": {"tokens": {"web": 1024, "code": 512}},
        "loader": FLAT["loader"],
    }


def test_the_form_before_of_convert_is_read(tmp_path):
    flat = {"step": 0, "tensors": ["model"], "run": {"model": {"dim": 256}}}
    flat["special_tokens"] = {"bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "state.json").write_text(json.dumps(flat))
    saved = read_state(tmp_path)
    assert saved.identity == RunIdentity(model={"dim": 256})
    assert saved.parts == {"special_tokens": {"bos_token_id": 1, "eos_token_id": 2}}


def test_a_file_of_another_program_is_named(tmp_path):
    for content, words in (
        ({"parts": {}}, "state.json has no step"),
        ({"step": 1, "parts": {}}, "state.json has no 'identity'"),
        ({"step": 1, "recipe": {}}, "state.json has no 'tokens_seen'"),
        ({"step": 1, "run": 5}, "state.json is not as it was written"),
    ):
        (tmp_path / "state.json").write_text(json.dumps(content))
        with pytest.raises(CorruptFileError, match=words):
            read_state(tmp_path)
