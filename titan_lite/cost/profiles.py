"""Profiles of machines, and machines that a TOML file describes.

    machine = load_machine("H100")              # a profile, or the path of a TOML file
    profile_of(torch.cuda.get_device_name())    # the profile of a GPU, or None

Peaks and bandwidths are from the vendors' datasheets, latencies from NCCL's tuning tables
(src/graph/tuning.cc, LL128 on a ring).
"""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.load import read_toml
from titan_lite.cost.kernels import IDLE_POWER
from titan_lite.cost.machine import Link, Machine
from titan_lite.text import one_line

# Bounds of a number in a file, which keep products of a few finite.
LEAST = 1e-9
MOST = 1e12

# Microseconds of a multiplication with autograd in eager mode (pytorch/pytorch issue 41383).
HOST = 7.0
# 390 GB/s in the table of nccl.py; 476 to 480 are published for registered buffers
# (NVIDIA/nccl-tests issues 212 and 290).
NVLS = 1.08

# GB/s of a GPU in each direction, microseconds per hop
NVLINK3 = Link(300, 1.9)
NVLINK4 = Link(450, 1.9)
NVLINK5 = Link(900, 1.9)
XGMI = Link(448, 4.0)
XGMI4 = Link(537, 4.0)
PCIE = Link(32, 4.0)
# One network card a GPU, as in DGX and HGX machines.
HDR200 = Link(25, 4.0)
NDR400 = Link(50, 4.0)
XDR800 = Link(100, 4.0)

# Dense peaks in TFLOP/s. float32 is without TF32, torch's default.
PEAKS_A100 = {"bfloat16": 312.0, "float32": 19.5}
PEAKS_H100 = {"bfloat16": 989.4, "float32": 66.9, "float8_e4m3fn": 1978.9}
PEAKS_H100_PCIE = {"bfloat16": 756.0, "float32": 51.2, "float8_e4m3fn": 1513.0}
PEAKS_H100_NVL = {"bfloat16": 835.5, "float32": 60.0, "float8_e4m3fn": 1671.0}
PEAKS_B200 = {"bfloat16": 2250.0, "float32": 80.0, "float8_e4m3fn": 4500.0}
PEAKS_GB200 = {"bfloat16": 2500.0, "float32": 80.0, "float8_e4m3fn": 5000.0}
PEAKS_MI300X = {"bfloat16": 1307.4, "float32": 163.4, "float8_e4m3fn": 2614.9}
PEAKS_MI355X = {"bfloat16": 2516.6, "float32": 157.3, "float8_e4m3fn": 5033.2}

