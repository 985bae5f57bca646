"""The keys of evaluations. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from titan_lite.config.section import RecipePath, Section


class EvaluationKeys(Section):
    """Scores of tasks of lm-evaluation-harness (titan_lite[evaluation])."""

    table: ClassVar[str] = "evaluation"

    tasks: tuple[str, ...] = ()
    """Names of tasks or groups, such as hellaswag; empty: no evaluation."""

    task_folder: RecipePath = ""
    """Folder with task files of your own (YAML)."""

    freq: int = Field(1000, ge=1)
    """Interval of evaluations in steps; there is one before the first step and one at the end."""

    limit: int | None = Field(None, ge=1)
    """Documents of each task, the first ones; not set: all."""

    num_fewshot: int | None = Field(None, ge=0)
    """Examples in a prompt; not set: as each task says. A task that says 0 keeps it."""

    batch_size: int | None = Field(None, ge=1)
    """Requests that a rank computes at a time; not set: training.local_batch_size."""

    max_length: int | None = Field(None, ge=2)
    """Tokens of a request; a longer one loses its beginning. Not set: training.seq_len."""


KEYS = (EvaluationKeys,)
TENSORS: dict[str, str] = {}
