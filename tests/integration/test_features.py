"""A feature is a folder and a line: one is added to a copy of the package, and each is removed from
one. Nothing else of the package is touched.
"""

import json
import re
import shutil

import pytest
from commands import python, run
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, ROOT, SMALL

from titan_lite.features import FEATURES

SCALED = ROOT / "tests/added_feature/scaled"
OPTIONS = [*SMALL, *NO_VALIDATION, *NO_WORKERS, "--lr_scheduler.warmup_steps=1"]
OPTIONS += ["--lr_scheduler.decay_begin=2", "--lr_scheduler.decay_length=2"]


def copied(folder):
    """A copy of the package, in `folder`."""
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "titan_lite", folder / "titan_lite", ignore=without)
    for name in ("assets", "train_configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def with_list(package, features):
    """Write the list of features."""
    path = package / "titan_lite/features/__init__.py"
    text, replaced = re.subn(
        r"FEATURES = \(.*?\)", f"FEATURES = {tuple(features)!r}", path.read_text(), flags=re.DOTALL
    )
    assert replaced == 1
    path.write_text(text)


def titan_lite(package, *arguments):
    return run(*python("-m", "titan_lite", *arguments), cwd=package, PYTHONPATH=package)


def trained(package, folder, steps, *options):
    """Train in a process of the package, and return it."""
    command = ["train", DEBUG, f"--job.dump_folder={folder}", f"--training.steps={steps}"]
    return titan_lite(package, *command, *OPTIONS, *options)


def rows(folder):
    """What metrics.jsonl has of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def test_a_feature_is_added_by_a_folder_and_a_line(tmp_path):
    package = copied(tmp_path / "package")
    shutil.copytree(SCALED, package / "titan_lite/features/scaled")
    with_list(package, [*FEATURES, "scaled"])

    wrong = trained(package, tmp_path / "run", 2, "--scaled.factor=2", "--optimizer.name=Lion")
    assert wrong.returncode == 2
    assert "scaled.factor = 2.0 changes no sign; use 1" in wrong.stdout
    unknown = trained(package, tmp_path / "run", 2, "--scaled.factr=2")
    assert "scaled.factor" in unknown.stdout

    plain = trained(package, tmp_path / "plain", 2)
    assert "scaled" not in plain.stdout
    first = trained(package, tmp_path / "run", 2, "--scaled.factor=2", "--checkpoint.interval=2")
    assert "gradients times 2 (scaled.factor)" in first.stdout
    resumed = trained(package, tmp_path / "run", 4, "--scaled.factor=2")
    assert resumed.returncode == 0
    norms = [row["grad_norm"] for row in rows(tmp_path / "run")]
    assert norms[0] == pytest.approx(2 * rows(tmp_path / "plain")[0]["grad_norm"], rel=1e-6)
    assert [row["scaled_steps"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_an_added_feature_is_verified(tmp_path):
    package = copied(tmp_path)
    shutil.copytree(SCALED, package / "titan_lite/features/scaled")
    with_list(package, [*FEATURES, "scaled"])
    done = titan_lite(
        package, "verify", DEBUG, "--processes", "--scaled.factor=2", "--world-size", 2
    )
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_removed_by_its_folder_and_its_line(name, tmp_path):
    package = copied(tmp_path / "package")
    shutil.rmtree(package / f"titan_lite/features/{name}")
    with_list(package, [feature for feature in FEATURES if feature != name])
    assert trained(package, tmp_path / "run", 2).returncode == 0
    resumed = trained(package, tmp_path / "run", 4)
    assert resumed.returncode == 0
    assert "step    4" in resumed.stdout
    assert titan_lite(package, "plan", DEBUG, *OPTIONS, "--world-size", 2).returncode == 0


@pytest.mark.slow
def test_without_the_feature_of_experts_they_are_trained_without_a_balance(tmp_path):
    package = copied(tmp_path / "package")
    shutil.rmtree(package / "titan_lite/features/moe")
    with_list(package, [feature for feature in FEATURES if feature != "moe"])
    experts = ["--model.name=qwen3_moe", "--model.hidden_dim=32"]
    assert trained(package, tmp_path / "run", 2, *experts).returncode == 0
    for words in (["plan", "--search", 1], ["verify"]):
        done = titan_lite(package, *words, DEBUG, *experts, "--world-size", 2)
        assert done.returncode == 0
