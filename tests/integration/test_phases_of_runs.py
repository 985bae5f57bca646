"""A recipe with phases, started by one command: to the bit its phases started by hand, one after
another, and killed or stopped anywhere.
"""

import os
import shutil
import signal

import cores
import pytest
import torch.distributed as dist
from checkpoints import flip, tensors_of
from commands import train
from ranks import end_ranks, start_ranks
from resumed import losses, same
from tiny import AOT_EAGER, DEBUG, NO_VALIDATION, NO_WORKERS, ROOT, TINY_MODEL

from titan_lite.checkpoint.state import read_state
from titan_lite.checkpoint.steps import SavedSteps
from titan_lite.config import load_config
from titan_lite.metrics.run_files import read_events
from titan_lite.resilience.exit_code import STOPPED
from titan_lite.train import phase_to_resume

STEPS = 8
OPTIONS = [
    *TINY_MODEL,
    *NO_VALIDATION,
    "--metrics.log_freq=1",
    "--lr_scheduler.warmup_steps=1",
    "--lr_scheduler.min_lr_factor=1",  # it does not depend on training.steps
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
    *NO_WORKERS,
    "--debug.deterministic",
]
# what changes at a step
PHASES = {
    3: {"training.seq_len": "64", "data.sources": "SOURCES"},
    6: {"training.global_batch_size": "4", "training.local_batch_size": "2"},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A corpus of lines of a's, and one of b's."""
    folder = tmp_path_factory.mktemp("corpora")
    for name in "ab":
        texts = [f'{{"text": "{(name + str(i)) * (i % 40 + 1)}"}}\n' for i in range(300)]
        (folder / f"{name}.jsonl").write_text("".join(texts))
    return folder


def data_of(corpora, weight):
    return (
        f'[{{dataset = "local", path = "{corpora}/a.jsonl"}},'
        f' {{dataset = "local", path = "{corpora}/b.jsonl", weight = {weight}}}]'
    )


@pytest.fixture(scope="module")
def recipe(corpora):
    """The recipe with phases, and the options of each when it is started by hand."""
    text = f'extends = "{DEBUG}"\n[training]\nseq_len = 32\nglobal_batch_size = 8\n'
    text += "local_batch_size = 4\n[data]\nvalidation_fraction = 0.0\n"
    text += f"sources = {data_of(corpora, 1)}\n"
    by_hand = [["--training.steps=3"], ["--training.steps=6"], [f"--training.steps={STEPS}"]]
    for number, (begin, changes) in enumerate(PHASES.items(), 1):
        text += f"[[phases]]\nbegin = {begin}\n"
        for key, value in changes.items():
            value = data_of(corpora, 3) if value == "SOURCES" else value
            text += f"{key} = {value}\n"
            for later in by_hand[number:]:
                later.append(f"--{key}={value}")
    path = corpora / "recipe.toml"
    path.write_text(text)
    plain = corpora / "plain.toml"
    plain.write_text(text.partition("[[phases]]")[0])
    return path, plain, by_hand


def loader_of(folder, step):
    return read_state(folder / f"checkpoint/step-{step}").parts["loader"]


@pytest.mark.parametrize(
    "compiled", [[], pytest.param(AOT_EAGER, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_one_command_is_to_the_bit_the_phases_by_hand(recipe, tmp_path, compiled):
    with_phases, plain, by_hand = recipe
    options = [*OPTIONS, *compiled]
    done = train(2, with_phases, tmp_path / "one", *options, f"--training.steps={STEPS}")
    assert done.returncode == 0
    for options_of_phase in by_hand:
        started = train(2, plain, tmp_path / "hand", *options, *options_of_phase)
        assert started.returncode == 0
    for step in (3, 6, STEPS):
        found, expected = (
            tensors_of(tmp_path / f"{name}/checkpoint/step-{step}") for name in ("one", "hand")
        )
        assert same(found, expected)
        assert loader_of(tmp_path / "one", step) == loader_of(tmp_path / "hand", step)
    assert losses(tmp_path / "one") == losses(tmp_path / "hand")
    # the log and the events say where phases begin, and what changes
    assert "phase 2 of 3, steps 4 to 6: training.seq_len = 64, " in done.stdout
    assert done.stdout.count("done: step") == 1
    events, _ = read_events(tmp_path / "one/events.jsonl")
    assert "failed" not in [event["event"] for event in events]
    begun = [event["text"] for event in events if event["event"] == "phase"]
    assert [text.partition(",")[0] for text in begun] == [f"phase {n} of 3" for n in (1, 2, 3)]
    windows = [8 * 3, 8 * 6, 8 * 6 + 4 * 2]
    taken = [loader_of(tmp_path / "one", step)["windows_taken"] for step in (3, 6, STEPS)]
    assert taken == windows


def killed_in_commit(step, when, words):
    """Train as rank 0 that dies as it commits this step's checkpoint, before or after it is there."""
    from titan_lite.checkpoint.manager import Checkpointer
    from titan_lite.train import main

    commit = Checkpointer._commit

    def deadly(self, saved, *arguments):
        if saved == step and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, saved, *arguments)
        if saved == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpointer._commit = deadly
    os.chdir(ROOT)
    main(words)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_in_the_checkpoint_of_a_boundary_loses_nothing(recipe, tmp_path, when):
    """Nor one that resumes in the step before a boundary, on other ranks."""
    options = [*OPTIONS, f"--training.steps={STEPS}"]
    with_phases, *_ = recipe
    words = [str(with_phases), "--job.dump_folder", str(tmp_path / "killed"), *options]
    with cores.given_to(1):
        codes = end_ranks(start_ranks(1, killed_in_commit, 3, when, words), 200)
    assert codes == [-signal.SIGKILL]
    assert (tmp_path / "killed/checkpoint/step-3").exists() == (when == "after")
    done = train(1, with_phases, tmp_path / "killed", *options)
    assert done.returncode == 0
    assert train(1, with_phases, tmp_path / "whole", *options).returncode == 0
    for step in (3, 6, STEPS):
        found, expected = (
            tensors_of(tmp_path / f"{name}/checkpoint/step-{step}") for name in ("killed", "whole")
        )
        assert same(found, expected)
        assert loader_of(tmp_path / "killed", step) == loader_of(tmp_path / "whole", step)
    # from step 5, the last but one of the second phase, on two ranks
    shutil.copytree(tmp_path / "whole", tmp_path / "other")
    for step in (6, 7, STEPS):
        shutil.rmtree(tmp_path / f"other/checkpoint/step-{step}")
    assert train(2, with_phases, tmp_path / "other", *options).returncode == 0
    assert loader_of(tmp_path / "other", STEPS) == loader_of(tmp_path / "whole", STEPS)
    for step, values in losses(tmp_path / "whole").items():
        assert losses(tmp_path / "other")[step] == pytest.approx(values, rel=1e-4)


