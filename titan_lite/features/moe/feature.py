"""An MoE model in a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.pipeline_schedule import runs_halves
from titan_lite.feature import Feature, StepPart
from titan_lite.features.moe.keys import ExpertsKeys
from titan_lite.models.shapes import shape_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titan_lite.distributed.parallelize import ParallelModel
    from titan_lite.models.transformer import Transformer


class MoEFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return shape_of(config.model).n_experts > 0

    def numerics(self, config: Config) -> Mapping[str, str]:
        if ExpertsKeys.of(config).balance == "bias":
            return {"biases of experts": "centred on their mean"}  # not in older steps
        return {}

    def for_verify(self, config: Config) -> tuple[Config, str]:
        keys = ExpertsKeys.of(config)
        if not keys.capacity_factor:
            return config, ""
        why = (
            f"experts.capacity_factor = {keys.capacity_factor:g}; there is room for all tokens of"
            " experts"
        )
        return config.replace(experts=keys.replace(capacity_factor=0)), why

    def turned_off_by(self, change: Mapping[str, str]) -> Mapping[str, str]:
        if change.get("parallelism.expert_parallel_degree") == "1":
            return {"experts.capacity_factor": "0"}
        return {}

    def plan_lines(self, config: Config) -> Sequence[str]:
        factor = ExpertsKeys.of(config).capacity_factor
        if not factor:
            return ()
        options = "--experts.capacity_factor=0"
        if recomputes_in_repeats(config):
            options += " --activation_checkpoint.mode=full"
        return [
            f"a step with more tokens of experts on a rank than {factor:g} times the mean runs"
            f" again, with more memory: plan it with {options}"
        ]

    def before_checkpointing(
        self, config: Config, model: "Transformer", mesh: "DeviceMesh"
    ) -> None:
        from titan_lite.features.moe.balance import apply_balance
        from titan_lite.features.moe.capacity import apply_capacity

        keys = ExpertsKeys.of(config)
        apply_balance(model, keys.balance, mesh)
        apply_capacity(model, keys.capacity_factor)

    def step_parts(self, model: "ParallelModel") -> Sequence[StepPart]:
        from titan_lite.features.moe.balance import ExpertBalance
        from titan_lite.features.moe.capacity import ExpertCapacity

        keys = ExpertsKeys.of(model.config)
        parts: list[StepPart] = [
            ExpertBalance(model.stages, model.layout, keys, model.mesh, model.device)
        ]
        if keys.capacity_factor:
            recomputes = recomputes_in_repeats(model.config)
            parts.append(
                ExpertCapacity(
                    model.stages, keys.capacity_factor, model.device, recomputes=recomputes
                )
            )
        return parts


def recomputes_in_repeats(config: Config) -> bool:
    """Return True if blocks recompute all that they can in a step that runs again (capacity.py).
    Without graphs, each half of a backward would do it.
    """
    return config.compile.enable or not runs_halves(config.parallelism)


FEATURE = MoEFeature()
