"""Peaks by the device's name: the vendors' dense figures, nothing for a device that is not in the
table, a CPU measured.
"""

import itertools

import pytest
import torch

from titan_lite.cost import measure
from titan_lite.cost.measure import find_machine, peak_flops
from titan_lite.cost.profiles import load_machine

# (name as torch.cuda.get_device_name gives it, bfloat16, float32), in TFLOP/s
DEVICES = [
    ("NVIDIA B200", 2250.0, 80.0),
    ("NVIDIA H200", 989.4, 66.9),
    ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
    ("NVIDIA H100 PCIe", 756.0, 51.2),
    ("NVIDIA H100 NVL", 835.5, 60.0),
    ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
    ("NVIDIA A100-PCIE-40GB", 312.0, 19.5),
    ("AMD Instinct MI300X", 1307.4, 163.4),
]
UNKNOWN = ["NVIDIA GeForce RTX 4090", "NVIDIA H20", "Tesla V100-SXM2-16GB", "AMD Instinct MI250X"]
NOT_THE_ONE_IN_THE_TABLE = ["NVIDIA RTX A1000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]


@pytest.mark.parametrize(("name", "bfloat16", "float32"), DEVICES)
def test_a_known_device(name, bfloat16, float32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    assert peak_flops(None, device, torch.bfloat16) == pytest.approx(bfloat16 * 1e12)
    assert peak_flops(load_machine("B200"), device, torch.float32) == pytest.approx(float32 * 1e12)


@pytest.mark.parametrize("name", [*UNKNOWN, *NOT_THE_ONE_IN_THE_TABLE])
def test_an_unknown_device_has_the_peak_that_a_recipe_states_or_none(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    stated = load_machine("H100").flops(torch.bfloat16)
    for device in (torch.device("cuda"), torch.device("cpu")):
        assert peak_flops(None, device, torch.bfloat16) is None
        assert peak_flops(load_machine("H100"), device, torch.bfloat16) == stated


def test_this_cpu_is_measured(monkeypatch):
    """By a clock on which each matmul and each copy takes half a second."""
    monkeypatch.setattr(measure.time, "perf_counter", itertools.count(0, 0.5).__next__)
    machine = find_machine("", torch.device("cpu"))
    assert machine.flops(torch.float32) == 4e9  # 2 * 1024**3 / 0.5, to one digit
    assert machine.memory_bandwidth == 0.07  # GB/s, of 2 * 2**24 bytes
    assert find_machine("H100", torch.device("cpu")) is load_machine("H100")
