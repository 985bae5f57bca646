"""What the launcher reports of a start before torch is imported, which takes seconds."""

import dataclasses
import json
import subprocess
import sys

import pytest
from tiny import DEBUG

from titan_lite import manifest
from titan_lite.config import load_config
from titan_lite.models.shapes import shape_of

# torch and wandb are not there; recipes are checked as ./run_train.sh does, a line of JSON for each
CHECK = """
import contextlib
import importlib.util
import io
import json
import sys
from importlib.abc import MetaPathFinder

class NotThere(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotThere())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "wandb" else find_spec(name, *rest)
from titan_lite import recipe
for arguments in json.loads(sys.argv[1]):
    with (
        contextlib.redirect_stderr(io.StringIO()) as errors,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = recipe.main(arguments)
    print(json.dumps([code, errors.getvalue()]))
"""


def folder_with_a_step(folder, **changed):
    """Write a step whose model has other values than the debug recipe's."""
    step = folder / "checkpoint/step-4"
    step.mkdir(parents=True)
    config = load_config(DEBUG)
    model = {**dataclasses.asdict(shape_of(config.model)), **changed}
    state = {
        "step": 4,
        "tensors": ["model"],
        "identity": {"recipe": config.model_dump(), "model": model},
        "parts": {},
    }
    (step / "state.json").write_text(json.dumps(state))
    manifest.write(step, 4, {"state.json": manifest.digest(step / "state.json")})
    return folder


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """(exit code, standard error) of each command line, all in one process."""
    folder = tmp_path_factory.mktemp("runs")
    options = {
        "can start": [folder / "new"],
        "a package": [folder / "new", "--metrics.enable_wandb"],
        "n_layers": [folder_with_a_step(folder / "layers", n_layers=3)],
        "dim": [folder_with_a_step(folder / "dim", dim=64)],
    }
    start = ["--world-size", "1", str(DEBUG), "--job.dump_folder"]
    command_lines = [[*start, *map(str, words)] for words in options.values()]
    command = [sys.executable, "-c", CHECK, json.dumps(command_lines)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = dict(zip(options, map(json.loads, done.stdout.splitlines()), strict=False))
    assert len(found) == len(options), done.stderr
    return found


def test_a_recipe_that_can_start(checked):
    assert checked["can start"] == [0, ""]


def test_a_package_that_is_missing(checked):
    code, errors = checked["a package"]
    assert code == 2
    assert "metrics.enable_wandb = true needs wandb, which is not installed here" in errors


@pytest.mark.parametrize("key", ["n_layers", "dim"])
def test_a_resume_with_another_model(checked, key):
    code, errors = checked[key]
    assert code == 2
    assert f"the model's {key}" in errors
