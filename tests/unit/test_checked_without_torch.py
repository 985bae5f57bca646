"""What the launcher tells of a start before torch is imported, which takes seconds."""

import dataclasses
import json
import subprocess
import sys

import pytest
from tiny import DEBUG

from titan_lite import manifest
from titan_lite.config import load_config
from titan_lite.models.shapes import shape_of

# torch and wandb are not there; the recipe is checked as ./run_train.sh does
CHECK = """
import importlib.util
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
sys.exit(recipe.main(sys.argv[1:]))
"""


def check(*arguments):
    command = [sys.executable, "-c", CHECK, "--world-size", "1", str(DEBUG), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_recipe_that_can_start(tmp_path):
    assert check("--job.dump_folder", tmp_path).returncode == 0


def test_a_package_that_is_missing(tmp_path):
    told = check("--job.dump_folder", tmp_path, "--metrics.enable_wandb")
    assert told.returncode != 0
    assert "metrics.enable_wandb = true needs wandb, which is not installed here" in told.stderr


@pytest.mark.parametrize(("key", "value"), [("n_layers", 3), ("dim", 64)])
def test_a_resume_with_another_model(tmp_path, key, value):
    step = tmp_path / "checkpoint/step-4"
    step.mkdir(parents=True)
    config = load_config(DEBUG)
    model = dataclasses.asdict(shape_of(config.model))
    state = {
        "step": 4,
        "tensors": ["model"],
        "identity": {"recipe": config.model_dump(), "model": {**model, key: value}},
        "parts": {},
    }
    (step / "state.json").write_text(json.dumps(state))
    manifest.write(step, 4, {"state.json": manifest.digest(step / "state.json")})
    told = check("--job.dump_folder", tmp_path)
    assert told.returncode != 0
    assert f"the model's {key}" in told.stderr
