"""The goodput of a planned run: its formula by cases worked by hand, and what raises it."""

from types import SimpleNamespace

import pytest
from test_plan import H100, RECIPES

from titan_lite.config import load_config
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.goodput import goodput, goodput_of
from titan_lite.tools.plan.simulate import DEVIATION, slowest_of


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


def test_the_slowest_of_many_ranks():
    # The maximum of two standard normals is 1 / sqrt(pi) = 0.564 on average, and that of 1,000 is
    # 3.24.
    assert (slowest_of(2) - 1) / DEVIATION == pytest.approx(0.564, rel=0.05)
    assert (slowest_of(1000) - 1) / DEVIATION == pytest.approx(3.24, rel=0.01)
    assert slowest_of(1) == 1


def test_a_run_of_more_ranks_or_slower_saves_keeps_less_of_its_time():
    """512 and 16,384 ranks fail every 99 and 3.1 hours; a save in the background blocks less."""
    few = goodput_of(planned())
    shards = "--parallelism.data_parallel_shard_degree=-1"
    many = goodput_of(planned(shards, ranks=16_384))
    in_background = goodput_of(planned(shards, "--checkpoint.async_mode=async", ranks=16_384))
    assert 0.5 < many < few < 1
    assert many < in_background < 1


def test_a_run_saves_one_step_at_a_time():
    each_step = goodput_of(planned("--checkpoint.interval=1"))
    # two steps are 40 s, and a save takes longer
    assert goodput_of(planned("--checkpoint.interval=2")) == each_step
    assert goodput_of(planned("--checkpoint.interval=100")) > each_step
