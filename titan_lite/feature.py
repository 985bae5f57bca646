"""The moments of a run at which a feature takes part. titan_lite/features/ has the features.

    class Scaled(Feature):
        def is_on(self, config):
            return ScaledKeys.of(config).factor != 1

        def step_parts(self, model):
            return [ScaledGradients(model.parameters, ScaledKeys.of(model.config).factor)]

    for feature in features_of(config):         # those that a recipe turns on
        options = feature.fsdp_options(config, options)

A run calls these methods in the order of FEATURES. Importing a feature imports what it computes
with only where a method needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from titan_lite.features import FEATURES as FEATURES  # checkpoints and rules have both from here
from titan_lite.features import part_of_each as part_of_each

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Parameter

    from titan_lite.collectives import Axis
    from titan_lite.compile.graph_passes import Pass
    from titan_lite.compile.joint import SplitBackward
    from titan_lite.config import Config
    from titan_lite.config.families import Shape
    from titan_lite.cost.costs import Costs
    from titan_lite.cost.machine import Machine
    from titan_lite.distributed.axes import Axes
    from titan_lite.distributed.buckets import Specs
    from titan_lite.distributed.layout import Layout
    from titan_lite.distributed.parallelize import ParallelModel
    from titan_lite.distributed.simple_fsdp import FSDPOptions
    from titan_lite.hooks import Hook
    from titan_lite.models.transformer import Transformer
    from titan_lite.one_group import OneGroup
    from titan_lite.optim.build import PartOptimizer
    from titan_lite.rules.mistakes import Mistake
    from titan_lite.trainer import Trainer


@dataclass(frozen=True)
class KeptNumbers:
    """Float32 numbers that a feature keeps for a parameter's shard, beside those of its update."""

    always: int = 0
    before_update: int = 0  # more, from the last backward to the update


class LowPrecision(NamedTuple):
    """Matmuls of blocks with fewer bits than those of training.mixed_precision_param."""

    name: str  # such as "float8"
    scales: str  # which numbers share one, in a word
    dtype: str  # of the factors, by its name in torch
    is_gathered: bool  # weights travel in it, too
    without: Config  # the recipe without it


class OwnedWork(Protocol):
    """The work of the owner of a matrix within a block. shape: of the complete matrix."""

    has_roots: bool  # computed by eigendecompositions from some step on

    @property
    def dtype(self) -> str:
        """The dtype in which matrices travel and are multiplied."""
        ...

    def flops(self, shape: Shape, eigendecomposition: float = ...) -> float:
        """Return the time of a step in operations of matmuls, averaged over steps.

        eigendecomposition: the operations of matmuls, divided by n^3, in the time of one.
        """
        ...

    def kept_bytes(self, shape: Shape) -> float:
        """Return the bytes that it keeps of the matrix, beside this rank's shard."""
        ...


