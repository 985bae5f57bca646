"""Model a machine by its datasheet, and estimate the seconds that the nodes of a graph take on it.

    machine = load_machine("H100")                              # profiles.py
    machine.cost(node)                                          # seconds of a computation or a collective
    machine.collective("all_gather", nbytes=2**30, ranks=range(128))

The passes that schedule collectives, their reports and the planner share these costs. A
computation follows the roofline model: the longer of arithmetic and memory traffic counts, at the
efficiencies that large matrix products and FlashAttention reach. A collective of GPUs is NCCL's
(nccl.py), that of others a ring (arXiv 1909.09756): a latency per hop, plus the bytes over the
slowest link.
"""

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from titan_lite.cost.collectives import (
    KINDS,
    aten,
    collective_bytes,
    collectives,
    kind_of,
    nbytes_of,
    ranks_of,
)
from titan_lite.cost.kernels import (
    ATTENTION,
    CLOCK_EXPONENT,
    SLOW_ACCUMULATION,
    attention_share,
    clock_share,
    product_seconds,
)
from titan_lite.cost.nccl import CHANNELS, all_to_all_latency, nccl_seconds

GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Link:
    """A link between two ranks."""

    bandwidth: float  # GB/s of one rank, in each direction
    latency: float  # microseconds per hop


