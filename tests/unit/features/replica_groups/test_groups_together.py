"""a replica group: with which others it can train, what it writes when it becomes the first, and
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
from titan_lite.features.replica_groups.groups import (
    IDENTITY,
    LINES,
    MAX_UNDONE,
    SeveralGroups,
    digest_of,
    identity_of,
    why_apart,
)
from titan_lite.features.replica_groups.quorum import GroupState
from titan_lite.logging import events
from titan_lite.resilience import TrainingError

OPTIONS = [
    "--fault_tolerance.replica_groups=2",
    "--fault_tolerance.lighthouse=http://node0:29510",
]


def identity(*options, **facts):
    recipe = load_config(DEBUG, [*OPTIONS, *options]).model_dump()
    return RunIdentity(recipe=recipe, sequences=16, device="CPU", **facts)


def apart(one, other, folders=("here", "here")):
    """Return the lines of the second of two groups that should train together."""
    first = identity_of(one, 0, folders[0])
    second = identity_of(other, 1, folders[1])
    lines = why_apart(Member(**json.loads(json.dumps(asdict(first)))), second)
    assert bool(lines) == (digest_of(first) != digest_of(second))
    return lines


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (identity("--optimizer.lr=1e-5"), "optimizer.lr differs: 0.002 in group 0 on"),
        (
            identity("--fault_tolerance.replica_groups=3"),
            "fault_tolerance.replica_groups differs: 2 in group 0",
        ),
        (
            identity("--job.dump_folder=b"),
            'job.dump_folder differs: "outputs/debug_model" in group',
        ),
        (
            replace(identity(), sequences=24),
            "sequences a step (training.global_batch_size) differs",
        ),
        (replace(identity(), device="NVIDIA H100"), 'device differs: "CPU" in group 0 on'),
        (identity(documents="b" * 64), 'the documents of [data] differs: "" in group 0'),
        (identity(sources="c" * 64), "SHA-256 of titan_lite's source files differs"),
        (identity(mesh={"tp": 2}), "ranks along tp differs: not set in group 0"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_groups_that_would_part_are_told_the_key(other, line):
    (found,) = apart(identity(), other)
    assert found.startswith(line)
    assert found.endswith(
        "; start all groups with the same recipe, command line, files and versions, on the same"
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


def test_groups_on_disks_that_are_not_shared_are_told_the_folder():
    (line,) = apart(identity(), identity(), folders=("one lock", "another"))
    assert line.startswith('job.dump_folder = "outputs/debug_model": the folder in group 1 on ')
    assert line.endswith("use one on a file system that all groups share")


@pytest.mark.parametrize(("undone", "stops"), [(MAX_UNDONE, False), (MAX_UNDONE + 1, True)])
def test_a_signal_is_heard_where_no_step_counts(undone, stops):
    """Else the sums of a step tell it to all groups."""
    groups = object.__new__(SeveralGroups)
    asked = []
    groups.undone = undone
    groups.trainer = SimpleNamespace(
        is_finished=False,
        stop=SimpleNamespace(requested=False, poll=lambda: asked.append("poll") or True),
    )
    groups.stop_alone = lambda: asked.append("stop")
    groups.parts = lambda: pytest.fail("goes on") if stops else (_ for _ in ()).throw(EOFError)
    if stops:
        assert groups.agree() is False
        assert asked == ["poll", "stop"]
    else:
        with pytest.raises(EOFError):  # it begins another step
            groups.agree()
        assert asked == []


def test_what_another_group_sends_is_taken_whole(monkeypatch):
    """Its tensors, and the counts and the position in the data beside them."""
    monkeypatch.setattr(events, "step", 0)
    taken = {}
    weight = torch.zeros(3)
    parts = ("progress", "loader")
    groups = object.__new__(SeveralGroups)
    groups.identity = identity_of(identity(), 0, "here")
    groups.trainer = SimpleNamespace(
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
    beside = {IDENTITY: asdict(groups.identity), LINES: [{"step": 7, "loss": 2.0}]}
    groups.load(GroupState({"weight": torch.ones(3)}, {**beside, **sent}))
    assert groups.trainer.metrics.lines == beside[LINES]
    assert taken == {**sent, "weight": [1.0, 1.0, 1.0]}
    assert events.step == 7
    groups.identity = identity_of(identity("--optimizer.lr=1e-5"), 1, "here")
    with pytest.raises(ConfigError, match=r"^optimizer\.lr differs: 0\.002 in group 0 on"):
        groups.load(GroupState({"weight": torch.zeros(3)}, {**beside, **sent}))
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_a_group_that_is_one_too_many_is_refused_unless_it_has_trained():
    groups = group_at(5, Disk(), steps=0, config=SimpleNamespace(replica_groups=2))
    groups.living = 3
    with pytest.raises(ConfigError, match=r"^group 1: 3 groups take part, and fault_tolerance"):
        groups.check_others()
    groups.steps = 1
    assert groups.check_others()


class Disk:
    """The checkpoints of a run, as a group finds them."""

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


def group_at(step, disk, *, last=12, stopped=False, **attributes):
    """Return a group that has become the first, of a run that saves every 4 steps."""
    groups = object.__new__(SeveralGroups)
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
        save=lambda: disk.steps.append(step),
    )
    vars(groups).update(
        trainer=trainer, number=1, owes_save=True, is_first=True, living=1, **attributes
    )
    return groups


@pytest.mark.parametrize(
    ("step", "stopped", "steps", "saved", "line"),
    [
        (8, False, [4], [4, 8], "step 8 is due and not on disk: group 1 saves it"),
        (8, False, [4, 8], [4, 8], ""),
        (9, False, [4, 8], [4, 8], ""),
        (
            *(9, False, [4], [4, 9]),
            "step 8 is not on disk, as the group that was saving it is lost: group 1 saves step 9 at"
            " once",
        ),
        (3, False, [], [], ""),  # nothing is due yet
        (3, True, [], [3], "step 3 is due and not on disk: group 1 saves it"),
        (7, False, [6], [6], ""),  # the run has begun there
        (14, False, [12], [12, 14], "step 14 is due and not on disk: group 1 saves it"),
    ],
)
def test_who_becomes_first_saves_what_is_due_and_not_there(
    step, stopped, steps, saved, line, caplog
):
    disk = Disk(*steps)
    groups = group_at(step, disk, last=14, stopped=stopped)
    groups.write_due()
    assert disk.steps == saved
    assert caplog.messages == [line] * bool(line)
    disk.steps.clear()
    groups.write_due()  # it looks once
    assert disk.steps == []


def test_what_another_living_group_still_saves_is_looked_at_again():
    disk = Disk(4, saving=True)
    groups = group_at(8, disk)
    groups.write_due()
    assert disk.steps == [4]
    disk.save_lock = Disk().save_lock
    groups.trainer.step = 9
    groups.write_due()
    assert disk.steps == [4, 8]  # the fake saves under the first number


@pytest.mark.parametrize("found", [True, False])
def test_the_last_step_is_saved_by_who_is_left(found):
    """With others that are still there, or alone where no quorum is found."""
    disk = Disk(4, 8)
    left = []
    groups = group_at(12, disk, meets_others=True)
    groups.quorum = SimpleNamespace(
        index=0, begin_step=lambda *_, **__: found, leave=lambda: left.append(True)
    )
    groups.write_files = lambda *, first: None
    groups.parts = lambda: {"progress": {"step": groups.trainer.step}}
    groups.leave()
    assert disk.steps == [4, 8, 12]
    assert left == [True]
    assert groups.parts_before["progress"] == {"step": 12}  # what another group would be sent


def test_a_group_that_is_not_the_first_leaves_when_the_last_step_is_on_disk():
    disk = Disk(4, 8)
    met = []

    def begin_step(*_, **__):
        met.append(True)
        if len(met) == 3:
            disk.steps.append(12)
        return True

    groups = group_at(12, disk, meets_others=True)
    groups.quorum = SimpleNamespace(index=1, begin_step=begin_step, leave=lambda: None)
    groups.is_first = False
    groups.write_files = lambda *, first: None
    groups.parts = lambda: {"progress": {"step": groups.trainer.step}}
    groups.trainer.save = lambda: pytest.fail("another group saves")
    groups.leave()
    assert len(met) == 3


def test_a_run_that_could_not_save_its_last_step_says_so():
    groups = group_at(12, Disk(4, 8), meets_others=False)
    groups.quorum = SimpleNamespace(leave=lambda: None)
    with pytest.raises(TrainingError, match="step 12 is not on disk in checkpoint: it could not"):
        groups.leave()


def test_a_group_that_starts_while_the_others_finish_ends_with_the_run(caplog):
    groups = group_at(8, Disk(8, 12), meets_others=True)
    groups.config = SimpleNamespace(replica_groups=2)
    groups.steps = 0
    assert groups.check_others() is False
    assert caplog.messages == [
        "group 1 ends at step 8, as the run is done: another group has saved step 12"
    ]
    assert not groups.meets_others
    groups.quorum = SimpleNamespace(leave=lambda: None)
    groups.leave()  # and ends with 0


def test_a_step_that_a_lost_group_has_saved_is_gone_on_from():
    groups = group_at(4, Disk(4, 8))
    groups.config = SimpleNamespace(replica_groups=2)
    groups.steps = 0
    with pytest.raises(TrainingError, match="another start resumes from it"):
        groups.check_others()


class OneStep:
    """The sums of a step over groups that are all in this process: each has its turn."""

    def __init__(self, living):
        self.tensors = []
        self.living = living
        self.fault = ""

    def take(self, groups, index, own):
        self.index = index
        groups.quorum = self
        groups.compare()
        own.append([tensor.clone() for tensor in self.tensors])

    def sum(self, tensors, op):
        self.tensors = list(tensors)
        for tensor, other in zip(self.tensors, self.others, strict=True):
            tensor.copy_(torch.maximum(tensor, other))


@pytest.mark.parametrize(
    ("index", "steps", "refused"),
    [(0, 0, False), (1, 0, True), (0, 5, False), (1, 5, False)],
)
def test_of_two_groups_with_one_number_the_second_is_refused(index, steps, refused):
    """The other one has begun now, too. One that has trained is not the second."""
    member = identity_of(identity(), 0, "here")
    step = OneStep(living=2)

    def process(at, trained):
        groups = group_at(5, Disk())
        vars(groups).update(
            number=0,
            steps=trained,
            config=SimpleNamespace(replica_groups=2),
            identity=member,
            digest=digest_of(member),
        )
        groups.trainer.device = torch.device("cpu")
        groups.trainer.config.training.compare_replicas_freq = 0
        return groups, at

    other, at = process(1 - index, 0)
    step.others = [torch.full((4,), -(2**63)), torch.zeros(2, dtype=torch.int64)]
    seen = []
    step.take(other, at, seen)
    step.others = seen[0]
    own, at = process(index, steps)
    if refused:
        with pytest.raises(ConfigError, match="environment: COPY=0: another process trains as"):
            step.take(own, at, seen)
    else:
        step.take(own, at, seen)


def test_ignored_labels_scale_the_loss_and_not_what_is_added_to_its_gradient():
    """Such as that of experts' balance, which counts ignored labels. Two groups count 3 and 2."""
    of_others = iter([[2], [0.2, 0.0, 0.4]])  # tokens; then gradient, counts, totals

    def add_others(tensors):
        for tensor, other in zip(tensors, next(of_others), strict=True):
            tensor += other

    parameter = torch.nn.Parameter(torch.zeros(1))
    groups = group_at(5, Disk(), steps=0, undone=0)
    groups.trainer.parameters = {"weight": parameter}
    groups.trainer.per_source = SimpleNamespace(own=torch.zeros(2))
    groups.trainer.step_parts = []
    groups.compare = lambda: ""
    groups.quorum = SimpleNamespace(sum=add_others, commit=lambda: True)

    tokens = groups.sum_tokens(torch.tensor(3))
    balance = 0.25
    parameter.grad = torch.ones(1) / tokens + balance
    totals = groups.commit(torch.tensor(0.6), torch.tensor(0.0))
    assert tokens == 5
    assert totals[0] == pytest.approx(1.0)
    assert parameter.grad.item() == pytest.approx(0.2 + balance + 0.2)
