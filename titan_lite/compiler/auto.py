"""Inductor's overlap scheduler, priced by our machine model: it orders collectives and buckets what that does not expose.

    schedule_by_inductor(graph_module, load_machine("H100"), fused=True)      # in place

What torch 2.11 and 2.13 do differently stands here and nowhere else.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._inductor import utils as inductor_utils
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import GraphModule, Node
from torch.utils import _runtime_estimation

from titan_lite.compiler.collectives import KINDS, kind_of, ranks_of
from titan_lite.compiler.hardware import Machine
from titan_lite.compiler.timeline import shards_of


def schedule_by_inductor(module: GraphModule, machine: Machine, *, fused: bool) -> None:
    """In place; nothing is added that would hold the order, so no later pass may change it."""
    own = shards_of(module.graph)

    def estimate(node: Node, nbytes: int | None = None) -> float:
        """Milliseconds; nbytes: as if a collective had so many. The same on all ranks, whose shards have not all as many rows."""
        if node in own:
            return 0.0
        if nbytes is not None and node.target in KINDS:
            return 1e3 * machine.collective(kind_of(node), nbytes, ranks_of(node))
        return 1e3 * machine.cost(node, fused)

    options: dict[str, Any] = {
        "collective_bucketing": True,
        "insert_overlap_deps": False,
        "custom_runtime_estimation": estimate,
        "collective_estimator": "analytical",
        "compute_estimator": "analytical",  # from torch 2.12 on; before, custom estimates alone
        "bucket_mode": "default",
        "pre_bucketing_fsdp_collectives": False,  # by NCCL's bandwidth on this machine, and not by our prices
    }
    known = inspect.signature(overlap_scheduling.schedule_overlap_bucketing).parameters
    with _numbers_of(machine, estimate):
        overlap_scheduling.schedule_overlap_bucketing(module, **{key: value for key, value in options.items() if key in known})


@contextmanager
def _numbers_of(machine: Machine, estimate: Callable[[Node], float]) -> Iterator[None]:
    """Within: torch's rooflines, which it computes even where it is given estimates, do not ask triton for a GPU."""
    with ExitStack() as stack:
        for module in (inductor_utils, _runtime_estimation):
            stack.enter_context(mock.patch.object(module, "get_gpu_dram_gbps", return_value=machine.memory_bandwidth))
            stack.enter_context(mock.patch.object(module, "get_device_tflops", lambda dtype: machine.flops(dtype) / 1e12))
        # torch 2.11 would also run what it is given prices of
        if hasattr(overlap_scheduling, "estimate_runtime_analytical"):
            stack.enter_context(mock.patch.object(overlap_scheduling, "estimate_runtime_analytical", estimate))
            price = lambda node, *_: (estimate(node), None)  # noqa: E731
            stack.enter_context(mock.patch.object(overlap_scheduling, "benchmark_node_with_cache_key", price))
        yield
