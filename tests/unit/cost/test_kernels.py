"""Matmuls by shape against published ones on an H100; attention and the clock by
hand-worked cases.
"""

import dataclasses
import statistics

import pytest
import torch
from torch.fx import Graph

from titan_lite.cost.kernels import (
    ATTENTION,
    CLOCK_EXPONENT,
    LAUNCH,
    SLOW_ACCUMULATION,
    SUM_BANDWIDTH,
    SUM_LAUNCH,
    TILE_OVERHEAD,
    TILES,
    attention_share,
    clock_share,
    matmul_seconds,
)
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.profiles import PROFILES

H100 = PROFILES["H100"]
# batch, m, n, k, TFLOP/s in bfloat16 (openxla/xla,
# xla/service/gpu/model/matmul_interpolator_data.h, sm_90): those of the fit
FITTED = """
1 1024 2048 256 139.5, 1 256 2048 256 41.8, 1 4096 512 512 238.8, 1 512 256 512 21.8
1 256 2048 4096 285.9, 1 4096 1024 512 343.7, 1 2048 2048 2048 632.0, 1 256 512 4096 91.7
1 256 1024 256 22.7, 1 4096 4096 256 392.2, 1 2048 512 2048 347.7, 1 4096 4096 4096 783.3
1 512 4096 1024 373.3, 1 512 256 4096 91.1, 1 256 1024 4096 172.3, 1 4096 2048 512 447.0
1 2048 256 1024 135.8, 1 2048 1024 2048 523.3, 1 1024 256 1024 68.3, 1 4096 256 2048 304.7
1 1024 1024 2048 350.0, 1 256 4096 2048 324.6, 1 1024 512 2048 220.0, 1 512 2048 1024 232.6
1 4096 512 1024 370.8, 1 1024 2048 2048 524.3, 2 4096 4096 2048 763.0, 2 4096 1024 4096 750.6
2 4096 2048 4096 783.2, 2 2048 4096 1024 678.7, 2 2048 2048 1024 600.2, 2 4096 512 4096 729.7
4 4096 4096 512 619.9, 4 4096 4096 256 503.9, 4 2048 2048 2048 725.7, 4 1024 2048 2048 712.7
4 4096 1024 1024 673.8, 4 4096 256 2048 588.7, 4 1024 1024 2048 626.1
"""
OTHERS = """
1 4096 2048 4096 758.4, 4 4096 4096 2048 764.6, 1 2048 2048 1024 493.9, 4 2048 4096 1024 688.6
2 1024 2048 2048 631.2, 1 1024 1024 512 145.6, 4 4096 512 2048 703.6, 4 512 4096 2048 699.7
1 2048 512 1024 235.9, 1 512 2048 4096 430.5, 2 2048 2048 4096 756.7, 1 2048 1024 1024 373.3
1 2048 4096 512 450.4, 4 2048 4096 4096 801.9, 1 1024 512 512 82.2, 1 1024 2048 512 237.6
1 512 2048 256 79.3, 1 2048 256 2048 216.1, 1 1024 4096 4096 738.5, 1 256 256 4096 84.3
1 512 1024 4096 309.6, 2 2048 1024 4096 737.2, 1 512 512 4096 174.5, 2 2048 512 4096 645.3
2 1024 4096 2048 714.6, 1 1024 4096 256 209.7, 1 4096 512 2048 521.7, 1 256 4096 1024 225.2
2 4096 4096 1024 693.0, 2 2048 4096 2048 729.1
"""

# m, n, k, TFLOP/s in bfloat16 and in float8 of an H100 at 500 W (pytorch/FBGEMM pull request 2546;
# float8 by a kernel in Triton)
AT_500_WATTS = (
    (8192, 8192, 8192, 585, 1126),
    (65536, 8192, 7168, 575, 1083),
    (65536, 3584, 8192, 546, 1141),
)
# The same in float8 on an H800 SXM, which computes as an H100, with sums in float32
# (deepseek-ai/DeepGEMM pull request 73)
FLOAT8 = (
    (4096, 24576, 1536, 1166),
    (4096, 32768, 512, 748),
    (4096, 7168, 16384, 1470),
    (4096, 7168, 2048, 1204),
)


def seconds_of(batch, m, n, k, machine=H100):
    shape = ([batch] if batch > 1 else []) + [m, k]
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    matmul = graph.call_function(
        (torch.ops.aten.bmm if batch > 1 else torch.ops.aten.mm).default, (a, b)
    )
    a.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    b.meta["val"] = torch.empty(*shape[:-2], k, n, dtype=torch.bfloat16, device="meta")
    matmul.meta["val"] = a.meta["val"] @ b.meta["val"]
    return node_seconds(matmul, machine)


def errors(rows):
    for row in rows.replace(",", "\n").strip().splitlines():
        *shape, published = map(float, row.split())
        batch, m, n, k = map(int, shape)
        yield seconds_of(batch, m, n, k) / (2 * batch * m * n * k / (published * 1e12)) - 1


def test_matmuls_are_as_fast_as_published_also_those_that_the_fit_has_not_seen():
    for rows, within in ((FITTED, 35), (OTHERS, 27)):
        found = [abs(error) for error in errors(rows)]
        assert statistics.median(found) < 0.04
        assert sum(error < 0.1 for error in found) >= within


