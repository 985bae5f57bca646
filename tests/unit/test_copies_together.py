"""A copy of the model: with which others it can train, what it writes when it becomes the first, and
when it stops without them.
"""

import functools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import DEBUG

pytest.importorskip("torchft")

from titan_lite.checkpoint.agreement import Member
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.config import load_config
from titan_lite.copies import (
    IDENTITY,
    LINES,
    MAX_UNDONE,
    Copies,
    digest_of,
    identity_of,
    why_apart,
)
from titan_lite.logging import events
from titan_lite.resilience.quorum import CopyState

OPTIONS = ["--fault_tolerance.copies=2", "--fault_tolerance.lighthouse=http://node0:29510"]


def identity(*options, **facts):
    recipe = load_config(DEBUG, [*OPTIONS, *options]).model_dump()
    return RunIdentity(recipe=recipe, sequences=16, device="CPU", **facts)


def apart(one, other, folders=("here", "here")):
    """Return the lines of the second of two copies that should train together."""
    first = identity_of(one, 0, folders[0])
    second = identity_of(other, 1, folders[1])
    lines = why_apart(Member(**json.loads(json.dumps(asdict(first)))), second)
    assert bool(lines) == (digest_of(first) != digest_of(second))
    return lines


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (identity("--optimizer.lr=1e-5"), "optimizer.lr differs: 0.002 in copy 0 on"),
        (identity("--fault_tolerance.copies=3"), "fault_tolerance.copies differs: 2 in copy 0"),
        (identity("--job.dump_folder=b"), 'job.dump_folder differs: "outputs/debug_model" in copy'),
        (
            replace(identity(), sequences=24),
            "sequences a step (training.global_batch_size) differs",
        ),
        (replace(identity(), device="NVIDIA H100"), 'device differs: "CPU" in copy 0 on'),
        (identity(documents="b" * 64), 'the documents of [data] differs: "" in copy 0'),
        (identity(sources="c" * 64), "SHA-256 of titan_lite's source files differs"),
        (identity(mesh={"tp": 2}), "ranks along tp differs: not set in copy 0"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_copies_that_would_part_are_told_the_key(other, line):
    (found,) = apart(identity(), other)
    assert found.startswith(line)
    assert found.endswith(
        "; start all copies with the same recipe, command line, files and versions, on the same"
        " kind of device"
    )


@pytest.mark.parametrize(
    "other",
    [
        identity("--fault_tolerance.lighthouse=http://10.0.0.1:29510"),
        identity("--data.path=/elsewhere/corpus"),
        identity("--model.tokenizer_path=/elsewhere/debug.model"),
        identity(git="only the first rank knows it"),
    ],
    ids=["lighthouse", "data", "tokenizer", "git"],
)
def test_what_does_not_matter_to_training_may_differ(other):
    """The contents of documents and tokenizer are compared by their hashes."""
    assert apart(identity(), other) == []


def test_copies_on_disks_that_are_not_shared_are_told_the_folder():
    (line,) = apart(identity(), identity(), folders=("one lock", "another"))
    assert line.startswith('job.dump_folder = "outputs/debug_model": the folder in copy 1 on ')
    assert line.endswith("use one on a file system that all copies share")


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
    copies.identity = identity_of(identity(), 0, "here")
    copies.trainer = SimpleNamespace(
        step=7,
        tensors=lambda: {"weight": weight},
        stateful={
            name: SimpleNamespace(load_state_dict=functools.partial(taken.__setitem__, name))
            for name in parts
        },
        metrics=SimpleNamespace(lines=[]),
        model=SimpleNamespace(parameters_have_changed=lambda: taken.update(weight=weight.tolist())),
    )
    sent = {name: {"of": name} for name in parts}
    beside = {IDENTITY: asdict(copies.identity), LINES: [{"step": 7, "loss": 2.0}]}
    copies.load(CopyState({"weight": torch.ones(3)}, {**beside, **sent}))
    assert copies.trainer.metrics.lines == beside[LINES]
    assert taken == {**sent, "weight": [1.0, 1.0, 1.0]}
    assert events.step == 7
