"""scripts/train.slurm with commands of Slurm that only say what they are asked: what it starts, and
when the job goes back.
"""

import os
import subprocess
from pathlib import Path

import pytest
from tiny import ROOT

COMMANDS = {
    "scontrol": (
        """
case "$1 $2" in
    "show job") echo "   Command=$SCRIPT recipe.toml" ;;
    "show hostnames") echo n0 ;;
    "show node") echo "NodeAddr=127.0.0.1" ;;
    *) echo "asked: scontrol $*"; exit 1 ;; # a requeue that succeeds would end this script
esac"""
    ),
    "srun": 'echo "asked: srun ${*: -4}"; exit "$CODE"',
    "squeue": "echo RUNNING",
}


def submit(folder, code, script=ROOT / "scripts/train.slurm", submitted=None):
    """submitted: the path that Slurm names, if the script is not the file that it runs."""
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n0",
        "SLURM_JOB_NUM_NODES": "1",
        "LOGS": str(folder / "logs"),
    }
    without = [
        each for each in os.environ["PATH"].split(":") if not Path(each, "titan-lite").exists()
    ]
    environment = {
        **os.environ,
        **slurm,
        "PATH": ":".join([str(folder), *without]),
        "SCRIPT": str(submitted or ROOT / "scripts/train.slurm"),
        "CODE": str(code),
    }
    command = ["bash", str(script), "recipe.toml", "--training.steps", "5"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, False), (2, False), (75, True), (138, True), (143, True)]
)
def test_what_a_signal_stopped_goes_back_into_the_queue(code, requeued, tmp_path):
    done = submit(tmp_path, code)
    assert done.returncode == code
    assert ("asked: scontrol requeue 7" in done.stdout) == requeued
    assert f"asked: srun bash {ROOT}/run_train.sh --training.steps 5\n" in done.stdout


def test_a_container_is_put_before_what_is_started(tmp_path):
    text = (ROOT / "scripts/train.slurm").read_text()
    assert text.count("\ncontainer=()\n") == 1
    script = tmp_path / "train.slurm"
    script.write_text(text.replace("\ncontainer=()\n", "\ncontainer=(apptainer exec image)\n"))
    assert (
        f"asked: srun image {ROOT}/run_train.sh --training.steps 5\n"
        in submit(tmp_path, 0, script).stdout
    )


def test_a_copy_of_an_installed_one_starts_the_command(tmp_path):
    submitted = tmp_path / "share/titan_lite/train.slurm"
    done = submit(tmp_path, 0, submitted=submitted)
    assert done.returncode == 2
    assert "nor titan-lite on the PATH: set VENV" in done.stderr
    (tmp_path / "titan-lite").write_text("#!/bin/sh\n")
    (tmp_path / "titan-lite").chmod(0o755)
    done = submit(tmp_path, 0, submitted=submitted)
    assert "asked: srun train recipe.toml --training.steps 5\n" in done.stdout
