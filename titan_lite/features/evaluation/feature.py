"""Evaluation in a run: what is measured every evaluation.freq steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.feature import Feature, Measurement
from titan_lite.features.evaluation.keys import EvaluationKeys
from titan_lite.logging import logger

if TYPE_CHECKING:
    from titan_lite.trainer import Trainer


class EvaluationFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return bool(EvaluationKeys.of(config).tasks)

    def measurements(self, trainer: "Trainer") -> Sequence[Measurement]:
        from titan_lite.features.evaluation.language_model import ShardedModel
        from titan_lite.features.evaluation.tasks import describe, load_tasks, scores

        config, layout = trainer.config, trainer.layout
        keys = EvaluationKeys.of(config)
        max_length = keys.max_length or layout.seq_len
        tasks = load_tasks(keys.tasks, keys.task_folder, keys.num_fewshot, max_length)
        model = ShardedModel(
            trainer.model,
            trainer.tokenizer,
            max_length=max_length,
            batch_size=keys.batch_size or layout.local_batch_size,
            goes_on=lambda: not trainer.replica_groups.poll_stop(),
        )

        def measure() -> dict[str, float] | None:
            values = scores(model, tasks, keys.limit)
            for line in describe(values or {}):
                logger.info(f"step {trainer.step:>4}  {line}")
            return values

        return [Measurement("evaluation", keys.freq, measure)]


FEATURE = EvaluationFeature()
