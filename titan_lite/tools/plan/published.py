"""Compare a plan with published runs: the errors of plans of the runs that are most like it.

    evidence = evidence_for(layout, machine)
    evidence.error          # 1.14: 80% of plans of such runs are at most so many times off
    evidence.in_words()     # "plans of 6 published runs (8B, ...) were 0.99 to 1.00 times as fast"

published.csv has the runs and their plans: `python scripts/compare_published.py --write` writes it
from the settings in scripts/published.toml. The errors come from the narrowest class of runs that
has three (`SPEED_FACETS`).
"""

import csv
import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_lite.cost.machine import Machine
from titan_lite.feature import low_precision
from titan_lite.models.shapes import shape_words
from titan_lite.tools.plan.trace import PlannedLayout

FILE = Path(__file__).with_suffix(".csv")
COVERED = 0.8  # share of runs that a range is to hold
# No range is narrower: published speeds of one recipe on one kind of device are up to this factor
# apart. Plans of CPU processes are within it, too (docs/plan.md).
LEAST_ERROR = 1.15
LEAST_RUNS = 3  # of a class that says something
SIZE_CLASS = 2  # most times as many parameters, or as few, of models of about the same size
KNOWN = 1.25  # with larger errors, a planned speed is a guess


@dataclass(frozen=True)
class RunKind:
    """The kind of a run: model, device, precision and mode, which others may have in common."""

    model: str
    billions: float  # parameters
    active_billions: float  # parameters that a token is multiplied by: fewer of an MoE model
    device: str
    power: float  # watts that the device is limited to
    precision: str  # of matmuls
    mode: str  # eager, or the backend of torch.compile

    @property
    def is_moe(self) -> bool:
        return self.active_billions < self.billions

    @property
    def limited(self) -> str:
        """The device and its power."""
        return f"{self.device} at {self.power:g} W"

    def is_of_size(self, other: "RunKind") -> bool:
        """Return True if a model has between half and twice the parameters of another one."""
        of_all = self.billions / other.billions
        of_active = self.active_billions / other.active_billions
        return all(1 / SIZE_CLASS <= times <= SIZE_CLASS for times in (of_all, of_active))


@dataclass(frozen=True)
class PublishedRun:
    """A published run, and its plan. Speeds: tokens a second and GPU; memory: GiB, reserved."""

    name: str
    role: str  # known, aside or blind: scripts/published.toml
    kind: RunKind
    published: float  # 0: not known yet
    planned: float
    published_gib: float  # 0: not published
    planned_gib: float
    unknown: str  # what is not known of the run

    @property
    def speed(self) -> float:
        """Planned by published."""
        return self.planned / self.published

    @property
    def memory(self) -> float:
        """Planned by published."""
        return self.planned_gib / self.published_gib

    @property
    def says_memory(self) -> bool:
        return bool(self.published_gib) and not self.unknown


# What runs need not have in common, one facet after the other, until a class has LEAST_RUNS.
SPEED_FACETS = ("power", "size", "mode", "precision", "device", "moe")
# Bytes are those of any device; the number of blocks and stages decides what is kept of them.
MEMORY_FACETS = ("power", "device", "precision", "mode", "size", "moe")


@dataclass(frozen=True)
class Evidence:
    """The published runs that are nearest to a kind of run, and the errors of their plans."""

    kind: RunKind
    runs: Sequence[PublishedRun]  # of the narrowest class for speed; empty on a CPU
    differ_in: Sequence[str]  # what they need not have in common with the kind
    memory_runs: Sequence[PublishedRun] = ()  # of that for memory

    @property
    def error(self) -> float:
        """The factor by which plans of COVERED of such runs are off at most, or LEAST_ERROR.

        Plans of a device are off together, so without runs of this one each device counts once.
        """
        errors = [abs(math.log(run.speed)) for run in self.runs]
        if "device" in self.differ_in:
            of_devices: dict[str, list[float]] = {}
            for run, error in zip(self.runs, errors, strict=True):
                of_devices.setdefault(run.kind.device, []).append(error)
            errors = [statistics.median(of_device) for of_device in of_devices.values()]
        return max(LEAST_ERROR, math.exp(_quantile(errors)))

    @property
    def is_known(self) -> bool:
        return self.error <= KNOWN

    @property
    def memory_error(self) -> float:
        """The share by which COVERED of such runs reserved more than planned, at most."""
        return max(0.0, _quantile([1 / run.memory - 1 for run in self.memory_runs]))

    def in_words(self) -> str:
        """Return the ratios of plans of these runs to the runs in words."""
        if not self.runs:
            return "no published run on a CPU to compare with"
        speeds = [run.speed for run in self.runs]
        plans = (
            f"plans of {len(self.runs)} published runs ({self.shared()}) were {min(speeds):.2f} to"
            f" {max(speeds):.2f} times as fast as the runs"
        )
        if not self.differ_in:
            return plans
        kind = self.kind
        described = ", ".join((kind.model, kind.mode, kind.precision, kind.limited))
        return (
            f"fewer than three published runs are like this one ({described}); of others, {plans}"
        )

    def shared(self) -> str:
        """Return what all the runs are, in words."""
        shown = {
            "size": " and ".join(dict.fromkeys(run.kind.model for run in self.runs)),
            "mode": self.kind.mode,
            "precision": self.kind.precision,
            "device": self.kind.device,
            "power": self.kind.limited,
        }
        if "power" not in self.differ_in:
            del shown["device"]
        words = [word for facet, word in shown.items() if facet not in self.differ_in]
        if not words:
            words = ["of MoE models" if self.kind.is_moe else "of dense models"]
            if "moe" in self.differ_in:
                words = ["all"]
        return ", ".join(words)


