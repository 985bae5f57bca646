"""A run with Shampoo, whose matrices ranks share: resumed to the bit, and on one rank to rounding."""

import pytest
from ranks import run_ranks
from resumed import copy_at_step_2, losses, same, trained
from tiny import steps

TINY = ["--model.dim=64", "--model.n_layers=2", "--model.hidden_dim=90"]
SHAMPOO = [
    "--optimizer.name=Shampoo",
    "--optimizer.max_preconditioner_dim=48",
    "--optimizer.start_preconditioning_step=2",
    "--optimizer.precondition_frequency=3",
]


def test_a_run_resumes_to_the_bit(tmp_path):
    options = [*steps(4), *TINY, *SHAMPOO]
    whole = run_ranks(2, trained, tmp_path / "whole", options, init=False)
    assert "optimizer: Shampoo for 14 matrices, shared by 2 ranks" in whole[0][0]
    at_step_2 = copy_at_step_2(tmp_path / "whole", tmp_path / "resumed")
    resumed = run_ranks(2, trained, at_step_2, options, init=False)
    after = {step: loss for step, loss in losses(tmp_path / "whole").items() if step > 2}
    assert losses(at_step_2) == after
    for (_, found), (_, expected) in zip(resumed, whole, strict=True):
        assert same(found, expected)

    on_one = copy_at_step_2(tmp_path / "whole", tmp_path / "on one")
    run_ranks(1, trained, on_one, options, init=False)
    assert losses(on_one)[4] == pytest.approx(losses(tmp_path / "whole")[4], rel=1e-5)
