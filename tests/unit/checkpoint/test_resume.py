"""Differences between a run and the one that saved its step: what is refused, what starts anew,
what is told.
"""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lite.checkpoint import resume
from titan_lite.checkpoint.resume import (
    COUNTS_WITH,
    ERRORS_DROPPED,
    FACTS,
    KIND_OF_KEY,
    NEEDED,
    Kind,
    compare,
    git_revision,
)
from titan_lite.config import KEYS, Checkpoint, ConfigError, load_config

DEBUG = Path(__file__).parents[3] / "train_configs/debug_model.toml"
RUN = {
    "model": {"dim": 256, "n_layers": 6, "rope_scaling": None},
    "tokenizer": "a" * 64,
    "rows": 8,
    "documents": "b" * 64,
    "shares": [1.0],
    "total_steps": 100,
    "world_size": 2,
    "mesh": {"dp_shard": 2, "tp": 1},
    "device": "CPU",
    "versions": {"torch": "2.13.0", "python": "3.11.2"},
    "git": "c" * 40,
}


TABLE = (
    '{"dataset": "%s", "path": "%s", "subset": "", "split": "train", "text_field": "text",'
    ' "weight": %.1f}'
)


def described(*overrides, **facts):
    config = load_config(DEBUG, overrides)
    return {
        "recipe": config.model_dump(),
        "run": {**RUN, "total_steps": config.total_steps, **facts},
    }


def saved(*overrides, **facts):
    """state.json of step 50, as it is read."""
    positions = {str(stream): [[stream + 8 * (stream % 3), 12]] for stream in range(8)}
    state = {
        "step": 50,
        "tokens_seen": 102_400,
        "loader": {"windows_taken": 400, "streams": 8, "positions": positions},
        "tensors": ["model", "optimizer"],
    }
    state |= {
        "validation_due": False,
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "spikes": {"accepted": [8.5], "skipped": []},
    }
    return json.loads(json.dumps({**state, **described(*overrides, **facts)}))


def differences(*overrides, was=(), **facts):
    """[(kind, text), ...] of a run beside the one that saved step 50."""
    changes = compare(saved(*was), described(*overrides, **facts))
    return [(kind, text) for kind, texts in changes.texts.items() for text in texts]


def test_only_keys_that_there_are_have_a_kind():
    others = {other for other, _ in COUNTS_WITH.values()}
    assert {*KIND_OF_KEY, *COUNTS_WITH, *others} <= KEYS.keys()
    assert FACTS.keys() == RUN.keys()


@pytest.mark.parametrize("key", KEYS)
def test_a_change_of_any_key_is_told(key):
    was, now = saved(), described()
    section, _, name = key.partition(".")
    other = [{"dataset": "c4"}] if key == "data.sources" else "something else"
    was["recipe"][section][name] = other
    texts = [text for texts in compare(was, now).texts.values() for text in texts]
    assert texts == [f"{key} = {json.dumps(now['recipe'][section][name])}, was {json.dumps(other)}"]


def test_nothing_differs():
    changes = compare(saved(), described())
    assert changes.lines() == ["nothing differs from the run that saved it"]
    assert not changes.restarts_data
    assert not changes.restarts_optimizer
    changes.refuse_unless_accepted("step-50", Checkpoint())