def test_larger_matmuls_of_normal_numbers():
    """cuBLAS on an H100 SXM (pranjalssh/fast.cu, README)."""
    for size, published in ((6144, 741.1), (8192, 797.8)):
        assert 2 * size**3 / seconds_of(1, size, size, size) / 1e12 == pytest.approx(
            published, rel=0.1
        )


def test_float8_matmuls_that_sum_in_float32():
    speed = H100.flops(torch.float8_e4m3fn) * H100.matmul_efficiency / SLOW_ACCUMULATION
    found = [
        2e-12 * m * n * k / matmul_seconds(1, m, n, k, speed=speed, multiprocessors=132) / each
        for m, n, k, each in FLOAT8
    ]
    assert statistics.median(found) == pytest.approx(1, abs=0.05)
    assert max(abs(ratio - 1) for ratio in found) < 0.25


def test_a_last_wave_that_is_not_full_costs_a_wave():
    def seconds(columns):  # one tile of 128 x 256 for each 256 columns
        return matmul_seconds(1, 128, 256 * columns, 8192, speed=132e12, multiprocessors=132)

    wave = 2 * 128 * 256 * 8192 / 1e12 + 1.5e-6
    assert seconds(132) == pytest.approx(wave + 1e-6)
    assert seconds(2 * 132) == pytest.approx(2 * wave + 1e-6)
    assert seconds(140) > 1.2 * wave  # not 140 / 132, also with smaller tiles


def test_a_machine_without_multiprocessors_has_one_efficiency():
    plain = Machine(
        "CPU",
        {"float32": 1.0, "bfloat16": 1.0},
        1,
        1e9,
        H100.intra_node,
        H100.inter_node,
        launch=0.0,
    )
    assert seconds_of(1, 300, 300, 300, plain) == pytest.approx(2 * 300**3 / 0.7e12)


def test_attention_by_kernel_and_length():
    assert attention_share(500) == 0.5
    assert attention_share(8192) > 0.94
    assert (
        H100.with_attention_kernel("FA2").attention_efficiency
        == ATTENTION["H100"]["FA2"]
        < H100.attention_efficiency
    )
    assert H100.with_attention_kernel("auto") == H100
    cluster = dataclasses.replace(H100, name="cluster", like="H100")
    assert cluster.with_attention_kernel("FA2").attention_efficiency == ATTENTION["H100"]["FA2"]
    assert PROFILES["MI300X"].with_attention_kernel("FA2") == PROFILES["MI300X"]


def test_a_power_limit_lowers_the_clock():
    assert clock_share(0, 700) == clock_share(700, 700) == clock_share(800, 700) == 1
    assert clock_share(500, 700) == pytest.approx((400 / 600) ** CLOCK_EXPONENT)
    limited = dataclasses.replace(H100, power=500)
    share = limited.flops(torch.bfloat16) / H100.flops(torch.bfloat16)
    assert share == pytest.approx((400 / 600) ** CLOCK_EXPONENT)
    own = dataclasses.replace(limited, clock_exponent=1 / 3)  # the law of a machine's file
    share = own.flops(torch.bfloat16) / H100.flops(torch.bfloat16)
    assert share == pytest.approx((400 / 600) ** (1 / 3))


def test_matmuls_under_a_power_limit_are_as_fast_as_published():
    limited = dataclasses.replace(H100, power=500)
    for m, n, k, *published in AT_500_WATTS:
        for dtype, tflops in zip((torch.bfloat16, torch.float8_e4m3fn), published, strict=True):
            peak = limited.flops(dtype) * limited.matmul_efficiency
            seconds = matmul_seconds(1, m, n, k, speed=peak, multiprocessors=132)
            assert 2 * m * n * k / seconds / 1e12 == pytest.approx(tflops, rel=0.06)


def test_parts_of_a_split_matmul_are_read_in_float32_and_the_sum_is_written_in_bfloat16():
    """One tile, so long that eight parts are fastest: the rest of its time is adding them."""
    speed, rows, columns, inner = 1e12, 64, 64, 2**16
    tile_speed = speed / 132 * TILES[rows, columns]
    computing = 2 * rows * columns * inner / 8 / tile_speed + TILE_OVERHEAD
    nbytes = 8 * 4 * rows * columns + 2 * rows * columns
    expected = computing + nbytes / SUM_BANDWIDTH + SUM_LAUNCH + LAUNCH
    found = matmul_seconds(1, rows, columns, inner, speed=speed, multiprocessors=132)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "published"),
    # TFLOP/s in bfloat16 of the fastest matmul that a search over sizes found (stas00/ml-engineering,
    # compute/accelerator/README.md)
    [
        ("A100", 271.2),
        ("H100", 794.5),
        ("B200", 1745.0),
        ("B300", 1769.0),
        ("GB200", 1822.0),
        ("MI300X", 668.4),
        ("MI325X", 784.9),
        ("MI355X", 1565.0),
    ],
)
def test_the_fastest_matmul_of_a_device_is_as_fast_as_published(name, published):
    machine = PROFILES[name]
    speed = machine.flops(torch.bfloat16) * machine.matmul_efficiency
    sizes = (4096, 8192, 16384, 32768)
    fastest = max(
        2
        * m
        * n
        * k
        / matmul_seconds(1, m, n, k, speed=speed, multiprocessors=machine.multiprocessors)
        for m in sizes
        for n in sizes
        for k in sizes
    )
    # the law that fits all matmuls of an H100 is 3% above its fastest one
    assert fastest / 1e12 == pytest.approx(1.03 * published, rel=0.02)
