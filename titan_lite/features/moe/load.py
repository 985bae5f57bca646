"""Show which experts the routers of an MoE model choose.

    loads = balance.loads()                             # balance.py
    values = values_of(loads)                           # {"expert_balance": 1.02, ...}
    write_shares(loads, dump_folder, steps=range(1, 11))
    line = idle_experts(loads, steps=range(1, 11))      # "" if all experts have tokens
    line = history.add(loads, steps=range(1, 11))       # "" unless a term hides a worse load

experts.json has the shares over the steps since the previous line of metrics.jsonl, which the
report draws as a picture:

    {"first_step": 1, "step": 10, "layers": [[0.12, 0.13, ...], ...]}
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from titan_lite import manifest
from titan_lite.logging import logger
from titan_lite.metrics.run_files import FILE_OF_EXPERTS
from titan_lite.text import first_names

SHOWN = 4  # layers, and experts of a layer, in a line
LINES = 10  # of metrics, over which a term and a load are compared


@dataclass(frozen=True)
class Loads:
    """Choices of routers over some steps, on all ranks."""

    shares: Tensor  # (layers, E), of each expert in the choices: they sum to 1
    probabilities: Tensor  # (layers, E), means over tokens
    entropies: Tensor  # (layers,), means over tokens, nats

    @property
    def relative(self) -> Tensor:
        """The tokens of an expert relative to the mean of its layer: (layers, E)."""
        return self.shares * self.shares.shape[1]

    @property
    def balance(self) -> Tensor:
        """E x sum_i f_i P_i of each layer: 1 if experts are equally loaded."""
        return (self.relative * self.probabilities).sum(1)

    @property
    def idle(self) -> dict[int, list[int]]:
        """Experts without any token, by layer."""
        found = {
            layer: (share == 0).nonzero().flatten().tolist()
            for layer, share in enumerate(self.shares)
        }
        return {layer: experts for layer, experts in found.items() if experts}


def values_of(loads: Loads) -> dict[str, float]:
    """Return the metrics by name (metrics/writer.py)."""
    values = {
        "expert_balance": float(loads.balance.mean()),
        "router_entropy": float(loads.entropies.mean()),
        "expert_load_max": float(loads.relative.max()),
        "expert_load_min": float(loads.relative.min()),
    }
    for layer, relative in enumerate(loads.relative):
        values[f"expert_balance/{layer}"] = float(loads.balance[layer])
        values[f"expert_load_max/{layer}"] = float(relative.max())
        values[f"expert_load_min/{layer}"] = float(relative.min())
    return values


def write_shares(loads: Loads, folder: Path, steps: range) -> None:
    """Write experts.json; warn if it cannot be written. steps: that the loads are of."""
    path = folder / FILE_OF_EXPERTS
    shares = [[float(f"{share:.4g}") for share in layer] for layer in loads.shares.tolist()]
    content = {"first_step": steps[0], "step": steps[-1], "layers": shares}
    try:
        manifest.replace_text(path, json.dumps(content))
    except OSError as error:
        logger.warning(f"no picture of experts: {path} cannot be written: {error.strerror}")


def idle_experts(loads: Loads, steps: range) -> str:
    """Return a line on the experts that had no token in these steps; "" if there are none."""
    if not loads.idle:
        return ""
    layers = [f"layers.{layer}: {_numbers(experts)}" for layer, experts in loads.idle.items()]
    more = f"; and {len(layers) - SHOWN} more layers" if len(layers) > SHOWN else ""
    return (
        f"{_range(steps)}: experts without a token (experts.balance):"
        f" {'; '.join(layers[:SHOWN])}{more}"
    )


class BalanceHistory:
    """The term and the largest load of each layer in the last lines of metrics.

    A term may fall while loads get worse, since with E experts

        E sum_i f_i P_i = 1 + E sum_i (f_i - 1/E) (P_i - 1/E)

    which a router also lowers by giving the expert that most tokens choose less probability than
    the others have in the tokens that do not choose it.
    """

    def __init__(self) -> None:
        # steps of a line; (layers,) each: terms, and the most loaded expert relative to the mean
        self.lines: deque[tuple[range, Tensor, Tensor]] = deque(maxlen=LINES)

    def add(self, loads: Loads, steps: range) -> str:
        """Add a line of metrics. Return one on the layers in which, over the last LINES, the term
        has fallen and the largest load has risen, each by more than it scatters; then, the history
        begins again. "" if there are none.
        """
        self.lines.append((steps, loads.balance, loads.relative.amax(1)))
        if len(self.lines) < LINES:
            return ""
        terms = torch.stack([term for _, term, _ in self.lines]).double()
        largest = torch.stack([load for _, _, load in self.lines]).double()
        found = (_rise(-terms) & _rise(largest)).nonzero().flatten().tolist()
        if not found:
            return ""
        over = range(self.lines[0][0].start, steps.stop)
        self.lines.clear()
        layers = [
            f"layers.{layer}: term {_course(terms[:, layer])}, largest load"
            f" {_course(largest[:, layer])} times the mean"
            for layer in found[:SHOWN]
        ]
        more = f"; and {len(found) - SHOWN} more layers" if len(found) > SHOWN else ""
        return (
            f"{_range(over)}: the balance term falls while the load of experts gets worse"
            f' (experts.balance; "bias" moves loads themselves): {"; ".join(layers)}{more}'
        )


def _rise(values: Tensor) -> Tensor:
    """Return for each layer if its values, (LINES, layers), rise by more than they scatter: a line
    is fitted, and its rise is larger than the range of what is left.
    """
    numbers = torch.arange(len(values), dtype=values.dtype)
    centered = (numbers - numbers.mean()).unsqueeze(1)
    slope = (centered * values).sum(0) / centered.square().sum()
    left = values - values.mean(0) - centered * slope
    # rounding is no rise
    return slope * (len(values) - 1) > left.amax(0) - left.amin(0) + 1e-6


def _course(values: Tensor) -> str:
    return f"{values[0]:.2f} to {values[-1]:.2f}"


def line_of_repeats(rows: Mapping[str, float], factor: float, steps: range) -> str:
    """Return a line on the steps that ran again with room for all rows; "" if there are none.

    rows: ExpertCapacity.metrics. factor: experts.capacity_factor.
    """
    repeated = round(rows.get("repeated_steps", 0))
    if not repeated:
        return ""
    most = rows["expert_rows_max"]
    which = f"{repeated:,} of {_range(steps)}" if len(steps) > 1 else _range(steps)
    return (
        f"{which} ran again, with memory for all tokens of experts: those of a rank had {most:.2f}"
        f" times the tokens of equally loaded ones, and experts.capacity_factor = {factor:g}"
    )


def _range(steps: range) -> str:
    """Return "step 5", or "steps 5 to 9"."""
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    return f"steps {steps[0]:,} to {steps[-1]:,}"


def _numbers(experts: Sequence[int]) -> str:
    return first_names([str(expert) for expert in experts], SHOWN)
