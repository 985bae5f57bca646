"""Every file of scripts/ is started by a test: those that pages name by test_readme_commands.py, the
others by a test that stands here or is named here.
"""

import re
import runpy
import shutil
import subprocess
import sys

import pytest
from commands import python, run
from test_readme_commands import HERE
from tiny import DEBUG_TOKENIZER, ROOT

SCRIPTS = ROOT / "scripts"
BESIDE_PAGES = {  # which no page names as a command that a test can run: the test that starts it
    "compare_layouts.py": "test_layouts_have_one_curve_which_is_drawn",
    "compare_losses.py": "test_two_trees_with_the_same_sources_are_equal_to_the_bit",
    "first_step.py": "test_a_command_of_the_pages_does_what_it_says",
    "kill_groups.py": "test_random_kills_lose_nothing",
    "make_debug_tokenizer.py": "test_a_tokenizer_is_made",
    "setup.sh": "test_the_main_job_writes_what_it_promises_goes_on_on_one_rank_and_is_exported",
    "train.slurm": "test_what_a_signal_stopped_goes_back_into_the_queue",
}


def test_every_script_has_a_test_that_starts_it():
    in_pages = {name for command in HERE for name in re.findall(r"scripts/([\w.]+)", command)}
    assert not in_pages & set(BESIDE_PAGES)
    assert in_pages | set(BESIDE_PAGES) == {
        path.name for path in SCRIPTS.iterdir() if path.is_file() and path.suffix != ".toml"
    }
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert [test for test in BESIDE_PAGES.values() if f"def {test}(" not in sources] == []


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda script: script.name)
def test_what_a_script_imports_and_asks_for_is_there(script, monkeypatch, capsys):
    """By its --help, in this process, which has torch already."""
    monkeypatch.syspath_prepend(SCRIPTS)  # as where it is run, beside its neighbours
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert f"usage: {script.name}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_tokenizer_is_made(tmp_path):
    made = tmp_path / "made.model"
    command = python(SCRIPTS / "make_debug_tokenizer.py", "--ranks", 300, "--output", made)
    done = run(*command, seconds=600)
    assert done.returncode == 0
    assert f"{made}: a vocabulary of " in done.stdout
    # The most frequent pairs are the same, however many there are.
    lines = DEBUG_TOKENIZER.read_bytes().splitlines()
    assert made.read_bytes().splitlines() == lines[:300]


@pytest.mark.release
def test_two_trees_with_the_same_sources_are_equal_to_the_bit(tmp_path):
    tree = tmp_path / "tree"
    for name in ("titan_lite", "train_configs", "assets", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", tree, "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True)
    options = ["--steps", 2, "--only", "2 ranks", "--cache", tmp_path / "cache"]
    done = run(*python(tree / "scripts/compare_losses.py", "HEAD", *options))
    assert (done.returncode, "2 ranks: equal to the bit" in done.stdout) == (0, True)


@pytest.mark.release
@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [[], ["--async"]], ids=["sync", "async"])
def test_random_kills_lose_nothing(mode):
    pytest.importorskip("torchft")
    done = run(*python(SCRIPTS / "kill_groups.py", "--kills", 3, "--seconds", 10, *mode))
    assert (done.returncode, "\nnothing is lost\n" in done.stdout) == (0, True)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_layouts_have_one_curve_which_is_drawn(tmp_path):
    picture = tmp_path / "small.png"
    options = ["--steps", 2, "--layouts", "FSDP 2, resumed as TP 2", "--output", picture]
    done = run(*python(SCRIPTS / "compare_layouts.py", *options))
    assert done.returncode == 0
    (largest,) = re.findall(r"2 layouts, relative difference at most (\S+)", done.stdout)
    assert float(largest) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
