"""Estimate the seconds, FLOPs and bytes of a graph's nodes on a machine.

    node_seconds(node, machine)                     # of a computation, or of a collective
    node_seconds(node, machine, fused=False)        # of an operator that is a kernel of its own
    flops_of(node)                                  # (of matmuls, of attention)

A computation follows the roofline model: the longer of arithmetic and memory traffic counts, at
the efficiencies that large matmuls and FlashAttention reach (kernels.py).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from titan_lite.cost.kernels import SLOW_ACCUMULATION, attention_share, matmul_seconds
from titan_lite.cost.machine import GB, MICROSECOND, Machine
from titan_lite.graph import (
    KINDS,
    MATMULS,
    all_readers,
    aten,
    base_of,
    collective_bytes,
    fuses_with_inputs,
    is_all_gather,
    is_free,
    is_fused_away,
    is_pointwise,
    kind_of,
    nbytes_of,
    ranks_of,
)
from titan_lite.models.experts import GROUPED_GEMM, GROUPED_GEMM_OF_WEIGHTS

# Matmuls of groups of rows (models/experts.py): in forward and of rows; of weights
GROUPED = frozenset({GROUPED_GEMM, GROUPED_GEMM_OF_WEIGHTS})


def node_seconds(node: Node, machine: Machine, fused: bool = True) -> float:
    """Return the seconds that `node` occupies the device, or for a collective its links.

    fused: count reads and writes of a region of pointwise operators once, as Inductor compiles it
    into one kernel, instead of once per operator. Views, inputs and waits cost nothing.
    meta["seconds"] of a node, where it is given, replaces the estimate.
    """
    if "seconds" in node.meta:
        return node.meta["seconds"]
    if node.op != "call_function" or is_free(node):
        return 0.0
    if node.target in KINDS:
        return _collective_seconds(node, machine, fused)
    return _computation_seconds(node, machine, fused)


def _computation_seconds(node: Node, machine: Machine, fused: bool) -> float:
    seconds = machine.memory_traffic(_bytes_moved(node, fused, on_gpu=not machine.is_cpu))
    matmul_flops, attention_flops = flops_of(node)
    if matmul_flops:
        seconds = max(seconds, _matmul_seconds(node, matmul_flops, machine))
    elif attention_flops:
        seconds = max(seconds, _attention_seconds(node, attention_flops, machine))
    if not seconds:
        return 0.0
    return seconds + machine.launch * MICROSECOND * node.meta.get("parts", 1)


def _matmul_seconds(node: Node, flops: float, machine: Machine) -> float:
    """Return the seconds of a matmul's arithmetic alone: no memory traffic, no launch."""
    if node.target in GROUPED:
        return _grouped_seconds(node, flops, machine)
    a, b = (factor.meta["val"] for factor in _factors(node))
    speed = machine.flops(a.dtype) * machine.matmul_efficiency
    if not machine.multiprocessors:
        return flops / speed
    if node.target is aten._scaled_mm.default and not _arguments(node).get("use_fast_accum"):
        speed /= SLOW_ACCUMULATION
    *batch, m, k = a.shape
    n = b.shape[-1]
    parts = node.meta.get("parts", 1)  # Inductor computes each rank's tokens by themselves
    return parts * matmul_seconds(
        math.prod(batch), m // parts, n, k, speed=speed, multiprocessors=machine.multiprocessors
    )


def _grouped_seconds(node: Node, flops: float, machine: Machine) -> float:
    """Return the seconds of a grouped GEMM's arithmetic, with equally loaded experts: a batch of
    matmuls, each of an expert's rows. Its tiles begin anew with each expert.
    """
    a, b, ends = (cast(Any, argument).meta["val"] for argument in node.args[:3])
    speed = machine.flops(a.dtype) * machine.matmul_efficiency
    if not machine.multiprocessors:
        return flops / speed
    experts = ends.shape[0]
    rows = math.ceil(expected_rows(node) / experts)
    n = b.shape[-1]
    is_of_weights = node.target is GROUPED_GEMM_OF_WEIGHTS  # it sums over an expert's rows
    m = a.shape[1] if is_of_weights else rows
    k = rows if is_of_weights else a.shape[1]
    return matmul_seconds(experts, m, n, k, speed=speed, multiprocessors=machine.multiprocessors)


