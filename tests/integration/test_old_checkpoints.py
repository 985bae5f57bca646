"""Checkpoints that the commit before the package was rearranged has saved are resumed: on the same
layout with the losses that this commit itself goes on with, on another one with nearly these.
"""

import json
import shutil
import subprocess
import sys

import pytest
from commands import TORCHRUN, python, run
from tiny import NO_VALIDATION, ROOT, SMALL

from titan_lite.metrics.run_files import read_metrics

OLD = "995ae738bd918177e550ceef648c033d0e84a0d3"
PACKAGES = ["tyro==1.0.17", "docstring-parser==0.18.0", "typeguard==4.6.1"]
MIX = """
[[data.sources]]
dataset = "stdlib"
weight = 3.0

[[data.sources]]
dataset = "local"
path = "numbers.jsonl"
"""
POWERSGD = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.replicate_compression=powersgd",
    "--parallelism.replicate_uncompressed_steps=1",
]
# the same learning rate, by the keys of then and of now
OF_OLD = ["--lr_scheduler.total_steps=12"]
OF_NOW = ["--lr_scheduler.decay_begin=10", "--lr_scheduler.decay_length=2"]
TENSOR_PARALLEL = "--parallelism.tensor_parallel_degree=2"
EXPERT_PARALLEL = "--parallelism.expert_parallel_degree=2"
# name: (options, those of the layout with its ranks, those of another layout with its ranks)
RUNS = {
    "dense": ([], (2, []), (2, [TENSOR_PARALLEL])),
    "experts with biases": (["--experts.balance=bias"], (2, [EXPERT_PARALLEL]), (1, [])),
    "Muon": (["--optimizer.name=Muon"], (2, []), (1, [])),
    "Shampoo": (["--optimizer.name=Shampoo"], (2, []), (1, [])),
    "PowerSGD": (POWERSGD, (4, []), (2, [])),
    "data mix": ([], (2, []), (1, [])),
    "saved asynchronously": (["--checkpoint.async_mode=async"], (2, []), (2, [TENSOR_PARALLEL])),
}


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory):
    """The sources of the old commit, with packages that it needs and this one does not."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", OLD], capture_output=True).returncode:
        pytest.skip(f"the history here does not reach back to {OLD[:8]}")
    tree = tmp_path_factory.mktemp("old") / "tree"
    subprocess.check_call([*git, "worktree", "add", "--quiet", "--detach", str(tree), OLD])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tree)]
    subprocess.check_call([*pip, *PACKAGES])
    yield tree
    subprocess.check_call([*git, "worktree", "remove", "--force", str(tree)])


def train(tree, folder, recipe, ranks, steps, *options):
    """Train to `steps` with the sources of a tree; return the losses by step."""
    done = run(
        *python("-m", TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "titan_lite.train", str(recipe)),
        *("--job.dump_folder", str(folder), f"--training.steps={steps}"),
        *(OF_OLD if tree != ROOT else OF_NOW),
        "--checkpoint.interval=2",
        *(*SMALL, *NO_VALIDATION, *options),
        PYTHONPATH=str(tree),
        PYTHONSAFEPATH="1",
    )
    assert done.returncode == 0
    metrics = read_metrics(folder / "metrics.jsonl")
    return {step: values["loss"] for step, values in metrics.items() if "loss" in values}


@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_the_old_package_is_resumed(name, old_tree, tmp_path):
    options, (ranks, layout), (other_ranks, other_layout) = RUNS[name]
    base = "qwen3_moe_debug.toml" if "experts" in name else "debug_model.toml"
    mix = MIX if name == "data mix" else ""
    old_recipe, recipe = tmp_path / "old.toml", tmp_path / "recipe.toml"
    for tree, path in ((old_tree, old_recipe), (ROOT, recipe)):
        path.write_text(f'extends = "{tree}/train_configs/{base}"\n{mix}')
    texts = (json.dumps({"text": f"{n} times {n} is {n * n}. " * 9}) for n in range(500))
    (tmp_path / "numbers.jsonl").write_text("\n".join(texts))
    saved, of_old, same, other = (tmp_path / run for run in ("saved", "old", "same", "other"))
    train(old_tree, saved, old_recipe, ranks, 4, *options, *layout)
    for copied in (of_old, same, other):
        shutil.copytree(saved, copied)
    expected = train(old_tree, of_old, old_recipe, ranks, 8, *options, *layout)
    found = train(ROOT, same, recipe, ranks, 8, *options, *layout)
    assert found == pytest.approx(expected, rel=1e-6)
    found = train(ROOT, other, recipe, other_ranks, 8, *options, *other_layout)
    # with other shards, PowerSGD leaves out other parts of a gradient
    assert found == pytest.approx(expected, rel=1e-3 if name == "PowerSGD" else 1e-4)
