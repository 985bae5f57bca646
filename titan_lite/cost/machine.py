"""Describe a machine: its datasheet, its links, and the seconds of memory traffic and collectives.

    machine = load_machine("H100")                              # profiles.py
    machine.flops(torch.bfloat16)                               # peak FLOP/s of matmuls
    machine.collective("all_gather", nbytes=2**30, ranks=range(128))    # seconds

The seconds of a graph's node on a machine are in op_cost.py. The passes that schedule collectives,
their reports and the planner share both. A collective of GPUs is NCCL's (nccl.py), that of others
a ring (arXiv 1909.09756): a latency per hop, plus the bytes over the slowest link.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import AfterValidator, ConfigDict, Field

from titan_lite.cost.kernels import ATTENTION, CLOCK_EXPONENT, IDLE_POWER, clock_share
from titan_lite.cost.nccl import CHANNELS, Ring, all_to_all_latency, nccl_seconds

GB = 1e9
GIB = 2**30
MICROSECOND = 1e-6  # seconds


def _is_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("expected a dtype of torch: bfloat16, float32 or float8_e4m3fn")
    return name


def _has_float32(peaks: Mapping[str, float]) -> Mapping[str, float]:
    if "float32" not in peaks:
        raise ValueError("expected float32, the peak of dtypes that are not listed")
    return peaks


def _is_above_idle(power: float) -> float:
    if 0 < power <= IDLE_POWER:
        raise ValueError(f"expected watts above the {IDLE_POWER:g} of an idle GPU, or 0")
    return power


# Values of a machine's file; the bounds keep products of a few finite.
Number = Annotated[float, Field(strict=True, ge=1e-9, le=1e12)]
NumberOrZero = Annotated[float, Field(strict=True, ge=0, le=1e12)]  # 0: off
Share = Annotated[float, Field(strict=True, ge=1e-9, le=1)]
Dtype = Annotated[str, AfterValidator(_is_dtype)]


@dataclass(frozen=True)
class Link:
    """A link between two ranks."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    bandwidth: Number  # GB/s of one rank, in each direction
    latency: Number  # microseconds per hop