class Feature:
    """An optional part of a run. Override what it needs."""

    def is_on(self, config: Config) -> bool:
        """Return True if the recipe turns the feature on."""
        raise NotImplementedError

    # The start, and a resume

    def start_lines(self, config: Config, layout: Layout) -> Sequence[str]:
        """Return lines for the log of the start."""
        return ()

    def numerics(self, config: Config) -> Mapping[str, str | int]:
        """Return what rounding depends on beside the recipe, by what it is. A resume tells of it if
        it differs.
        """
        return {}

    def tensors_depend_on(self, config: Config, layout: Layout) -> Mapping[str, Mapping[str, int]]:
        """Return what the tensors that the feature adds to a checkpoint depend on, by the first
        word of their names. A resume loads them only where that is the same.
        """
        return {}

    # The model, and training

    def hooks(self, config: Config) -> Sequence[Hook]:
        """Return observers of the run, which change no number (titan_lite/hooks.py)."""
        return ()

    def before_tensor_parallel(self, config: Config, model: Transformer, axis: Axis) -> None:
        """Change the model of a pipeline stage in place, before it is split over ranks. model: on
        the meta device. axis: of tensor parallelism.
        """

    def before_checkpointing(self, config: Config, model: Transformer, mesh: DeviceMesh) -> None:
        """Change the model of a pipeline stage in place, after it was split over ranks. model: on
        the meta device. mesh: of all axes.
        """

    def fsdp_options(self, config: Config, options: FSDPOptions) -> FSDPOptions:
        """Return the options of SimpleFSDP, changed."""
        return options

    def passes(self, config: Config, passes: list[Pass]) -> list[Pass]:
        """Return the passes on each graph of a compiled model, changed (`choose_passes`)."""
        return passes

    def inductor_settings(
        self, config: Config, model: Transformer, mesh: DeviceMesh
    ) -> Mapping[str, object]:
        """Return settings of Inductor for the graphs of a stage, beside its own. Compilation may
        then communicate. mesh: of all axes.
        """
        return {}

    def split_backward(self) -> SplitBackward | None:
        """Return what splits backward graphs in two, where a pipeline schedule runs their halves
        apart.
        """
        return None

    def optimizers(
        self, config: Config, parameters: Mapping[str, Parameter]
    ) -> Sequence[PartOptimizer]:
        """Return the optimizers of some of the parameters, by FQN. An elementwise one has the rest
        (optim/build.py).
        """
        return ()

    def step_parts(self, model: ParallelModel) -> Sequence[StepPart]:
        """Return the feature's parts of a training step. model: allocated and initialized."""
        return ()

    def measurements(self, trainer: Trainer) -> Sequence[Measurement]:
        """Return what is measured of the weights between steps. trainer: with its model and data,
        before a checkpoint is loaded.
        """
        return ()

    def replica_groups(self, trainer: Trainer) -> OneGroup | None:
        """Return the replica groups that share the run; None if it is alone."""
        return None

    # `titan-lite verify` and `titan-lite plan`

    def for_verify(self, config: Config) -> tuple[Config, str]:
        """Return the recipe for a few steps on CPUs that are compared with one process, and what to
        say that it is without: what only approximates; "" for nothing. All else that the feature
        does is in the first step.
        """
        return config, ""

    def low_precision(self, config: Config) -> LowPrecision | None:
        """Return what blocks multiply with fewer bits; None: nothing. It rounds otherwise on each
        layout, so `verify` has other tolerances.
        """
        return None

    def mistakes_on(self, config: Config, machine: Machine) -> Iterable[Mistake]:
        """Return mistakes of the recipe on a machine that it is planned for."""
        return ()

    def turned_off_by(self, change: Mapping[str, str]) -> Mapping[str, str]:
        """Return what else a planned change of a recipe changes: keys that turn off what would have
        no effect, which is an error. change: values by key, as on the command line.
        """
        return {}

    def kept_of_shard(self, config: Config, shape: Sequence[int]) -> KeptNumbers:
        """Return what the feature keeps for a shard of this shape."""
        return KeptNumbers()

    def owner_costs(self, config: Config) -> OwnedWork | None:
        """Return the work of a rank that owns a complete matrix; None: no rank owns any."""
        return None

    def add_costs_after_backward(
        self, config: Config, costs: Costs, specs: Specs, machine: Machine, axes: Axes
    ) -> None:
        """Add the seconds and bytes between backward and update.

        specs: of the parameters that the optimizer updates. axes: of groups of ranks.
        """

    def plan_lines(self, config: Config) -> Sequence[str]:
        """Return lines for the end of a plan."""
        return ()


class Measured(NamedTuple):
    """Numbers of one step."""

    values: Mapping[str, float]  # for a line of metrics.jsonl (metrics/writer.py)
    shown: str  # of these in the log, in words


class Measurement:
    """Something that is measured of the weights before the first step, and after every `freq`-th
    and the last one. It changes nothing of training. Its time does not count as that of steps, and
    a run that stops meanwhile repeats it when it resumes.
    """

    name: str  # in checkpoints, and of its seconds in metrics
    freq: int

    def measure(self, stops: Callable[[], bool]) -> Measured | None:
        """Return what is found; None if the run stops. A collective of all ranks.

        stops: asks all ranks whether the run stops, to be called now and then.
        """
        raise NotImplementedError


class Repeat(NamedTuple):
    """A step runs again, since it could not end as it was."""

    why: str  # the name of this phase in reports of hangs
    context: AbstractContextManager[object]  # in which forward and backward run again


class StepPart:
    """A feature's part in every training step. Override what it needs."""

    def begin_step(self, step: int) -> None:
        """Before the first forward of a step, and again before one that repeats or replaces it:
        `before_update` may be missing between. step: the first one is 1.
        """

    def repeat(self) -> Repeat | None:
        """Return how forward and backward of this step run again, None if they need not. A
        collective. `begin_step` is called again, and gradients are dropped.
        """
        return None

    def after_backward(self, step: int) -> None:
        """After the last backward. Gradients are sharded, and summed over the ranks of this replica
        group; they are clipped and applied afterwards.
        """

    def before_update(self, skip: Tensor) -> None:
        """After gradients are clipped, before the optimizer's update.

        skip: 1 if the step does not count, else 0: a float32 scalar on the device, not to be read
        on the host.
        """

    def counts(self) -> list[Tensor]:
        """Return what this rank has counted in the step, to be summed over groups in place."""
        return []

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint has, by their names there."""
        return {}

    def metrics(self, steps: range, folder: Path | None) -> Mapping[str, float]:
        """Return values for a line of metrics.jsonl (metrics/writer.py). A collective.

        steps: since the line before. folder: of the run, None on ranks that write no files.
        """
        return {}


def features_of(config: Config) -> list[Feature]:
    """Return the features that a recipe turns on."""
    return [feature for feature in all_features() if feature.is_on(config)]


def low_precision(config: Config) -> LowPrecision | None:
    """Return what the blocks of a recipe multiply with fewer bits; None: nothing."""
    found = (feature.low_precision(config) for feature in features_of(config))
    return next(filter(None, found), None)


@functools.cache
def all_features() -> tuple[Feature, ...]:
    """Return the features that there are."""
    return tuple(module.FEATURE for module in part_of_each("feature"))
