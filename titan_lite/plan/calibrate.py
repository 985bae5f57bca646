"""Fit a machine's profile to a run that has ended.

    print("\n".join(calibrate_run(Path("outputs/llama3_8b"), lay_out)))     # prints the change of each number

The run's folder has its recipe and measured.json, with the measurements of its ranks at its end (measure.py) and the step time.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_lite.compiler.hardware import GIB, Machine
from titan_lite.compiler.profiles import machine_from
from titan_lite.config import Config, ConfigError
from titan_lite.config.recipe import load_config
from titan_lite.outside import NO_OTHER, OBJECT, POSITIVE, SIZE, WORD, Damaged, optional, read_json
from titan_lite.plan.measure import RECORD, against, calibrated, machine_to_toml, numbers_of
from titan_lite.plan.summary import make_plan
from titan_lite.plan.trace import PlannedLayout
from titan_lite.shape import shape_words

PROFILE = "hardware.toml"  # the result, in the run's folder
_REACHED = dict.fromkeys(("matmul", "attention", "memory", "launch"), POSITIVE)
_LINKS = dict.fromkeys(("latency", "bandwidth", "reduction"), POSITIVE)
_RECORD = {
    **dict.fromkeys(("world_size", "nodes", "windows"), SIZE),
    **dict.fromkeys(("device", "memory_is"), WORD),
    "profile": OBJECT,
    "reached": (_REACHED | _LINKS, _REACHED | dict.fromkeys(_LINKS, optional(NO_OTHER))),
    **dict.fromkeys(("step_seconds", "memory_bytes"), POSITIVE),
}
PACES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 4.0, 10.0)  # compute-speed factors to try


def calibrate_run(
    folder: Path,
    lay_out: Callable[[Config, int, float], PlannedLayout],
    profile: Machine | None = None,
) -> list[str]:
    """Fit the profile of a run's plan, or another one, to its measurements, write it to the run's folder, and return lines on the
    change of each number. Raises ConfigError if the run has no measurements.

    The first step uses the measurements of products, attention, memory and links. The second step scales all efficiencies of
    computation by one factor, so that the planned step takes as long as the measured one.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ConfigError(
            f'--calibrate {folder}: no {RECORD} in it, which a run writes at its end; use metrics.compare_plan = "always" there'
        )
    try:
        record = read_json(path, _RECORD)
    except Damaged as damage:
        raise ConfigError(
            f"--calibrate {folder}: {damage}; use the folder of another run"
        ) from None
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
    ends = " (the limit)" if pace in (PACES[0], PACES[-1]) else ""
    return [
        f"{shape_words(config.model)} on {layout.world_size} {record['device']}, {record['windows']} windows of steps",
        "",
        *moved(stated, found),
        "",
        f"step: measured {record['step_seconds']:.4g} s; planned {seconds[0]:.4g} s with the profile, {seconds[1]:.4g} s with "
        f"the measurements of its ranks; computation at {pace:.2f} of that speed{ends} reproduces the measured step",
        f"memory: {against(plan.memory.reserved, record['memory_bytes'])} {record['memory_is']}",
        f"written to {folder / PROFILE}, for --hardware and compile.machine",
    ]


def paced(machine: Machine, pace: float) -> Machine:
    """Return the machine with its compute speed scaled by a factor, up to its peaks; on a CPU, which has none, without limit."""
    if machine.is_cpu:
        tflops = {name: value * pace for name, value in machine.tflops.items()}
        changed: dict[str, Any] = {
            "tflops": tflops,
            "memory_bandwidth": machine.memory_bandwidth * pace,
        }
    else:
        names = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
        changed = {name: min(1.0, getattr(machine, name) * pace) for name in names}
    return dataclasses.replace(
        machine, **changed, launch=machine.launch / pace, host=machine.host / pace
    )


def pace_of(measured: float, seconds: Sequence[float]) -> float:
    """Return the compute-speed factor that reproduces the measured step, or the first or last of PACES if none does.

    seconds: the step at each of PACES. Compute time is proportional to 1 / pace, so `seconds` is interpolated over that.
    """
    for (slow, low), (fast, high) in itertools.pairwise(zip(seconds, PACES, strict=True)):
        if fast <= measured <= slow and slow > fast:
            return 1 / (1 / low + (1 / high - 1 / low) * (slow - measured) / (slow - fast))
    return PACES[0] if measured > seconds[0] else PACES[-1]


def moved(before: Machine, after: Machine) -> list[str]:
    """Return a line for each number that has changed."""
    old, new = numbers_of(before), numbers_of(after)
    return [
        f"  {name:<24} {old[name]:>10.4g} -> {value:<10.4g} {100 * (value / old[name] - 1):+6.1f}%"
        for name, value in new.items()
        if not math.isclose(value, old[name], rel_tol=1e-3)
    ]
