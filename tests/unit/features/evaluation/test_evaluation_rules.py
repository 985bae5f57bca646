"""Wrong recipes of [evaluation]: one line each, before the start."""

import json
import random

import pytest
from evaluation_tasks import write_tasks
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.config import ConfigError, load_config
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.features.evaluation import tasks
from titan_lite.rules import check_keys

TOKENIZER = load_tokenizer(str(DEBUG_TOKENIZER))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("limit=5", "evaluation.limit = 5 has no effect without tasks"),
        ("tasks=a --evaluation.max_length=513", "training.seq_len = 512; use at most 512"),
        ("tasks=a --evaluation.max_length=1", "leaves no room for a prompt; use 2 or more"),
    ],
)
def test_keys_that_cannot_be(option, told):
    options = f"--training.seq_len=512 --evaluation.{option}".split()
    with pytest.raises(ConfigError, match=told):
        check_keys(load_config(DEBUG, options))


def test_a_package_that_is_not_here(monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'titan_lite\[evaluation\]'"):
        tasks.load_tasks(("hellaswag",), key="of this test")


def loaded(folder, name="until", max_length=32):
    tasks.load_tasks.cache_clear()
    found = tasks.load_tasks((name,), str(folder))
    tasks.check_tasks(found, TOKENIZER, max_length)


def test_tasks_that_cannot_be_run(tmp_path):
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    with pytest.raises(ConfigError, match=r"evaluation.task_folder = .* is no folder"):
        loaded(folder)
    write_tasks(tmp_path)
    loaded(folder)
    with pytest.raises(ConfigError, match=r'"until" generates 8 tokens, .* context has 8'):
        loaded(folder, max_length=8)
    text = (folder / "choice.yaml").read_text()
    (folder / "choice.yaml").write_text(text.replace("test: ", "test: /nowhere"))
    with pytest.raises(ConfigError, match='the data of the task "choice" is not here'):
        loaded(folder, "choice")
    documents = tmp_path / "rolling.jsonl"
    documents.write_text(json.dumps({"other": "x"}) + "\n")
    with pytest.raises(ConfigError, match="not as the task says"):
        loaded(folder, "rolling")


@pytest.mark.slow
def test_an_unknown_task_has_the_nearest_names(tmp_path):
    """It reads the names of all tasks that lm_eval has."""
    pytest.importorskip("lm_eval")
    write_tasks(tmp_path)
    with pytest.raises(ConfigError, match=r'there is no task "helaswag".*hellaswag'):
        loaded(tmp_path / "tasks", "helaswag")


def test_random_numbers_are_back_and_the_same_within():
    random.seed(7)
    after = random.getstate()
    drawn = []
    for _ in range(2):
        with tasks.quiet():
            drawn.append(random.random())
    assert random.getstate() == after
    assert drawn[0] == drawn[1]
