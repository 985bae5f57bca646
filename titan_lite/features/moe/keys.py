"""The keys of MoE models, beside the shape of the model. Imports no torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from titan_lite.config.section import Section


class ExpertsKeys(Section):
    """Balance of experts, which no layout changes, and their memory (docs/moe.md)."""

    table: ClassVar[str] = "experts"

    balance: Literal["step", "sequence", "bias", "none"] = "step"
    """How experts get equally many tokens. step, sequence: a loss term from the choices of the last
    step, or of each sequence (DeepSeek-V3); bias: a number that is added to an expert's probability
    when experts are chosen, and changes after each step; none: nothing."""

    balance_coefficient: float = Field(1e-3, gt=0, le=1)
    """Factor of that term: n_experts x the sum over experts of share of choices x mean probability,
    summed over layers. router_aux_loss_coef of transformers is to be multiplied by
    experts_per_token / n_layers."""

    bias_update_rate: float = Field(1e-3, gt=0, le=1)
    """Change of an expert's bias in a step, with balance = bias."""

    capacity_factor: Annotated[float, Field(ge=1)] | Literal[0] = 0
    """With expert parallelism: tokens that a rank has memory for, relative to equal loads; 0: all
    that may come. A step with more runs again with memory for all, so none is dropped. The host
    waits for the device once a step."""


KEYS = (ExpertsKeys,)
TENSORS: dict[str, str] = {}
