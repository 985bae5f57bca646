"""Rules of [evaluation]."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.features.evaluation.keys import EvaluationKeys
from titan_lite.rules.mistakes import (
    Inputs,
    Mistake,
    is_first_rank,
    keys_set,
    rule_of_inputs,
    rule_of_keys,
    told_by,
)


@rule_of_keys
def evaluation_has_tasks(config: Config) -> Iterator[Mistake]:
    if EvaluationKeys.of(config).tasks:
        return
    others = [f"evaluation.{name}" for name in EvaluationKeys.model_fields if name != "tasks"]
    for key, value in keys_set(config, others).items():
        yield Mistake(
            key=key,
            value=value,
            why="has no effect without tasks",
            instead='evaluation.tasks = ["hellaswag"], or leave it out',
        )


@rule_of_keys
def one_group_evaluates(config: Config) -> Iterator[Mistake]:
    groups = config.fault_tolerance.replica_groups
    if EvaluationKeys.of(config).tasks and groups > 1:
        yield Mistake(
            key="evaluation.tasks",
            value=EvaluationKeys.of(config).tasks,
            why=f"cannot be with fault_tolerance.replica_groups = {groups}: a group that joins"
            " would wait for the others' evaluation, and a stop, too",
            instead="`titan-lite evaluate` on checkpoints",
        )


@rule_of_keys
def requests_fit_the_context(config: Config) -> Iterator[Mistake]:
    keys = EvaluationKeys.of(config)
    seq_len = config.training.seq_len
    if keys.max_length > seq_len:
        yield Mistake(
            key="evaluation.max_length",
            value=keys.max_length,
            why=f"is longer than the model's context in this run, training.seq_len = {seq_len}",
            instead=f"at most {seq_len}, or 0 for it",
        )
    if keys.tasks and keys.max_length == 1:
        yield Mistake(
            key="evaluation.max_length",
            value=1,
            why="leaves no room for a prompt",
            instead="2 or more",
        )


@rule_of_inputs
def tasks_are_here(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    """On the first rank alone: it loads what all ranks then read."""
    keys = EvaluationKeys.of(config)
    if not keys.tasks or not is_first_rank():
        return

    def load_and_try() -> None:
        from titan_lite.features.evaluation.tasks import check_tasks, load_tasks

        tasks = load_tasks(keys.tasks, keys.task_folder, keys.num_fewshot)
        if inputs.tokenizer is not None:
            max_length = keys.max_length or config.training.seq_len
            check_tasks(tasks, inputs.tokenizer, max_length, keys.limit)

    yield from told_by("evaluation.tasks", load_and_try)