def evidence_for(layout: PlannedLayout, machine: Machine) -> Evidence:
    """Return the evidence of published runs for a plan of a layout on a machine."""
    kind = kind_of_run(layout, machine)
    if machine.is_cpu:
        return Evidence(kind, (), ())
    return evidence_among(published_runs(), kind)


def evidence_among(runs: Sequence[PublishedRun], kind: RunKind) -> Evidence:
    """Return the evidence of some runs for a kind of run."""
    differ_in, nearest = _narrowest([run for run in runs if run.published], kind, SPEED_FACETS)
    _, for_memory = _narrowest([run for run in runs if run.says_memory], kind, MEMORY_FACETS)
    return Evidence(kind, nearest, differ_in, for_memory)


def kind_of_run(layout: PlannedLayout, machine: Machine) -> RunKind:
    """Return the kind of a layout's run on a machine.

    A machine of a file is of the device that it is like.
    """
    config = layout.config
    low = low_precision(config)
    return RunKind(
        shape_words(config.model),
        layout.parameters / 1e9,
        layout.active_parameters / 1e9,
        machine.like or machine.name,
        machine.power or machine.nominal_power,
        low.name if low else config.training.mixed_precision_param,
        config.compile.backend if config.compile.enable else "eager",
    )


@functools.cache
def published_runs() -> Sequence[PublishedRun]:
    """Return the runs of published.csv."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [_run_of(row) for row in csv.DictReader(file)]


def _run_of(row: dict[str, str]) -> PublishedRun:
    of_kind = dataclasses.fields(RunKind)
    are_numbers = {
        field.name for field in (*of_kind, *dataclasses.fields(PublishedRun)) if field.type is float
    }
    values: dict[str, Any] = {
        name: float(text) if name in are_numbers else text for name, text in row.items()
    }
    kind = RunKind(**{field.name: values.pop(field.name) for field in of_kind})
    return PublishedRun(kind=kind, **values)


def _narrowest(
    runs: Sequence[PublishedRun], kind: RunKind, facets: Sequence[str]
) -> tuple[Sequence[str], Sequence[PublishedRun]]:
    """Return the narrowest class around a kind that has LEAST_RUNS: what its runs need not have in
    common, the first of `facets`, and the runs.
    """
    alike: Sequence[PublishedRun] = ()
    for count in range(len(facets) + 1):
        alike = [run for run in runs if _unlike(run.kind, kind) <= {*facets[:count]}]
        if len(alike) >= LEAST_RUNS:
            return facets[:count], alike
    return facets, alike


def _unlike(one: RunKind, other: RunKind) -> set[str]:
    """Return in what two kinds differ."""
    alike = {
        "device": one.device == other.device,
        "power": one.limited == other.limited,
        "precision": one.precision == other.precision,
        "mode": one.mode == other.mode,
        "moe": one.is_moe == other.is_moe,
        "size": one.is_of_size(other),
    }
    return {facet for facet, is_alike in alike.items() if not is_alike}


def _quantile(errors: Sequence[float]) -> float:
    """Return the error that a further run exceeds with a chance of 1 - COVERED, if it is drawn as
    these are (conformal prediction, arXiv 2107.07511); 0.0 without errors.
    """
    if not errors:
        return 0.0
    rank = math.ceil(COVERED * (len(errors) + 1))
    return sorted(errors)[min(rank, len(errors)) - 1]
