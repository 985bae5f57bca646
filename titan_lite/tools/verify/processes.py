"""Train the proxy of a recipe on CPU processes, and compare it with one process.

    verify(config, [layout_of(config)], steps=5)        # True if all layouts agree

The proxy (proxy.py) is trained in float32, with float8 matmuls if the recipe has them, on the
standard library's text. The same model is trained with the same seed and data in one eager process
without checkpointing. The comparison covers the losses of all steps and of validation, every
gradient of the first step, the output of every module in its forward (in eager mode), and which
experts each token has.
"""

import os
from collections.abc import Sequence

import torch.multiprocessing as mp

from titan_lite.config import Config, ConfigError
from titan_lite.config.families import ModelConfig
from titan_lite.distributed.device import device_memory
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.pipeline_schedule import TooFewLayers
from titan_lite.feature import LowPrecision, features_of, low_precision
from titan_lite.models.shapes import shape_of, shape_words
from titan_lite.rules.machine import check_machine
from titan_lite.tools.verify.compare import FLOAT32, LOW_PRECISION, Comparison, compare
from titan_lite.tools.verify.observe import Observed, Prepare, run
from titan_lite.tools.verify.proxy import (
    MIN_LAYERS,
    SEQ_LEN,
    SEQUENCES,
    Degrees,
    name_of,
    processes_of,
    proxy,
    proxy_model,
    reference,
)


def verify(
    config: Config, layouts: Sequence[Degrees], *, steps: int, prepare: Prepare | None = None
) -> bool:
    """Print a line for each layout, and return whether all that are possible agree.

    prepare: as for `run`. Raises ConfigError if none is possible.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA is initialized
    verification = Verification(config, layouts, steps, prepare)
    verification.print_head()
    verdicts = [verification.verify(layout) for layout in layouts]
    if len(verification.impossible) == len(layouts):
        raise ConfigError("none of these layouts is possible")
    return all(verdicts)


class Verification:
    """The verification of a recipe: a table with a row for each layout."""

    def __init__(
        self,
        config: Config,
        layouts: Sequence[Degrees],
        steps: int,
        prepare: Prepare | None = None,
    ):
        self.config = config
        self.flavor = shape_of(config.model)
        self.layouts = layouts
        self.steps = steps
        self.prepare = prepare
        self.tolerances = LOW_PRECISION if low_precision(config) else FLOAT32
        # by (layers, sequences of a step), which decide the model and the batches of a proxy
        self.references: dict[tuple[int, int], Observed] = {}
        self.impossible: list[ConfigError] = []  # why, of the layouts that are
        self.width = max(len(name) for name in ("layout", *map(name_of, layouts)))  # first column

    def print_head(self) -> None:
        low = low_precision(self.config)
        kind = f"{low.name} {low.scales} beside float32" if low else "float32"
        model = proxy_model(self.flavor, 1)
        print(
            f"scaled-down proxy of {shape_words(self.config.model)}: {model.n_layers} layers or"
            f" more, dim {model.dim}, {kind}, {SEQUENCES} sequences of {SEQ_LEN} tokens a step,"
            f" {self.steps} steps; expected: one eager process"
        )
        print(
            f"tolerances, relative: loss {self.tolerances.loss:g}, gradient"
            f" {self.tolerances.gradient:g}, activations {self.tolerances.activation:g}"
        )
        if self.flavor.n_experts:
            print(
                "the experts of every token of the first step are compared; two may be exchanged"
                f" whose probabilities are apart by {self.tolerances.tie:g} at most"
            )
        for feature in features_of(self.config):
            _, why = feature.for_verify(self.config)
            if why:
                print(f"not in the proxy: {why}")
        print(
            f"{'layout':<{self.width}}  processes  loss     gradient  {'of':<31} "
            f" {'first to diverge':<24}  verdict"
        )

    def verify(self, layout: Degrees) -> bool:
        """Print the row of a layout, and return False if it differs or fails.

        Raises ConfigError if it is impossible and the only one.
        """
        small = proxy(self.config, layout, self.steps)
        try:
            model = with_enough_layers(small, self.flavor, processes_of(layout))
        except ConfigError as error:
            if len(self.layouts) == 1:
                raise
            self.impossible.append(error)
            self._print_row(layout, f"not possible: {error}")
            return True
        expected = self._reference(small, model)
        try:
            result = compare(run(small, model, prepare=self.prepare), expected, self.tolerances)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            self._print_row(layout, f"FAILS\n{error}")
            return False
        verdict = "agrees" if result.agrees else "DIFFERS"
        self._print_row(layout, f"{differences(result):<50}  {result.module or '-':<24}  {verdict}")
        if result.flips:
            tie = "nearly equal" if result.gap <= self.tolerances.tie else "not equal"
            print(
                f"{name_of(layout):<{self.width}}  {result.flips} tokens have other experts, whose"
                f" probabilities are {tie}: apart by {result.gap:.1e} at most"
            )
        return result.agrees

    def _reference(self, small: Config, model: ModelConfig) -> Observed:
        """Return what one eager process computes from the proxy's batches."""
        key = (model.n_layers, small.training.global_batch_size)
        if key not in self.references:
            alone = reference(small)
            self.references[key] = run(alone, model)
            if low := low_precision(alone):
                self._print_rounding(low, model, self.references[key])
        return self.references[key]

    def _print_row(self, layout: Degrees, text: str) -> None:
        name = f"{name_of(layout):<{self.width}}  {processes_of(layout):>9}"
        print(f"{name}  {text}", flush=True)

    def _print_rounding(self, low: LowPrecision, model: ModelConfig, rounded: Observed) -> None:
        """Print how far a run in low precision is from the same in bfloat16 and in float32."""
        for dtype in ("bfloat16", "float32"):
            training = low.without.training.replace(mixed_precision_param=dtype)
            result = compare(rounded, run(low.without.replace(training=training), model))
            name = f"{low.name} beside {dtype}"
            print(f"{name:<{self.width + 11}}  {differences(result)}", flush=True)


def differences(result: Comparison) -> str:
    """Return the columns of the loss, the gradient, and the parameter that it is of."""
    return f"{result.loss:.1e}  {result.gradient:.1e}   {result.parameter}"


def with_enough_layers(config: Config, flavor: ModelConfig, processes: int) -> ModelConfig:
    """Return the proxy's model with the fewest layers for its stages.

    Raises ConfigError if the layout has another mistake.
    """
    for layers in range(MIN_LAYERS, 4 * processes + 8):
        model = proxy_model(flavor, layers)
        try:
            layout = Layout.from_config(config, processes, model, device_memory())
            check_machine(config, layout)
            return model
        except TooFewLayers as error:
            too_few = error
    raise too_few
