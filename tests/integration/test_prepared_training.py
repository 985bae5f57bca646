"""Training on prepared data, with a tokenizer.json: the run that the text itself would make."""

import json

import pytest
from commands import train
from tiny import DEBUG, DEBUG_TOKENIZER, NO_CHECKPOINT, NO_VALIDATION, SMALL, steps

from titan_lite.data import prepare
from titan_lite.data.tokenizer import load_tiktoken
from titan_lite.data.tokenizer_json import to_json, tokenizer_config
from titan_lite.metrics.figures import read_metrics

OPTIONS = [
    *SMALL,
    *steps(3),
    *NO_VALIDATION,
    *NO_CHECKPOINT,
    "--data.validation_fraction=0",
    "--data.no-shuffle",
]


@pytest.fixture
def corpus(tmp_path):
    """(text, by which tokenizer.json it has been prepared, where)."""
    text, tokenizer, prepared = (
        tmp_path / "corpus.jsonl",
        tmp_path / "tokenizer.json",
        tmp_path / "prepared",
    )
    text.write_text(
        "".join(
            json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 9}) + "\n"
            for i in range(100)
        )
    )
    tokenizer.write_text(json.dumps(to_json(load_tiktoken(DEBUG_TOKENIZER))))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    options = [
        *OPTIONS,
        "--data.dataset",
        "local",
        "--data.path",
        text,
        "--model.tokenizer_path",
        tokenizer,
        "--workers",
        "0",
    ]
    assert prepare.main([str(DEBUG), str(prepared), *map(str, options)]) == 0
    return text, tokenizer, prepared


def losses(folder, *options):
    """{step: loss} of a run of one process."""
    assert train(1, DEBUG, folder, *OPTIONS, *options).returncode == 0
    return {step: values["loss"] for step, values in read_metrics(folder / "metrics.jsonl").items()}


def on_prepared(tmp_path, corpus):
    _, tokenizer, prepared = corpus
    data = [
        "--data.dataset",
        "prepared",
        "--data.path",
        prepared,
        "--model.tokenizer_path",
        tokenizer,
    ]
    return losses(tmp_path / "on prepared", *data)


def test_the_loss_falls_on_prepared_data_with_a_tokenizer_json(tmp_path, corpus):
    found = on_prepared(tmp_path, corpus)
    assert list(found) == [1, 2, 3]
    assert found[3] < found[1] < 7.8  # ln 2,048 is 7.6


@pytest.mark.slow
def test_prepared_data_has_the_losses_of_its_text(tmp_path, corpus):
    assert on_prepared(tmp_path, corpus) == losses(
        tmp_path / "on text", "--data.dataset", "local", "--data.path", corpus[0]
    )
