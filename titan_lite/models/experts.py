"""A mixture of experts: a router chooses K of E feed-forward networks for each token.

    moe = MixtureOfExperts(config)
    y = moe(x)                                      # (B, T, C) -> (B, T, C)

    x (B, T, C) -> router: probabilities (B, T, E) -> the K largest; weights, which sum to 1
      -> rows of tokens, those of an expert side by side
      -> SwiGLU of each row by its expert: three grouped GEMMs; hidden units times the weight
      -> rows back in the order of tokens, summed over K -> (B, T, C)

The number of rows does not depend on the choices, so shapes are static and nothing waits for the
host; how many rows each expert has is a tensor. A token is routed once, in float32, by the rank
that has it between blocks. Of equal probabilities the expert with the lower number is chosen, on
every device.

A rank may have some of the experts alone (distributed/expert_parallel.py). Then rows between the
last end and the last row are of no expert: what matmuls leave there is undefined, and nothing
reads it. The last row is spare. Results are zero there, and choices of other ranks' experts read
it, so that sums over K and gradients are right without a mask.

Two buffers of a router last from step to step, and are in checkpoints: `expert_bias`, which is
added to probabilities when experts are chosen and has no part in weights (arXiv 2408.15664), and
`expert_share`, each expert's share of the choices in the last step that counted.
features/moe/balance.py updates the one that experts.balance reads, from what `choose_experts`
gives to the Load of the router.

Dimensions: as in models/transformer.py; E experts, e of a rank, K of a token, F their hidden units,
N tokens, R rows; I and O, the inner and the outer size of a matmul.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate

from titan_lite.collectives import all_reduce
from titan_lite.config.families import ModelConfig
from titan_lite.sinks import Sinks

# --- Operators ------------------------------------------------------------------------------------


# Takes what a router chooses of a microbatch in training: probabilities (B, T, E), choices
# (B, T, K) and counts (B, E).
Load = Callable[[Tensor, Tensor, Tensor], None]
# That of each router. Without one, nothing is counted.
LOADS = Sinks[Load]("titan_lite::choose_experts")
# The rows that experts have needed in training at most, relative to their room: scalars, float64.
# Only experts with a capacity are in it.
ROOM_NEEDED = Sinks[Tensor]("titan_lite::rows_of_experts")


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
        LOADS[fqn](probabilities, choices, counts)
    return choices, counts


@choose_experts.register_fake
def _(probabilities: Tensor, bias: Tensor, k: int, fqn: str) -> tuple[Tensor, Tensor]:
    sequences, tokens, experts = probabilities.shape
    choices = probabilities.new_empty(sequences, tokens, k, dtype=torch.int64)
    return choices, probabilities.new_empty(sequences, experts, dtype=torch.int64)


@torch.library.custom_op("titan_lite::rows_of_experts", mutates_args=())
def rows_of_experts(
    choices: Tensor, first: int, experts: int, room: int, spare: int, fqn: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange choices in rows, those of an expert side by side, in the order of tokens.

    choices: (N, K). A rank's experts are first to first + experts - 1. It has `room` rows for them;
    choices beyond it have none, as choices of other ranks' experts. spare: 1, or 0 if every choice
    has a row. Returns what `Rows` has, with R = room + spare: the choice of each row (R,), the row
    of each choice (N K,), and the ends (e,) of the rows of each expert. fqn: of the entry of
    ROOM_NEEDED that gets the rows of all choices, relative to the room; "": of none.
    """
    flat = choices.flatten()
    is_own = (flat >= first) & (flat < first + experts)
    in_order, order = torch.where(is_own, flat - first, experts).sort(stable=True)
    numbers = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(in_order, numbers, right=True)
    if fqn in ROOM_NEEDED:
        needed = ROOM_NEEDED[fqn]
        needed.copy_(torch.maximum(needed, ends[-1].double() / room))
    ends = ends.clamp(max=room).int()
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=flat.device))
    row = torch.where(row < ends[-1], row, room)
    return F.pad(order, (0, spare))[: room + spare], row, ends


@rows_of_experts.register_fake
def _(
    choices: Tensor, first: int, experts: int, room: int, spare: int, fqn: str
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        choices.new_empty(room + spare),
        choices.new_empty(choices.numel()),
        choices.new_empty(experts, dtype=torch.int32),
    )


# F.grouped_mm has no fake result in float32 (torch 2.13), and its backward is one operator, which
# a pipeline could not divide into halves.
@torch.library.custom_op("titan_lite::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor, spare: int) -> Tensor:
    """Multiply rows (R, I) by the matrix of their group, weights (e, I, O) -> (R, O).

    ends: (e,) int32, where the rows of each group end; groups may be empty. Rows past the last end
    are undefined. spare: 1 if the last row is in no group, and zero; else 0.
    """
    product = F.grouped_mm(rows, weights, offs=ends)
    if spare:
        product[-1] = 0.0
    return product


@grouped_mm.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor, spare: int) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@torch.library.custom_op("titan_lite::grouped_mm_of_weights", mutates_args=())
def grouped_mm_of_weights(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a^T b of the rows of each group: a (R, O), b (R, I) -> (e, O, I); zeros for an empty
    group. ends: as for `grouped_mm`.
    """
    product = F.grouped_mm(a.t(), b, offs=ends)
    if product.is_cuda:  # some kernels do not write that of an empty group (pytorch issue 172439)
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        product.masked_fill_(is_empty[:, None, None], 0.0)
    return product


@grouped_mm_of_weights.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


GROUPED_GEMM = torch.ops.titan_lite.grouped_mm.default
GROUPED_GEMM_OF_WEIGHTS = torch.ops.titan_lite.grouped_mm_of_weights.default
CHOICE = torch.ops.titan_lite.choose_experts.default


class Rows(NamedTuple):
    """Rows of tokens for the experts of a rank."""

    choice: Tensor  # (R,) int64, of each row: a number in (N, K), flat
    row: Tensor  # (N K,) int64, of each choice: the last one, which is spare, if it has none here
    ends: Tensor  # (e,) int32, where the rows of each expert end
    tokens: int  # N
    spare: int  # 1 if the last row is of no choice; else 0

    @property
    def of_token(self) -> int:
        """K, the choices of a token."""
        return self.row.shape[0] // self.tokens


class _GroupedLinear(torch.autograd.Function):
    """Input (R, I), weights (e, O, I) -> (R, O): each row times the transposed matrix of its
    expert.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weights: Tensor, rows: Rows) -> Tensor:  # noqa: ANN401 torch's
        ctx.save_for_backward(input, weights, rows.ends)
        ctx.spare = rows.spare
        return grouped_mm(input, weights.transpose(1, 2), rows.ends, rows.spare)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401 torch's
        input, weights, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_input = grouped_mm(gradient, weights, ends, ctx.spare)
        of_weights = grouped_mm_of_weights(gradient, input, ends)
        return of_input, of_weights, None


