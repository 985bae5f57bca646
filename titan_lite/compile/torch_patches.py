"""Replace attributes of torch for a while: each with its reason, and the versions that need it.

    with meshes_in_cache_keys():
        compile_fx_inner(graph, inputs)

The links are to the code that is replaced. Each context restores what it found.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch import partitioners
from torch._inductor import utils as inductor_utils
from torch._inductor.codecache import FxGraphCachePickler
from torch._inductor.fx_passes import overlap_scheduling
from torch.distributed.device_mesh import DeviceMesh
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
def meshes_in_cache_keys() -> Iterator[None]:
    """Return a context in which keys of Inductor's cache identify a DeviceMesh by its ranks.

    A mesh is an input of graphs with DTensors. torch 2.13 pickles it with pickle's memo, which
    depends on the identity of equal strings, so that no key matches another run's:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/codecache.py#L827
    """
    reduce: Any = FxGraphCachePickler._reduce_fake_script_object

    def reduce_mesh(pickler: FxGraphCachePickler, script_object: Any) -> Any:  # noqa: ANN401 torch's
        mesh = script_object.real_obj
        if not isinstance(mesh, DeviceMesh):
            return reduce(pickler, script_object)
        return str, (f"{mesh.device_type} {mesh.mesh_dim_names} {mesh.mesh.tolist()}",)

    with replaced(FxGraphCachePickler, "_reduce_fake_script_object", reduce_mesh):
        yield


@contextmanager
def no_random_state_saved() -> Iterator[None]:
    """Return a context in which the partitioner saves no random-number state.

    It would for operators that it recomputes. Attention operators count as random because of
    dropout, which Llama does not use. torch 2.13 confuses saved states with the meshes of DTensors,
    which it saves as well:
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