def expected_rows(node: Node) -> int:
    """Return the rows that a grouped GEMM computes of those that there is room for: all, or as
    many as the model's code names (models/experts.py).
    """
    rows = cast(Any, node.args[0]).meta["val"].shape[0]
    return cast(int, node.meta.get("custom", {}).get("balanced_rows", rows))


def _bytes_of_groups(node: Node) -> int:
    """Return the bytes that a grouped GEMM reads and writes, without rows in no group."""
    a, b = cast(Any, node.args[:2])
    share = expected_rows(node) / a.meta["val"].shape[0]
    if node.target is GROUPED_GEMM_OF_WEIGHTS:
        of_rows = nbytes_of(a) + nbytes_of(b)
        of_experts = nbytes_of(node)
    else:
        of_rows = nbytes_of(a) + nbytes_of(node)
        of_experts = nbytes_of(b)
    return round(share * of_rows) + of_experts


def _attention_seconds(node: Node, flops: float, machine: Machine) -> float:
    """Return the seconds of attention's arithmetic alone: no memory traffic, no launch."""
    attention = _attention_of(node)
    share = attention_share(attention.keys) if machine.multiprocessors else 1.0
    return flops / (machine.flops(attention.dtype) * machine.attention_efficiency * share)


def _collective_seconds(node: Node, machine: Machine, fused: bool) -> float:
    ranks = ranks_of(node)
    matmuls = node.meta.get("fused_with")
    if matmuls is not None and machine.multiprocessors and machine.nodes(ranks) == 1:
        return _fused_collective_seconds(node, matmuls, machine, fused)
    return machine.collective(kind_of(node), collective_bytes(node), ranks)


def _fused_collective_seconds(
    node: Node, matmuls: Sequence[Node], machine: Machine, fused: bool
) -> float:
    """Return the seconds of a collective that the matmuls which Inductor fuses with it do not
    hide.

    Each rank computes its own part while the next one travels, by copy engines, which leave all
    multiprocessors to the matmuls. Before the first one, a rank copies its shard to where others
    read it; after a matmul, it sums the parts. Ranks of a node meet at both ends
    (torch.distributed._symmetric_memory). Copies that put tokens first are not counted.
    """
    nbytes = collective_bytes(node)
    ranks = len(ranks_of(node))
    bandwidth = machine.intra_node.bandwidth * machine.link_efficiency * GB
    of_part = machine.launch * MICROSECOND + nbytes / ranks / bandwidth
    hiding = sum(node_seconds(matmul, machine, fused) for matmul in matmuls) / ranks
    exposed = (ranks - 1) * max(0.0, of_part - hiding)
    copied = 2 * nbytes / ranks if is_all_gather(node) else nbytes + nbytes / ranks
    meetings = 2 * machine.collective_launch * MICROSECOND
    return exposed + machine.memory_traffic(copied) + meetings


