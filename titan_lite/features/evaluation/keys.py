"""The keys of [evaluation]: tasks of lm-evaluation-harness in training. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from titan_lite.config.section import RecipePath, Section


class EvaluationKeys(Section):
    """Scores in tasks of lm-evaluation-harness, on the model as it trains."""

    table: ClassVar[str] = "evaluation"

    tasks: tuple[str, ...] = ()
    """Names of tasks, or of groups of them, such as "hellaswag"; empty: no evaluation. Needs
    titan_lite[evaluation]."""

    task_folder: RecipePath = ""
    """Folder with tasks of your own (YAML files as in lm-evaluation-harness), beside those that it
    has."""

    freq: int = Field(1000, ge=1)
    """Interval of evaluations in steps; there is one before the first step and at the end, too."""

    limit: int = Field(0, ge=0)
    """The first documents of each task alone; 0: all."""

    num_fewshot: int = Field(-1, ge=-1)
    """Examples before each question; -1: as the task says. A task that says 0 keeps it."""

    batch_size: int = Field(8, ge=1)
    """Requests that a rank reads at once."""

    max_length: int = Field(0, ge=0)
    """Tokens of a request; a longer one loses its beginning. 0: training.seq_len."""


KEYS = (EvaluationKeys,)
TENSORS: dict[str, str] = {}
