"""Keep the experts of an MoE model equally loaded, by the same numbers on every layout.

    apply_balance(model, "step", mesh)                          # on the meta device
    balance = ExpertBalance(model.stages, layout, ExpertsKeys.of(config), mesh, device)
    balance.begin_step(step)
    ...                                     # forward and backward: routers report to LOADS
    balance.before_update(skip)             # skip: a scalar; if it is 1, the step does not count
    balance.metrics(steps, folder)          # of the steps since the last call

With f_i the share of expert i in the choices (they sum to 1) and P_i its mean probability, a layer
has a term

    coefficient x E x sum_i f_i P_i

which is summed over layers and added to the loss. Taken over a rank's microbatch, f and P would
depend on the layout. So there are three choices:

    step        f of all tokens of the last step that counted, 1 / E at first; P of this step
    sequence    f and P of a sequence, the term averaged over sequences (DeepSeek-V3, arXiv
                2412.19437, equations 17 to 20); f is summed over ranks that share a sequence
    bias        no term: after a step, the bias of an expert grows by `bias_update_rate` if it had
                fewer tokens than the mean, and shrinks if it had more (arXiv 2408.15664). Their
                mean, which no choice depends on, would drift until float32 lacks the digits that
                decide (torchtitan 1506), so it is subtracted

step and bias need the counts of all ranks: an all-reduce a step for each axis with several ranks.
f has no gradient, so a term is linear in probabilities, and its gradient is a sum over tokens: that
of a token's p_i is coefficient x E x f_i / tokens of the step, which backward adds
(models/experts.py). All positions count, ignored labels too, since a block does not see labels. The
logged loss does not have the term.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import sum_over_positions
from titan_lite.distributed.stage import Stage
from titan_lite.feature import StepPart
from titan_lite.features.moe.keys import ExpertsKeys
from titan_lite.features.moe.load import (
    BalanceHistory,
    Loads,
    idle_experts,
    values_of,
    write_shares,
)
from titan_lite.logging import logger
from titan_lite.models.experts import LOADS, Balance, Router, routers_of


def apply_balance(model: nn.Module, balance: Balance, mesh: DeviceMesh) -> None:
    """Set the balance of the routers of `model`, in place. mesh: of all axes."""
    groups = tuple(
        mesh.get_group(axis).group_name for axis in ("cp", "tp") if mesh[axis].size() > 1
    )
    for router in routers_of(model).values():
        router.balance = balance
        router.sequence_groups = groups


def _add_load(row: Tensor, probabilities: Tensor, choices: Tensor, counts: Tensor) -> None:
    """Add what a router chose to its row of `ExpertBalance.own`, (2 E + 1,). A Load."""
    experts = counts.shape[-1]
    row[:experts] += counts.sum(0)
    row[experts:-1] += probabilities.sum((0, 1))
    row[-1] -= torch.special.xlogy(probabilities, probabilities).sum()


class ExpertBalance(StepPart):
    """The loads of this rank's routers, and what follows from them.

    own: a row for each layer, of this rank's tokens in this step: tokens of each expert, sums of
    probabilities, the sum of entropies; zeros of other stages' layers. window: the same, of the
    steps that counted since the last `loads`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: Layout,
        settings: ExpertsKeys,
        mesh: DeviceMesh,
        device: torch.device,
    ):
        """layout: its tokens are all positions of a step, of all replica groups, ignored labels
        included; losses are divided by fewer.
        """
        self.n_experts = layout.model.n_experts
        self.experts_per_token = layout.model.experts_per_token
        self.settings = settings
        self.mesh = mesh
        self.routers: dict[int, Router] = {}  # of this rank, by layer
        columns = 2 * self.n_experts + 1
        self.own = torch.zeros(layout.model.n_layers, columns, dtype=torch.float64, device=device)
        self.window = torch.zeros_like(self.own)
        self.history = BalanceHistory()
        scale = settings.balance_coefficient * self.n_experts / layout.tokens
        for stage in stages:
            for fqn, router in routers_of(stage.model).items():
                layer = int(fqn.split(".")[1])
                self.routers[layer] = router
                LOADS[fqn] = functools.partial(_add_load, self.own[layer])
                router.balance_scale.fill_(scale)

    def begin_step(self, step: int) -> None:
        self.own.zero_()  # of what ran outside of a step

    def counts(self) -> list[Tensor]:
        return [self.own]

    @torch.no_grad()
    def before_update(self, skip: Tensor) -> None:
        """Update what routers keep. A collective, if the balance needs it. skip: as in StepPart."""
        if self.settings.balance in ("step", "bias"):
            counts = self.own[:, : self.n_experts].contiguous()
            sum_over_positions(counts, self.mesh)
            for layer, router in self.routers.items():
                self._update_router(router, counts[layer], skip.bool())
        self.window += torch.where(skip.bool(), 0.0, self.own)
        self.own.zero_()

    def _update_router(self, router: Router, counts: Tensor, skip: Tensor) -> None:
        """counts: (E,), tokens of each expert in the step, over all ranks: whole numbers."""
        if self.settings.balance == "step":
            kept = router.expert_share
            new = (counts / counts.sum()).float()
        else:
            kept = router.expert_bias
            direction = (counts.sum() - self.n_experts * counts).sign()
            grown = kept + self.settings.bias_update_rate * direction  # float64
            new = (grown - grown.mean()).float()
        kept.copy_(torch.where(skip, kept, new))

    @torch.no_grad()
    def loads(self) -> Loads | None:
        """Return the loads of the steps that counted since the last call; None if there were none.
        A collective.
        """
        dist.all_reduce(self.window)
        window = self.window.cpu()
        self.window = torch.zeros_like(self.window)
        counts = window[:, : self.n_experts]
        choices = counts.sum(1, keepdim=True)
        if not choices.all():
            return None
        tokens = choices / self.experts_per_token
        return Loads(
            shares=counts / choices,
            probabilities=window[:, self.n_experts : -1] / tokens,
            entropies=(window[:, -1:] / tokens).flatten(),
        )

    def metrics(self, steps: range, folder: Path | None) -> dict[str, float]:
        """Return the metrics of loads, and write experts.json. Warn of idle experts, and of a term
        that falls while loads get worse.
        """
        loads = self.loads()
        if loads is None:
            return {}
        if dist.get_rank() == 0:
            lines = [idle_experts(loads, steps)]
            if self.settings.balance in ("step", "sequence"):
                lines.append(self.history.add(loads, steps))
            for line in filter(None, lines):
                logger.warning(line)
        if folder is not None:
            write_shares(loads, folder, steps)
        return values_of(loads)
