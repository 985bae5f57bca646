"""This rank's device, and its share of memory.

device = init_device(config.debug)      # cuda:LOCAL_RANK, or the CPU with a share of its cores
device_memory()                         # bytes of the GPU; infinite on a CPU
"""

import math
import os

import torch

from titan_lite.config import Debug
from titan_lite.environment import usable_cores


def init_device(debug: Debug, float32_matmul_precision: str = "highest") -> torch.device:
    """Return this rank's GPU, or the CPU with a fair share of its cores, after setting seed,
    determinism and precision.
    """
    torch.set_float32_matmul_precision(float32_matmul_precision)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # True would write every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    # launch.py sets OMP_NUM_THREADS, unless the user has
    if "TITAN_LITE_COMMAND" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    return torch.device("cpu")


def device_memory() -> float:
    """Return the bytes of this rank's GPU; infinite on a CPU, see `host_memory`."""
    if not torch.cuda.is_available():
        return math.inf
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.cuda.get_device_properties(local_rank).total_memory


def host_memory() -> float:
    """Return the bytes of this machine's memory per rank on it."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return nbytes / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
