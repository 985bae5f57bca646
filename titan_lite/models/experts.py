"""A mixture of experts: a router chooses K of E feed-forward networks for each token.

    moe = MixtureOfExperts(config)
    y = moe(x)                                      # (B, T, C) -> (B, T, C)

    x (B, T, C) -> router: probabilities (B, T, E) -> the K largest; weights, which sum to 1
      -> B T K rows of tokens, those of an expert side by side
      -> SwiGLU of each row by its expert: three grouped products; hidden units times the weight
      -> rows back in the order of tokens, summed over K -> (B, T, C)

The number of rows does not depend on the choices, so shapes are static and nothing waits for the
host; how many rows each expert has is a tensor. A token is routed once, in float32, by the rank
that has it between blocks. Of equal probabilities the expert with the lower number is chosen, on
every device.

Two buffers of a router last from step to step, and are in checkpoints: `expert_bias`, which is
added to probabilities when experts are chosen and has no part in weights (arXiv 2408.15664), and
`expert_share`, each expert's share of the choices in the last step that counted.
distributed/expert_balance.py updates the one that experts.balance reads, from what `choose_experts`
gives to the Load of the router.

Dimensions: as in models/transformer.py; E experts, K of a token, F their hidden units, N = B T
tokens, R = N K rows; I and O, the inner and the outer size of a product.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_lite.collectives import all_reduce
from titan_lite.config.families import ModelConfig

# --- Operators ------------------------------------------------------------------------------------


class Load(Protocol):
    """Takes what a router chooses in training."""

    def add(self, probabilities: Tensor, choices: Tensor, counts: Tensor) -> None:
        """Take the results of a microbatch: (B, T, E), (B, T, K) and (B, E)."""
        ...


# The Load of each router of this process by its FQN: an operator of a graph takes tensors and plain
# values, no objects. Without one, nothing is counted.
LOADS: dict[str, Load] = {}


@torch.library.custom_op("titan_lite::choose_experts", mutates_args=())
def choose_experts(probabilities: Tensor, bias: Tensor, k: int, fqn: str) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, (B, T, K) int64, and how many tokens of each sequence an
    expert has, (B, E) int64.

    They come by descending probability + bias, of equal sums the lower number first. probabilities:
    (B, T, E). bias: (E,). fqn: of the router, whose Load gets the results; "": of none.

    Recomputation in backward must take these results, and not call it again: it would count twice,
    and may choose otherwise where probabilities are nearly equal. Activation checkpointing
    (distributed/activation_checkpoint.py) and the compiler (compile/joint.py) see to it.
    """
    # topk chooses any of equal numbers
    choices = (probabilities + bias).sort(dim=-1, descending=True, stable=True)[1][..., :k]
    choices = choices.contiguous()
    # bincount would wait for the device
    counts = choices.new_zeros(choices.shape[0], probabilities.shape[-1])
    experts = choices.flatten(1)
    counts.scatter_add_(1, experts, torch.ones_like(experts))
    if fqn in LOADS:
        LOADS[fqn].add(probabilities, choices, counts)
    return choices, counts


@choose_experts.register_fake
def _(probabilities: Tensor, bias: Tensor, k: int, fqn: str) -> tuple[Tensor, Tensor]:
    sequences, tokens, experts = probabilities.shape
    choices = probabilities.new_empty(sequences, tokens, k, dtype=torch.int64)
    return choices, probabilities.new_empty(sequences, experts, dtype=torch.int64)