# The efficiency of products is that of full waves of tiles. It is fitted for H100 (kernels.py). For
# the others the best product is as fast as in "Maximum Achievable Matmul FLOPS"
# (stas00/ml-engineering, compute/accelerator/README.md). Attention on B300 and GB200 is assumed to
# reach the share of the peak that it reaches on B200; on MI325X and MI355X, that on MI300X.
B200 = Machine(
    name="B200",
    tflops=PEAKS_B200,
    memory=180,
    memory_bandwidth=7700,
    intra_node=NVLINK5,
    inter_node=NDR400,
    nvls=NVLS,
    host=HOST,
    multiprocessors=148,
    nominal_power=1000,
    matmul_efficiency=0.81,
    attention_efficiency=0.55,
)
B300 = dataclasses.replace(
    B200,
    name="B300",
    memory=268,
    memory_bandwidth=8000,
    inter_node=XDR800,
    nominal_power=1100,
    matmul_efficiency=0.82,
)
# NVLink joins 72 GPUs. 184.3 GiB are published for one (pytorch/torchtitan pull request 3914).
GB200 = dataclasses.replace(
    B200,
    name="GB200",
    tflops=PEAKS_GB200,
    memory=184,
    memory_bandwidth=8000,
    ranks_per_node=72,
    nominal_power=1200,
    matmul_efficiency=0.76,
)
H100 = Machine(
    name="H100",
    tflops=PEAKS_H100,
    memory=80,
    memory_bandwidth=3350,
    intra_node=NVLINK4,
    inter_node=NDR400,
    nvls=NVLS,
    host=HOST,
    multiprocessors=132,
    nominal_power=700,
    matmul_efficiency=0.84,
    attention_efficiency=0.52,
)
H200 = dataclasses.replace(H100, name="H200", memory=141, memory_bandwidth=4800)
H100_PCIE = dataclasses.replace(
    H100,
    name="H100 PCIe",
    tflops=PEAKS_H100_PCIE,
    memory_bandwidth=2000,
    intra_node=PCIE,
    nvls=0.0,
    multiprocessors=114,
    nominal_power=350,
    matmul_efficiency=0.68,
    attention_efficiency=0.4,
)
H100_NVL = dataclasses.replace(
    H100,
    name="H100 NVL",
    tflops=PEAKS_H100_NVL,
    memory=94,
    memory_bandwidth=3900,
    intra_node=PCIE,
    nvls=0.0,
    nominal_power=400,
)
H200_NVL = dataclasses.replace(
    H200, name="H200 NVL", tflops=PEAKS_H100_NVL, nvls=0.0, nominal_power=600
)
A100 = Machine(
    name="A100",
    tflops=PEAKS_A100,
    memory=80,
    memory_bandwidth=2039,
    intra_node=NVLINK3,
    inter_node=HDR200,
    host=HOST,
    multiprocessors=108,
    nominal_power=400,
    matmul_efficiency=0.9,
    attention_efficiency=0.55,
)
MI300X = Machine(
    name="MI300X",
    tflops=PEAKS_MI300X,
    memory=192,
    memory_bandwidth=5300,
    intra_node=XGMI,
    inter_node=NDR400,
    host=HOST,
    multiprocessors=304,
    nominal_power=750,
    matmul_efficiency=0.53,
    attention_efficiency=0.3,
)
MI325X = dataclasses.replace(
    MI300X,
    name="MI325X",
    memory=256,
    memory_bandwidth=6000,
    nominal_power=1000,
    matmul_efficiency=0.62,
)
MI355X = dataclasses.replace(
    MI300X,
    name="MI355X",
    tflops=PEAKS_MI355X,
    memory=288,
    memory_bandwidth=8000,
    intra_node=XGMI4,
    multiprocessors=256,
    nominal_power=1400,
    matmul_efficiency=0.65,
)
# A device has the first profile with a name that occurs in its own, as a word: longer names first.
PROFILES = {
    machine.name: machine
    for machine in (
        *(GB200, B300, B200),
        *(H200_NVL, H200, H100_PCIE, H100_NVL, H100),
        A100,
        *(MI355X, MI325X, MI300X),
    )
}


def load_machine(name: str, written: str = "") -> Machine:
    """Return a profile by name, or the machine in the TOML file `name`. Raises ConfigError.

    written: the key or option as the user wrote it, for errors.

    A file has the fields of Machine: `intra_node` and `inter_node` are tables of bandwidth and
    latency, `tflops` is a table by dtype. With `like = "H100"`, fields that are not given are those
    of that profile.
    """
    if name in PROFILES:
        return PROFILES[name]
    written = written or f'compile.machine = "{name}"'
    profiles = ", ".join(PROFILES)
    if not name.endswith(".toml"):
        raise ConfigError(
            f"{written} is not a profile; use {profiles}, or the path of a .toml file"
        )
    if not os.path.exists(name):
        raise ConfigError(f"{written}: no such file; use {profiles}, or another path")
    return machine_from(read_toml(Path(name)), name)


