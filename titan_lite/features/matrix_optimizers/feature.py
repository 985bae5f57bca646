"""Muon and Shampoo in a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.feature import Feature
from titan_lite.features.matrix_optimizers.keys import OPTIMIZERS, MatrixOptimizerKeys
from titan_lite.models.fqns import is_matrix, is_of_experts
from titan_lite.models.shapes import matrices_in

if TYPE_CHECKING:
    from torch import nn

    from titan_lite.features.matrix_optimizers.matrix_optimizer import OwnerCosts
    from titan_lite.optim.build import PartOptimizer


class MatrixOptimizers(Feature):
    def is_on(self, config: Config) -> bool:
        return config.optimizer.name in OPTIMIZERS

    def start_lines(self, config: Config, layout: Layout) -> Sequence[str]:
        ranks = layout.world_size // layout.degrees["pp"]
        matrices = sum(not is_of_experts(shape) for shape in matrices_in(layout.shapes_of_rank))
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        roots = ""
        if config.optimizer.name == "Shampoo":
            start = MatrixOptimizerKeys.of(config).start_preconditioning_step
            roots = f", with roots from step {start} on"
        of_experts = routers = ""
        if n_experts := layout.model.n_experts:
            parameters = sum(map(is_of_experts, layout.shapes_of_rank.values()))
            of_experts = f", and {n_experts * parameters} of experts on the ranks that have them"
            routers = ", routers"
        return [
            f"optimizer: {config.optimizer.name} for {matrices}"
            f" matrices{shared}{of_experts}{roots}; AdamW for embedding, output{routers} and norms"
            " (optimizer.name)"
        ]

    def for_verify(self, config: Config) -> tuple[Config, str]:
        optimizer = config.optimizer
        read = OPTIMIZERS[optimizer.name].keys
        exact = {"ns_dtype": "float32", "start_preconditioning_step": 1}
        changes = {key: value for key, value in exact.items() if key in read}
        return config.replace(optimizer=optimizer.replace(**changes)), ""

    def owner_costs(self, config: Config) -> "OwnerCosts":
        from titan_lite.features.matrix_optimizers.matrix_optimizer import optimizer_class

        return optimizer_class(config.optimizer.name).costs(MatrixOptimizerKeys.of(config))

    def optimizers(
        self, config: Config, parameters: Mapping[str, "nn.Parameter"]
    ) -> Sequence["PartOptimizer"]:
        from titan_lite.features.matrix_optimizers.matrix_optimizer import optimizer_class

        matrices: dict[str, nn.Parameter] = {}
        of_experts: dict[str, nn.Parameter] = {}
        for fqn, weight in parameters.items():
            if is_matrix(fqn):
                (of_experts if is_of_experts(weight.shape) else matrices)[fqn] = weight
        optimizer = optimizer_class(config.optimizer.name)
        return [optimizer(weights, config) for weights in (matrices, of_experts) if weights]


FEATURE = MatrixOptimizers()
