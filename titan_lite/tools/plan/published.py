"""Ratios of planned to published speed, which docs/benchmarks.md and every plan show.

`python scripts/compare_published.py` plans the runs and reports ratios that have changed. Only runs
of which all is published that a plan needs are here, except the number of a pipeline's
microbatches; the script's table has what is missing of the others. Some had asynchronous tensor
parallelism beside float8, which a run here refuses.
"""

import math
from typing import NamedTuple

from titan_lite.config import Config
from titan_lite.config.families import ModelConfig, find_family
from titan_lite.cost.machine import Machine
from titan_lite.cost.profiles import PROFILES
from titan_lite.models.shapes import parameter_shapes, shape_words

SIZE_CLASS = 2  # most times as many parameters, or as few, as a model of about the same size


class RunKind(NamedTuple):
    """A kind of published runs: of one model, mode, precision and machine."""

    flavor: str
    mode: str  # eager, or the backend of torch.compile
    precision: str  # of matrix products
    machine: str
    family: str = "llama3"


# Nominal planned tokens per second / published, by kind and name in scripts/compare_published.py
RUNS = {
    RunKind("8B", "eager", "bfloat16", "H100"): {
        "TorchTitan paper: 8B on 8, eager": 0.89,
        "TorchTitan paper: 8B on 128, eager": 0.97,
        "torchtitan 2024-12: 8B on 8, eager": 0.96,
        "torchtitan 2024-12: 8B on 128, eager": 0.98,
    },
    RunKind("8B", "inductor", "bfloat16", "H100"): {
        "TorchTitan paper: 8B on 8, compiled": 0.99,
        "TorchTitan paper: 8B on 128, compiled": 1.00,
        "torchtitan 2024-12: 8B on 8, compiled": 0.99,
        "torchtitan 2024-12: 8B on 128, compiled": 1.00,
        "torchtitan 2025-06: 8B on 64, FSDP 8 x TP 8": 0.99,
        "torchtitan 2025-06: 8B on 64, FSDP 8 x TP 8, async TP": 0.99,
    },
    RunKind("8B", "inductor", "float8", "H100"): {
        "TorchTitan paper: 8B on 8, float8": 0.94,
        "TorchTitan paper: 8B on 128, float8": 0.94,
        "torchtitan 2024-12: 8B on 8, float8": 1.04,
        "torchtitan 2024-12: 8B on 128, float8": 1.05,
        "torchtitan 2024-12: 8B on 8, float8, 32k tokens": 0.99,
        "torchtitan 2024-12: 8B, float8, FSDP 4 x CP 2, 64k tokens": 0.88,
        "torchtitan 2024-12: 8B, float8, FSDP 2 x CP 4, 128k tokens": 1.15,
        "torchtitan 2025-06: 8B on 64, float8": 1.14,
        "torchtitan 2025-06: 8B on 64, float8, async TP": 1.10,
    },
    RunKind("70B", "inductor", "float8", "H100"): {
        "TorchTitan paper: 70B on 256, float8": 0.93,
        "TorchTitan paper: 70B on 256, float8, async TP": 0.89,
        "torchtitan 2024-12: 70B on 256, float8": 1.01,
        "torchtitan 2024-12: 70B on 256, float8, async TP": 1.03,
        "torchtitan 2025-06: 70B on 256, float8": 1.03,
        "torchtitan 2025-06: 70B on 256, float8, async TP": 0.96,
    },
    RunKind("405B", "inductor", "float8", "H100"): {
        "TorchTitan paper: 405B on 512, float8, 1F1B": 0.98,
        "TorchTitan paper: 405B on 512, float8, interleaved": 1.00,
        "torchtitan 2024-12: 405B on 512, float8, 1F1B": 1.08,
        "torchtitan 2024-12: 405B on 512, float8, interleaved": 1.10,
        "torchtitan 2024-12: 405B on 512, float8, CP 1, 32k tokens": 0.98,
        "torchtitan 2024-12: 405B on 512, float8, CP 2, 64k tokens": 1.12,
        "torchtitan 2024-12: 405B on 512, float8, CP 4, 128k tokens": 1.07,
    },
    RunKind("8B", "aot_eager", "bfloat16", "H100"): {
        "torchtitan 1881: 8B, FSDP 8": 0.78,
        "torchtitan 1881: 8B, FSDP 4 x TP 2": 0.84,
    },
    RunKind("70B", "inductor", "bfloat16", "H100"): {
        "torchtitan 2025-06: 70B on 256, FSDP 32 x TP 8": 0.98,
        "torchtitan 2025-06: 70B on 256, FSDP 32 x TP 8, async TP": 0.99,
    },
    RunKind("8B", "inductor", "float8", "H200"): {
        "torchtitan 2025-06, H200: 8B on 32, float8": 1.18,
        "torchtitan 2025-06, H200: 8B on 64, float8": 1.20,
    },
}
RATIOS = {name: ratio for runs in RUNS.values() for name, ratio in runs.items()}


def bias_of(model: ModelConfig, config: Config, machine: Machine) -> str:
    """Return the error of plans of published runs like this one, in words; or that there is none.

    Alike are runs on the same machine, compiled by the same backend, in the same precision, and of
    models of about this size.
    """
    mode = config.compile.backend if config.compile.compiles("model") else "eager"
    training = config.training
    precision = "float8" if config.float8.enable else training.mixed_precision_param
    ratios: list[float] = []
    flavors: list[str] = []
    for kind, runs in RUNS.items():
        is_alike = (kind.mode, kind.precision) == (mode, precision)
        if is_alike and PROFILES[kind.machine] == machine and is_of_size(model, kind):
            ratios += runs.values()
            is_of_family = kind.family == model.family
            flavors.append(kind.flavor if is_of_family else f"{kind.family} {kind.flavor}")
    if not ratios:
        described = ", ".join((shape_words(config.model), mode, precision, machine.name))
        return f"no published run of this kind ({described}) to compare with"
    described = ", ".join((" and ".join(flavors), mode, precision, machine.name))
    return (
        f"plans of {len(ratios)} published runs ({described}) were {min(ratios):.2f} to"
        f" {max(ratios):.2f} times as fast as the runs"
    )


def is_of_size(model: ModelConfig, kind: RunKind) -> bool:
    """Return True if a model has between half and twice the parameters of the runs'."""
    times = parameters(model) / parameters(find_family(kind.family).flavors[kind.flavor])
    return 1 / SIZE_CLASS <= times <= SIZE_CLASS


def parameters(model: ModelConfig) -> int:
    return sum(map(math.prod, parameter_shapes(model).values()))
