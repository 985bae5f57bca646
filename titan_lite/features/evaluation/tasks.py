"""Tasks of lm-evaluation-harness, and the scores of a model.

    tasks = load_tasks(("hellaswag", "mine"), "my_tasks", num_fewshot=None, max_length=4096)
    scores(model, tasks, limit=200)     # {"evaluation/hellaswag/acc": 0.31, ...}; on all ranks

Prompts, metrics and standard errors are those of lm_eval.
"""

import functools
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from titan_lite.config import ConfigError
from titan_lite.config.errors import did_you_mean, shown
from titan_lite.features.evaluation.language_model import ShardedModel, Stopped
from titan_lite.text import error_line

SEED = 1234  # of few-shot examples, as lm_eval's command line has it
RESAMPLES = 1000  # for the standard error of what is no mean

Tasks = Mapping[str, Any]  # what TaskManager.load returns: "tasks" by name, "groups"


@functools.cache
def load_tasks(
    names: tuple[str, ...],
    folder: str,
    num_fewshot: int | None,
    max_length: int,
    key: str = "evaluation.tasks:",
) -> Tasks:
    """Return tasks with their documents, which are downloaded if they are not here.

    folder: with task files of the user's own; "" for none. num_fewshot: None for each task's own.
    max_length: tokens of a request. key: the beginning of errors. Raises ConfigError for tasks that
    cannot be evaluated.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True)  # it has no option for this
    datasets.disable_progress_bars()
    manager = _manager(names, folder)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            *(
                f"{key} {shown(name)} is no task of lm_eval"
                f"{' or of ' + folder if folder else ''}"
                + did_you_mean(name, manager.all_tasks, otherwise="; `lm-eval ls tasks` lists them")
                for name in unknown
            )
        )
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        try:
            found = manager.load(name)
        except Exception as error:  # of data sets, the network, and of a task's own code
            raise ConfigError(
                f"{key} {shown(name)} cannot be loaded"
                f" ({type(error).__name__}: {error_line(error)}); use a task whose data is on this"
                " machine, or can be reached from it"
            ) from error
        loaded = {kind: {**loaded[kind], **found[kind]} for kind in loaded}
    for name, task in loaded["tasks"].items():
        _check_task(f"{key} {shown(name)}", task, max_length)
        of_task = task.get_config("num_fewshot")
        if of_task is None or (num_fewshot is not None and of_task != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return loaded


def _manager(names: tuple[str, ...], folder: str) -> TaskManager:
    """Return a manager that knows these tasks: reading lm_eval's own takes seconds."""
    if folder:
        if not os.path.isdir(folder):
            raise ConfigError(
                f"evaluation.task_folder = {shown(folder)} is no folder; use one with task files"
            )
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=folder or None)


def _check_task(key: str, task: Any, max_length: int) -> None:  # noqa: ANN401 lm_eval's
    """Raise ConfigError for a task that a model of text cannot do. key: the error's beginning."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"{key} runs code that the model writes; use another task")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"{key} needs a model that reads images or sound; use another task")
    if task.OUTPUT_TYPE == "generate_until":
        new = normalize_gen_kwargs(task.config.generation_kwargs or {})["max_gen_toks"]
        if new >= max_length:
            raise ConfigError(
                f"{key} generates up to {new} tokens, and a request has at most {max_length} with"
                f" its prompt; use max_gen_toks below {max_length} in its file, or a longer"
                " training.seq_len or evaluation.max_length"
            )


def scores(model: ShardedModel, tasks: Tasks, limit: int | None) -> dict[str, float] | None:
    """Return the scores of tasks and groups, and their standard errors, by the names of metrics;
    None if the model has stopped. A collective.

    limit: documents of each task; None: all.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=SEED)
    with _own_random_numbers():
        try:
            results = evaluate(
                model,
                tasks,  # type: ignore[arg-type]  # as TaskManager.load returns it
                limit=limit,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
            )
        except Stopped:
            return None
    assert results is not None
    values = {}
    for name, of_task in {**results["results"], **results.get("groups", {})}.items():
        for metric, value in of_task.items():
            if isinstance(value, int | float) and "," in metric:
                values[f"evaluation/{name}/{metric.removesuffix(',none')}"] = float(value)
    return values


def describe(values: Mapping[str, float]) -> list[str]:
    """Return scores in words, a line for each task: "hellaswag: acc 0.3100 ± 0.0080"."""
    by_task: dict[str, list[str]] = {}
    for name, value in values.items():
        _, task, metric = name.split("/", 2)
        if "_stderr" in metric:
            continue
        error = values.get(f"evaluation/{task}/{_error_of(metric)}")
        spread = "" if error is None else f" ± {error:.4f}"
        by_task.setdefault(task, []).append(f"{metric} {value:.4f}{spread}")
    return [f"{task}: {', '.join(parts)}" for task, parts in by_task.items()]


def _error_of(metric: str) -> str:
    """Return the name of a metric's standard error: "acc,strict" -> "acc_stderr,strict"."""
    name, comma, filter_name = metric.partition(",")
    return f"{name}_stderr{comma}{filter_name}"


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Return a context whose random numbers are always the same, and change none after it."""
    before = random.getstate(), np.random.get_state(), os.environ.get("DISABLE_MULTIPROC")
    random.seed(0)
    np.random.seed(SEED)
    os.environ["DISABLE_MULTIPROC"] = "1"  # or lm_eval forks this process
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if before[2] is None:
            del os.environ["DISABLE_MULTIPROC"]
