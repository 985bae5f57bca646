"""Rules of [evaluation]: a package, tasks that are there, requests that fit the model."""

from collections.abc import Iterator
from importlib.util import find_spec

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.features.evaluation.keys import EvaluationKeys
from titan_lite.rules.mistakes import (
    Mistake,
    keys_set,
    rule_of_keys,
    rule_of_layout,
    rule_of_machine,
    told_by,
)

TASKS = "evaluation.tasks"


@rule_of_keys
def evaluation_has_tasks_and_their_package(config: Config) -> Iterator[Mistake]:
    keys = EvaluationKeys.of(config)
    if keys.tasks and not find_spec("lm_eval"):
        yield Mistake(
            TASKS,
            keys.tasks,
            "needs the package lm_eval, which is not installed",
            "pip install 'titan_lite[evaluation]'",
        )
    if keys.tasks:
        return
    names = (f"evaluation.{name}" for name in EvaluationKeys.model_fields)
    for key, value in keys_set(config, names).items():
        yield Mistake(key, value, "has no effect without tasks", TASKS)


@rule_of_layout
def requests_fit_the_model(config: Config, layout: Layout) -> Iterator[Mistake]:
    longest = EvaluationKeys.of(config).max_length
    if longest is not None and longest > layout.seq_len:
        yield Mistake(
            "evaluation.max_length",
            longest,
            f"is longer than the model's context, training.seq_len = {layout.seq_len}",
            f"{layout.seq_len} or less",
        )


@rule_of_machine
def tasks_are_here(config: Config, layout: Layout) -> Iterator[Mistake]:
    keys = EvaluationKeys.of(config)
    if not keys.tasks or not find_spec("lm_eval"):
        return
    from titan_lite.features.evaluation.tasks import load_tasks

    yield from told_by(
        TASKS,
        lambda: load_tasks(
            keys.tasks, keys.task_folder, keys.num_fewshot, keys.max_length or layout.seq_len
        ),
    )