# F.grouped_mm has no fake result in float32 (torch 2.13), and its backward is one operator, which
# a pipeline could not divide into halves.
@torch.library.custom_op("titan_lite::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (R, I) by the matrix of their group, weights (E, I, O) -> (R, O).

    ends: (E,) int32, where the rows of each group end; groups may be empty. The rows past the last
    end are undefined.
    """
    return F.grouped_mm(rows, weights, offs=ends)


@grouped_mm.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@torch.library.custom_op("titan_lite::grouped_mm_of_weights", mutates_args=())
def grouped_mm_of_weights(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a^T b of the rows of each group: a (R, O), b (R, I) -> (E, O, I); zeros for an empty
    group.
    """
    product = F.grouped_mm(a.t(), b, offs=ends)
    if product.is_cuda:  # some kernels do not write that of an empty group (pytorch issue 172439)
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        product.masked_fill_(is_empty[:, None, None], 0.0)
    return product


@grouped_mm_of_weights.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


GROUPED_PRODUCT = torch.ops.titan_lite.grouped_mm.default
GROUPED_PRODUCT_OF_WEIGHTS = torch.ops.titan_lite.grouped_mm_of_weights.default
CHOICE = torch.ops.titan_lite.choose_experts.default


class _GroupedLinear(torch.autograd.Function):
    """rows (R, I), weights (E, O, I) -> (R, O): each row times the transposed matrix of its group.

    ends: as for `grouped_mm`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:  # noqa: ANN401 torch's
        ctx.save_for_backward(rows, weights, ends)
        return grouped_mm(rows, weights.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401 torch's
        rows, weights, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_mm(gradient, weights, ends)
        return of_rows, grouped_mm_of_weights(gradient, rows, ends), None


class _Rearranged(torch.autograd.Function):
    """Rows in another order: (R, C) -> (R, C), of which row i is row order[i].

    The gradient is gathered by the inverse order. Autograd would add it up row by row, on GPUs in
    any order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: ANN401 torch's
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 torch's
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


class _Repeated(torch.autograd.Function):
    """Rows of tokens, each K times, in the order of experts: (N, C) -> (N K, C), of which row i is
    row order[i] // K.

    inverse: of `order`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: ANN401 torch's
        ctx.save_for_backward(inverse)
        ctx.tokens = x.shape[0]
        return x.index_select(0, order // (order.shape[0] // x.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 torch's
        (inverse,) = ctx.saved_tensors
        of_tokens = gradient.index_select(0, inverse).unflatten(0, (ctx.tokens, -1))
        return of_tokens.sum(1), None, None


class _BalanceGradient(torch.autograd.Function):
    """Return probabilities (B, T, E) unchanged; backward adds the gradient of the balance term.

    The term is linear in probabilities, and its gradient is share times scale (expert_balance.py).
    share: (E,), or (B, 1, E) of each sequence. Each pipeline stage adds its own.
    """

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, share: Tensor, scale: Tensor) -> Tensor:  # noqa: ANN401 torch's
        ctx.save_for_backward(share, scale)
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 torch's
        share, scale = ctx.saved_tensors
        return gradient + share * scale, None, None


# --- Modules --------------------------------------------------------------------------------------

Balance = Literal["none", "step", "sequence", "bias"]  # values of experts.balance


class Routing(NamedTuple):
    """The experts of some tokens."""

    weights: Tensor  # (B, T, K) float32, which sum to 1
    choices: Tensor  # (B, T, K) int64
    counts: Tensor  # (B, E) int64, tokens of each sequence that an expert has


class Router(nn.Module):
    """Chooses K of E experts for each token: x (B, T, C) -> Routing."""

    expert_bias: Tensor
    expert_share: Tensor
    balance_scale: Tensor

    SAVED = ("expert_bias", "expert_share")  # buffers that a checkpoint has

    fqn = ""  # set by the Transformer
    balance: Balance = "none"  # in training alone
    # groups of the ranks that have other tokens of the same sequences, for the balance "sequence"
    sequence_groups: Sequence[str] = ()

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.register_buffer("expert_bias", torch.empty(config.n_experts))
        self.register_buffer("expert_share", torch.empty(config.n_experts))
        # coefficient x E / tokens of the step
        self.register_buffer("balance_scale", torch.empty(()), persistent=False)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the buffers with what they are before the first step."""
        # float32, also where `to` has cast them
        experts = len(self.expert_bias)
        device = self.expert_bias.device
        self.expert_bias = torch.zeros(experts, device=device)
        self.expert_share = torch.full((experts,), 1 / experts, device=device)
        self.balance_scale = torch.zeros((), device=device)

    def forward(self, x: Tensor) -> Routing:
        probabilities = F.linear(x.float(), self.weight.float()).softmax(-1)
        fqn = self.fqn if self.training else ""
        choices, counts = choose_experts(
            probabilities.detach(), self.expert_bias, self.experts_per_token, fqn
        )
        if self.training and self.balance in ("step", "sequence"):
            share = self.expert_share
            if self.balance == "sequence":
                share = self._share_of_sequences(counts)
            probabilities = _BalanceGradient.apply(probabilities, share, self.balance_scale)
        weights = probabilities.gather(-1, choices)
        return Routing(weights / weights.sum(-1, keepdim=True), choices, counts)

    def _share_of_sequences(self, counts: Tensor) -> Tensor:
        """Return the share of each expert in the choices of each sequence: (B, 1, E)."""
        of_sequences = counts.float()
        for group in self.sequence_groups:
            of_sequences = all_reduce(of_sequences, "sum", group)
        return (of_sequences / of_sequences.sum(-1, keepdim=True)).unsqueeze(1)


class Experts(nn.Module):
    """E networks of SwiGLU: tokens (N, C) -> (N, C), each the weighted sum over its K experts.

    The weight of an expert multiplies its hidden units: the sum is the same, and backward needs no
    output of an expert, of which there are K times C numbers a token.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        widening = (config.n_experts, config.hidden_dim, config.dim)
        narrowing = (config.n_experts, config.dim, config.hidden_dim)
        self.w1 = nn.Parameter(torch.empty(widening))
        self.w2 = nn.Parameter(torch.empty(narrowing))
        self.w3 = nn.Parameter(torch.empty(widening))

    def forward(self, x: Tensor, weights: Tensor, choices: Tensor, counts: Tensor) -> Tensor:
        """x: (N, C). weights, choices: (N, K). counts: (E,), tokens of each expert."""
        order = choices.flatten().argsort(stable=True)
        inverse = order.scatter(0, order, torch.arange(len(order), device=order.device))
        ends = counts.cumsum(0).int()
        rows = _Repeated.apply(x, order, inverse)
        gate = _GroupedLinear.apply(rows, self.w1, ends)
        hidden = F.silu(gate) * _GroupedLinear.apply(rows, self.w3, ends)
        weight = _Rearranged.apply(weights.reshape(-1, 1), order, inverse)
        hidden = hidden * weight.to(hidden.dtype)
        of_experts = _GroupedLinear.apply(hidden, self.w2, ends)
        return _Rearranged.apply(of_experts, inverse, order).unflatten(0, choices.shape).sum(1)


class MixtureOfExperts(nn.Module):
    """A router and its experts. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        routing: Routing = self.router(x)
        weights = routing.weights.flatten(0, 1)
        choices = routing.choices.flatten(0, 1)
        return self.experts(x.flatten(0, 1), weights, choices, routing.counts.sum(0)).view_as(x)


def routers_of(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a model by FQN, in order."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, Router)}
