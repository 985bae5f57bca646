"""Replace attributes of torch for a while: each with its reason, and the versions that need it.

    with no_random_state_saved():
        min_cut_rematerialization_partition(joint, inputs)

The links are to the code that is replaced. Each context restores what it found.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch import partitioners
from torch._inductor import utils as inductor_utils
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import GraphModule, Node
from torch.utils import _runtime_estimation

from titan_lite.cost.machine import Machine


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Return a context in which the attribute `name` of a module or class is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def is_compiling() -> Iterator[None]:
    """Return a context in which `torch.compiler.is_compiling()` is True.

    torch.compile has its own; tracing without it has none. All versions:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/compiler/__init__.py#L472
    """
    with replaced(torch.compiler, "_is_compiling_flag", True):
        yield


@contextmanager
def no_random_state_saved() -> Iterator[None]:
    """Return a context in which the partitioner saves no random-number state.

    It would for operators that it recomputes. Attention operators count as random because of
    dropout, which Llama does not use. All versions:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/partitioners.py#L190
    """

    def has_none(graph: GraphModule) -> bool:
        return False

    with replaced(partitioners, "has_recomputable_rng_ops", has_none):
        yield


@contextmanager
def rooflines_replaced(machine: Machine, estimate: Callable[[Node], float]) -> Iterator[None]:
    """Return a context in which Inductor's overlap scheduler asks `machine` and no GPU.

    It computes rooflines with this GPU's bandwidth and FLOPS even for nodes that have a custom
    estimate, and needs triton for that. estimate: milliseconds of a node. All versions:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_runtime_estimation.py
    """

    def memory_bandwidth() -> float:
        return machine.memory_bandwidth  # GB/s

    def device_tflops(dtype: torch.dtype) -> float:
        return machine.flops(dtype) / 1e12

    def benchmark(node: Node, *_: object) -> tuple[float, None]:
        return estimate(node), None

    with ExitStack() as stack:
        for module in (inductor_utils, _runtime_estimation):
            stack.enter_context(replaced(module, "get_gpu_dram_gbps", memory_bandwidth))
            stack.enter_context(replaced(module, "get_device_tflops", device_tflops))
        # torch 2.11 also benchmarks nodes that have custom estimates
        if hasattr(overlap_scheduling, "estimate_runtime_analytical"):
            stack.enter_context(
                replaced(overlap_scheduling, "estimate_runtime_analytical", estimate)
            )
            stack.enter_context(
                replaced(overlap_scheduling, "benchmark_node_with_cache_key", benchmark)
            )
        yield
