"""Sources of several kinds through the whole run: mixed, with bad documents, on two ranks, resumed
on one.
"""

import json
import re

import pytest
from commands import train
from test_training import OPTIONS
from tiny import DEBUG, NO_VALIDATION, steps

from titan_lite.metrics.writer import read_metrics

pytest.importorskip("pyarrow")


@pytest.fixture
def options(tmp_path):
    """A mix of the standard library and a file with three bad documents and a short one."""
    lines = [
        json.dumps({"text": f"document {i}: " + "words and more words " * 5}) for i in range(60)
    ]
    lines[7], lines[20], lines[33] = '{"text": null}', "not json", '{"text": 1}'
    lines[40] = '{"text": "short"}'
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(lines) + "\n")
    sources = f'[{{dataset = "local", path = "{corpus}", weight = 0.7}}, {{weight = 0.3}}]'
    options = [
        *OPTIONS,
        *NO_VALIDATION,
        "--data.sources",
        sources,
        "--data.min_document_tokens",
        "10",
    ]
    return [
        *options,
        "--data.num_workers",
        "2",
        "--training.local_batch_size",
        "4",
        "--data.on_bad_document",
        "skip",
    ]


def test_a_mix_with_bad_documents_trains_and_goes_on(options, tmp_path):
    folder = tmp_path / "out"
    first = train(2, DEBUG, folder, *options, *steps(3))
    assert first.returncode == 0
    assert re.search(
        r"first sequence of 64 tokens: '.*words and more|first sequence of 64 tokens: '",
        first.stdout,
    )
    assert "far from ln" not in first.stdout
    second = train(1, DEBUG, folder, *options, *steps(12), "--training.local_batch_size", "8")
    assert second.returncode == 0
    metrics = read_metrics(folder / "metrics.jsonl")
    assert sum(values.get("short_documents", 0) for values in metrics.values()) >= 1
    assert all("data_wait" in values for step, values in metrics.items() if step)
    listed = [
        json.loads(line) for line in (folder / "bad_documents.jsonl").read_text().splitlines()
    ]
    assert {entry["location"] for entry in listed} == {"line 21", "line 34", "line 8"}
    assert metrics[12]["bad_documents"] == len(listed)
    assert re.search(
        rf"done: step 12, .*, {len(listed)} bad documents left out, listed in .*/bad_documents.jsonl",
        second.stdout,
    )


@pytest.mark.slow
def test_bad_documents_that_every_validation_reads_are_counted_once(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * 20}) for i in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    lines[::3] = ["{"] * 20
    (tmp_path / "validation.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "out"
    options = [
        *("--data.dataset=local", f"--data.path={tmp_path}/train.jsonl"),
        *(f"--validation.path={tmp_path}/validation.jsonl", "--validation.freq=1"),
        "--data.on_bad_document=skip",
    ]
    result = train(1, DEBUG, folder, *OPTIONS, *options, *steps(4))
    assert result.returncode == 0, result.stdout
    metrics = read_metrics(folder / "metrics.jsonl")
    assert metrics[4]["bad_documents"] == metrics[1]["bad_documents"] > 0


def test_what_ends_a_run_before_its_first_step_is_named_and_listed(tmp_path):
    (tmp_path / "bad.jsonl").write_text("bad\n" * 9)
    more = [
        "--data.dataset",
        "local",
        "--data.path",
        tmp_path / "bad.jsonl",
        "--data.validation_fraction",
        "0",
    ]
    more += [*NO_VALIDATION, "--data.on_bad_document", "skip"]
    result = train(1, DEBUG, tmp_path / "out", *OPTIONS, *more)
    assert re.search(
        r"error: \[rank 0\] data.max_bad_documents = 100: there are 101, over all epochs, the last"
        r" one .*bad.jsonl, line \d: not JSON",
        result.stdout,
    )
    listed = {
        json.loads(line)["location"]
        for line in (tmp_path / "out/bad_documents.jsonl").read_text().splitlines()
    }
    assert listed == {f"line {number}" for number in range(1, 10)}


@pytest.mark.slow
def test_data_that_starts_anew_counts_bad_documents_anew(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * 5}) if i % 3 else "{" for i in range(60)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    folder = tmp_path / "out"
    data = [
        f"--data.path={tmp_path / 'corpus.jsonl'}",
        *("--data.dataset=local", "--data.validation_fraction=0", "--data.on_bad_document=skip"),
    ]
    options = [*OPTIONS, *NO_VALIDATION, *data]
    assert train(1, DEBUG, folder, *options, *steps(3)).returncode == 0
    before = (folder / "bad_documents.jsonl").read_bytes()
    again = ["--debug.seed=7", "--checkpoint.restart_data"]
    assert train(1, DEBUG, folder, *options, *steps(4), *again).returncode == 0
    after = (folder / "bad_documents.jsonl").read_bytes()
    count = read_metrics(folder / "metrics.jsonl")[4]["bad_documents"]
    assert len(after.removeprefix(before).splitlines()) == count > 0
