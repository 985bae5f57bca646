"""Float8 matmuls in a run."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.feature import Feature, LowPrecision
from titan_lite.features.float8.keys import Float8Keys
from titan_lite.features.float8.rules import float8_has_results_on_gpus
from titan_lite.rules.mistakes import Mistake

if TYPE_CHECKING:
    from titan_lite.collectives import Axis
    from titan_lite.cost.machine import Machine
    from titan_lite.models.transformer import Transformer


class Float8(Feature):
    def is_on(self, config: Config) -> bool:
        return Float8Keys.of(config).enable

    def start_lines(self, config: Config, layout: Layout) -> Sequence[str]:
        import torch

        keys = Float8Keys.of(config)
        gathered = ", gathered in float8" if keys.all_gather and layout.fsdp_degree > 1 else ""
        emulated = ", emulated on this CPU: no faster than float32"
        if torch.cuda.is_available():
            emulated = ""
        return [f"matmuls of the blocks in float8, {keys.recipe}{gathered}{emulated} ([float8])"]

    def before_tensor_parallel(self, config: Config, model: "Transformer", axis: "Axis") -> None:
        from titan_lite.features.float8.linear import apply_float8, check_layers
        from titan_lite.features.float8.tokens import apply_float8_tokens
        from titan_lite.features.float8.weights import apply_scaled_weights

        keys = Float8Keys.of(config)
        family = model.config.family
        check_layers(model, family, keys.filter_fqns)
        apply_float8(model, keys.recipe, keys.filter_fqns)
        if keys.recipe != "tensorwise":
            return
        apply_scaled_weights(model, all_gather=keys.all_gather)
        if axis.degree > 1:
            apply_float8_tokens(model, family, compiled=config.compile.enable)

    def low_precision(self, config: Config) -> LowPrecision:
        keys = Float8Keys.of(config)
        return LowPrecision(
            name="float8",
            scales=keys.recipe,
            dtype="float8_e4m3fn",
            is_gathered=keys.all_gather,
            without=config.replace(float8=Float8Keys()),
        )

    def mistakes_on(self, config: Config, machine: "Machine") -> Iterator[Mistake]:
        if "float8_e4m3fn" not in machine.tflops:
            yield Mistake(
                "float8.enable",
                line=(
                    f"float8.enable = true: {machine.name} has no peak of float8; use"
                    " --float8.no-enable, another machine, or tflops.float8_e4m3fn in its file"
                ),
            )
        if not machine.is_cpu:
            yield from float8_has_results_on_gpus(config)


FEATURE = Float8()
