"""Run Inductor's overlap scheduler on our cost model.

It reorders collectives and buckets those that stay hidden.

    schedule_by_inductor(graph_module, load_machine("H100"), fused=True)      # in place

Differences between torch 2.11 and 2.13 are handled in this file alone.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._inductor import utils as inductor_utils
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import GraphModule, Node
from torch.utils import _runtime_estimation

from titan_lite.compile.replacing import replaced
from titan_lite.cost.collectives import KINDS, kind_of, ranks_of
from titan_lite.cost.machine import Machine
from titan_lite.cost.op_cost import node_seconds
from titan_lite.cost.timeline import shards_of


def schedule_by_inductor(module: GraphModule, machine: Machine, *, fused: bool) -> None:
    """Reorder and bucket collectives in place.

    Nothing pins the order, so no later pass may change it.
    """
    shard_work = shards_of(module.graph)

    def estimate(node: Node, nbytes: int | None = None) -> float:
        """Return milliseconds. nbytes: the size of a collective, by default its own."""
        if (
            node in shard_work
        ):  # shards differ in size between ranks, and all ranks must decide the same
            return 0.0
        if nbytes is not None and node.target in KINDS:
            return 1e3 * machine.collective(kind_of(node), nbytes, ranks_of(node))
        return 1e3 * node_seconds(node, machine, fused)

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
    with _patched_rooflines(machine, estimate):
        overlap_scheduling.schedule_overlap_bucketing(
            module, **{key: value for key, value in options.items() if key in known}
        )


@contextmanager
def _patched_rooflines(machine: Machine, estimate: Callable[[Node], float]) -> Iterator[None]:
    """Replace torch's rooflines, to query no GPU.

    torch computes them even with custom estimates.
    """

    def memory_bandwidth() -> float:
        return machine.memory_bandwidth

    def device_tflops(dtype: torch.dtype) -> float:
        return machine.flops(dtype) / 1e12

    def cost(node: Node, *_: Any) -> tuple[float, None]:
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
            stack.enter_context(replaced(overlap_scheduling, "benchmark_node_with_cache_key", cost))
        yield
