"""[[phases]] of a recipe: where each begins, its recipe, and what is refused."""

import pytest
from tiny import DEBUG_TOKENIZER

from titan_lite.config import ConfigError, flatten, load_config, save_recipe
from titan_lite.config.phases import describe_phase, phase_at, phases_of
from titan_lite.rules import check_keys

RECIPE = f"""
[model]
tokenizer_path = "{DEBUG_TOKENIZER}"
[training]
steps = 100
seq_len = 32
global_batch_size = 8
[checkpoint]
enable = true
"""


def recipe(tmp_path, phases, name="recipe.toml", text=RECIPE):
    path = tmp_path / name
    path.write_text(text + phases)
    return path


def test_a_phase_has_what_the_ones_before_it_have_changed(tmp_path):
    phases = """
[[phases]]
begin = 60
training.seq_len = 64
[phases.data]
sources = [{dataset = "local", path = "web"}, {weight = 0.5}]

[[phases]]
begin = 80
optimizer.lr = 1e-4
"""
    config = load_config(recipe(tmp_path, phases), ["--training.local_batch_size=2"])
    check_keys(config)
    assert phases_of(config) == [(1, 0, 60), (2, 60, 80), (3, 80, 100)]
    first, second, third = config.phases
    assert (first.training.seq_len, first.data.sources) == (32, ())
    for phase in (second, third):
        assert phase.training.seq_len == 64
        assert phase.data.sources[0].path == str(tmp_path / "web")
    assert {phase.training.local_batch_size for phase in config.phases} == {2}
    assert (second.optimizer.lr, third.optimizer.lr) == (3e-4, 1e-4)
    for step, number in ((0, 1), (59, 1), (60, 2), (79, 2), (80, 3), (100, 3), (500, 3)):
        assert phase_at(config, step).phase.number == number
        assert phase_at(phase_at(config, 80), step).phase.number == number
    assert describe_phase(third) == "phase 3 of 3, steps 81 to 100: optimizer.lr = 0.0001"


def test_a_source_has_one_name_in_all_phases(tmp_path):
    """Also if one of the same last part was there before and is gone: its tokens are its own."""
    phases = """
[data]
sources = [{dataset = "local", path = "a/web"}, {dataset = "local", path = "b/web"}]
validation_fraction = 0
[[validation.sources]]
dataset = "local"
path = "c/web"
[[phases]]
begin = 60
data.sources = [{dataset = "local", path = "b/web", weight = 2}]
validation.sources = [{dataset = "local", path = "d/web"}, {dataset = "local", path = "c/web"}]
[[phases]]
begin = 80
data.sources = [{dataset = "local", path = "e/web"}, {dataset = "local", path = "a/web"}]
"""
    config = load_config(recipe(tmp_path, phases))
    for step, names, validation in (
        (0, ["web", "web_2"], ["web"]),
        (60, ["web_2"], ["web_2", "web"]),
        (80, ["web_3", "web"], ["web_2", "web"]),
    ):
        phase = phase_at(config, step)
        assert phase.data.source_names() == names
        assert phase.validation_data.source_names() == validation
        assert [part.name for _, part in phase.data.mixture()] == names
        assert [part.name for _, part in phase.validation_data.mixture()] == validation


def test_a_recipe_without_phases_is_one(tmp_path):
    config = load_config(recipe(tmp_path, ""), ["--training.steps=7"])
    assert phases_of(config) == [(1, 0, 7)]
    assert config.phases == (config,)


def test_the_recipe_of_a_run_has_its_phases(tmp_path):
    """So a run resumes from its config.toml, whichever phase has written it."""
    phases = """
[[phases]]
begin = 60
training.seq_len = 64
data.sources = [{dataset = "local", path = "web", weight = 2}]

[[phases]]
begin = "TOKENS tokens"
training.mask_documents = true
""".replace("TOKENS", "30000")
    config = load_config(recipe(tmp_path, phases))
    assert phases_of(config)[2].begin == 89
    for step in (0, 60):
        save_recipe(phase_at(config, step), tmp_path / "run")
        again = load_config(tmp_path / "run/config.toml")
        assert phases_of(again) == phases_of(config)
        for one, other in zip(again.phases, config.phases, strict=True):
            values = flatten(other) | {"job.dump_folder": str(tmp_path / "run")}
            assert flatten(one) == values


