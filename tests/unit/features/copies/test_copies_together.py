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
from titan_lite.config import ConfigError, load_config
from titan_lite.features.copies.copies import (
    IDENTITY,
    LINES,
    MAX_UNDONE,
    Copies,
    digest_of,
    identity_of,
    why_apart,
)
from titan_lite.features.copies.quorum import CopyState
from titan_lite.logging import events
from titan_lite.resilience import TrainingError

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


class Disk:
    """The checkpoints of a run, as a copy finds them."""

    def __init__(self, *steps, saving=False):
        self.steps = list(steps)
        self.save_lock = SimpleNamespace(is_held_by_another=lambda: saving)
        self.folder = "checkpoint"

    def wait(self):
        """Until a save in the background has ended."""

    def present(self):
        return self.steps

    def newest(self):
        return max(self.steps, default=0)


def copy_at(step, disk, *, last=12, stopped=False, **attributes):
    """Return a copy that has become the first, of a run that saves every 4 steps."""
    copies = object.__new__(Copies)
    trainer = SimpleNamespace(
        rank=0,
        step=step,
        is_finished=step >= last,
        stop=SimpleNamespace(requested=stopped, received=False),
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(enable=True, interval=4, load_step=-1),
            training=SimpleNamespace(steps=last),
            comm=SimpleNamespace(init_timeout_seconds=0),
        ),
        checkpointer=disk,
        metrics=SimpleNamespace(missing=list),
        save_here=lambda: disk.steps.append(step),
    )
    vars(copies).update(
        trainer=trainer, number=1, owes_save=True, is_first=True, living=1, **attributes
    )
    return copies


@pytest.mark.parametrize(
    ("step", "stopped", "steps", "saved", "line"),
    [
        (8, False, [4], [4, 8], "step 8 is due and not on disk: copy 1 saves it"),
        (8, False, [4, 8], [4, 8], ""),
        (9, False, [4, 8], [4, 8], ""),
        (
            *(9, False, [4], [4, 9]),
            "step 8 is not on disk, as the copy that was saving it is lost: copy 1 saves step 9 at"
            " once",
        ),
        (3, False, [], [], ""),  # nothing is due yet
        (3, True, [], [3], "step 3 is due and not on disk: copy 1 saves it"),
        (7, False, [6], [6], ""),  # the run has begun there
        (14, False, [12], [12, 14], "step 14 is due and not on disk: copy 1 saves it"),
    ],
)
def test_who_becomes_first_saves_what_is_due_and_not_there(
    step, stopped, steps, saved, line, caplog
):
    disk = Disk(*steps)
    copies = copy_at(step, disk, last=14, stopped=stopped)
    copies.write_due()
    assert disk.steps == saved
    assert caplog.messages == [line] * bool(line)
    disk.steps.clear()
    copies.write_due()  # it looks once
    assert disk.steps == []


def test_what_another_living_copy_still_saves_is_looked_at_again():
    disk = Disk(4, saving=True)
    copies = copy_at(8, disk)
    copies.write_due()
    assert disk.steps == [4]
    disk.save_lock = Disk().save_lock
    copies.trainer.step = 9
    copies.write_due()
    assert disk.steps == [4, 8]  # the fake saves under the first number


@pytest.mark.parametrize("found", [True, False])
def test_the_last_step_is_saved_by_who_is_left(found):
    """With others that are still there, or alone where no quorum is found."""
    disk = Disk(4, 8)
    left = []
    copies = copy_at(12, disk, meets_others=True)
    copies.quorum = SimpleNamespace(
        index=0, begin_step=lambda *_, **__: found, leave=lambda: left.append(True)
    )
    copies.write_files = lambda *, first: None
    copies.parts = lambda: {"progress": {"step": copies.trainer.step}}
    copies.leave()
    assert disk.steps == [4, 8, 12]
    assert left == [True]
    assert copies.parts_before["progress"] == {"step": 12}  # what another copy would be sent


def test_a_copy_that_is_not_the_first_leaves_when_the_last_step_is_on_disk():
    disk = Disk(4, 8)
    met = []

    def begin_step(*_, **__):
        met.append(True)
        if len(met) == 3:
            disk.steps.append(12)
        return True

    copies = copy_at(12, disk, meets_others=True)
    copies.quorum = SimpleNamespace(index=1, begin_step=begin_step, leave=lambda: None)
    copies.is_first = False
    copies.write_files = lambda *, first: None
    copies.parts = lambda: {"progress": {"step": copies.trainer.step}}
    copies.trainer.save_here = lambda: pytest.fail("another copy saves")
    copies.leave()
    assert len(met) == 3


def test_a_run_that_could_not_save_its_last_step_says_so():
    copies = copy_at(12, Disk(4, 8), meets_others=False)
    copies.quorum = SimpleNamespace(leave=lambda: None)
    with pytest.raises(TrainingError, match="step 12 is not on disk in checkpoint: it could not"):
        copies.leave()


def test_a_copy_that_starts_while_the_others_finish_ends_with_the_run(caplog):
    copies = copy_at(8, Disk(8, 12), meets_others=True)
    copies.config = SimpleNamespace(copies=2)
    copies.steps = 0
    assert copies.check_others() is False
    assert caplog.messages == [
        "copy 1 ends at step 8, as the run is done: another copy has saved step 12"
    ]
    assert not copies.meets_others
    copies.quorum = SimpleNamespace(leave=lambda: None)
    copies.leave()  # and ends with 0


def test_a_step_that_a_lost_copy_has_saved_is_gone_on_from():
    copies = copy_at(4, Disk(4, 8))
    copies.config = SimpleNamespace(copies=2)
    copies.steps = 0
    with pytest.raises(TrainingError, match="another start resumes from it"):
        copies.check_others()


class OneStep:
    """The sums of a step over copies that are all in this process: each has its turn."""

    def __init__(self, living):
        self.tensors = []
        self.living = living
        self.fault = ""

    def take(self, copies, index, own):
        self.index = index
        copies.quorum = self
        copies.compare()
        own.append([tensor.clone() for tensor in self.tensors])

    def sum(self, tensors, op):
        self.tensors = list(tensors)
        for tensor, other in zip(self.tensors, self.others, strict=True):
            tensor.copy_(torch.maximum(tensor, other))


@pytest.mark.parametrize(
    ("index", "steps", "refused"),
    [(0, 0, False), (1, 0, True), (0, 5, False), (1, 5, False)],
)
def test_of_two_copies_with_one_number_the_second_is_refused(index, steps, refused):
    """The other one has begun now, too. One that has trained is not the second."""
    member = identity_of(identity(), 0, "here")
    step = OneStep(living=2)

    def process(at, trained):
        copies = copy_at(5, Disk())
        vars(copies).update(
            number=0,
            steps=trained,
            config=SimpleNamespace(copies=2),
            identity=member,
            digest=digest_of(member),
        )
        copies.trainer.device = torch.device("cpu")
        copies.trainer.config.training.compare_copies_freq = 0
        return copies, at

    other, at = process(1 - index, 0)
    step.others = [torch.full((4,), -(2**62)), torch.zeros(2, dtype=torch.int64)]
    seen = []
    step.take(other, at, seen)
    step.others = seen[0]
    own, at = process(index, steps)
    if refused:
        with pytest.raises(ConfigError, match="environment: COPY=0: another process trains as"):
            step.take(own, at, seen)
    else:
        step.take(own, at, seen)
