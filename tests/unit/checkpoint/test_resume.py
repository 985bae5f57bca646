"""Differences between the recipes of a run and its checkpoint: their consequences, and those that are refused."""

import copy
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lite.checkpoint import resume
from titan_lite.checkpoint.resume import (
    FACTS,
    compare,
    consequence_of,
    explain,
    git_revision,
    position,
    refuse,
    restarts_data,
)
from titan_lite.config import KEYS, SECTIONS, Checkpoint, ConfigError
from titan_lite.config.recipe import load_config
from titan_lite.config.row import CANNOT, DATA, LEARNING, NOTHING, PLACE, ROUNDING, WORST_FIRST
from titan_lite.data.dataset import EPOCH

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


TABLE = '{"dataset": "%s", "path": "%s", "subset": "", "split": "train", "text_field": "text", "weight": %.1f}'


def described(*overrides, **facts):
    config, _ = load_config(DEBUG, overrides)
    return {
        "recipe": dataclasses.asdict(config),
        "run": {**RUN, "total_steps": config.total_steps, **facts},
    }


def saved(*overrides, **facts):
    """state.json of step 50, as it is read."""
    rows = {str(row): [50, [row + 8 * (row % 3), 12]] for row in range(8)}
    state = {
        "step": 50,
        "tokens_seen": 102_400,
        "loader": {"rows": rows, "of": 8},
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
    return [(d.consequence, d.text) for d in compare(saved(*was), described(*overrides, **facts))]


def test_every_key_has_one_consequence():
    for key in KEYS:
        assert consequence_of(key) in WORST_FIRST
    assert {field.metadata["fact"] for field in KEYS.values()} - {""} <= FACTS.keys() == RUN.keys()


def test_a_new_key_of_a_section_whose_keys_differ_is_forgotten_on_the_safe_side():
    assert (SECTIONS["data"].resume, SECTIONS["training"].resume) == (PLACE, LEARNING)
    for section in ("model", "debug"):
        assert not hasattr(SECTIONS[section], "resume")


@pytest.mark.parametrize("key", KEYS)
def test_a_change_of_any_key_is_told(key):
    was, now = saved(), described()
    section, _, name = key.partition(".")
    other = was["recipe"][section][name] = (
        [{"dataset": "c4"}] if key == "data.sources" else "something else"
    )
    found = [d.text for d in compare(was, now)]
    assert found == [f"{key} = {json.dumps(now['recipe'][section][name])}, was {json.dumps(other)}"]


def test_nothing_differs():
    assert differences() == []
    assert explain([], saved(), described()) == ["nothing differs from the run that saved it"]
    assert not restarts_data([])
    refuse([], "step-50", Checkpoint())


CASES = [
    (["--metrics.log_freq=1"], {}, [(NOTHING, "metrics.log_freq = 1, was 5")]),
    (["--training.seq_len=512"], {}, [(DATA, "training.seq_len = 512, was 256")]),
    (["--training.dtype=bfloat16"], {}, [(ROUNDING, 'training.dtype = "bfloat16", was "float32"')]),
    ([], {"mesh": {"dp_shard": 4, "tp": 1}}, [(ROUNDING, "ranks along dp_shard: 4, was 2")]),
    (
        [],
        {"versions": {"torch": "2.11.0", "python": "3.11.2"}},
        [(ROUNDING, 'version of torch: "2.11.0", was "2.13.0"')],
    ),
    ([], {"git": ""}, []),  # not looked up on this rank
    (
        ["--optimizer.lr=1e-3", "--parallelism.fsdp_keep_gathered=norm"],
        {},
        [
            (LEARNING, "optimizer.lr = 0.001, was 0.002"),
            (ROUNDING, 'parallelism.fsdp_keep_gathered = ["norm"], was ["norm", "output"]'),
        ],
    ),
    (  # a longer run on a schedule of the same length, and of another
        ["--training.steps=80", "--lr_scheduler.total_steps=100"],
        {},
        [
            (NOTHING, "training.steps = 80, was 100"),
            (NOTHING, "lr_scheduler.total_steps = 100, was -1"),
        ],
    ),
    (
        ["--training.steps=200"],
        {},
        [
            (LEARNING, "training.steps = 200, was 100"),
            (LEARNING, "steps of the schedule (lr_scheduler.total_steps): 200, was 100"),
        ],
    ),
    (  # the same global batch, and another
        ["--training.global_batch_size=-1", "--training.local_batch_size=4"],
        {},
        [
            (ROUNDING, "training.local_batch_size = 4, was 2"),
            (NOTHING, "training.global_batch_size = -1, was 8"),
        ],
    ),
    (
        ["--training.global_batch_size=16"],
        {"rows": 16},
        [
            (LEARNING, "training.global_batch_size = 16, was 8"),
            (LEARNING, "sequences a step (training.global_batch_size): 16, was 8"),
        ],
    ),
    (
        ["--training.global_batch_ramp=4 until 10"],
        {},
        [(LEARNING, 'training.global_batch_ramp = ["4 until 10"], was []')],
    ),
    (  # a corpus that moved, and another one
        ["--data.dataset=local", "--data.path=/b"],
        {},
        [(PLACE, 'data.dataset = "local", was "stdlib"'), (NOTHING, 'data.path = "/b", was ""')],
    ),
    (
        [],
        {"documents": "d" * 64},
        [
            (
                PLACE,
                f"SHA-256 of the documents' names and sizes ([data]): {'d' * 12}, was {'b' * 12}",
            )
        ],
    ),
    (
        ["--data.shuffle_buffer=5", "--data.text_field=content"],
        {},
        None,
    ),  # which do nothing with stdlib
    (["--no-data.shuffle"], {}, [(PLACE, "data.shuffle = false, was true")]),
    (
        ['--data.sources=[{weight=3, path="/a", dataset="local"}, {}]'],
        {"shares": [0.75, 0.25]},
        [
            (
                NOTHING,
                f"data.sources = [{TABLE % ('local', '/a', 3)}, {TABLE % ('stdlib', '', 1)}], was []",
            ),
            (LEARNING, "share of each source's tokens (data.sources): [0.75, 0.25], was [1.0]"),
        ],
    ),
    (
        ["--data.on_bad_document=skip", "--data.max_bad_documents=3", "--data.num_workers=4"],
        {},
        None,
    ),
    (["--data.min_document_tokens=9"], {}, [(LEARNING, "data.min_document_tokens = 9, was 0")]),
    (["--debug.seed=1"], {}, [(PLACE, "debug.seed = 1, was 0")]),
    (
        ["--model.flavor=1B"],
        {"model": {"dim": 2048, "n_layers": 6, "rope_scaling": {"factor": 8.0}}},
        [
            (CANNOT, 'model.flavor = "1B", was "debug"'),
            (CANNOT, "the model's dim: 2048, was 256"),
            (CANNOT, "the model's rope_scaling.factor: 8.0, was null"),
        ],
    ),
    (
        ["--model.flavor=1B"],
        {},
        [(NOTHING, 'model.flavor = "1B", was "debug"')],
    ),  # another name for the same
    (
        [],
        {"tokenizer": "e" * 64},
        [(CANNOT, f"SHA-256 of model.tokenizer_path: {'e' * 12}, was {'a' * 12}")],
    ),
]


@pytest.mark.parametrize(("overrides", "facts", "expected"), CASES)
def test_consequences(overrides, facts, expected):
    found = differences(*overrides, **facts)
    if expected is None:
        assert {consequence for consequence, _ in found} == {NOTHING}
    else:
        assert found == expected


def test_without_shuffling_the_seed_is_of_no_data():
    plain = ["--no-data.shuffle"]
    assert differences(*plain, "--debug.seed=1", was=plain) == [(NOTHING, "debug.seed = 1, was 0")]


def test_a_key_that_does_nothing_before_and_after_changes_nothing():
    keys = [
        "--training.spike_sigmas=3",
        "--parallelism.pipeline_parallel_schedule=GPipe",
        "--compile.backend=aot_eager",
    ]
    assert {consequence for consequence, _ in differences(*keys)} == {NOTHING}
    window = ["--training.spike_window=9"]
    assert differences(*window, "--training.spike_sigmas=3", was=window) == [
        (LEARNING, "training.spike_sigmas = 3.0, was 6.0")
    ]


def test_of_prepared_data_the_bytes_count_and_not_what_once_made_them():
    was = ["--data.dataset=prepared", "--data.path=/a"]
    now = [
        "--data.dataset=prepared",
        "--data.path=/b",
        "--data.validation_fraction=0.3",
        "--data.shuffle_buffer=5",
    ]
    assert {consequence for consequence, _ in differences(*now, was=was)} == {NOTHING}
    assert PLACE in {
        consequence for consequence, _ in differences(*now, "--no-data.shuffle", was=was)
    }


def test_recipes_of_other_versions_are_compared_by_what_both_know():
    state = saved()
    state["recipe"]["training"]["old_key"] = 3
    del state["recipe"]["training"]["gc_freq"]  # at its default now
    del state["recipe"]["optimizer"]["lr"]
    found = [(d.consequence, d.text) for d in compare(state, described("--optimizer.lr=3e-4"))]
    assert found == [(NOTHING, "training.old_key was 3, and is not a key of this version")]
    now = described()
    found = compare(state, now)
    assert found[1].text == "optimizer.lr = 0.002, was 0.0003"
    assert "step 51 is 1.96e-03 instead of 2.95e-04" in explain(found, state, now)[0]


def test_moments_of_versions_without_their_key_had_the_dtype_of_parameters():
    state = saved("--training.dtype=bfloat16")
    del state["recipe"]["optimizer"]["state_dtype"]
    found = [
        (d.consequence, d.text) for d in compare(state, described("--training.dtype=bfloat16"))
    ]
    assert found == [(ROUNDING, 'optimizer.state_dtype = "float32", was "bfloat16"')]
    state = saved()
    del state["recipe"]["optimizer"]["state_dtype"]
    assert compare(state, described()) == []


@pytest.mark.parametrize(
    ("options", "consequence"), [([], NOTHING), (["--optimizer.state_dtype=bfloat16"], ROUNDING)]
)
def test_a_seed_rounds_where_it_does_not_shuffle(options, consequence):
    options = [*options, "--no-data.shuffle"]
    assert differences(*options, "--debug.seed=5", was=options) == [
        (consequence, "debug.seed = 5, was 0")
    ]


def test_a_step_that_says_nothing_of_its_run_is_refused():
    for key in ("recipe", "run", "tensors"):
        state = saved()
        del state[key]
        with pytest.raises(ConfigError, match=rf"is incomplete \(no {key}\)"):
            compare(state, described())


def refused(found, **accepting):
    with pytest.raises(ConfigError) as error:
        refuse(found, "out/step-50", Checkpoint(**accepting))
    return str(error.value)


def test_another_model_or_tokenizer_is_refused_whatever_the_recipe_accepts():
    found = compare(saved(), described("--model.flavor=1B", model={**RUN["model"], "dim": 2048}))
    assert refused(found, restart_data=True, accept_model_only=True) == (
        'out/step-50: it cannot go on: model.flavor = "1B", was "debug"; '
        "the model's dim: 2048, was 256; use the old value, or another job.dump_folder"
    )


def test_of_many_reasons_the_error_has_three():
    found = compare(
        saved(),
        described(model={"dim": 1, "n_layers": 2, "rope_scaling": {"a": 3, "b": 4, "c": 5}}),
    )
    assert (
        "n_layers: 2, was 6; the model's rope_scaling.a: 3, was null; and 2 more, which --checkpoint.explain"
        in refused(found)
    )


def test_other_data_is_refused_unless_it_may_begin_anew():
    found = compare(saved(), described("--debug.seed=3"))
    assert refused(found, accept_model_only=True) == (
        "out/step-50: the data cannot go on where it was: debug.seed = 3, was 0; use the old value, or "
        "checkpoint.restart_data = true, which starts the recipe's data at its first document"
    )
    refuse(found, "out/step-50", Checkpoint(restart_data=True))
    assert restarts_data(found)
    assert not restarts_data(
        compare(saved(), described("--training.seq_len=512", "--checkpoint.restart_data"))
    )


def test_a_step_without_optimizer_is_refused_unless_that_is_accepted():
    state = saved()
    state["tensors"] = ["model"]
    found = compare(state, described())
    assert (
        "a step that has the optimizer's state, or checkpoint.accept_model_only = true"
        in refused(found, restart_data=True)
    )
    refuse(found, "out/step-50", Checkpoint(accept_model_only=True))


def test_the_explanation_goes_from_the_worst_to_nothing_and_tells_the_learning_rate():
    now = described(
        "--training.steps=200",
        "--metrics.log_freq=1",
        "--training.seq_len=512",
        "--no-data.shuffle",
        device="GPU",
    )
    state = saved()
    assert explain(compare(state, now), state, now) == [
        "the data cannot go on where it was; checkpoint.restart_data = true starts the recipe's data at its first document",
        "  data.shuffle = false, was true",
        "the data goes on at the same token, in sequences of another length",
        "  training.seq_len = 512, was 256",
        # of 100 steps the second half decays from 2e-3 to a tenth of that
        "training changes: the learning rate of step 51 is 2.00e-03 instead of 1.96e-03",
        "  training.steps = 200, was 100",
        "  steps of the schedule (lr_scheduler.total_steps): 200, was 100",
        "numbers change by rounding",
        '  device: "GPU", was "CPU"',
        "training does not change",
        "  metrics.log_freq = 1, was 5",
    ]
    now = described("--training.global_batch_size=16", rows=16)
    refuse(compare(state, now), "out/step-50", Checkpoint())
    assert explain(compare(state, now), state, now)[0] == (
        "training changes: step 51 has 16 sequences instead of 8"
    )
    for until, told in ((60, ": step 51 has 4 sequences instead of 8"), (50, "")):
        now = described(f"--training.global_batch_ramp=4 until {until}")  # one of them is over
        assert explain(compare(state, now), state, now)[0] == f"training changes{told}"
    now = described("--optimizer.beta1=0.8")
    assert explain(compare(state, now), state, now)[0] == "training changes"  # at the same rate


def test_the_position_in_words():
    assert position(saved()) == (
        "step 50, 102,400 tokens seen: 400 sequences of 8 streams, which are at documents 0 to 21"
    )


def test_the_position_in_pieces_in_several_sources():
    state = saved()
    state["loader"]["rows"] = {
        str(row): [50, [row, 12], [(row % 3) * EPOCH + 5, 0]] for row in range(8)
    }
    assert position(state).endswith(
        "which are at documents 0 to 7 of source 1, epochs 0 to 2 of source 2"
    )


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
