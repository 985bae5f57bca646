"""What a machine really reaches, measured by the ranks of a run together; and a profile with that in it.

    reached = measure(shapes, device)                      # {"matmul": 4.1e10, ...}
    machine = calibrated(profile, reached, dtype)          # the profile, with what was measured in it
    Path("mine.toml").write_text(to_toml(machine))         # for --hardware and compile.machine

A profile's peaks are a datasheet's and stay; what moves is how much of them is reached.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_lite.compiler.collectives import all_gather_single
from titan_lite.compiler.hardware import GB, GIB, Link, Machine
from titan_lite.models.llama3 import ModelConfig

RECORD = "measured.json"  # in a run's folder: what the trainer writes of it
SMALL, LARGE = 2**12, 2**21  # bytes a rank in a collective; what is between lies on a line
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shapes:
    """Of what a rank computes at once: sequences of `tokens` tokens, tp-th parts of a model's matrices and heads, in `dtype`."""

    model: ModelConfig
    sequences: int
    tokens: int
    tp: int
    dtype: torch.dtype


def measure(shapes: Shapes, device: torch.device, seconds: float = 0.15) -> dict[str, float]:
    """All ranks together, in about ten times as many seconds; the slowest rank counts.

    matmul, attention        FLOP/s, forward and backward
    memory                   bytes a second, read and written by a pointwise operator
    launch                   seconds of an operator with nothing to do
    latency, bandwidth       of an all-gather over all ranks, as of a ring: seconds a hop, bytes a second and rank
    reduction                how many times as long a reduce-scatter takes
    """
    model, tp, dtype = shapes.model, shapes.tp, shapes.dtype
    rows, hidden, head = shapes.sequences * shapes.tokens, model.hidden_dim // tp, model.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    x, w, gradient = random(rows, model.dim), random(hidden, model.dim), random(rows, hidden)
    products = _time(lambda: (x @ w.T, gradient @ w, gradient.T @ x), device, seconds)
    q = random(shapes.sequences, max(1, model.n_heads // tp), shapes.tokens, head).requires_grad_()
    k, v = (random(shapes.sequences, max(1, model.n_kv_heads // tp), shapes.tokens, head).requires_grad_() for _ in range(2))
    upstream = torch.ones_like(q)

    def attend() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), upstream)

    attention = _time(attend, device, seconds)
    pointwise = _time(lambda: F.silu(gradient) * gradient, device, seconds)
    one = torch.ones(1, dtype=dtype, device=device)
    found = {
        "matmul": 3 * 2 * rows * model.dim * hidden / products,
        "attention": 7 * 2 * q.numel() * shapes.tokens / 2 / attention,  # two products forward and five backward, half of each
        "memory": 5 * gradient.nbytes / pointwise,
        "launch": -_time(lambda: [one + one for _ in range(100)], device, seconds / 5) / 100,  # of which the largest counts
    }
    figures = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(figures, dist.ReduceOp.MIN)
    found = dict(zip(found, figures.tolist(), strict=True))
    found["launch"] *= -1
    return found | (_measure_links(device) if dist.get_world_size() > 1 else {})


def _measure_links(device: torch.device) -> dict[str, float]:
    ranks = dist.get_world_size()

    def times(collective: Callable[[Tensor, Tensor], Any]) -> list[float]:
        """Of SMALL and LARGE."""
        pairs = [tuple(torch.zeros(count * size // 4, device=device) for count in (ranks, 1)) for size in (SMALL, LARGE)]
        return [_time_together(functools.partial(collective, whole, part), device) for whole, part in pairs]

    gathers = times(all_gather_single)
    reduces = times(lambda whole, part: reduce_scatter_single(part, whole))
    small, large = gathers
    return {
        "latency": small / ranks,  # a launch, which takes as long, and as many hops as there are other ranks
        "bandwidth": (ranks - 1) * (LARGE - SMALL) / max(large - small, 1e-7),
        "reduction": sum(reduces) / sum(gathers),
    }


def _time(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Of one call, the mean of as many as fit: what a step sees, others beside it included."""
    work()
    _synchronize(device)
    calls, start = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - start < seconds:
        work()
        _synchronize(device)
        calls += 1
    return (time.perf_counter() - start) / calls


def _time_together(work: Callable[[], Any], device: torch.device, rounds: int = 15) -> float:
    """Of one collective, the mean; of all ranks the slowest's."""
    work()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    _synchronize(device)
    mean = torch.tensor((time.perf_counter() - start) / rounds, dtype=torch.float64, device=device)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calibrated(machine: Machine, reached: Mapping[str, float], dtype: torch.dtype, nodes: int = 1) -> Machine:
    """The machine that reaches what was measured in `dtype`. nodes: over which the ranks were.

    A CPU has no datasheet: its peaks are what was measured, too.
    """
    if machine.name.startswith("CPU"):
        machine = dataclasses.replace(
            machine,
            tflops={**machine.tflops, str(dtype).removeprefix("torch."): reached["matmul"] / 1e12},
            memory_bandwidth=reached["memory"] / GB,
        )
    found: dict[str, Any] = {
        "matmul_efficiency": min(1.0, reached["matmul"] / machine.flops(dtype)),
        "attention_efficiency": min(1.0, reached["attention"] / machine.flops(dtype)),
        "memory_efficiency": min(1.0, reached["memory"] / (machine.memory_bandwidth * GB)),
        "launch": 1e6 * reached["launch"],
    }
    if "bandwidth" in reached:
        found["reduction"] = reached["reduction"]
        if machine.name.startswith("CPU"):
            microseconds = 1e6 * reached["latency"]
            found["intra_node"] = found["inter_node"] = Link(reached["bandwidth"] / GB / machine.link_efficiency, microseconds)
            found["collective_launch"] = microseconds
        elif nodes == 1:
            found["link_efficiency"] = min(1.0, reached["bandwidth"] / GB / machine.intra_node.bandwidth)
        else:  # of a ring across nodes, which has every card of a node
            cards = machine.ranks_per_node * machine.inter_node.bandwidth
            found["link_efficiency"] = min(1.0, reached["bandwidth"] / GB / min(cards, machine.intra_node.bandwidth))
    return dataclasses.replace(machine, **found)


def to_toml(machine: Machine) -> str:
    """As load_machine reads it."""

    def table(values: Mapping[str, float]) -> str:
        return "{ " + ", ".join(f"{key} = {number!r}" for key, number in values.items()) + " }"

    lines = [f'name = "{machine.name}"']
    for name, value in vars(machine).items():
        if isinstance(value, Link):
            lines.append(f"{name} = {table(vars(value))}")
        elif isinstance(value, Mapping):
            lines.append(f"{name} = {table(value)}")
        elif name != "name":
            lines.append(f"{name} = {value!r}")
    return "\n".join(lines) + "\n"


def against(planned: float, measured: float) -> str:
    """Both, in GiB."""
    return f"planned {planned / GIB:.2f} GiB, measured {measured / GIB:.2f}"
