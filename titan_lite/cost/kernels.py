"""Estimate how GPU kernels use the device: matmuls, attention, the clock.

    matmul_seconds(1, 16384, 14336, 4096, speed=0.84 * 989e12, multiprocessors=132)    # 2.5e-3
    attention_share(8192)                                                               # 0.94
    ATTENTION["H100"]["FA2"]                                                            # 0.31

A matmul is cut into tiles, and a wave of tiles runs at once, one on each multiprocessor; the last
wave may be partly empty. The constants are fitted to matmuls on an H100 in openxla/xla
(xla/service/gpu/model/matmul_interpolator_data.h, sizes 256 to 4096).
tests/unit/cost/test_kernels.py has the matmuls of the fit, and others that it has not seen.
"""

import math

# tile -> speed on one multiprocessor, relative to the largest tile. A smaller one reads its inputs
# more often.
TILES = {
    (128, 256): 1.0,
    (256, 128): 1.0,
    (128, 128): 0.85,
    (64, 128): 0.72,
    (128, 64): 0.72,
    (64, 64): 0.61,
}
TILE_OVERHEAD = 1.5e-6  # seconds of a wave: fill the pipeline, write the result
LAUNCH = 1.0e-6  # seconds of a matmul beyond the launch of any kernel
SPLITS = (1, 2, 4, 8)  # of the inner dimension
SPLIT_LENGTH = 256  # least length of a part of the inner dimension
# Bytes per second at which the parts of a split matmul are added, in the L2 cache.
SUM_BANDWIDTH = 2.5e12
SUM_LAUNCH = 1.5e-6  # seconds of adding them besides
# Time of a float8 matmul that sums in float32, relative to one with fast accumulation: 1.1 to 1.2
# (pytorch/ao issue 2377).
SLOW_ACCUMULATION = 1.15

# Share of the dense bf16 peak that causal attention reaches at a head dimension of 128 and long
# sequences, for 2 parts of forward and 5 of backward. The shares of forward are near published
# ones, and those of backward are partly assumed:
#   H100, FA2    0.355 (35%, arXiv 2407.08608) and 0.30, assumed
#   H100, FA3    0.62 and 0.50, assumed: 1.5 to 2 times FA2 (the same);
#                cuDNN is assumed to be as fast
#   A100, FA2    0.62 and 0.53, assumed within the 50 to 73% of arXiv 2307.08691;
#                cuDNN 0.82 of it (huggingface/transformers 48163)
#   B200, FA4    0.63 and 0.52 (Dao-AILab/flash-attention pull request 2280);
#                cuDNN is assumed to be as fast
# "auto" is what torch chooses: cuDNN on compute capabilities 9 and 10 if it is newer than 9.15.0,
# else FA2 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
ATTENTION = {
    "H100": {"auto": 0.52, "cudnn": 0.52, "FA2": 0.31, "FA3": 0.53},
    "H200": {"auto": 0.52, "cudnn": 0.52, "FA2": 0.31, "FA3": 0.53},
    "A100": {"auto": 0.55, "cudnn": 0.45, "FA2": 0.55},
    "B200": {"auto": 0.55, "cudnn": 0.55, "FA4": 0.55},
    "B300": {"auto": 0.55, "cudnn": 0.55, "FA4": 0.55},
    "GB200": {"auto": 0.55, "cudnn": 0.55, "FA4": 0.55},
}
# Tokens at which attention reaches half its speed. With 2,048 tokens causal attention has 0.79
# (FA2) and 0.84 (cuDNN) of the speed without a mask on an H20 (Dao-AILab/flash-attention issue
# 1310), which has few whole tiles there.
HALF_SPEED_KEYS = 500
IDLE_POWER = 100.0  # watts of a GPU whose multiprocessors do nothing
# The clock grows with the power above IDLE_POWER, to this exponent. Three published matmuls on an
# H100 at 500 W (pytorch/FBGEMM pull request 2546), relative to the plan at 700 W, give 0.74, 0.84
# and 0.96 in bfloat16, and 0.80, 0.94 and 0.81 in float8.
CLOCK_EXPONENT = 0.84


def matmul_seconds(
    batch: int, m: int, n: int, k: int, *, speed: float, multiprocessors: int
) -> float:
    """Return the seconds of a batch of (m, k) x (k, n) matmuls, without the launch of a kernel.

    speed: FLOP/s of the device with full waves of the largest tile.
    """
    best = math.inf
    for (rows, columns), relative_speed in TILES.items():
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        tile_speed = speed / multiprocessors * relative_speed
        for split in SPLITS:
            if split > 1 and k < SPLIT_LENGTH * split:
                break
            waves = math.ceil(tiles * split / multiprocessors)
            seconds = waves * (2 * rows * columns * k / split / tile_speed + TILE_OVERHEAD)
            if split > 1:  # float32 parts are written and read, the result is written
                seconds += (4 * split + 2) * batch * m * n / SUM_BANDWIDTH + SUM_LAUNCH
            best = min(best, seconds)
    return best + LAUNCH


def attention_share(keys: int) -> float:
    """Return the speed of attention over `keys` tokens, relative to that on long sequences."""
    return keys / (keys + HALF_SPEED_KEYS)


def clock_share(limit: float, nominal: float, exponent: float = CLOCK_EXPONENT) -> float:
    """Return the clock under a power limit, relative to that at the nominal power.

    limit, nominal: watts; limit 0: none, which gives 1.

    Dynamic power grows with frequency times voltage squared. Voltage follows the frequency at high
    clocks, which gives a cube root (exponent 1/3), and stays at its minimum at low clocks, which
    gives a straight line (1). The default is the median of an H100's matmuls. Two other pairs have
    exponents near 0.46 and 0.9: H100 PCIe beside SXM, at 350 and 700 W, per multiprocessor
    (stas00/ml-engineering); GB300 at 500 and 1400 W, 617 and 1600 to 2174 TFLOP/s
    (facebookexperimental/triton pull request 2023).
    """
    if not 0 < limit < nominal:
        return 1.0
    return ((limit - IDLE_POWER) / (nominal - IDLE_POWER)) ** exponent