@dataclass(frozen=True)
class Machine:
    """A rank's device and links. A machine's TOML file has these fields as keys, and pydantic
    checks them (profiles.py).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    # dense peak in TFLOP/s, by dtype
    tflops: Annotated[Mapping[Dtype, Number], AfterValidator(_has_float32)]
    memory: Number  # GiB
    memory_bandwidth: Number  # GB/s, reads and writes together
    intra_node: Link
    inter_node: Link  # one rank's own network card
    ranks_per_node: Annotated[int, Field(strict=True, ge=1)] = 8
    # Microseconds of overhead per kernel.
    launch: Number = 3.0
    # Microseconds of the host for an operator that no graph was compiled for; 0: not planned.
    host: NumberOrZero = 0.0
    # Microseconds of overhead per collective.
    collective_launch: Number = 14.0
    # Of a GPU, which cuts matmuls into tiles (kernels.py); 0: none.
    multiprocessors: Annotated[int, Field(strict=True, ge=0)] = 0
    # Bandwidth of all-reduces in the switch of a node, relative to a ring's; 0: no such switch.
    nvls: NumberOrZero = 0.0
    nominal_power: Number = 700.0  # watts
    # watts that the device is limited to, above those of an idle GPU; 0: nominal_power
    power: Annotated[NumberOrZero, AfterValidator(_is_above_idle)] = 0.0
    # Of the clock over the power above that of an idle GPU (clock_share).
    clock_exponent: Annotated[float, Field(strict=True, ge=1 / 3, le=1)] = CLOCK_EXPONENT
    matmul_efficiency: Share = 0.7  # share of the peak that large matmuls reach
    attention_efficiency: Share = 0.4  # share of the peak
    memory_efficiency: Share = 0.85  # share of the bandwidth
    link_efficiency: Share = 0.8  # share of the bandwidth
    ranks_per_core: Number = 1.0  # of a CPU: above 1, ranks take turns
    like: str = ""  # the profile that the machine was derived from
    # Time of a reduce-scatter divided by that of an all-gather of the same bytes; higher with gloo
    # than with NCCL.
    reduction: Number = 1.0

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("CPU")

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak FLOP/s of matmuls. An unknown dtype is as fast as float32."""
        name = str(dtype).removeprefix("torch.")
        name = {"float16": "bfloat16", "float8_e5m2": "float8_e4m3fn"}.get(name, name)
        peak = self.tflops.get(name, self.tflops["float32"]) * 1e12
        return peak * clock_share(self.power, self.nominal_power, self.clock_exponent)

    def memory_traffic(self, nbytes: float) -> float:
        """Return the seconds to read and write `nbytes` in total."""
        return nbytes / (self.memory_bandwidth * self.memory_efficiency * GB)

    def nodes(self, ranks: Sequence[int]) -> int:
        """Return the number of nodes that these global ranks are on."""
        return len({rank // self.ranks_per_node for rank in ranks})

    def collective(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective.

        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"; nbytes: unsharded;
        ranks: global, consecutive within a node.
        """
        if len(ranks) < 2:
            return 0.0
        nodes = self.nodes(ranks)
        if kind == "all_to_all":
            return self._all_to_all(nbytes, len(ranks), len(ranks) / nodes)
        ring = self._ring(len(ranks), nodes)
        if self.multiprocessors:
            seconds = nccl_seconds(kind, nbytes, ring, nvls=self.nvls)
        else:
            seconds = ring.seconds(kind, nbytes)
        as_gather = self.collective_launch * MICROSECOND + seconds
        if kind == "all_gather":
            return as_gather
        if kind == "reduce_scatter":
            return as_gather * self.reduction
        return as_gather * ((1.0 + self.reduction) / 2)  # a reduce-scatter, then an all-gather

    def _ring(self, ranks: int, nodes: int) -> Ring:
        bandwidth = self.intra_node.bandwidth
        if nodes > 1:  # a ring uses the network cards of all its ranks in a node
            bandwidth = min(bandwidth, self.inter_node.bandwidth * ranks / nodes)
        return Ring(
            ranks,
            nodes,
            hop_in_node=self.intra_node.latency * MICROSECOND,
            hop_between_nodes=self.inter_node.latency * MICROSECOND,
            bandwidth=bandwidth * self.link_efficiency * GB,
        )

    def _all_to_all(self, nbytes: float, ranks: int, ranks_in_node: float) -> float:
        """Return the seconds to send parts of `nbytes` to so many ranks.

        What goes to other nodes takes the rank's own card, while a ring uses those of all ranks in
        its node (NVIDIA/nccl-tests issue 267).
        """
        near, far = ranks_in_node - 1, ranks - ranks_in_node
        slowest = max(near / self.intra_node.bandwidth, far / self.inter_node.bandwidth)
        travel = slowest * nbytes / ranks / (self.link_efficiency * GB)
        if self.multiprocessors:
            latency = all_to_all_latency(ranks)
        else:
            hops = near * self.intra_node.latency + far * self.inter_node.latency
            latency = hops * MICROSECOND
        return self.collective_launch * MICROSECOND + latency + travel

    def send(self, nbytes: float, source: int, target: int) -> float:
        """Return the seconds to send `nbytes` from rank `source` to rank `target`."""
        link = self.intra_node if self.nodes((source, target)) == 1 else self.inter_node
        travel = nbytes / (link.bandwidth * self.link_efficiency * GB)
        return (self.collective_launch + link.latency) * MICROSECOND + travel

    def with_attention_kernel(self, kernel: str) -> "Machine":
        """Return the machine with the efficiency of a training.attention_kernel, if it is known."""
        shares = ATTENTION.get(self.like or self.name, {})
        if kernel not in shares:
            return self
        relative = shares[kernel] / shares["auto"]
        return dataclasses.replace(self, attention_efficiency=self.attention_efficiency * relative)

    def beside_collective(self) -> "Machine":
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