CASES = [
    (["--metrics.log_freq=1"], {}, [(Kind.NOTED, "metrics.log_freq = 1, was 5")]),
    (["--training.seq_len=512"], {}, [(Kind.NOTED, "training.seq_len = 512, was 256")]),
    (
        [],
        {"mesh": {"dp_shard": 4, "tp": 1}},
        [(Kind.NOTED, "ranks along dp_shard: 4, was 2")],
    ),
    (
        [],
        {"versions": {"torch": "2.11.0", "python": "3.11.2"}},
        [(Kind.NOTED, 'version of torch: "2.11.0", was "2.13.0"')],
    ),
    ([], {"git": ""}, []),  # not looked up on this rank
    (
        ["--training.steps=200"],
        {},
        [
            (Kind.NOTED, "training.steps = 200, was 100"),
            (Kind.NOTED, "steps of the schedule (lr_scheduler.total_steps): 200, was 100"),
        ],
    ),
    (  # a corpus that moved, and another one
        ["--data.path=/b"],
        {},
        [(Kind.NOTED, 'data.path = "/b", was "/a"')],
    ),
    (
        [],
        {"documents": "d" * 64},
        [
            (
                Kind.DATA,
                f"SHA-256 of the documents' names and sizes ([data]): {'d' * 12}, was {'b' * 12}",
            )
        ],
    ),
    (["--data.no-shuffle"], {}, [(Kind.DATA, "data.shuffle = false, was true")]),
    (["--debug.seed=1"], {}, [(Kind.DATA, "debug.seed = 1, was 0")]),
    (
        ["--optimizer.name=Muon", "--optimizer.max_preconditioner_dim=9"],
        {},
        [
            (Kind.OPTIMIZER, 'optimizer.name = "Muon", was "AdamW"'),
            (Kind.NOTED, "optimizer.max_preconditioner_dim = 9, was 1024"),
        ],
    ),
    (
        ["--model.flavor=1B"],
        {"model": {"dim": 2048, "n_layers": 6, "rope_scaling": {"factor": 8.0}}},
        [
            (Kind.REFUSED, "the model's dim ([model]): 2048, was 256"),
            (Kind.REFUSED, "the model's rope_scaling.factor ([model]): 8.0, was null"),
            (Kind.NOTED, 'model.flavor = "1B", was "debug"'),
        ],
    ),
    (
        ["--model.flavor=1B"],
        {},
        [(Kind.NOTED, 'model.flavor = "1B", was "debug"')],
    ),  # another name for the same
    (
        [],
        {"model": {"dim": 256, "n_layers": 6, "rope_scaling": None, "max_seq_len": 512}},
        [(Kind.NOTED, "the model's max_seq_len ([model]): 512, was null")],
    ),
    (
        [],
        {"tokenizer": "e" * 64},
        [(Kind.REFUSED, f"SHA-256 of model.tokenizer_path: {'e' * 12}, was {'a' * 12}")],
    ),
]
LOCAL = ["--data.dataset=local", "--data.path=/a"]


@pytest.mark.parametrize(("overrides", "facts", "expected"), CASES)
def test_what_a_difference_does(overrides, facts, expected):
    assert differences(*LOCAL, *overrides, was=LOCAL, **facts) == expected


def test_without_shuffling_the_seed_and_the_buffer_are_of_no_data():
    plain = ["--data.no-shuffle"]
    found = differences(*plain, "--debug.seed=1", "--data.shuffle_buffer=5", was=plain)
    assert [kind for kind, _ in found] == [Kind.NOTED, Kind.NOTED]


def test_of_shampoo_the_size_of_blocks_is_of_its_state():
    shampoo = ["--optimizer.name=Shampoo"]
    assert differences(*shampoo, "--optimizer.max_preconditioner_dim=9", was=shampoo) == [
        (Kind.OPTIMIZER, "optimizer.max_preconditioner_dim = 9, was 1024")
    ]


def test_a_key_that_only_one_side_has_is_told():
    state = saved()
    state["recipe"]["training"]["old_key"] = 3
    del state["recipe"]["optimizer"]["lr"]
    lines = compare(state, described()).lines()
    assert lines == [
        "changed: training.old_key = null, was 3",
        "changed: optimizer.lr = 0.002, was null",
    ]


def test_a_step_that_says_nothing_of_its_run_is_refused():
    for key in NEEDED:
        state = saved()
        del state[key]
        with pytest.raises(ConfigError, match=rf"is incomplete \(no {key}\)"):
            compare(state, described())


def refused(changes, **accepting):
    with pytest.raises(ConfigError) as error:
        changes.refuse_unless_accepted("out/step-50", Checkpoint(**accepting))
    return str(error.value)


