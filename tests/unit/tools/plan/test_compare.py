"""A plan beside a run that has ended: the table, the number of ranks, and folders that cannot be
compared.
"""

import json

import pytest
from test_plan import RECIPES

from titan_lite.config import ConfigError, load_config, to_toml
from titan_lite.tools.plan.command import main
from titan_lite.tools.plan.compare import read_windows

DEBUG = RECIPES / "debug_model.toml"
SHORT = ["--training.seq_len=64", "--training.global_batch_size=8", "--training.steps=9"]


@pytest.fixture
def run(tmp_path):
    """The folder of a run on two ranks: steps of 0.5 s with 8 x 64 tokens, the first one slower."""
    config = load_config(DEBUG, SHORT)
    (tmp_path / "config.toml").write_text(to_toml(config))
    lines = [
        {
            "step": step,
            "step_time": seconds,
            "tps": 512 / 2 / seconds,
            "tokens_seen": 512 * step,
            "memory_gib": memory,
        }
        for step, seconds, memory in ((1, 9.0, 1.0), (2, 0.5, 2.0), (3, 0.5, 1.5))
    ]
    write_metrics(tmp_path, lines)
    return tmp_path


def write_metrics(folder, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_a_run_is_printed_beside_its_plan(run, capsys):
    assert main([str(DEBUG), *SHORT, "--training.steps=3", "--compare", str(run)]) == 0
    told = capsys.readouterr().out
    rows = {line[:20].strip(): line[20:].split() for line in told.splitlines()}
    assert told.startswith("debug, world size 2, planned on H100\n")
    assert rows[""] == []
    for name, measured in (("step, s", 0.5), ("tokens/s per rank", 512), ("memory, GiB", 2.0)):
        planned, *_, of_run, ratio = rows[name]
        assert float(of_run) == measured
        assert float(ratio.replace(",", "")) == pytest.approx(
            float(planned.replace(",", "")) / measured, abs=0.01, rel=0.1
        )
    assert "medians of 2 windows" in told


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "no step to compare"),
        (
            [{"step": 1, "step_time": 1.0, "tps": 1.0, "tokens_seen": 1, "memory_gib": 1.0}],
            "no step",
        ),
    ],
)
def test_a_folder_without_steps_is_refused(run, lines, reason, capsys):
    write_metrics(run, lines)
    assert main([str(DEBUG), *SHORT, "--compare", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --compare {run}: ")
    assert reason in line


def test_a_run_of_another_recipe_is_refused(run, capsys):
    assert main([str(DEBUG), *SHORT, "--training.local_batch_size=1", "--compare", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line
        == f"error: --compare {run}: its run had training.local_batch_size = 2, and this recipe has"
        f" 1; use the run's own, {run}/config.toml"
    )


def test_keys_of_features_are_compared_too(run):
    config = load_config(DEBUG, SHORT)
    other = config.replace(experts=config.experts.replace(capacity_factor=2.0))
    with pytest.raises(ConfigError, match=r"its run had experts.capacity_factor"):
        read_windows(run, other)
