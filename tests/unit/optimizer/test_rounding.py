"""Stochastic rounding: its mean, its bits, and what must not be rounded."""

import math

import pytest
import torch

from titan_lite.optimizer.rounding import (
    TENSORS,
    at_step,
    keys_of,
    round_stochastically,
    row_numbers,
)


def rounded(exact, seed=0, fqn="w", step=1, tensor=0):
    keys = at_step(keys_of(seed, [fqn]), torch.tensor(float(step)))
    return round_stochastically(exact, row_numbers(exact), keys[0, tensor])


def down(exact):
    """The next value of bfloat16 towards zero."""
    return (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)


def up(exact):
    return ((exact.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)


@pytest.mark.parametrize("number", [1.001, -1.001, 3e-20, 1e-40, -7.99, 1.9999], ids=str)
def test_a_number_becomes_one_of_its_neighbours_and_its_mean_stays(number):
    exact = torch.full((400, 1000), number)
    found = rounded(exact)
    below, above = down(exact)[0, 0].item(), up(exact)[0, 0].item()
    assert set(found.unique().tolist()) == {below, above}
    assert torch.equal(found.bfloat16().float(), found)
    share = (number - below) / (above - below)
    assert (found == above).double().mean().item() == pytest.approx(
        share, abs=5 * math.sqrt(share * (1 - share) / exact.numel())
    )


def test_what_bfloat16_has_and_what_is_not_finite_stays():
    exact = torch.randn(50, 60).bfloat16().float()
    exact[0, :4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    assert torch.equal(rounded(exact).view(torch.int32), exact.view(torch.int32))
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001], dtype=torch.int32).view(
        torch.float32
    )  # the first is CUDA's
    assert rounded(nan).isnan().all()


def test_bits_depend_on_seed_step_name_and_tensor_and_on_nothing_else():
    exact = torch.rand(30, 40)
    found = [
        rounded(exact),
        rounded(exact, seed=1),
        rounded(exact, fqn="v"),
        rounded(exact, step=2),
        rounded(exact, tensor=1),
    ]
    assert torch.equal(found[0], rounded(exact))
    above = [(each == up(exact)).double().flatten() for each in found]
    for one in range(len(found)):
        for other in range(one):
            assert (
                abs(torch.corrcoef(torch.stack((above[one], above[other])))[0, 1]) < 0.5
            )  # both follow the fraction
            assert not torch.equal(above[one], above[other])


def test_draws_of_elements_and_of_steps_are_independent():
    """Numbers halfway: no two neighbours, rows, steps or tensors are rounded alike more often than by chance."""
    half = torch.full((300, 300), 1 + 2.0**-8)
    draws = torch.stack(
        [
            rounded(half, step=step, tensor=tensor)
            for step in (1, 2, 3)
            for tensor in range(len(TENSORS))
        ]
    )
    signs = (draws > 1).double() * 2 - 1
    limit = 5 / 300  # standard deviations
    assert signs.mean(dim=(1, 2)).abs().max() < limit
    for shifts in [
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (3, 0, 0),
        (1, 0, 1),
        (0, 0, 2),
        (0, 0, 256),
        (0, 16, 0),
    ]:
        assert (signs * signs.roll(shifts, (0, 1, 2))).mean(dim=(1, 2)).abs().max() < limit, shifts


def test_bits_are_these():
    """A run that was saved by an earlier version goes on with the same numbers."""
    found = rounded(
        torch.full((2, 6), 1 + 2.0**-8), seed=3, fqn="layers.0.attention.wq.weight", step=7
    )
    assert (found > 1).int().tolist() == EXPECTED


EXPECTED = [[1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1]]