@dataclass(frozen=True)
class Machine:
    """A rank's device and links."""

    name: str
    tflops: Mapping[str, float]  # dense peak in TFLOP/s, by dtype
    memory: float  # GiB
    memory_bandwidth: float  # GB/s, reads and writes together
    intra_node: Link
    inter_node: Link  # one rank's own network card
    ranks_per_node: int = 8
    launch: float = 3.0  # microseconds of overhead per kernel
    # microseconds of the host for an operator that no graph was compiled for; 0: not planned
    host: float = 0.0
    collective_launch: float = 14.0  # microseconds of overhead per collective
    multiprocessors: int = (
        0  # of a GPU, which cuts matrix products into tiles (kernels.py); 0: none
    )
    nvls: float = (
        0.0  # bandwidth of all-reduces in the switch of a node, relative to a ring's; 0: none
    )
    nominal_power: float = 700.0  # watts
    power: float = 0.0  # watts that the device is limited to; 0: nominal_power
    clock_exponent: float = (
        CLOCK_EXPONENT  # of the clock over the power above that of an idle GPU (clock_share)
    )
    matmul_efficiency: float = 0.7  # share of the peak that large matrix products reach
    attention_efficiency: float = 0.4
    memory_efficiency: float = 0.85
    link_efficiency: float = 0.8
    ranks_per_core: float = 1.0  # of a CPU: above 1, ranks take turns
    like: str = ""  # the profile that the machine was derived from
    # reduce-scatter time divided by all-gather time, for the same bytes; higher with gloo than with
    # NCCL
    reduction: float = 1.0

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("CPU")

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s of matrix products. An unknown dtype is as fast as float32."""
        name = str(dtype).removeprefix("torch.")
        name = {"float16": "bfloat16", "float8_e5m2": "float8_e4m3fn"}.get(name, name)
        peak = self.tflops.get(name, self.tflops["float32"]) * 1e12
        return peak * clock_share(self.power, self.nominal_power, self.clock_exponent)

    def attending(self, kernel: str) -> "Machine":
        """Return the machine with the attention efficiency of a training.attention_kernel, if that
        is known.
        """
        shares = ATTENTION.get(self.like or self.name, {})
        relative = shares[kernel] / shares["auto"] if kernel in shares else 1.0
        return dataclasses.replace(self, attention_efficiency=self.attention_efficiency * relative)

    def collective(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective.

        nbytes: unsharded; ranks: global, consecutive within a node.
        """
        if len(ranks) < 2:
            return 0.0
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        if kind == "all_to_all":
            return self._all_to_all(nbytes, len(ranks), len(ranks) / nodes)
        bandwidth = self.intra_node.bandwidth
        if nodes > 1:  # a ring uses the network cards of all its ranks in a node
            bandwidth = min(bandwidth, self.inter_node.bandwidth * len(ranks) / nodes)
        inside, between = self.intra_node.latency * 1e-6, self.inter_node.latency * 1e-6
        speed = bandwidth * self.link_efficiency * GB
        rounds, hops = (
            (2 if kind == "all_reduce" else 1),
            len(ranks) - 1,
        )  # an all-reduce is a reduce-scatter and an all-gather
        latency = rounds * ((hops - nodes + 1) * inside + (nodes - 1) * between)
        if self.multiprocessors:
            seconds = nccl_seconds(
                kind,
                nbytes,
                len(ranks),
                nodes,
                inside=inside,
                between=between,
                speed=speed,
                nvls=self.nvls,
            )
        else:
            seconds = latency + rounds * nbytes * hops / len(ranks) / speed
        gather = self.collective_launch * 1e-6 + seconds
        return gather * {"all_gather": 1.0, "reduce_scatter": self.reduction}.get(
            kind, (1.0 + self.reduction) / 2
        )

    def _all_to_all(self, nbytes: float, ranks: int, near: float) -> float:
        """Return the seconds to send parts of `nbytes` to so many ranks, of which `near` are in a
        node. What goes to other nodes takes the rank's own card, while a ring uses those of all
        ranks in its node (NVIDIA/nccl-tests issue 267).
        """
        links = ((near - 1, self.intra_node), (ranks - near, self.inter_node))
        travels = (
            max(peers / link.bandwidth for peers, link in links)
            * nbytes
            / ranks
            / (self.link_efficiency * GB)
        )
        latency = (
            all_to_all_latency(ranks)
            if self.multiprocessors
            else sum(n * link.latency for n, link in links) * 1e-6
        )
        return self.collective_launch * 1e-6 + latency + travels

    def send(self, nbytes: float, source: int, target: int) -> float:
        """Return the seconds to send `nbytes` from rank `source` to rank `target`."""
        link = (
            self.intra_node
            if source // self.ranks_per_node == target // self.ranks_per_node
            else self.inter_node
        )
        return (self.collective_launch + link.latency) * 1e-6 + nbytes / (
            link.bandwidth * self.link_efficiency * GB
        )

    def cost(self, node: Node, fused: bool = True) -> float:
        """Return the seconds that `node` occupies the device, or for a collective its links.

        fused: count reads and writes of a region of pointwise operators once, as Inductor compiles
        it into one kernel, instead of once per operator. Views, inputs and waits cost nothing.
        """
        if node.op != "call_function" or is_free(node):
            return 0.0
        if node.target in KINDS:
            ranks = ranks_of(node)
            if (
                "fused_with" in node.meta
                and self.multiprocessors
                and len({rank // self.ranks_per_node for rank in ranks}) == 1
            ):
                return self.in_parts(node, node.meta["fused_with"], fused)
            return self.collective(kind_of(node), collective_bytes(node), ranks)
        seconds = self.memory_traffic(_bytes_moved(node, fused, not self.is_cpu))
        matmul, attention = flops_of(node)
        if matmul or attention:
            seconds = max(
                seconds, self.product(node, matmul) if matmul else self.attention(node, attention)
            )
        return seconds + (self.launch * 1e-6 * node.meta.get("parts", 1) if seconds else 0.0)

    def in_parts(self, node: Node, products: Sequence[Node], fused: bool) -> float:
        """Return the seconds of a collective that the products which Inductor fuses with it do not
        hide.

        Each rank computes its own part while the next one travels, by copy engines, which leave all
        multiprocessors to the products. Before the first one, a rank copies its shard to where
        others read it; after a product, it sums the parts. Ranks of a node meet at both ends
        (torch.distributed._symmetric_memory). Copies that put tokens first are not counted.
        """
        nbytes, ranks = collective_bytes(node), len(ranks_of(node))
        each = self.launch * 1e-6 + nbytes / ranks / (
            self.intra_node.bandwidth * self.link_efficiency * GB
        )
        left = (ranks - 1) * max(
            0.0, each - sum(self.cost(product, fused) for product in products) / ranks
        )
        moved = 2 * nbytes / ranks if kind_of(node) == "all_gather" else nbytes + nbytes / ranks
        return left + self.memory_traffic(moved) + 2 * self.collective_launch * 1e-6

    def product(self, node: Node, flops: float) -> float:
        """Return the seconds of a matrix product of so many floating-point operations, without
        memory traffic and launch.
        """
        inputs = [each.meta["val"] for each in _factors(node)]
        peak = self.flops(inputs[0].dtype)
        if not self.multiprocessors:
            return flops / (peak * self.matmul_efficiency)
        (*batch, m, k), n, parts = inputs[0].shape, inputs[1].shape[-1], node.meta.get("parts", 1)
        slowly = node.target is aten._scaled_mm.default and not _given(node).get("use_fast_accum")
        speed = peak * self.matmul_efficiency / (SLOW_ACCUMULATION if slowly else 1.0)
        return parts * product_seconds(
            math.prod(batch), m // parts, n, k, speed=speed, multiprocessors=self.multiprocessors
        )

    def attention(self, node: Node, flops: float) -> float:
        """Return the seconds of attention of so many floating-point operations, without memory
        traffic and launch.
        """
        _, keys, dtype = _attention_of(node)
        share = attention_share(keys) if self.multiprocessors else 1.0
        return flops / (self.flops(dtype) * self.attention_efficiency * share)

    def beside_collectives(self) -> "Machine":
        """Return the machine without the multiprocessors that a collective takes while it runs."""
        if self.multiprocessors <= CHANNELS:
            return self
        share = 1 - CHANNELS / self.multiprocessors
        return dataclasses.replace(
            self,
            multiprocessors=self.multiprocessors - CHANNELS,
            tflops={dtype: share * peak for dtype, peak in self.tflops.items()},
            memory_efficiency=share * self.memory_efficiency,
        )

    def memory_traffic(self, nbytes: float) -> float:
        """Return the seconds to read and write `nbytes` in total."""
        return nbytes / (self.memory_bandwidth * self.memory_efficiency * GB)

    def spread(self) -> tuple["Machine", "Machine", "Machine"]:
        """Return the machine itself, and the slow and the fast end of an interval that 80% of runs
        should be in.
        """

        def scaled(direction: int) -> Machine:
            factors = {name: 1 + direction * JOINT * share for name, share in UNCERTAINTY.items()}
            found = {name: min(1.0, getattr(self, name) * each) for name, each in factors.items()}
            beyond = (max if direction < 0 else min)(
                self.clock_exponent, CLOCK_EXPONENTS[direction]
            )
            exponent = self.clock_exponent + JOINT * (beyond - self.clock_exponent)
            return dataclasses.replace(
                self,
                **found,
                clock_exponent=exponent,
                host=self.host * (1 - direction * JOINT * HOST_UNCERTAINTY),
            )

        return self, scaled(-1), scaled(1)


# Relative uncertainty. Large products reach 0.6 to 0.8 of an H100's peak, depending on clocks and
# heat; a copy 0.8 to 0.92 of memory bandwidth; a ring 0.65 to 0.9 of its links' bandwidth.
UNCERTAINTY = {
    "matmul_efficiency": 0.12,
    "attention_efficiency": 0.25,
    "memory_efficiency": 0.08,
    "link_efficiency": 0.15,
}
# relative, of an operator: 2 microseconds without autograd and 7 with it (pytorch/pytorch issue
# 41383)
HOST_UNCERTAINTY = 0.5
CLOCK_EXPONENTS = {
    -1: 1.0,
    1: 0.46,
}  # at a power limit: the law of the lowest clocks, and the least of a published pair
# Share of these that the ends of an interval have all at once. Independent errors add up as the
# root of the sum of their squares: an 8B step has 7%, 2.5%, 1.6% and 1% by the four, and at 500 W
# 4% (slow end) and 10% more by the clock; the roots are 0.63, 0.54 and 0.57 of the sums.
JOINT = 0.6


def is_free(node: Node) -> bool:
    """Return whether a node moves no bytes: a view, a wait or a number.

    meta["is_view"]: a pass says that it is one.
    """
    target: Any = node.target
    return (
        getattr(target, "is_view", False)
        or target in FREE
        or "is_view" in node.meta
        or not nbytes_of(node)
    )


NO_VIEWS = frozenset({collectives.wait_tensor.default, aten.empty.memory_format})
FREE = NO_VIEWS | {operator.getitem, aten.reshape.default, aten._unsafe_view.default}
MATMULS = frozenset(
    {
        aten._scaled_mm.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
    }
)
# Operators that Inductor fuses like pointwise ones. scatter writes a constant, in the loss's
# backward.
AS_POINTWISE = frozenset(
    {
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        aten.cat.default,
        aten.full.default,
        aten.scatter.value,
    }
)
# Operators that may end a fused kernel. gather computes only the elements that it selects.
REDUCTIONS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.amax.default,
        aten.gather.default,
    }
)


