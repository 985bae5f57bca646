"""A machine as numbers. So far: the peak of its matrix units, which MFU is measured against.

peak_flops(torch.device("cuda"), torch.bfloat16)      # 989.4e12 on an H100
"""

import re
import time

import torch

# Dense peak in TFLOP/s from the vendors' datasheets; the first name that occurs in the device's name as a word. float32 is
# without TF32, which torch does not use for matrix products unless it is told to.
PEAK_TFLOPS: tuple[tuple[str, dict[torch.dtype, float]], ...] = (
    ("B200", {torch.bfloat16: 2250.0, torch.float32: 80.0}),
    ("H200 NVL", {torch.bfloat16: 835.5, torch.float32: 60.0}),
    ("H200", {torch.bfloat16: 989.4, torch.float32: 66.9}),
    ("H100 PCIe", {torch.bfloat16: 756.0, torch.float32: 51.2}),
    ("H100 NVL", {torch.bfloat16: 835.5, torch.float32: 60.0}),
    ("H100", {torch.bfloat16: 989.4, torch.float32: 66.9}),
    ("A100", {torch.bfloat16: 312.0, torch.float32: 19.5}),
    ("MI300X", {torch.bfloat16: 1307.4, torch.float32: 163.4}),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense matrix products of one device; None for a device that is not known. A CPU is measured (0.2 s)."""
    if device.type == "cpu":
        return _measured_cpu_flops(dtype)
    return known_peak_flops(torch.cuda.get_device_name(device), dtype)


def known_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """As `peak_flops`, for a CUDA device's name."""
    if "MIG " in name:  # a slice of a device
        return None
    for known, peaks in PEAK_TFLOPS:
        if re.search(rf"\b{known}\b", name) and dtype in peaks:
            return peaks[dtype] * 1e12
    return None


def _measured_cpu_flops(dtype: torch.dtype, size: int = 1024) -> float:
    """The best of several matrix products with the threads that this process has."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    best = float("inf")
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
