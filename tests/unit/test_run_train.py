"""What ./run_train.sh answers before it makes an environment, in a checkout that has none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Python without packages, whose modules venv and pip would install them: it notes that it was asked
BARE_PYTHON = """\
#!/bin/sh
[ "$1" != -m ] || { echo "$@" >>"$0.asked"; exit 1; }
exec "$REAL_PYTHON" -S "$@"
"""


@pytest.fixture
def bare(tmp_path):
    """The folder of a checkout; bin/ in it has the one Python there is."""
    for name in ("scripts", "titan_lite", "train_configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run_train.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python"):
        (tmp_path / "bin" / name).write_text(BARE_PYTHON)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run_train(folder, *arguments, **variables):
    environment = {
        "PATH": f"{folder}/bin:/usr/bin:/bin",
        "REAL_PYTHON": os.path.realpath(sys.executable),
        "HOME": str(folder),
        **variables,
    }
    command = [folder / "run_train.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def has_installed(folder):
    return bool(list((folder / "bin").glob("*.asked"))) or (folder / ".venv").exists()


@pytest.mark.parametrize("arguments", [("--help",), ("--training.steps", "3", "-h")])
def test_help_needs_no_installation(bare, arguments):
    done = run_train(bare, *arguments)
    assert (done.returncode, done.stderr, has_installed(bare)) == (0, "", False)
    assert done.stdout.startswith("usage: ./run_train.sh [OPTION ...] ")
    for word in ("CONFIG_FILE ", "NGPU ", "--section.key", "docs/recipes.md"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"MODULE": "llama3", "CONFIG": "llama3_8b"},
            "CONFIG=llama3_8b: the recipe is named by CONFIG_FILE; use it, such as"
            " CONFIG_FILE=llama3_8b, or unset CONFIG",
        ),
        (
            {"MODULE": "llama3"},
            "MODULE=llama3: the recipe is named by CONFIG_FILE; use it, such as"
            " CONFIG_FILE=llama3_8b, or unset MODULE",
        ),
        (
            {"COMM_MODE": "fake_backend", "CONFIG_FILE": "llama3_8b"},
            "COMM_MODE=fake_backend: this script trains; to check a recipe use python -m titan_lite"
            " recipe RECIPE --world-size 8, or unset COMM_MODE",
        ),
    ],
)
def test_a_variable_of_torchtitan_is_one_line_that_names_ours(bare, variables, line):
    done = run_train(bare, **variables)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"titan_lite: {line}\n")
    assert not has_installed(bare)


def test_a_variable_of_torchtitan_means_nothing_beside_ours(bare):
    done = run_train(bare, CONFIG_FILE="llama3_8b", CONFIG="Release")
    assert (done.returncode, has_installed(bare)) == (1, True)
