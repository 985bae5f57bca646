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

from pydantic import TypeAdapter, ValidationError

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.load import read_toml
from titan_lite.cost.machine import Link, Machine

MACHINE = TypeAdapter(Machine)

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

# The efficiency of matmuls is that of full waves of tiles. It is fitted for H100 (kernels.py). For
# the others the best matmul is as fast as in "Maximum Achievable Matmul FLOPS"
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


def machine_from(keys: Mapping[str, Any], file: str) -> Machine:
    """Return the machine that the keys of a TOML file describe. Raises ConfigError with all
    mistakes.
    """
    values = {"name": Path(file).stem, **keys}
    like = keys.get("like")
    if like is not None:
        if not isinstance(like, str) or like not in PROFILES:
            raise ConfigError(
                f"{file}: like = {shown(like)} is not a profile; use {', '.join(PROFILES)}"
            )
        profile = PROFILES[like]
        if isinstance(keys.get("tflops"), dict):
            values["tflops"] = {**profile.tflops, **keys["tflops"]}
        if "intra_node" in keys:  # other links have no NVLink switch
            values.setdefault("nvls", 0.0)
        values = {**vars(profile), **values}
    try:
        return MACHINE.validate_python(values)
    except ValidationError as error:
        lines = []
        for part in error.errors():
            key = ".".join(map(str, part["loc"]))
            lines.append(f"{file}: {key}: {part['msg']}")
        raise ConfigError(*lines) from None


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