@pytest.mark.slow
def test_damaged_checkpoints_of_a_phase_are_trained_again_from_the_phase_before(recipe, tmp_path):
    """By the same start, as elsewhere: one flipped bit is seen when all of a checkpoint is read."""
    options = [*OPTIONS, f"--training.steps={STEPS}"]
    with_phases, *_ = recipe
    assert train(1, with_phases, tmp_path / "whole", *options).returncode == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    for step in range(4, STEPS + 1):
        shutil.rmtree(tmp_path / f"damaged/checkpoint/step-{step}")
    flip(tmp_path / "damaged/checkpoint/step-3/__0_0.distcp")  # with which the second phase begins
    done = train(2, with_phases, tmp_path / "damaged", *options)
    assert done.returncode == 0
    assert "set aside as invalid-step-3" in done.stdout
    events, _ = read_events(tmp_path / "damaged/events.jsonl")
    assert "failed" not in [event["event"] for event in events]
    for step in (3, 6, STEPS):
        assert loader_of(tmp_path / "damaged", step) == loader_of(tmp_path / "whole", step)
    for step, values in losses(tmp_path / "whole").items():
        assert losses(tmp_path / "damaged")[step] == pytest.approx(values, rel=1e-4)


def test_the_first_rank_says_which_phase_is_resumed(recipe, tmp_path, monkeypatch):
    """A rank that sees another folder would meet the others nowhere, to be told so."""
    with_phases, *_ = recipe
    store = dist.HashStore()
    seen = []
    for rank, step in ((0, 6), (1, None)):
        monkeypatch.setattr(SavedSteps, "step_to_load", lambda self, step=step: step)
        config = load_config(with_phases, [f"--training.steps={STEPS}"])
        seen.append(phase_to_resume(config, rank, store).phase.number)
    assert seen == [3, 3]


def stopped_between(where, words):
    """Train as a rank that has SIGTERM in the boundary's checkpoint, or after the first phase."""
    from titan_lite import train as command
    from titan_lite.checkpoint.manager import Checkpointer

    owner, name = {"in": (Checkpointer, "_commit"), "after": (command, "free_memory")}[where]
    function = getattr(owner, name)

    def signalled(*arguments):
        if where == "after" or arguments[1] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        function(*arguments)

    setattr(owner, name, signalled)
    os.chdir(ROOT)
    raise SystemExit(command.main(words))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in", "after"])
def test_a_signal_at_a_boundary_stops_the_run_which_goes_on_exactly(recipe, tmp_path, where):
    options = [*OPTIONS, f"--training.steps={STEPS}"]
    with_phases, *_ = recipe
    words = [str(with_phases), "--job.dump_folder", str(tmp_path / "stopped"), *options]
    with cores.given_to(1):
        codes = end_ranks(start_ranks(1, stopped_between, where, words), 200)
    assert codes == [STOPPED]
    assert sorted(losses(tmp_path / "stopped")) == [1, 2, 3]
    assert train(1, with_phases, tmp_path / "stopped", *options).returncode == 0
    assert train(1, with_phases, tmp_path / "whole", *options).returncode == 0
    found, expected = (
        tensors_of(tmp_path / f"{name}/checkpoint/step-{STEPS}") for name in ("stopped", "whole")
    )
    assert same(found, expected)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
