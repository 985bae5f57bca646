"""The keys of MoE models, beside the shape of the model. Imports no torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from titan_lite.config.section import Section


class ExpertsKeys(Section):
    """Balance of experts, which no layout changes, and their memory (docs/moe.md)."""

    table: ClassVar[str] = "experts"

    balance: Literal["step", "sequence", "bias", "none"] = "step"
    """Method by which experts get equally many tokens. step: a term with the shares of the last
    step's choices; sequence: a term with those of each sequence of training.seq_len (DeepSeek-V3);
    bias: after a step, a number that is added to an expert's probability when experts are chosen
    grows by bias_update_rate, or shrinks; none: nothing."""

    balance_coefficient: float = Field(1e-3, gt=0, le=1)
    """Factor of the term of balance = step and sequence: E x the sum over experts of the share of
    choices (which sum to 1) x the mean probability, summed over layers as in Megatron.
    router_aux_loss_coef of transformers is for layers pooled and shares that sum to
    experts_per_token: c there is c x experts_per_token / layers here."""

    bias_update_rate: float = Field(1e-3, gt=0, le=1)
    """Change of an expert's bias in a step, with balance = bias."""

    capacity_factor: Annotated[float, Field(ge=1)] | Literal[0] = 0
    """With expert parallelism: tokens that a rank's experts have memory for, relative to equally
    loaded experts; 0: all that may come, expert_parallel_degree times as many, or n_experts /
    experts_per_token if that is less. No token is dropped: a step in which a rank gets more runs
    again with memory for all of them. The host waits for the device once a step."""


KEYS = (ExpertsKeys,)
TENSORS: dict[str, str] = {}
