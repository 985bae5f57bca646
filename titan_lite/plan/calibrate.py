"""A machine's profile, fitted to a run that has ended.

    print("\n".join(calibrate_run(Path("outputs/llama3_8b"), lay_out)))     # and by how much each number moved

The run's folder has its recipe and, in measured.json, what its ranks measured at its end (measure.py) and how long a step took.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_lite.compiler.hardware import GIB, Machine, machine_from
from titan_lite.config import Config, ConfigError
from titan_lite.config.recipe import load_config
from titan_lite.outside import NO_OTHER, OBJECT, POSITIVE, SIZE, WORD, Damaged, optional, read_json
from titan_lite.plan.measure import RECORD, against, calibrated, machine_to_toml, numbers_of
from titan_lite.plan.summary import make_plan
from titan_lite.plan.trace import PlannedLayout
from titan_lite.shape import shape_words

PROFILE = "hardware.toml"  # in the run's folder: what is made of it
_REACHED = dict.fromkeys(("matmul", "attention", "memory", "launch"), POSITIVE)
_LINKS = dict.fromkeys(("latency", "bandwidth", "reduction"), POSITIVE)
_RECORD = {
    **dict.fromkeys(("world_size", "nodes", "windows"), SIZE),
    **dict.fromkeys(("device", "memory_is"), WORD),
    "profile": OBJECT,
    "reached": (_REACHED | _LINKS, _REACHED | dict.fromkeys(_LINKS, optional(NO_OTHER))),
    **dict.fromkeys(("step_seconds", "memory_bytes"), POSITIVE),
}
PACES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 4.0, 10.0)  # at which computation is tried


def calibrate_run(
    folder: Path, lay_out: Callable[[Config, int, float], PlannedLayout], profile: Machine | None = None
) -> list[str]:
    """Fits the profile that a run was planned with, or another one, to its measurements; writes it to the run's folder, and says
    by how much each number moved. Raises ConfigError where the run has none.

    First comes what its ranks measured of products, attention, memory and links; then all efficiencies of computation move
    together, until the planned step takes as long as the run's.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ConfigError(
            f'--calibrate {folder}: no {RECORD} in it, which a run writes at its end; metrics.compare_plan = "always" would work'
        )
    try:
        record = read_json(path, _RECORD)
    except Damaged as damage:
        raise ConfigError(f"--calibrate {folder}: {damage}; a run's own would work") from None
    config, _ = load_config(folder / "config.toml", [])
    stated = profile or machine_from(record["profile"], str(path))
    layout = lay_out(config, record["world_size"], stated.memory * GIB)
    dtype = getattr(torch, config.training.mixed_precision_param)
    reached = calibrated(stated, record["reached"], dtype, record["nodes"])
    plan = make_plan(layout, [stated, reached, *(paced(reached, pace) for pace in PACES)])
    seconds = [step.seconds for step in plan.steps]
    pace = pace_of(record["step_seconds"], seconds[2:])
    found = dataclasses.replace(paced(reached, pace), name=f"{stated.name}, calibrated")
    (folder / PROFILE).write_text(machine_to_toml(found), encoding="utf-8")
    ends = " (the end of what was tried)" if pace in (PACES[0], PACES[-1]) else ""
    return [
        f"{shape_words(config.model)} on {layout.world_size} {record['device']}, {record['windows']} windows of steps",
        "",
        *moved(stated, found),
        "",
        f"step: measured {record['step_seconds']:.4g} s; planned {seconds[0]:.4g} s with the profile, {seconds[1]:.4g} s with "
        f"what its ranks measured, which computation at {pace:.2f} of that pace{ends} makes the same",
        f"memory: {against(plan.memory.reserved, record['memory_bytes'])} {record['memory_is']}",
        f"written to {folder / PROFILE}, for --hardware and compile.machine",
    ]


def paced(machine: Machine, pace: float) -> Machine:
    """Whose computation is so many times as fast, and no faster than its peaks; of a CPU, which has none, these move."""
    if machine.name.startswith("CPU"):
        tflops = {name: value * pace for name, value in machine.tflops.items()}
        changed: dict[str, Any] = {"tflops": tflops, "memory_bandwidth": machine.memory_bandwidth * pace}
    else:
        names = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
        changed = {name: min(1.0, getattr(machine, name) * pace) for name in names}
    return dataclasses.replace(machine, **changed, launch=machine.launch / pace)


def pace_of(measured: float, seconds: Sequence[float]) -> float:
    """At which a step would take as long as measured: what computes takes longer as 1 / pace, so it is on the lines between
    `seconds` over that; the first or the last of PACES where no pace does."""
    for (slow, low), (fast, high) in itertools.pairwise(zip(seconds, PACES, strict=True)):
        if fast <= measured <= slow and slow > fast:
            return 1 / (1 / low + (1 / high - 1 / low) * (slow - measured) / (slow - fast))
    return PACES[0] if measured > seconds[0] else PACES[-1]


def moved(before: Machine, after: Machine) -> list[str]:
    """A line for each number that is another one now."""
    old, new = numbers_of(before), numbers_of(after)
    return [
        f"  {name:<24} {old[name]:>10.4g} -> {value:<10.4g} {100 * (value / old[name] - 1):+6.1f}%"
        for name, value in new.items()
        if not math.isclose(value, old[name], rel_tol=1e-3)
    ]