def _is_pointwise(node: Node) -> bool:
    if any(_is_complex(each) for each in (node, *node.all_input_nodes)):
        return False
    pointwise = (
        torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in AS_POINTWISE
    )
    return node.op == "call_function" and pointwise


def _is_complex(node: Node) -> bool:
    """Return whether a node's value is a tensor of complex numbers, whose operators Inductor does
    not compile.
    """
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _is_view(node: Node) -> bool:
    return (
        node.op == "call_function"
        and is_free(node)
        and node.target not in NO_VIEWS
        and bool(nbytes_of(node))
    )


def _base_of(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read `node` or a view of it."""
    for user in node.users:
        yield from _readers(user) if _is_view(user) else (user,)


def _fuses_with_inputs(node: Node) -> bool:
    """Return whether `node` is fused into the kernel that computes its inputs."""
    return _is_pointwise(node) or node.target in REDUCTIONS


def is_fused_away(node: Node) -> bool:
    """Return whether Inductor stores no result for `node`, since each reader is fused with it or
    recomputes it.
    """
    return _is_pointwise(node) and bool(node.users) and all(map(_fuses_with_inputs, _readers(node)))


def _library_kernel(node: Node) -> Any:
    """Return the call that a GPU computes in one kernel, and of which `node` is a part; None for
    other nodes.

    On a CPU, rms_norm is traced as several operators.
    """
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or [("", None)]
    return (
        (stack[-1][0], "fwd_source_fn_stack" in node.meta)
        if stack[-1][1] is torch.rms_norm
        else None
    )


def _bytes_moved(node: Node, fused: bool, gpu: bool = False) -> int:
    if gpu and not fused and (kernel := _library_kernel(node)):
        outside = [
            source for source in node.all_input_nodes if _library_kernel(_base_of(source)) != kernel
        ]
        stored = any(_library_kernel(reader) != kernel for reader in _readers(node))
        return sum(map(nbytes_of, outside)) + stored * nbytes_of(node)
    if node.target is aten.nll_loss_forward.default:  # reads one column of each row
        return 2 * nbytes_of(node.all_input_nodes[1])
    if node.target is aten.nll_loss_backward.default:  # writes zeros and one column of each row
        return nbytes_of(node)
    if node.target is aten.embedding.default:  # reads only the selected rows
        return 2 * nbytes_of(node)
    if node.target is aten.embedding_dense_backward.default:
        return 2 * nbytes_of(node) + nbytes_of(node.all_input_nodes[0])
    if node.target is aten.gather.default and fused:
        return 3 * nbytes_of(node)
    written = 0 if fused and is_fused_away(node) else nbytes_of(node)
    joins = fused and _fuses_with_inputs(node)
    read = (
        source for source in node.all_input_nodes if not (joins and _is_pointwise(_base_of(source)))
    )
    return sum(map(nbytes_of, read)) + written


def bytes_copied(node: Node, fused: bool) -> int:
    """Return the bytes that aten.cat or aten.clone copies, without those that a fused kernel
    computes in place.
    """
    if node.target is aten.cat.default:
        return sum(
            nbytes_of(each)
            for each in node.all_input_nodes
            if not (fused and _is_pointwise(_base_of(each)))
        )
    return 0 if fused and is_fused_away(node) else nbytes_of(node)


def flops_of(node: Node) -> tuple[float, float]:
    """Return floating-point operations (of matrix products, of attention), both 0 for other nodes.

    Attention has two products forward and five backward. Causal attention computes half of each; if
    there are fewer queries than keys, they are the last tokens (distributed/context_parallel.py).
    The operators of models/attention.py are causal, and a sequence counts as one document, since
    the ends of documents are known only in a run.
    """
    name, target = str(node.target), cast(Any, node.target)
    if node.op != "call_function":
        return 0.0, 0.0
    if target in MATMULS:
        a, b = (each.meta["val"].shape for each in _factors(node))
        return 2.0 * math.prod(a) * b[-1], 0.0
    if "scaled_dot_product" not in name and "flash_attention" not in name:
        return 0.0, 0.0
    query, keys, _ = _attention_of(node)
    products, ours = 5 if "backward" in name else 2, name.startswith("titan_lite.")
    queries = query[1 if ours else -2]
    seen = 1 - 0.5 * min(1.0, queries / keys) if ours or _given(node).get("is_causal") else 1.0
    return 0.0, products * 2.0 * math.prod(query) * keys * seen


def _factors(node: Node) -> Sequence[Node]:
    """Return the two factors of a matrix product."""
    arguments = cast(Any, node.args)
    return arguments[:2] if node.target is aten._scaled_mm.default else arguments[-2:]


def _given(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name."""
    names = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _attention_of(node: Node) -> tuple[torch.Size, int, torch.dtype]:
    """Return (shape of the queries, number of keys, dtype) of an attention operator."""
    query, key = (_given(node)[name].meta["val"] for name in ("query", "key"))
    return (
        query.shape,
        key.shape[1 if str(node.target).startswith("titan_lite.") else -2],
        key.dtype,
    )
