"""The hook and the metric of docs/metrics.md, from a file of a user's own and from Python."""

import pytest
from commands import TORCHRUN, python, run
from pages import PAGES, blocks
from tiny import DEBUG, NO_CHECKPOINT, NO_VALIDATION, SMALL, steps

from titan_lite.metrics.run_files import read_metrics

OWN, FROM_PYTHON = (block for block in blocks(PAGES["docs/metrics.md"], "python"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_run.py").write_text(OWN)
    return tmp_path


def start(folder, ranks, *command):
    """As typed in `folder`, whose modules Python finds beside the script."""
    torchrun = python("-m", TORCHRUN, "--standalone", "--nproc-per-node", ranks)
    done = run(*torchrun, *command, cwd=folder, PYTHONSAFEPATH=None)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_hook_of_ones_own_writes_a_metric_on_any_layout(folder):
    options = [*SMALL, *NO_CHECKPOINT, *NO_VALIDATION, *steps(10)]
    norms = []
    for name, ranks, layout in (
        ("one", 1, []),
        ("fsdp", 2, []),
        ("tp", 2, ["--parallelism.tensor_parallel_degree=2"]),
    ):
        there = ["--job.dump_folder", folder / name]
        assert "done: step 10" in start(
            folder, ranks, "my_run.py", DEBUG, *options, *layout, *there
        )
        metrics = read_metrics(folder / name / "metrics.jsonl")
        assert "embedding_norm" not in metrics[9]
        assert "loss" in metrics[10]
        norms.append(metrics[10]["embedding_norm"])
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=1e-4)


@pytest.mark.slow
def test_a_trainer_takes_a_hook_from_python(folder):
    options = [*SMALL, *NO_CHECKPOINT, *NO_VALIDATION, *steps(10)]
    arguments = [*options, f"--job.dump_folder={folder}/run"]
    page = FROM_PYTHON.replace("train_configs/debug_model.toml", str(DEBUG))
    assert '["--training.steps=20"]' in page
    (folder / "page.py").write_text(page.replace('["--training.steps=20"]', str(arguments)))
    start(folder, 1, "page.py")
    assert read_metrics(folder / "run/metrics.jsonl")[10]["embedding_norm"] > 0
