"""Let Inductor's overlap scheduler reorder and bucket collectives, by our cost model.

    before   w1 = wait(all_gather(s1)); w2 = wait(all_gather(s2))
             y = x @ w1; z = y @ w2
    after    w1 = wait(all_gather(s1)); a2 = all_gather(s2)
             y = x @ w1; w2 = wait(a2); z = y @ w2

It buckets those that stay hidden. Nothing pins the order, so no later pass may change it. What
differs between torch 2.11 and 2.13 is handled here and in torch_patches.py.
"""

import inspect
from typing import Any

from torch import Tensor
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import Graph, Node

from titan_lite.compile.settings import PassSettings
from titan_lite.compile.torch_patches import rooflines_replaced
from titan_lite.cost.op_cost import node_seconds
from titan_lite.graph import KINDS, kind_of, parameter_collectives, ranks_of, shards_of, wait_of


def overlap_by_inductor(graph: Graph, settings: PassSettings) -> int:
    """Reorder and bucket collectives, in place. Return how many are then overlapped."""
    if not parameter_collectives(graph):
        return 0
    give_own_values(graph)
    machine = settings.required_machine()
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
