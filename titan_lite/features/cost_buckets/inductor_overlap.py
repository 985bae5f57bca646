"""Let Inductor's overlap scheduler reorder and bucket collectives, by our cost model.

    before   w1 = wait(all_gather(s1)); w2 = wait(all_gather(s2))
             y = x @ w1; z = y @ w2
    after    w1 = wait(all_gather(s1)); a2 = all_gather(s2)
             y = x @ w1; w2 = wait(a2); z = y @ w2

It buckets those that stay hidden. Nothing pins the order, so no later pass may change it. What
differs between torch 2.11 and 2.13 is handled here.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor import utils as inductor_utils
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import Graph, Node
from torch.utils import _runtime_estimation

from titan_lite.compile.settings import PassSettings
from titan_lite.compile.torch_patches import replaced
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.graph import KINDS, kind_of, parameter_collectives, ranks_of, shards_of, wait_of


def overlap_by_inductor(graph: Graph, settings: PassSettings) -> int:
    """Reorder and bucket collectives, in place. Return how many are then overlapped."""
    if not parameter_collectives(graph):
        return 0
    give_own_values(graph)
    assert settings.machine is not None  # by rules.py
    machine = settings.machine
    shard_work = shards_of(graph)

    def estimate(node: Node, nbytes: int | None = None) -> float:
        """Return milliseconds. nbytes: the size of a collective, by default its own."""
        if node in shard_work:  # differs in size between ranks, and all ranks must decide the same
            return 0.0
        if nbytes is not None and node.target in KINDS:
            return 1e3 * machine.collective(kind_of(node), nbytes, ranks_of(node))
        return 1e3 * node_seconds(node, machine, settings.fused)

    options: dict[str, Any] = {
        "collective_bucketing": True,
        "insert_overlap_deps": False,
        "custom_runtime_estimation": estimate,
        "collective_estimator": "analytical",
        # torch >= 2.12; earlier versions use custom estimates alone
        "compute_estimator": "analytical",
        "bucket_mode": "default",
        # this would use NCCL's bandwidth on this machine, not our cost model
        "pre_bucketing_fsdp_collectives": False,
    }
    known = inspect.signature(overlap_scheduling.schedule_overlap_bucketing).parameters
    module = graph.owning_module
    assert module is not None
    with rooflines_replaced(machine, estimate):
        overlap_scheduling.schedule_overlap_bucketing(
            module, **{key: value for key, value in options.items() if key in known}
        )
    assert module.graph is graph
    name_parameters(graph)
    return sum(node.next is not wait_of(node) for node in parameter_collectives(graph))


def give_own_values(graph: Graph) -> None:
    """Give each node a fake result of its own.

    Copies of a block share theirs (model_graph.py), but Inductor identifies the inputs of a bucket
    by their fake tensors.
    """
    seen = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and id(value) in seen:
            value = value.detach()
            node.meta["val"] = value
        seen.add(id(value))


def name_parameters(graph: Graph) -> None:
    """Give buckets the names of their parameters, which Inductor keeps elsewhere."""
    for node in graph.nodes:
        if "bucketing_custom_sources" in node.meta:
            sources = node.meta["bucketing_custom_sources"]
            node.meta["bucket"] = [source["fqn"] for source in sources if "fqn" in source]


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
