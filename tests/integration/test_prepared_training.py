"""Training on prepared data, with a tokenizer.json: the run that the text itself would make."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lite.data.tokenizer import load_tiktoken
from titan_lite.data.tokenizer_json import to_json, tokenizer_config
from titan_lite.metrics import read_metrics

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "train_configs/debug_model.toml"


def python(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_prepared_with_a_tokenizer_json_it_trains_as_on_the_text(tmp_path):
    pytest.importorskip("tokenizers")
    corpus, tokenizer = tmp_path / "corpus.jsonl", tmp_path / "tokenizer.json"
    corpus.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 9}) + "\n" for i in range(100)))
    tokenizer.write_text(json.dumps(to_json(load_tiktoken(ROOT / "assets/tokenizer/debug.model"))))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    text = ["--data.dataset", "local", "--data.path", corpus]
    small = ["--training.seq_len", "32", "--training.steps", "3", "--metrics.log_freq", "1", "--no-validation.enable"]
    small += ["--no-data.shuffle", "--data.validation_fraction", "0", "--no-checkpoint.enable", "--no-metrics.enable_tensorboard"]
    python("-m", "titan_lite.train", DEBUG, *small, *text, "--job.dump_folder", tmp_path / "a")
    by_json = ["--model.tokenizer_path", tokenizer]
    python("-m", "titan_lite.data.prepare", DEBUG, tmp_path / "prepared", "--workers", "1", *text, *by_json, *small)
    prepared = ["--data.dataset", "prepared", "--data.path", tmp_path / "prepared"]
    python("-m", "titan_lite.train", DEBUG, *small, *prepared, *by_json, "--job.dump_folder", tmp_path / "b")
    losses = [
        [
            (step, values.get("loss"), values.get("validation_loss"))
            for step, values in read_metrics(folder / "metrics.jsonl").items()
        ]
        for folder in (tmp_path / "a", tmp_path / "b")
    ]
    assert len(losses[0]) >= 3
    assert losses[0] == losses[1]
