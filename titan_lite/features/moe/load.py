"""Show which experts the routers of an MoE model choose.

    loads = balance.loads()                             # balance.py
    values = values_of(loads)                           # {"expert_balance": 1.02, ...}
    write_shares(loads, dump_folder, steps=range(1, 11))
    line = idle_experts(loads, steps=range(1, 11))      # "" if all experts have tokens

experts.json has the shares over the steps since the previous line of metrics.jsonl, which the
report draws as a picture:

    {"first_step": 1, "step": 10, "layers": [[0.12, 0.13, ...], ...]}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from titan_lite import manifest
from titan_lite.logging import logger
from titan_lite.metrics.run_files import FILE_OF_EXPERTS
from titan_lite.text import first_names

SHOWN = 4  # layers, and experts of a layer, in a line


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


def repeated_steps(rows: Mapping[str, float], factor: float, steps: range) -> str:
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