# Rows are moved by gathers in both directions. Autograd would add gradients up row by row, on GPUs
# in any order.
def _to_rows(x: Tensor, rows: Rows) -> Tensor:
    """Tokens (N, C) -> the token of each row (R, C)."""
    return x.index_select(0, rows.choice // rows.of_token)


def _to_tokens(x: Tensor, rows: Rows) -> Tensor:
    """Rows (R, C) -> the sum of each token's rows (N, C)."""
    return x.index_select(0, rows.row).unflatten(0, (rows.tokens, -1)).sum(1)


def _weights_of_rows(weights: Tensor, rows: Rows) -> Tensor:
    """Weights (N, K) -> the weight of each row (R, 1)."""
    return weights.reshape(-1, 1).index_select(0, rows.choice)


def _weights_of_choices(weights: Tensor, rows: Rows) -> Tensor:
    """Weights of rows (R, 1) -> the weight of each choice (N, K)."""
    return weights.index_select(0, rows.row).view(rows.tokens, -1)


Move = Callable[[Tensor, Rows], Tensor]


class _Moved(torch.autograd.Function):
    """`move(x, rows)`, with `move_back` as its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, move: Move, move_back: Move) -> Tensor:  # noqa: ANN401 torch's
        ctx.save_for_backward(rows.choice, rows.row, rows.ends)
        ctx.sizes = (rows.tokens, rows.spare)
        ctx.move_back = move_back
        return move(x, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 torch's
        rows = Rows(*ctx.saved_tensors, *ctx.sizes)
        return ctx.move_back(gradient, rows), None, None, None


class _BalanceGradient(torch.autograd.Function):
    """Return probabilities (B, T, E) unchanged; backward adds the gradient of the balance term.

    The term is linear in probabilities, and its gradient is share times scale
    (features/moe/balance.py). Each pipeline stage adds its own. share: (E,), or (B, 1, E) of each
    sequence.
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
        return Routing(weights / weights.sum(-1, keepdim=True), choices)

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

    fqn = ""  # set by the Transformer
    # of rows, relative to equally loaded experts, that there is room for in training; 0: of all
    capacity_factor = 0.0

    def __init__(self, config: ModelConfig):
        super().__init__()
        widening = (config.n_experts, config.hidden_dim, config.dim)
        narrowing = (config.n_experts, config.dim, config.hidden_dim)
        self.w1 = nn.Parameter(torch.empty(widening))
        self.w2 = nn.Parameter(torch.empty(narrowing))
        self.w3 = nn.Parameter(torch.empty(widening))
        self.n_experts = config.n_experts
        # The experts that this rank computes. Of tokens with others alone, the result is zero.
        self.own = range(config.n_experts)

    def forward(self, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
        """x: (N, C). weights, choices: (N, K)."""
        rows = self.rows_of(choices)
        # for prices, of nodes in backward too: matmuls of an expert's rows have no fixed size
        with annotate({"balanced_rows": self.balanced_rows(choices)}):
            input = _Moved.apply(x, rows, _to_rows, _to_tokens)
            gate = _GroupedLinear.apply(input, self.w1, rows)
            hidden = F.silu(gate) * _GroupedLinear.apply(input, self.w3, rows)
            weight = _Moved.apply(weights, rows, _weights_of_rows, _weights_of_choices)
            hidden = hidden * weight.to(hidden.dtype)
            of_rows = _GroupedLinear.apply(hidden, self.w2, rows)
            return _Moved.apply(of_rows, rows, _to_tokens, _to_rows)

    def balanced_rows(self, choices: Tensor) -> int:
        """Return the rows that this rank's experts have if all experts are equally loaded."""
        return choices.numel() * len(self.own) // self.n_experts

    def rows_of(self, choices: Tensor) -> Rows:
        """Return the rows of choices (N, K)."""
        tokens, of_token = choices.shape
        own = len(self.own)
        room = tokens * min(of_token, own)
        fqn = ""
        if self.training and self.capacity_factor:
            room = min(room, math.ceil(self.capacity_factor * self.balanced_rows(choices)))
            fqn = self.fqn
        spare = int(own < self.n_experts)
        choice, row, ends = rows_of_experts(choices, self.own.start, own, room, spare, fqn)
        return Rows(choice, row, ends, tokens, spare)


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
        return self.experts(x.flatten(0, 1), weights, choices).view_as(x)


def routers_of(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a model by FQN, in order."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, Router)}


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """Return the modules of experts of a model by FQN, in order."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, Experts)}