def machine_from(keys: Mapping[str, object], file: str) -> Machine:
    """Return the machine that the keys of a TOML file describe. Raises ConfigError."""
    given = {key: _checked(file, key, value) for key, value in keys.items() if key != "like"}
    values: dict[str, Any] = {"name": Path(file).stem}
    like = keys.get("like")
    if like is not None:
        if not isinstance(like, str) or like not in PROFILES:
            raise ConfigError(
                f"{file}: like = {shown(like)} is not a profile; use {', '.join(PROFILES)}"
            )
        profile = PROFILES[like]
        values = {**vars(profile), **values, "like": like}
        if "tflops" in given:
            given["tflops"] = {**profile.tflops, **given["tflops"]}
        if "intra_node" in given:  # other links have no NVLink switch
            values["nvls"] = 0.0
    values.update(given)
    missing = [
        field.name
        for field in dataclasses.fields(Machine)
        if field.name not in values and field.default is dataclasses.MISSING
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


def _checked(file: str, key: str, value: object) -> Any:  # noqa: ANN401 - as the field is
    """Return the value of a field of Machine. Raises ConfigError."""
    fields = {field.name: field for field in dataclasses.fields(Machine)}
    if key not in fields or key == "like":
        raise ConfigError(
            f"{file}: {one_line(key, 100)} is not a field of a machine; use {', '.join(fields)}"
        )
    if key == "name":
        if not isinstance(value, str):
            raise ConfigError(
                f"{file}: name = {shown(value)} is not a string; use a name in quotes"
            )
        return value
    if key in ("intra_node", "inter_node"):
        return Link(**_numbers(file, key, value, keys=("bandwidth", "latency")))
    if key == "tflops":
        return _peaks(file, value)
    if value == 0 and fields[key].default == 0 and not isinstance(value, bool):
        return value  # turns off what is off by default
    return _checked_number(file, key, _number(file, key, value))


def _peaks(file: str, value: object) -> dict[str, float]:
    peaks = _numbers(file, "tflops", value)
    for dtype in peaks:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(
                f"{file}: tflops.{one_line(dtype, 100)} is not a dtype of torch; use bfloat16,"
                " float32 or float8_e4m3fn"
            )
    return peaks


def _checked_number(file: str, key: str, number: float) -> float:
    """Raise ConfigError if a number is out of the bounds of its own key."""
    if key in ("ranks_per_node", "multiprocessors") and not isinstance(number, int):
        raise ConfigError(f"{file}: {key} = {number} is not a whole number; use {round(number)}")
    if key == "power" and number <= IDLE_POWER:
        raise ConfigError(
            f"{file}: power = {number} is not above the {IDLE_POWER:g} W of an idle GPU; use its"
            " power limit in watts"
        )
    if key == "clock_exponent" and not 1 / 3 <= number <= 1:
        raise ConfigError(
            f"{file}: clock_exponent = {number} is no law of a power limit; use 1/3 to 1"
        )
    if key.endswith("efficiency") and number > 1:
        default = next(field.default for field in dataclasses.fields(Machine) if field.name == key)
        raise ConfigError(f"{file}: {key} = {number} is above 1, the peak; use {default}")
    return number


def _numbers(file: str, table: str, value: object, keys: Collection[str] = ()) -> dict[str, float]:
    """Return a table of numbers. keys: those that it must have; (): any."""
    if not isinstance(value, dict) or (keys and set(value) != set(keys)):
        form = "{ " + ", ".join(f"{key} = ..." for key in keys or ("bfloat16", "float32")) + " }"
        raise ConfigError(f"{file}: {table} = {shown(value)} is not valid; use {table} = {form}")
    return {
        key: _number(file, f"{table}.{one_line(key, 100)}", number) for key, number in value.items()
    }


def _number(file: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
        raise ConfigError(
            f"{file}: {key} = {shown(value)} is not a number above 0; use 1e-9 to 1e12"
        )
    return value


def profile_of(device_name: str) -> Machine | None:
    """Return the profile of a GPU by torch's name for it.

    None if it is unknown, or a MIG slice.
    """
    if "MIG " in device_name:
        return None
    for name, machine in PROFILES.items():
        if re.search(rf"\b{name}\b", device_name):
            return machine
    return None
