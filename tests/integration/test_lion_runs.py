"""A run with Lion as a page has it: resumed to the bit, and what the state is."""

from ranks import run_ranks
from resumed import copy_at_step_2, losses, same, trained
from tiny import steps

TINY = ["--model.dim=64", "--model.n_layers=2", "--model.hidden_dim=90"]
LION = [
    "--optimizer.name=Lion",
    "--optimizer.lr=1e-4",
    "--optimizer.weight_decay=0.3",
    "--optimizer.beta1=0.95",
    "--optimizer.beta2=0.98",
]


def test_a_run_with_lion_resumes_to_the_bit(tmp_path):
    options = [*steps(4), *TINY, *LION]
    whole = run_ranks(2, trained, tmp_path / "whole", options, init=False)
    at_step_2 = copy_at_step_2(tmp_path / "whole", tmp_path / "resumed")
    resumed = run_ranks(2, trained, at_step_2, options, init=False)
    after = {step: loss for step, loss in losses(tmp_path / "whole").items() if step > 2}
    assert losses(at_step_2) == after
    for (_, found), (_, expected) in zip(resumed, whole, strict=True):
        assert same(found, expected)
        state = {name.rpartition(".")[2] for name in found if name.startswith("optimizer.")}
        assert state == {"exp_avg", "step"}
