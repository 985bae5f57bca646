"""The table for many ranks: its formulas by cases worked by hand, its rows, and what is refused."""

import dataclasses
from types import SimpleNamespace

import pytest
from test_plan import H100, RECIPES

from titan_lite.config import load_config
from titan_lite.tools.plan import scale
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.scale import (
    RANKS,
    Scale,
    best_interval,
    describe_scale,
    goodput,
    scale_of,
    slowest_of,
)


def planned(*settings, ranks=512, recipe="llama3_405b"):
    """A plan of a step that was not traced: 20 s, of which 0.02 s are the optimizer's, with 14 GB
    sent by FSDP.
    """
    config = load_config(
        RECIPES / f"{recipe}.toml", ["--parallelism.no-enable_async_tensor_parallel", *settings]
    )
    step = SimpleNamespace(seconds=20.0, parts={"optimizer": 0.02}, sent={"dp_shard": 14e9})
    return SimpleNamespace(layout=lay_out(config, ranks), machine=H100, nominal=step)


def test_goodput_by_hand():
    assert goodput(1000, 50, 300, 1e15) == pytest.approx(1000 / 1050)  # next to nothing fails
    # 1,000 s and a mean of 10,000 s: exp(0.1) - 1 = 0.10517 failures a period, so 1,000 s take
    # 1,051.7 s
    assert goodput(1000, 0, 0, 10_000) == pytest.approx(1000 / 1051.7, rel=1e-4)
    # and if the run needs 1,000 s to be back, exp(0.1) = 1.10517 times as long
    assert goodput(1000, 0, 1000, 10_000) == pytest.approx(1000 / 1051.7 / 1.10517, rel=1e-4)
    assert goodput(1e7, 0, 0, 10) < 1e-200  # no period is ever done


def test_the_best_interval_is_youngs_with_dalys_terms_and_no_other_is_better():
    # sqrt(2 x 50 x 10,000) = 1,000; blocked / (2 mtbf) = 0.0025, whose root is 0.05: 1,000 x (1 +
    # 0.05 / 3 + 0.0025 / 9) - 50
    assert best_interval(50, 10_000) == pytest.approx(966.94, abs=0.01)
    assert best_interval(30_000, 10_000) == 10_000
    best = goodput(best_interval(50, 10_000), 50, 300, 10_000)
    assert all(goodput(factor * 967, 50, 300, 10_000) < best for factor in (0.8, 0.95, 1.05, 1.2))


def test_the_slowest_of_many_ranks():
    # The maximum of two standard normals is 1 / sqrt(pi) = 0.564 on average, and that of 1,000 is
    # 3.24.
    assert (slowest_of(2) - 1) / scale.DEVIATION == pytest.approx(0.564, rel=0.05)
    assert (slowest_of(1000) - 1) / scale.DEVIATION == pytest.approx(3.24, rel=0.01)
    assert slowest_of(1) == 1


def test_what_stays_and_what_grows():
    small, _, large, largest = (scale_of(planned(), ranks) for ranks in RANKS)
    assert [each.layout.degrees["dp_shard"] for each in (small, large, largest)] == [4, 128, 781]
    assert largest.ranks == 781 * 128  # the largest multiple of TP and pipeline
    assert large.layout.microbatches == small.layout.microbatches
    assert large.layout.tokens == 32 * small.layout.tokens
    assert small.saved == pytest.approx(32 * large.saved)
    assert large.meeting == pytest.approx(32 * small.meeting)
    assert large.mtbf * 32 == pytest.approx(small.mtbf)
    assert 20 * 0.99 < large.planned_step < 20 * 1.1
    assert small.blocked == small.writing  # checkpoint.async_mode = "disabled"
    later = scale_of(planned("--checkpoint.async_mode=async"), 16_384)
    assert later.blocked < 0.1 < later.writing == large.writing
    assert later.again == pytest.approx(large.again + later.writing - later.blocked)
    assert later.goodput(later.best_interval) > large.goodput(large.best_interval)


def test_a_step_that_sends_nothing_takes_as_long_on_more_ranks():
    plan = planned()
    plan.nominal.sent.clear()
    assert scale_of(plan, 16_384).planned_step == pytest.approx(20 - 0.02 * 31 / 32)


def test_more_ranks_are_more_owners():
    muon = [scale_of(planned("--optimizer.name=Muon"), ranks).planned_step for ranks in RANKS[::2]]
    adamw = [scale_of(planned(), ranks).planned_step for ranks in RANKS[::2]]
    assert muon[0] == adamw[0]  # the plan's own number of ranks
    assert muon[1] < adamw[1]


def test_the_table_has_a_column_for_each_number_of_ranks():
    lines = describe_scale(planned())
    named = {line[:48].strip(): line[48:].split() for line in lines if line.startswith("  ")}
    assert named["ranks"] == ["512", "4,096", "16,384", "99,968"]
    assert {len(values) for values in named.values()} == {4}
    assert named["checkpoint.interval = 500, minutes"][0] == "174"  # 500 steps of 20 s, 4.5% longer
    for part in (
        "meeting",
        "compiling",
        "reading",
        "goodput",
        "best interval",
    ):
        assert any(part in name for name in named), part
    text = "\n".join(lines)
    for source in ("arXiv 2407.21783", "arXiv 2208.11035", "assumed: "):
        assert source in text
    assert max(map(len, lines)) < 120


def test_a_run_saves_one_step_at_a_time():
    slow = dataclasses.replace(
        scale_of(planned("--checkpoint.async_mode=async"), 512), writing=90_000.0
    )
    assert isinstance(slow, Scale)
    assert slow.best_interval == 90_000
    assert slow.goodput(1.0) == slow.goodput(90_000)
