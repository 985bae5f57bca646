"""The mixture of docs/data.md trains with every default and goes on; figures on any layout."""

import json
import re

import pyarrow
import pytest
from commands import run, script, train
from pages import ALL, blocks
from tiny import DEBUG, NO_CHECKPOINT, NO_WORKERS, SMALL, steps

from titan_lite.metrics.run_files import read_metrics

(MIXTURE,) = (block for block in blocks(ALL, "toml") if "[[data.sources]]" in block)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe of docs/data.md beside the files that it names."""
    folder = tmp_path_factory.mktemp("mixture")
    for path, field, words in (
        ("web/a.jsonl.zst", "text", "a page of the web "),
        ("code/b.jsonl", "content", "return x + 1; "),
    ):
        (folder / path).parent.mkdir()
        lines = "".join(
            json.dumps({field: f"{number} {words * 30}"}) + "\n" for number in range(200)
        ).encode()
        packed = (
            pyarrow.compress(lines, codec="zstd", asbytes=True) if path.endswith("zst") else lines
        )
        (folder / path).write_bytes(packed)
    (folder / "mixture.toml").write_text(f'extends = "{DEBUG}"\n{MIXTURE}')
    return folder / "mixture.toml"


@pytest.mark.slow
def test_the_mixture_of_the_pages_trains_and_resumes(recipe, tmp_path):
    folder = tmp_path / "out"
    short = [
        "--training.seq_len=64",
        "--checkpoint.interval=5",
        "--validation.freq=5",
        "--validation.steps=2",
    ]
    first = run(*script(folder, *short, *steps(5, schedule=10)), CONFIG_FILE=recipe)
    assert first.returncode == 0
    assert re.search(r"source web: 70% of the tokens; 1 file, 0\.0\d MiB", first.stdout)
    assert re.search(r"source code: 30% of the tokens; 1 file, 0\.\d\d MiB", first.stdout)
    assert list((folder / "tb").glob("events.*"))
    second = run(*script(folder, *short, *steps(10)), CONFIG_FILE=recipe)
    assert second.returncode == 0
    assert "steps: 5 done of 10" in second.stdout
    rows = read_metrics(folder / "metrics.jsonl")
    for step in (5, 10):
        tokens = {name: rows[step][f"tokens_by_source/{name}"] for name in ("web", "code")}
        assert sum(tokens.values()) == rows[step]["tokens_seen"] == step * 8 * 64
        assert abs(tokens["web"] - 0.7 * step * 8 * 64) <= 5 * 64
        assert {
            "loss_by_source/web",
            "loss_by_source/code",
            "validation_loss_by_source/web",
        } <= rows[step].keys()


OPTIONS = [
    *SMALL,
    *steps(2),
    *NO_CHECKPOINT,
    *NO_WORKERS,
    "--validation.freq=2",
    "--validation.steps=1",
]


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    """The figures of one rank, which its losses agree with."""
    folder = tmp_path_factory.mktemp("alone")
    assert train(1, recipe, folder, *OPTIONS).returncode == 0
    rows, before = read_metrics(folder / "metrics.jsonl"), {"web": 0, "code": 0}
    for row in list(rows.values())[1:]:
        tokens = {name: row[f"tokens_by_source/{name}"] - before[name] for name in before}
        weighted = sum(row[f"loss_by_source/{name}"] * tokens[name] for name in tokens) / sum(
            tokens.values()
        )
        assert weighted == pytest.approx(row["loss"], rel=1e-5)
        assert row["loss_by_source/web"] != pytest.approx(row["loss"], rel=1e-4)
        before = {name: before[name] + tokens[name] for name in before}
    return rows


LAYOUTS = {
    "tp x pp": [
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
    ],
    "tp x pp, loss in chunks": [
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
        "--training.loss_chunk_tokens=20",
    ],
}


@pytest.mark.parametrize(
    "layout",
    ["tp x pp", pytest.param("tp x pp, loss in chunks", marks=pytest.mark.slow)],
)
def test_figures_by_source_are_the_same_on_every_layout(layout, recipe, alone, tmp_path):
    assert train(4, recipe, tmp_path, *OPTIONS, *LAYOUTS[layout]).returncode == 0
    found = read_metrics(tmp_path / "metrics.jsonl")
    for step, row in alone.items():
        expected = {name: value for name, value in row.items() if "by_source" in name}
        assert {
            name: value for name, value in found[step].items() if "by_source" in name
        } == pytest.approx(expected, rel=1e-4)
