"""The commands of docs/first-real-run.md, in their order, on two CPU processes in debug size: all
but the installation and sbatch (tests/integration/test_slurm.py).
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import run
from pages import PAGES, blocks
from tiny import DEBUG_TOKENIZER, RECIPES, ROOT

from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.data.tokenizer_json import to_json
from titan_lite.metrics.run_files import read_metrics

PAGE = PAGES["docs/first-real-run.md"]
NUMBERED = PAGE[: PAGE.index("## What a run writes")]
SMALL = "--training.seq_len 32 --model.n_layers 2 --model.dim 64 --model.hidden_dim 96"
SMALL += " --metrics.log_freq 1 --validation.freq 4 --validation.steps 1"
# the beginning of a command: what makes it small
ADDED = {
    "hf ": "",
    "titan-lite prepare ": "--workers 1",
    "titan-lite plan ": "--training.global_batch_size 16",
    "titan-lite verify ": "--world-size 2",
    "CONFIG_FILE=train_configs/my_run.toml ./run_train.sh": f"{SMALL} --training.steps 4",
    "titan-lite report ": "",
    "titan-lite convert ": "",
}
ELSEWHERE = ("./run_train.sh --training.steps 1 ", "source ", "sbatch ")
PROGRAMS = {  # the hub, and the installed command
    "hf": 'cp "$TOKENIZER" "${@: -1}/tokenizer.json"',
    "titan-lite": 'exec python -m titan_lite "$@"',
}


@pytest.fixture
def folder(tmp_path):
    """A checkout with the documents and the recipe of the page."""
    for name in ("titan_lite", "scripts", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(RECIPES, tmp_path / "train_configs")
    for name in ("run_train.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (recipe,) = blocks(PAGE, "toml")
    (tmp_path / "train_configs/my_run.toml").write_text(f'extends = "debug_model.toml"\n{recipe}')
    (tmp_path / "books").mkdir()
    lines = [json.dumps({"text": f"Chapter {n}. The best of times. " * 9}) for n in range(200)]
    (tmp_path / "books/one.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "hub.json").write_text(json.dumps(to_json(load_tokenizer(DEBUG_TOKENIZER))))
    (tmp_path / "bin").mkdir()
    for name, line in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(0o755)
    return tmp_path


def typed(folder: Path, command: str) -> str:
    done = run(
        "bash",
        "-c",
        command,
        cwd=folder,
        seconds=600,
        PATH=f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        PYTHONPATH=folder,
        PYTHONSAFEPATH=None,
        TOKENIZER=f"{folder}/hub.json",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_its_commands_train_resume_and_export(folder):
    shown = [block for block in blocks(NUMBERED) if block not in blocks(NUMBERED, "toml")]
    lines = [line for block in shown for line in block.splitlines()]
    commands = [re.sub(r"\s+# .*", "", line) for line in lines]
    headings = re.findall(r"^## (\d+)\. ", NUMBERED, re.M)
    assert headings == [str(number) for number in range(1, 11)]
    output = []
    for command in commands:
        if command.startswith(ELSEWHERE):
            continue
        (added,) = (more for begin, more in ADDED.items() if command.startswith(begin))
        if "--training.steps 4000" in command:
            added = added.replace("--training.steps 4", "")
        words = command.replace("--training.steps 4000", "--training.steps 8")
        output.append(typed(folder, f"{words} {added}"))
    assert len(output) == 8
    told = "\n".join(output)
    for words in (
        "step time",
        "equal to one process",
        "done: step 4",
        "steps: 4 done of 8",
        "results differ by floating-point rounding: ranks along tp: 2, was 1",
        "done: step 8",
    ):
        assert words in told
    metrics = read_metrics(folder / "outputs/my_run/metrics.jsonl")
    assert {1, 8} <= set(metrics)
    assert (folder / "outputs/my_run/report.html").is_file()
    assert (folder / "exported/model.safetensors").is_file()
