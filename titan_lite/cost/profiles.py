"""Profiles of machines, and machines that a TOML file describes.

    machine = load_machine("H100")              # a profile, or the path of a TOML file
    profile_of(torch.cuda.get_device_name())    # the profile of a GPU, or None

Peaks and bandwidths are from the vendors' datasheets, latencies from NCCL's tuning tables
(src/graph/tuning.cc, LL128 on a ring).
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titan_lite.config import ConfigError
from titan_lite.config.errors import one_line, shown
from titan_lite.config.load import read_toml
from titan_lite.cost.kernels import IDLE
from titan_lite.cost.machine import Link, Machine

HOST = 7.0  # a multiplication with autograd in eager mode (pytorch/pytorch issue 41383)
# 390 GB/s in the table of nccl.py; 476 to 480 are published for registered buffers
# (NVIDIA/nccl-tests issues 212 and 290)
NVLS = 1.08
NVLINK3, NVLINK4, NVLINK5 = Link(300, 1.9), Link(450, 1.9), Link(900, 1.9)
XGMI, PCIE = Link(448, 4.0), Link(32, 4.0)
HDR200, NDR400 = Link(25, 4.0), Link(50, 4.0)  # one network card a GPU, as in DGX and HGX machines


def _peaks(bfloat16: float, float32: float, float8: float = 0.0) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float32": float32} | (
        {"float8_e4m3fn": float8} if float8 else {}
    )


def _gpu(
    multiprocessors: int,
    nominal_power: float,
    matmul_efficiency: float,
    attention_efficiency: float,
    nvls: float = 0.0,
) -> dict[str, Any]:
    return {**locals(), "host": HOST}


# The efficiency of products is that of full waves of tiles. It is fitted for H100 (kernels.py). For
# the others the best product is as fast as in "Maximum Achievable Matmul FLOPS"
# (stas00/ml-engineering, compute/accelerator/README.md). float32 is without TF32, torch's default.
# A device has the first profile with a name that occurs in its own, as a word.
PROFILES = {
    machine.name: machine
    for machine in (
        Machine(
            "B200",
            _peaks(2250.0, 80.0, 4500.0),
            180,
            7700,
            NVLINK5,
            NDR400,
            **_gpu(148, 1000, 0.81, 0.55, NVLS),
        ),
        Machine(
            "H200 NVL",
            _peaks(835.5, 60.0, 1671.0),
            141,
            4800,
            NVLINK4,
            NDR400,
            **_gpu(132, 600, 0.84, 0.52),
        ),
        Machine(
            "H200",
            _peaks(989.4, 66.9, 1978.9),
            141,
            4800,
            NVLINK4,
            NDR400,
            **_gpu(132, 700, 0.84, 0.52, NVLS),
        ),
        Machine(
            "H100 PCIe",
            _peaks(756.0, 51.2, 1513.0),
            80,
            2000,
            PCIE,
            NDR400,
            **_gpu(114, 350, 0.68, 0.4),
        ),
        Machine(
            "H100 NVL",
            _peaks(835.5, 60.0, 1671.0),
            94,
            3900,
            PCIE,
            NDR400,
            **_gpu(132, 400, 0.84, 0.52),
        ),
        Machine(
            "H100",
            _peaks(989.4, 66.9, 1978.9),
            80,
            3350,
            NVLINK4,
            NDR400,
            **_gpu(132, 700, 0.84, 0.52, NVLS),
        ),
        Machine(
            "A100",
            _peaks(312.0, 19.5),
            80,
            2039,
            NVLINK3,
            HDR200,
            **_gpu(108, 400, 0.9, 0.55),
        ),
        Machine(
            "MI300X",
            _peaks(1307.4, 163.4, 2614.9),
            192,
            5300,
            XGMI,
            NDR400,
            **_gpu(304, 750, 0.53, 0.3),
        ),
    )
}


def load_machine(name: str, said: str = "") -> Machine:
    """Return a profile by name, or the machine in the TOML file `name`.

    said: the user's option, for errors. Raises ConfigError.

    A file has the fields of Machine: `intra_node` and `inter_node` are tables of bandwidth and
    latency, `tflops` is a table by dtype. With `like = "H100"`, fields that are not given are those
    of that profile.
    """
    if name in PROFILES:
        return PROFILES[name]
    said, profiles = said or f'compile.machine = "{name}"', ", ".join(PROFILES)
    if not name.endswith(".toml"):
        raise ConfigError(f"{said} is not a profile; use {profiles}, or the path of a .toml file")
    if not os.path.exists(name):
        raise ConfigError(f"{said}: no such file; use {profiles}, or another path")
    return machine_from(read_toml(Path(name)), name)


def machine_from(tables: Mapping[str, Any], file: str) -> Machine:
    """Return the machine that a TOML file describes. Raises ConfigError."""
    tables = dict(tables)
    like = tables.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in PROFILES):
        raise ConfigError(
            f"{file}: like = {shown(like)} is not a profile; use {', '.join(PROFILES)}"
        )
    values: dict[str, Any] = {
        **(vars(PROFILES[like]) if like else {}),
        "name": Path(file).stem,
        "like": like or "",
    }
    fields = {field.name: field for field in dataclasses.fields(Machine)}
    for key, value in tables.items():
        if key not in fields:
            raise ConfigError(
                f"{file}: {one_line(key, 100)} is not a field of a machine; use"
                f" {', '.join(fields)}, or like"
            )
        if key in ("intra_node", "inter_node"):
            value = Link(**_numbers(file, key, value, ("bandwidth", "latency")))
        elif key == "tflops":
            value = {**values.get("tflops", {}), **_numbers(file, key, value, ())}
            unknown = [
                name for name in value if not isinstance(getattr(torch, name, None), torch.dtype)
            ]
            if unknown:
                wrong = f"{file}: tflops.{one_line(unknown[0], 100)} is not a dtype of torch"
                raise ConfigError(f"{wrong}; use bfloat16, float32 or float8_e4m3fn")
        elif key == "name":
            if not isinstance(value, str):
                raise ConfigError(
                    f"{file}: name = {shown(value)} is not a string; use a name in quotes"
                )
        else:
            if (
                value != 0 or fields[key].default != 0 or isinstance(value, bool)
            ):  # 0 turns off what is off by default
                _number(file, key, value)
            if key in ("ranks_per_node", "multiprocessors") and not isinstance(value, int):
                raise ConfigError(
                    f"{file}: {key} = {value} is not a whole number; use {round(value)}"
                )
            if key == "power" and 0 < value <= IDLE:
                raise ConfigError(
                    f"{file}: power = {value} is not above the {IDLE:g} W of an idle GPU; use its"
                    " power limit in watts"
                )
            if key == "clock_exponent" and not 1 / 3 <= value <= 1:
                raise ConfigError(
                    f"{file}: clock_exponent = {value} is no law of a power limit; use 1/3 to 1"
                )
            if key.endswith("efficiency") and value > 1:
                raise ConfigError(
                    f"{file}: {key} = {value} is above 1, the peak; use {fields[key].default}"
                )
        values[key] = value
    if "intra_node" in tables and "nvls" not in tables:  # other links have no NVLink switch
        values["nvls"] = 0.0
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(
            f'{file}: {", ".join(missing)} missing; add them, or use like = "H100" for its values'
        )
    if "float32" not in values["tflops"]:
        raise ConfigError(
            f"{file}: tflops.float32 missing, the peak of dtypes that are not listed; use float32 ="
            " ... in tflops"
        )
    return Machine(**values)


def _numbers(file: str, table: str, value: Any, keys: tuple[str, ...]) -> dict[str, float]:
    if not isinstance(value, dict) or (keys and set(value) != set(keys)):
        form = "{ " + ", ".join(f"{key} = ..." for key in keys or ("bfloat16", "float32")) + " }"
        raise ConfigError(f"{file}: {table} = {shown(value)} is not valid; use {table} = {form}")
    return {
        key: _number(file, f"{table}.{one_line(key, 100)}", number) for key, number in value.items()
    }


def _number(file: str, key: str, value: Any) -> float:
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 < value < 1e12
    ):  # keeps products of a few finite
        raise ConfigError(
            f"{file}: {key} = {shown(value)} is not a number above 0; use 1e-9 to 1e12"
        )
    return value


def profile_of(device_name: str) -> Machine | None:
    """Return the profile of a GPU by torch's name for it, or None if it is unknown or a MIG slice."""
    if "MIG " in device_name:
        return None
    return next(
        (machine for name, machine in PROFILES.items() if re.search(rf"\b{name}\b", device_name)),
        None,
    )
