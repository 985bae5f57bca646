"""Training on prepared data, with a tokenizer.json: the run that the text itself would make."""

import json

from commands import train
from tiny import DEBUG, DEBUG_TOKENIZER, NO_CHECKPOINT, SMALL, steps

from titan_lite.data.tokenizer import load_tiktoken
from titan_lite.data.tokenizer_json import to_json, tokenizer_config
from titan_lite.metrics.writer import read_metrics
from titan_lite.tools import prepare

OPTIONS = [*SMALL, *steps(3), *NO_CHECKPOINT, "--validation.enable", "--validation.steps=2"]


def losses(folder, *options):
    """Losses of training and of validation of a run of one process."""
    assert train(1, DEBUG, folder, *OPTIONS, *options).returncode == 0
    return {
        step: {name: value for name, value in values.items() if "loss" in name}
        for step, values in read_metrics(folder / "metrics.jsonl").items()
    }


def test_prepared_data_has_the_losses_of_its_text(tmp_path):
    """Shuffled, and with documents held out."""
    texts = [f"def f{i}(x):\n    return x + {i}\n" * 9 for i in range(100)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    tokenizer = tmp_path / "tokenizer.json"
    ours = load_tiktoken(DEBUG_TOKENIZER)
    tokenizer.write_text(json.dumps(to_json(ours)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(ours)))

    data = [f"--model.tokenizer_path={tokenizer}", "--data.validation_fraction=0.2"]
    text = ["--data.dataset=local", f"--data.path={tmp_path}/corpus.jsonl", *data]
    tokens = ["--data.dataset=prepared", f"--data.path={tmp_path}/prepared", *data]
    assert prepare.main([str(DEBUG), f"{tmp_path}/prepared", "--workers=0", *text]) == 0

    on_tokens = losses(tmp_path / "on tokens", *tokens)
    assert on_tokens[3]["loss"] < on_tokens[1]["loss"] < 7.8  # ln 2,048 is 7.6
    assert any("validation" in name for name in on_tokens[3])
    assert on_tokens == losses(tmp_path / "on text", *text)
