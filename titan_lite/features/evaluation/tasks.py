"""Tasks of lm-evaluation-harness, and what is wrong with them for a run.

    tasks = load_tasks(("hellaswag", "mine"), folder="tasks", num_fewshot=5)    # raises ConfigError
    check_tasks(tasks, tokenizer, max_length=2048)

lm_eval is imported when it is called: it takes seconds.
"""

import contextlib
import functools
import io
import os
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_lite.config import ConfigError
from titan_lite.config.errors import did_you_mean, shown
from titan_lite.text import error_line

if TYPE_CHECKING:
    from titan_lite.data.tokenizer import Tokenizer

SEED = 1234  # of examples, as lm_eval's own
DEFAULT_NEW_TOKENS = 256  # of a task that does not say how many, as lm_eval's own
KINDS = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")
TRIED = 4  # documents of each task whose prompts are made before a run

Tasks = dict[str, Any]  # of lm_eval's TaskManager: "tasks" by name, "groups", "group_map"


@functools.cache  # the rules of a recipe load them first
def load_tasks(
    names: tuple[str, ...], folder: str = "", num_fewshot: int = -1, key: str = "evaluation.tasks"
) -> Tasks:
    """Return tasks with their data. Raises ConfigError.

    names: of tasks or groups. folder: of more tasks. num_fewshot: examples before each question;
    -1: as a task says. key: how the user named the tasks, for errors.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"{key} = {shown(list(names))} needs the package lm_eval, which is not here; use"
            " pip install 'titan_lite[evaluation]'"
        )
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"evaluation.task_folder = {shown(folder)} is no folder; use one that is")
    from lm_eval.tasks import TaskManager

    with quiet():
        # To read all of lm_eval's own tasks takes ten seconds.
        manager = TaskManager(include_path=folder or None, include_defaults=not folder)
        if not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder or None)
        for name in names:
            if name not in manager.all_tasks:
                hint = did_you_mean(name, manager.all_tasks, otherwise="; use one that lm_eval has")
                raise ConfigError(f"{key}: there is no task {shown(name)}{hint}")
        tasks: Tasks = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in names:
            try:
                loaded = manager.load([name])
            except Exception as error:  # of datasets, of the network, and of a task's own code
                raise ConfigError(
                    f"{key}: the data of the task {shown(name)} is not here, cannot be reached, or"
                    f" is not as the task says ({type(error).__name__}: {error_line(error)}); use a"
                    " task whose data is here, or load it once with a network"
                ) from error
            for part in tasks:
                tasks[part] |= loaded.get(part, {})
    for name, task in tasks["tasks"].items():
        _refuse(name, task, key)
        of_task = task.get_config("num_fewshot")
        if num_fewshot >= 0 and of_task != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif of_task is None:
            task.set_config(key="num_fewshot", value=0)
    return tasks


def _refuse(name: str, task: Any, key: str) -> None:  # noqa: ANN401 lm_eval's Task
    """Raise ConfigError for a task that is not to be run in training."""
    why = ""
    if task.OUTPUT_TYPE not in KINDS:
        why = f"asks for {shown(task.OUTPUT_TYPE)}; use tasks of {', '.join(KINDS)}"
    elif getattr(task, "UNSAFE_CODE", False):
        why = "runs code that the model writes; use another one"
    elif getattr(task, "MULTIMODAL", False):
        why = "has images or sound, and the model reads text; use another one"
    if why:
        raise ConfigError(f"{key}: the task {shown(name)} {why}")


def new_tokens(task: Any) -> int:  # noqa: ANN401 lm_eval's Task
    """Return the most tokens that a task generates for a prompt; 0 for one that generates none."""
    if task.OUTPUT_TYPE != "generate_until":
        return 0
    from lm_eval.models.utils import normalize_gen_kwargs

    found = normalize_gen_kwargs(task.config.generation_kwargs or {}, DEFAULT_NEW_TOKENS)
    return int(found["max_gen_toks"])


def check_tasks(
    tasks: Tasks,
    tokenizer: "Tokenizer",
    max_length: int,
    limit: int = 0,
    key: str = "evaluation.tasks",
) -> None:
    """Make the first prompts of each task. Raises ConfigError.

    max_length: tokens of the longest request.
    """
    for name, task in tasks["tasks"].items():
        if new_tokens(task) >= max_length:
            raise ConfigError(
                f"{key}: the task {shown(name)} generates {new_tokens(task)} tokens, and the"
                f" model's context has {max_length} with the prompt; use a longer context, or"
                " max_gen_toks in its generation_kwargs"
            )
        try:
            with quiet():
                task.set_fewshot_seed(seed=SEED)
                task.build_all_requests(limit=min(limit or TRIED, TRIED))
                texts = [part for made in task.instances for part in made.args]
        except Exception as error:  # of a task's own code
            raise ConfigError(
                f"{key}: the task {shown(name)} makes no prompts ({type(error).__name__}:"
                f" {error_line(error)}); use a task whose data is as it says"
            ) from error
        for text in texts:
            if not isinstance(text, str):
                continue  # what a generation is to be like
            try:
                tokenizer.encode(text)
            except ConfigError as error:
                raise ConfigError(f"{key}: a prompt of the task {shown(name)}: {error}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context of lm_eval's code: without its bars and prints and without processes of
    its own; Python's and numpy's random numbers are the same on each rank, and are back afterwards.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    alone = "DISABLE_MULTIPROC"  # a variable of lm_eval
    before = os.environ.get(alone)
    os.environ[alone] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ[alone]
        else:
            os.environ[alone] = before
        random.setstate(of_python)
        np.random.set_state(of_numpy)
