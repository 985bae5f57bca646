"""Rules of [checkpoint]: a step that is there, and that this recipe can resume."""

from collections.abc import Iterator
from pathlib import Path

from titan_lite.config import Config
from titan_lite.config.phases import phase_at
from titan_lite.rules.job import dump_folder_cannot_be_written
from titan_lite.rules.mistakes import (
    Inputs,
    Mistake,
    is_first_rank,
    rule_of_inputs,
    rule_of_keys,
    told_by,
)


@rule_of_keys
def a_step_is_loaded_from_checkpoints(config: Config) -> Iterator[Mistake]:
    checkpoint = config.checkpoint
    if checkpoint.enable:
        return
    why = "loads nothing from checkpoints that are off"
    if checkpoint.load_step != -1:
        yield Mistake("checkpoint.load_step", checkpoint.load_step, why, "checkpoint.enable = true")
    if checkpoint.must_resume:
        yield Mistake("checkpoint.must_resume", True, why, "checkpoint.enable = true")
    if checkpoint.branch_from:
        path = checkpoint.branch_from
        yield Mistake("checkpoint.branch_from", path, why, "checkpoint.enable = true")


@rule_of_keys
def a_branch_has_one_beginning(config: Config) -> Iterator[Mistake]:
    checkpoint = config.checkpoint
    if not checkpoint.branch_from:
        return
    if checkpoint.load_step != -1:
        yield Mistake(
            key="checkpoint.load_step",
            value=checkpoint.load_step,
            why="is of the run's own checkpoints, and checkpoint.branch_from names another run's",
            instead="-1",
        )
    if checkpoint.initial_load_path:
        yield Mistake(
            key="checkpoint.initial_load_path",
            value=checkpoint.initial_load_path,
            why="has no effect: the weights are those of checkpoint.branch_from",
            instead="one of both",
        )


@rule_of_inputs
def the_run_can_go_on_from_its_step(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    """On the first rank alone: all ranks would open ranks x files."""
    if not is_first_rank() or any(dump_folder_cannot_be_written(config)):
        return
    from titan_lite.checkpoint.resume import compare
    from titan_lite.checkpoint.run_identity import documents_of_run, run_identity
    from titan_lite.checkpoint.steps import SavedSteps

    saved = SavedSteps(config.checkpoint, Path(config.job.dump_folder))
    step = saved.step_to_load()
    if step is None or inputs.layout is None or inputs.tokenizer is None:
        return
    if phase_at(config, step).phase != config.phase:
        return  # another phase resumes from it
    documents = documents_of_run(inputs.listings)
    identity = run_identity(config, inputs.layout, inputs.tokenizer, documents)
    changes = compare(saved.read_state(step), identity, documents)
    yield from told_by("checkpoint.", changes.refuse_unless_accepted, config.checkpoint)