def test_another_model_or_tokenizer_is_refused_whatever_the_recipe_accepts():
    changes = compare(saved(), described(model={**RUN["model"], "dim": 2048}))
    assert (
        refused(changes, restart_data=True, accept_model_only=True)
        == "out/step-50: it cannot go on: the model's dim ([model]): 2048, was 256; "
        "use the old value, or another job.dump_folder"
    )


def test_other_data_is_refused_unless_it_may_begin_anew():
    changes = compare(saved(), described("--debug.seed=3"))
    assert changes.restarts_data
    assert (
        refused(changes, accept_model_only=True)
        == "out/step-50: the data starts anew: debug.seed = 3, was 0; use the old value, or "
        "checkpoint.restart_data = true, which starts the recipe's data at its first document"
    )
    changes.refuse_unless_accepted("out/step-50", Checkpoint(restart_data=True))


def test_a_step_without_optimizer_is_refused_unless_that_is_accepted_or_the_run_is_done():
    state = saved()
    state["tensors"] = ["model"]
    changes = compare(state, described())
    assert (
        "a step that has the optimizer's state, or checkpoint.accept_model_only = true"
        in refused(changes, restart_data=True)
    )
    changes.refuse_unless_accepted("out/step-50", Checkpoint(accept_model_only=True))
    changes.refuse_unless_accepted("out/step-50", Checkpoint(), done=True)


def test_what_starts_anew_is_not_loaded():
    tensors = {"model.w": 1, "optimizer.w.exp_avg": 2, "between.w": 3}
    compresses = {"dp_replicate": 2, "rank": 8}
    state = saved(between=compresses)
    state["tensors"] = ["model", "optimizer", "between"]
    same = compare(state, described(between=compresses))
    assert same.to_load(tensors) == tensors
    assert same.lines() == ["nothing differs from the run that saved it"]
    other_rank = compare(state, described(between=compresses | {"rank": 4}))
    assert other_rank.to_load(tensors).keys() == {"model.w", "optimizer.w.exp_avg"}
    assert other_rank.lines() == [ERRORS_DROPPED]
    muon = compare(state, described("--optimizer.name=Muon", between=compresses))
    assert muon.to_load(tensors).keys() == {"model.w", "between.w"}


def test_lines_begin_with_what_matters_most():
    now = described("--training.steps=200", "--data.no-shuffle", "--optimizer.name=Muon")
    assert compare(saved(), now).lines() == [
        "the data starts anew: data.shuffle = false, was true",
        'the optimizer starts anew: optimizer.name = "Muon", was "AdamW"',
        "changed: training.steps = 200, was 100",
        "changed: steps of the schedule (lr_scheduler.total_steps): 200, was 100",
    ]


def test_comparing_changes_neither_side():
    state, now = saved(), described("--training.steps=200")
    before = copy.deepcopy((state, now))
    compare(state, now)
    assert (state, now) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_git_revision_is_of_the_checkout_that_holds_the_package(tmp_path, monkeypatch):
    def git(*arguments):
        names = ["-c", "user.name=n", "-c", "user.email=e@e"]
        return subprocess.run(
            ["git", "-C", tmp_path, *names, *arguments], check=True, capture_output=True, text=True
        ).stdout

    module = tmp_path / "package/resume.py"
    module.parent.mkdir()
    module.write_text("first")
    monkeypatch.setattr(resume, "__file__", str(module))
    assert git_revision.__wrapped__() == ""
    git("init", "-q")
    assert git_revision.__wrapped__() == ""  # a checkout of something else
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD").strip()
    assert git_revision.__wrapped__() == head
    module.write_text("second")
    assert git_revision.__wrapped__() == f"{head}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision.__wrapped__() == ""  # without git


def test_neither_torch_nor_a_process_is_needed():
    code = "import sys, titan_lite.checkpoint.resume; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=DEBUG.parents[1]).returncode == 0
