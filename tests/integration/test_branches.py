"""Branches of a run: one with nothing changed is the run to the bit, and none changes the run."""

from ranks import run_ranks
from resumed import losses, same, trained
from tiny import steps

TRUNK = [*steps(4), "--lr_scheduler.decay_begin=", "--lr_scheduler.decay_length=0"]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_branch_with_nothing_changed_is_the_run_to_the_bit_and_a_cooldown_is_another(tmp_path):
    trunk = tmp_path / "trunk"
    whole = run_ranks(2, trained, trunk, TRUNK, init=False)
    before = contents(trunk)
    options = [*TRUNK, f"--checkpoint.branch_from={trunk}/checkpoint/step-2"]

    branch = run_ranks(2, trained, tmp_path / "branch", options, init=False)
    assert losses(tmp_path / "branch") == {
        step: loss for step, loss in losses(trunk).items() if step > 2
    }
    assert all(
        same(found, expected) for (_, found), (_, expected) in zip(branch, whole, strict=True)
    )
    log, _ = branch[0]
    assert f"{trunk}/checkpoint/step-2 is kept by its run until this one has saved" in log
    assert f"resumed from {trunk}/checkpoint/step-2" in log
    assert "results differ" not in log

    cooldown = [*options, "--lr_scheduler.decay_begin=2", "--lr_scheduler.decay_length="]
    (log, cooled), *_ = run_ranks(2, trained, tmp_path / "cooldown", cooldown, init=False)
    assert "begin of the learning rate's decay (lr_scheduler): 2, was 4" in log
    assert not same(cooled, whole[0][1])
    assert contents(trunk) == before
