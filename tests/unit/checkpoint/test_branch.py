"""A run that begins from a checkpoint of another one: which one, what is kept for it, what is
refused. A world of one.
"""

import re
import shutil

import pytest
import torch
import torch.distributed as dist
from checkpoints import flip
from tiny import DEBUG

from titan_lite.checkpoint.lock import StepHold, not_held
from titan_lite.checkpoint.manager import Checkpointer
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState
from titan_lite.config import Checkpoint, ConfigError, load_config
from titan_lite.rules import check_keys


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of(folder, **settings):
    return Checkpointer(Checkpoint(enable=True, **settings), folder)


def save(checkpointer, *steps):
    recipe = {"checkpoint": checkpointer.config.model_dump()}
    for step in steps:
        weights = {"w": torch.full((4,), float(step))}
        checkpointer.save(step, weights, RunState(RunIdentity(recipe=recipe)))


@pytest.fixture
def trunk(tmp_path):
    """Steps 1 to 3 of a run, which keeps the newest two from now on."""
    save(of(tmp_path / "trunk", keep_latest_k=0), 1, 2, 3)
    return of(tmp_path / "trunk", keep_latest_k=2)


def branch_of(trunk, step, folder="branch"):
    path = trunk.path_of(step)
    return of(path.parents[2] / folder, branch_from=str(path), keep_latest_k=1)


def weights_at(checkpointer, step):
    found = {"w": torch.zeros(4)}
    checkpointer.load(step, found)
    return found["w"].tolist()


def test_a_branch_begins_from_the_step_of_the_other_run_and_resumes_from_its_own(trunk):
    branch = branch_of(trunk, 2)
    assert branch.verified_step() == 2
    assert weights_at(branch, 2) == [2.0] * 4
    assert branch.describe_newest().endswith(f"resumes from {trunk.path_of(2)}")
    assert not branch.path_of(2).exists()
    save(branch, 3)
    shutil.rmtree(trunk.folder)
    again = branch_of(trunk, 2)
    assert again.verified_step() == 3
    assert weights_at(again, 3) == [3.0] * 4


def test_the_run_keeps_a_step_for_a_branch_until_that_has_saved_one(trunk):
    branches = [branch_of(trunk, 1, f"branch-{number}") for number in range(10)]
    for branch in branches:
        branch.lock_on_first()
    save(trunk, 4)
    assert trunk.steps() == [1, 3, 4]
    for branch in branches:
        save(branch, 2)
    save(trunk, 5)
    assert trunk.steps() == [4, 5]


def test_a_branch_that_is_closed_holds_nothing(trunk):
    branch = branch_of(trunk, 1)
    branch.lock_on_first()
    with not_held(trunk.path_of(1)) as is_free:
        assert not is_free
    branch.close()
    with not_held(trunk.path_of(1)) as is_free:
        assert is_free


def test_a_branch_does_not_hold_a_step_that_is_being_deleted_and_says_so(trunk, caplog):
    with not_held(trunk.path_of(1)):
        branch_of(trunk, 1).lock_on_first()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"{trunk.path_of(1)} cannot be locked: its run may delete it")


def test_a_file_system_without_locks_keeps_nothing(trunk, monkeypatch):
    def no_locks(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert not StepHold(trunk.path_of(1)).acquire()
    with not_held(trunk.path_of(1)) as is_free:
        assert is_free


def refusal(checkpointer):
    with pytest.raises(ConfigError) as error:
        checkpointer.verified_step()
    return str(error.value)


def test_a_branch_from_no_checkpoint_is_refused(trunk, tmp_path):
    known = f"use a checkpoint such as {trunk.path_of(3)}"
    missing = trunk.path_of(7)
    assert refusal(branch_of(trunk, 7)) == (
        f'checkpoint.branch_from = "{missing}": there is no such folder; {known}'
    )
    run = of(tmp_path / "branch", branch_from=str(tmp_path / "trunk"))
    assert refusal(run).endswith(f"state.json is missing; {known}")
    flip(trunk.path_of(2) / "__0_0.distcp")
    assert "__0_0.distcp" in refusal(branch_of(trunk, 2))
    nothing = of(tmp_path / "branch", branch_from=str(tmp_path / "nowhere/step-1"))
    assert refusal(nothing).endswith("there is no such folder; use another run's step-N")


def test_a_run_that_has_begun_elsewhere_is_refused(trunk, tmp_path):
    same_folder = of(tmp_path / "trunk", branch_from=str(trunk.path_of(2)))
    assert refusal(same_folder).endswith("with step-3, is no branch; use another job.dump_folder")
    save(branch_of(trunk, 2), 3)
    assert f"began from {trunk.path_of(2)}; use another" in refusal(branch_of(trunk, 1))
    assert of(tmp_path / "branch").verified_step() == 3  # without the key it goes on


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--checkpoint.no-enable"],
            r"branch_from = .* that are off; use checkpoint.enable = true",
        ),
        (["--checkpoint.load_step=5"], "load_step = 5 is of the run's own checkpoints"),
        (["--checkpoint.initial_load_path=w"], "initial_load_path = .* has no effect: the weights"),
    ],
)
def test_a_branch_has_one_beginning(options, message):
    config = load_config(DEBUG, ["--checkpoint.branch_from=x", *options])
    with pytest.raises(ConfigError) as error:
        check_keys(config)
    assert re.search(message, str(error.value))