def test_a_phase_of_a_base_recipe_has_its_paths_and_may_be_replaced(tmp_path):
    (tmp_path / "base").mkdir()
    phase = '[[phases]]\nbegin = 50\ndata.dataset = "local"\ndata.path = "books"\n'
    recipe(tmp_path / "base", phase)
    extends = 'extends = "base/recipe.toml"\n'
    config = load_config(recipe(tmp_path, "", text=extends))
    assert config.phases[1].data.path == str(tmp_path / "base/books")
    other = "[[phases]]\nbegin = 20\ntraining.seq_len = 8\n"
    config = load_config(recipe(tmp_path, other, text=extends))
    assert [phase.begin for phase in phases_of(config)] == [0, 20]


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        # 8 x 32 tokens a step; 8 x 64 in the second phase
        (["2560 tokens", "2561 tokens"], [10, 11]),
        ([20, "5120 tokens"], [20, 20]),
        ([20, "5121 tokens"], [20, 21]),
        ([20, "5.12K tokens"], None),
        ([5, "0.00512M tokens"], [5, 13]),
        (["0.01M tokens", 60], [40, 60]),
    ],
)
def test_a_beginning_in_tokens(tmp_path, begins, expected):
    tables = [
        f"[[phases]]\nbegin = {begin!r}\ntraining.seq_len = 64\n".replace("'", '"')
        for begin in begins
    ]
    path = recipe(tmp_path, "\n".join(tables))
    if expected is None or expected[0] == expected[1]:
        with pytest.raises(ConfigError, match=r"phases\[2\]\.begin"):
            load_config(path)
    else:
        assert [phase.begin for phase in phases_of(load_config(path))] == [0, *expected]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (
            "[[phases]]\nbegin = 60\n[[phases]]\nbegin = 60",
            "phases[2].begin = 60: does not come after step 60, where the phase before it begins",
        ),
        ("[[phases]]\nbegin = 0", "phases[1].begin = 0: does not come after step 0"),
        (
            "[[phases]]\nbegin = 100",
            "phases[1].begin = 100: no step reaches it, since training.steps = 100; use an earlier",
        ),
        (
            '[[phases]]\nbegin = "1B tokens"',
            'phases[1].begin = "1B tokens": no step reaches it (step 3906250), since training',
        ),
        ("[[phases]]\nbegin = -1", "phases[1].begin = -1: expected a number of steps, or tokens"),
        ('[[phases]]\nbegin = "60%"', 'phases[1].begin = "60%": expected a number of steps, or'),
        ("[[phases]]\ntraining.seq_len = 64", "phases[1] has no begin; use one such as begin ="),
        ("[[phases]]\nbegin = 60\nseq_len = 64", "phases[1].seq_len = 64: expected a key with its"),
        ("phases = 5", "unknown key phases = 5 in [checkpoint]"),
        ("[[phases]]\nbegin = 60\ntraining.seq_len = 0", "phases[1]: training.seq_len = 0"),
        ("[[phases]]\nbegin = 60\ntraining.seqlen = 8", "did you mean"),
        (
            "[[phases]]\nbegin = 60\nmodel.dim = 64",
            "phases[1]: model.dim = 64: is the same in all phases of a run; set it before",
        ),
        (
            "[[phases]]\nbegin = 60\ntraining.steps = 64",
            "phases[1]: training.steps = 64: is the same in all phases",
        ),
        (
            "[[phases]]\nbegin = 60\ndebug.seed = 64",
            "phases[1]: debug.seed = 64: the data restarts in a phase that changes it; leave it"
            " out, or use checkpoint.restart_data = true there",
        ),
        (
            '[[phases]]\nbegin = 60\noptimizer.name = "Lion"',
            'optimizer.name = "Lion": the optimizer restarts in a phase that changes it',
        ),
        (
            "[[phases]]\nbegin = 60\ncheckpoint.load_step = 5",
            "checkpoint.load_step = 5: is the same in all phases",
        ),
    ],
)
def test_a_wrong_phase_is_told_before_a_start(tmp_path, phases, message):
    with pytest.raises(ConfigError) as error:
        check_keys(load_config(recipe(tmp_path, phases)))
    assert message in str(error.value)
    assert "recipe.toml" in str(error.value)


def test_phases_need_checkpoints_and_tokens_a_batch(tmp_path):
    phases = "[[phases]]\nbegin = 60\n"
    off = load_config(recipe(tmp_path, phases), ["--checkpoint.no-enable"])
    with pytest.raises(ConfigError, match="has no checkpoint at the boundary of two phases"):
        check_keys(off)
    path = recipe(tmp_path, phases.replace("60", '"1M tokens"'))
    with pytest.raises(ConfigError, match=r"needs training\.global_batch_size"):
        load_config(path, ["--training.global_batch_size=-1"])


def test_a_phase_changes_no_key_of_the_command_line(tmp_path):
    path = recipe(tmp_path, "[[phases]]\nbegin = 60\ntraining.seq_len = 64\n")
    with pytest.raises(ConfigError, match=r"--training.seq_len would undo what .*phases\[1\]"):
        load_config(path, ["--training.seq_len=16"])


def test_what_a_phase_restarts_may_be_accepted_in_it(tmp_path):
    phases = "[[phases]]\nbegin = 60\ndebug.seed = 7\ncheckpoint.restart_data = true\n"
    check_keys(load_config(recipe(tmp_path, phases)))


@pytest.mark.parametrize("name", ["decay_begin", "decay_length"])
@pytest.mark.parametrize(
    ("option", "phase", "is_refused"),
    [
        ([], "training.seq_len = 64", True),
        ([], "training.global_batch_size = 4", True),
        (["--training.global_batch_size=-1"], "", True),
        ([], "optimizer.lr = 1e-4", False),
    ],
)
def test_a_decay_in_tokens_needs_one_number_of_tokens_a_step(
    tmp_path, name, option, phase, is_refused
):
    path = recipe(tmp_path, f"[[phases]]\nbegin = 60\n{phase}\n")
    for amount in ("10%", "10", "5000 tokens"):
        config = load_config(path, [*option, f"--lr_scheduler.{name}={amount}"])
        if is_refused and amount == "5000 tokens":
            message = rf"lr_scheduler\.{name} .*5000 tokens.* phases may have several"
            with pytest.raises(ConfigError, match=message):
                check_keys(config)
        else:
            check_keys(config)
