"""Where it takes part in a run: in every step after backward, in metrics and in checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.dtensor import gradient_shard
from titan_lite.feature import Feature, StepPart
from titan_lite.features.scaled.keys import ScaledKeys


class ScaledGradients(Feature):
    def is_on(self, config: Config) -> bool:
        return ScaledKeys.of(config).factor != 1

    def start_lines(self, config: Config, layout: Layout) -> Sequence[str]:
        return [f"gradients times {ScaledKeys.of(config).factor:g} (scaled.factor)"]

    def tensors_depend_on(self, config: Config, layout: Layout) -> Mapping[str, Mapping[str, int]]:
        return {"scaled": {}}

    def step_parts(self, model: ParallelModel) -> Sequence[StepPart]:
        return [Scale(model, ScaledKeys.of(model.config).factor)]


class Scale(StepPart):
    def __init__(self, model: ParallelModel, factor: float):
        self.model = model
        self.factor = factor
        self.steps = torch.zeros((), dtype=torch.int64)  # that it took part in

    def after_backward(self, step: int) -> None:
        for parameter in self.model.parameters.values():
            gradient_shard(parameter).mul_(self.factor)

    def before_update(self, skip: Tensor) -> None:
        self.steps += 1

    def state_tensors(self) -> dict[str, Tensor]:
        return {"scaled.steps": self.steps}

    def metrics(self, steps: range, folder: Path | None) -> Mapping[str, float]:
        return {"scaled_steps": float(self.steps)}


FEATURE = ScaledGradients()
