"""A profile that moves to what was measured: by hand, through a file, and on this machine."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from titan_lite.compiler.hardware import Link
from titan_lite.compiler.profiles import load_machine
from titan_lite.models.llama3 import FLAVORS
from titan_lite.plan.calibrate import PACES, moved, pace_of, paced
from titan_lite.plan.command import main
from titan_lite.plan.measure import Shapes, calibrated, machine_to_toml, measure
from titan_lite.plan.plan_vs_actual import PlanVsActual

H100 = load_machine("H100")
REACHED = {"matmul": 494.7e12, "attention": 300e12, "memory": 2345e9, "launch": 5e-6}
CPU, SHAPES = torch.device("cpu"), Shapes(FLAVORS["debug"], 1, 128, 2, torch.float32)
LINKS = {"latency": 1e-5, "bandwidth": 270e9, "reduction": 1.25}


def test_efficiencies_move_to_what_was_reached_and_peaks_stay():
    found = calibrated(H100, REACHED | LINKS, torch.bfloat16)
    assert found.matmul_efficiency == pytest.approx(0.5)
    assert found.memory_efficiency == pytest.approx(0.7)
    assert found.link_efficiency == pytest.approx(0.6)  # of 450 GB/s
    assert (found.launch, found.reduction) == (5.0, 1.25)
    assert (found.tflops, found.intra_node, found.inter_node) == (
        H100.tflops,
        H100.intra_node,
        H100.inter_node,
    )
    lines = moved(H100, found)
    assert any(
        "matmul_efficiency" in line and "0.84 -> 0.5" in line and "-40.5%" in line for line in lines
    )
    assert not any("tflops" in line for line in lines)
    assert moved(H100, H100) == []


def test_no_efficiency_is_above_one_and_across_nodes_a_ring_has_all_cards():
    found = calibrated(
        H100, {**REACHED, "matmul": 2e15, **LINKS, "bandwidth": 8 * 25e9}, torch.bfloat16, nodes=2
    )
    assert found.matmul_efficiency == 1.0
    assert found.link_efficiency == pytest.approx(0.5)  # of 50 GB/s a card


def test_a_cpu_has_no_peaks_but_what_it_reached():
    cpu = dataclasses.replace(H100, name="CPU, measured", link_efficiency=1.0)
    found = calibrated(
        cpu, {**REACHED, **LINKS, "matmul": 4e10, "attention": 1e10, "memory": 5e9}, torch.float32
    )
    assert found.flops(torch.float32) * found.matmul_efficiency == pytest.approx(4e10)
    assert found.flops(torch.float32) * found.attention_efficiency == pytest.approx(1e10)
    assert found.memory_traffic(5e9) == pytest.approx(1.0)
    assert found.collective("all_gather", 0.0, range(4)) == pytest.approx(
        4 * 1e-5
    )  # a launch and three hops
    assert found.collective("all_gather", 270e9 * 2, range(2)) == pytest.approx(1.0, rel=1e-3)
    assert paced(found, 2.0).flops(torch.float32) == pytest.approx(8e10)


def test_a_profile_goes_through_a_file(tmp_path):
    found = dataclasses.replace(
        calibrated(H100, REACHED | LINKS, torch.bfloat16), inter_node=Link(12.5, 7.0)
    )
    (tmp_path / "mine.toml").write_text(machine_to_toml(found))
    assert load_machine(str(tmp_path / "mine.toml")) == found


def test_the_pace_makes_the_step_as_long_as_it_was():
    seconds = [1.0 + 2.0 / pace for pace in PACES]  # a second of it is communication
    assert pace_of(3.0, seconds) == pytest.approx(1.0)
    assert pace_of(4.0, seconds) == pytest.approx(2 / 3)
    assert pace_of(100.0, seconds) == PACES[0]
    assert pace_of(0.1, seconds) == PACES[-1]
    slow = paced(H100, 0.5)
    assert (slow.matmul_efficiency, slow.link_efficiency) == (0.42, H100.link_efficiency)
    assert slow.launch == 2 * H100.launch


def measure_here():
    return measure(SHAPES, CPU, seconds=0.01)


def test_ranks_measure_the_same_together():
    first, second = run_ranks(2, measure_here)
    assert first == second
    assert set(first) == {*REACHED, *LINKS}
    assert all(value > 0 for value in first.values())


def test_on_a_cpu_a_plan_is_compared_only_where_it_is_asked_for(tmp_path):
    for mode in ("auto", "never"):
        assert PlanVsActual(mode, tmp_path, CPU, None, SHAPES).close(1.0) == []
    assert list(tmp_path.iterdir()) == []


PLAN = {
    "step_seconds": {"stated": 2.0, "fast": 1.5, "slow": 2.5},
    "memory": {"reserved": 3 * 2**30},
}
RECORD = {"step_seconds": 1.6, "memory_bytes": 4 * 2**30, "memory_is": "reserved"}


def planning(tmp_path, *command):
    """One whose plan is made by this command."""
    compared = PlanVsActual("always", tmp_path, CPU, None, SHAPES)
    compared.planning = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    return compared


def test_planned_and_measured_are_told_together(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (line,) = planning(tmp_path, "true").compare(RECORD)
    assert "step 2 s (1.5 to 2.5) against 1.6 s, +25%" in line
    assert "planned 3.00 GiB, measured 4.00 reserved" in line


def test_a_plan_that_failed_is_told(tmp_path):
    (line,) = planning(tmp_path, "sh", "-c", "echo error: no such layout >&2; exit 2").compare(
        RECORD
    )
    assert line == "no plan to compare with: no such layout"


def test_a_plan_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_lite.plan.plan_vs_actual.LONGEST", 0.1)
    compared = planning(tmp_path, "sleep", "60")
    assert "planning took longer" in compared.compare(RECORD)[0]
    assert compared.planning.wait(10) != 0


def test_a_folder_that_is_gone_is_told_in_a_line(tmp_path, monkeypatch):
    def gone(peak):
        return (tmp_path / "gone/measured.json").write_text("")

    compared = PlanVsActual("always", tmp_path / "gone", CPU, None, SHAPES)
    monkeypatch.setattr(compared, "_close", gone)
    assert compared.close(1.0) == [
        f"no plan to compare with: {tmp_path}/gone/measured.json: No such file or directory"
    ]
    assert compared.compare(RECORD) == ["no plan to compare with: its process could not be started"]


@pytest.mark.slow
def test_a_run_is_held_against_its_plan_and_calibrates_a_profile(tmp_path):
    overrides = [
        "--training.steps=6",
        "--training.seq_len=64",
        "--metrics.log_freq=1",
        "--no-validation.enable",
    ]
    overrides += [
        "--no-checkpoint.enable",
        "--metrics.compare_plan=always",
        f"--job.dump_folder={tmp_path}",
    ]
    recipe = Path(__file__).parents[3] / "train_configs/debug_model.toml"
    said = run(["titan_lite.train", str(recipe), *overrides])
    assert "planned against measured: step " in said
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 1
    said = run(["titan_lite.plan", "--calibrate", str(tmp_path)])
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert f"step: measured {measured['step_seconds']:.4g} s" in said
    assert "tflops.float32" in said
    assert load_machine(str(tmp_path / "hardware.toml")).name == "CPU, measured, calibrated"
    said = run(
        [
            "titan_lite.plan",
            str(tmp_path / "config.toml"),
            "--world-size",
            "1",
            "--json",
            "--hardware",
            f"{tmp_path}/hardware.toml",
        ]
    )
    assert json.loads(said)["step_seconds"]["stated"] == pytest.approx(
        measured["step_seconds"], rel=0.05
    )


def run(arguments):
    result = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_folder_without_measurements_is_told(tmp_path, capsys):
    assert main(["--calibrate", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--calibrate {tmp_path}" in error
    assert "measured.json" in error
    assert main(["some.toml", "--calibrate", str(tmp_path)]) == 2
    assert "config.toml" in capsys.readouterr().err