def flops_of(node: Node) -> tuple[float, float]:
    """Return floating-point operations (of matmuls, of attention), both 0 for other nodes.

    Attention has two matmuls forward and five backward. Causal attention computes half of each; if
    there are fewer queries than keys, they are the last tokens (distributed/context_parallel.py).
    The operator of models/attention.py is causal, and a sequence counts as one document, since
    the ends of documents are known only in a run.
    """
    if node.op != "call_function":
        return 0.0, 0.0
    if node.target in MATMULS:
        a, b = (factor.meta["val"].shape for factor in _factors(node))
        return 2.0 * math.prod(a) * b[-1], 0.0
    if node.target in GROUPED:
        a, b = (cast(Any, argument).meta["val"].shape for argument in node.args[:2])
        return 2.0 * expected_rows(node) * math.prod(a[1:]) * b[-1], 0.0
    name = str(node.target)
    if "scaled_dot_product" not in name and "flash_attention" not in name:
        return 0.0, 0.0
    attention = _attention_of(node)
    matmuls = 5 if "backward" in name else 2
    attended = 1.0  # share of the keys
    if attention.causal:
        attended = 1 - 0.5 * min(1.0, attention.queries / attention.keys)
    return 0.0, matmuls * 2.0 * math.prod(attention.query_shape) * attention.keys * attended


class _Attention(NamedTuple):
    query_shape: torch.Size
    queries: int  # tokens
    keys: int  # tokens
    dtype: torch.dtype
    causal: bool


def _attention_of(node: Node) -> _Attention:
    """Return what an attention operator computes. Ours has (B, T, H, D), torch's (B, H, T, D)."""
    is_ours = str(node.target).startswith("titan_lite.")
    tokens = 1 if is_ours else -2  # dim
    arguments = _arguments(node)
    query = arguments["query"].meta["val"]
    key = arguments["key"].meta["val"]
    causal = is_ours or bool(arguments.get("is_causal"))
    return _Attention(query.shape, query.shape[tokens], key.shape[tokens], key.dtype, causal)


def _factors(node: Node) -> Sequence[Node]:
    """Return the two factors of a matmul."""
    arguments = cast(Any, node.args)
    return arguments[:2] if node.target is aten._scaled_mm.default else arguments[-2:]


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name."""
    names = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _bytes_moved(node: Node, fused: bool, on_gpu: bool) -> int:
    """Return the bytes that a computation reads and writes."""
    if on_gpu and not fused:
        kernel = _library_kernel(node)
        if kernel is not None:
            return _bytes_of_part(node, kernel)
    target = node.target
    nbytes = nbytes_of(node)
    if target is aten.nll_loss_forward.default:  # reads one column of each row
        return 2 * nbytes_of(node.all_input_nodes[1])
    if target is aten.nll_loss_backward.default:  # writes zeros and one column of each row
        return nbytes
    if target is aten.embedding.default:  # reads only the selected rows
        return 2 * nbytes
    if target is aten.embedding_dense_backward.default:
        return 2 * nbytes + nbytes_of(node.all_input_nodes[0])
    if target is aten.gather.default and fused:
        return 3 * nbytes
    if target in GROUPED:
        return _bytes_of_groups(node)
    sources: Sequence[Node] = node.all_input_nodes
    if fused and fuses_with_inputs(node):
        sources = [source for source in sources if not is_pointwise(base_of(source))]
    written = 0 if fused and is_fused_away(node) else nbytes
    return sum(map(nbytes_of, sources)) + written


_LibraryKernel = tuple[str, bool]  # (name of the call, True in backward)


def _library_kernel(node: Node) -> _LibraryKernel | None:
    """Return the call that a GPU computes in one kernel, and of which `node` is a part.

    None for other nodes. On a CPU, rms_norm is traced as several operators.
    """
    forward = node.meta.get("source_fn_stack")
    backward = node.meta.get("fwd_source_fn_stack")
    stack = forward or backward
    if not stack or stack[-1][1] is not torch.rms_norm:
        return None
    return stack[-1][0], "fwd_source_fn_stack" in node.meta


def _bytes_of_part(node: Node, kernel: _LibraryKernel) -> int:
    """Return the bytes that a part of a library's kernel reads and writes outside of it."""
    read = [source for source in node.all_input_nodes if _library_kernel(base_of(source)) != kernel]
    is_stored = any(_library_kernel(reader) != kernel for reader in all_readers(node))
    return sum(map(nbytes_of, read)) + (nbytes_of(node) if is_stored else 0)
