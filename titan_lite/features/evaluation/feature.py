"""Evaluation in a run: scores in tasks, between steps."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.feature import Feature, Measured, Measurement
from titan_lite.features.evaluation.keys import EvaluationKeys

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer


class EvaluationFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return bool(EvaluationKeys.of(config).tasks)

    def measurements(self, trainer: "Trainer") -> Sequence[Measurement]:
        return [TaskScores(trainer)]


class TaskScores(Measurement):
    """The scores of the recipe's tasks."""

    name = "evaluation"

    def __init__(self, trainer: "Trainer"):
        from titan_lite.features.evaluation.harness import Evaluation
        from titan_lite.features.evaluation.tasks import load_tasks

        keys = EvaluationKeys.of(trainer.config)
        self.freq = keys.freq
        self.evaluation = Evaluation(
            trainer.model,
            trainer.tokenizer,
            load_tasks(keys.tasks, keys.task_folder, keys.num_fewshot),
            keys.tasks,
            batch_size=keys.batch_size,
            max_length=keys.max_length or trainer.layout.seq_len,
            limit=keys.limit,
            is_first=trainer.rank == 0,
        )

    def measure(self, stops: Callable[[], bool]) -> Measured | None:
        from titan_lite.features.evaluation.harness import Stopped

        try:
            return self.evaluation.run(stops)
        except Stopped:
            return None


FEATURE = EvaluationFeature()
