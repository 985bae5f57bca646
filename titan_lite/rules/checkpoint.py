"""Rules of [checkpoint]: a step that is there, and that this recipe can go on from."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.rules.mistakes import Mistake, rule_of_keys

if TYPE_CHECKING:
    from titan_lite.checkpoint.run_identity import ListingsOfRun
    from titan_lite.data.tokenizer import Tokenizer


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


def check_resume(
    config: Config, layout: Layout, tokenizer: "Tokenizer", listings: "ListingsOfRun"
) -> None:
    """Raise ConfigError if the run cannot go on from the step that it would load."""
    from titan_lite.checkpoint.resume import compare
    from titan_lite.checkpoint.run_identity import documents_of_run, run_identity
    from titan_lite.checkpoint.steps import SavedSteps

    saved = SavedSteps(config.checkpoint, Path(config.job.dump_folder))
    step = saved.step_to_load()
    if step is not None:
        documents = documents_of_run(listings)
        identity = run_identity(config, layout, tokenizer, documents)
        changes = compare(saved.read_state(step), identity, documents)
        changes.refuse_unless_accepted(config.checkpoint)
