"""Tensor parallelism, with sequence parallelism between blocks, as a table from FQN to style.

    apply_tensor_parallel(model, mesh["tp"], "llama3")    # before SimpleFSDP, which shards a part

A rank has some heads and some hidden units of every block (arXiv 1909.08053), and between blocks
some tokens of every sequence (arXiv 2205.05198). With t = T / tp, for attention (the feed-forward
network is analogous):

    x (B, t, C)
      -> all-gather -> (B, T, C)
      -> wq, wk, wv: own heads -> attention -> wo: own columns
      -> reduce-scatter -> (B, t, C)

Embedding and output have a rank's rows of the vocabulary. The loss is computed from their logits
(`models/loss.py`), and no rank ever has the logits of the full vocabulary. Modules compute on plain
tensors: a graph has plain collectives.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_lite.collectives import Axis, all_gather, all_reduce, reduce_scatter
from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import (
    Shape,
    attention_parameters,
    feed_forward_parameters,
    find_family,
)
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import axis_of
from titan_lite.distributed.specialize import specialize
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.loss import VocabularyShard
from titan_lite.models.transformer import Transformer
from titan_lite.sharding import chunk_size


@dataclass(frozen=True)
class Style:
    """Parallel style of a module."""

    # dimension in which its weight is split; None: replicated, or no weight
    weight: int | None = None
    gathers: bool = False  # all-gather the tokens of its input
    scatters: bool = False  # reduce-scatter the tokens of its output
    vocabulary: bool = False  # look up this rank's rows of an embedding table


# of the matmul x @ weight.T
COLUMN = Style(weight=0)
ROW = Style(weight=1, scatters=True)
STYLES: dict[str, Style] = {
    "tok_embeddings": Style(weight=0, scatters=True, vocabulary=True),
    "layers.*.attention_norm": Style(),
    "layers.*.attention": Style(gathers=True),
    "layers.*.attention.wq": COLUMN,
    "layers.*.attention.wk": COLUMN,
    "layers.*.attention.wv": COLUMN,
    "layers.*.attention.wo": ROW,
    "layers.*.ffn_norm": Style(),
    "layers.*.feed_forward": Style(gathers=True),
    "layers.*.feed_forward.w1": COLUMN,
    "layers.*.feed_forward.w3": COLUMN,
    "layers.*.feed_forward.w2": ROW,
    "norm": Style(),
    "output": Style(weight=0, gathers=True),  # logits stay split: `VocabularyShard` of loss.py
}
# names for a family's own modules (`styles` of config/families.py)
STYLE_NAMES = {
    "replicated": Style(),
    "columns": COLUMN,
    "rows": ROW,
    "gathers": Style(gathers=True),  # a module around those of columns and rows
}


@functools.cache
def styles_of(family: str) -> dict[str, Style]:
    """Return the styles of all modules of a family by FQN, with "*" for a block's number.

    Raises ConfigError for a style that does not exist.
    """
    own = {}
    for module, style in find_family(family).styles.items():
        if style not in STYLE_NAMES:
            raise ConfigError(
                f"model.name = {shown(family)}: the style of {module} is {shown(style)}; use one of"
                f" {', '.join(STYLE_NAMES)}"
            )
        own[f"layers.*.{module}"] = STYLE_NAMES[style]
    return STYLES | own


Move = Callable[[Tensor, Axis], Tensor]  # a collective of tokens


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, family: str) -> None:
    """Split `model` over the one-axis `mesh` in place; FQNs do not change.

    Does nothing for a mesh of one rank.

    Parameters become DTensors on `mesh`, split or replicated; those on the meta device stay there.
    The gradient of a replicated one must be summed over ranks, because each rank sees other tokens;
    SimpleFSDP does it. Raises ConfigError for a parameter of a module that has no style.
    """
    if mesh.size() > 1:
        apply_styles(model, axis_of(mesh), family, functools.partial(split_over, mesh))


def apply_styles(
    model: nn.Module,
    axis: Axis,
    family: str,
    split: Callable[[nn.Parameter, int | None], nn.Parameter],
) -> None:
    """Split `model` over `axis` in place; see `apply_tensor_parallel`.

    split: a parameter, and the dimension in which it is split, None: it is replicated -> this
    rank's part. Matrices of experts are left: no expert is cut (mesh.expert_mesh). A module whose
    attribute `exchanges_tokens` is true gathers or scatters tokens itself, along its `tp_axis`.
    """
    parts: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are split once
    for fqn, module in model.named_modules():
        style = style_of(fqn, family)
        for name, parameter in module._parameters.items():
            if parameter is None or is_of_experts(parameter.shape):
                continue
            if style is None:
                raise _no_style(f"{fqn}.{name}", family)
            if parameter not in parts:
                parts[parameter] = split(parameter, style.weight)
            module._parameters[name] = parts[parameter]
        if style is not None and (style.gathers or style.scatters):
            module.__dict__["tp_axis"] = axis
            if not getattr(module, "exchanges_tokens", False):
                specialize(module, tensor_parallel, style)


@contextmanager
def all_tokens_on_each_rank(model: nn.Module) -> Iterator[None]:
    """Return a context without sequence parallelism: each rank has all tokens between blocks, T of
    any number. For forwards without a gradient, such as that of a single token.
    """
    split = [module for module in model.modules() if "tp_axis" in module.__dict__]
    for module in split:
        module.__dict__["tp_axis"] = replace(module.__dict__["tp_axis"], has_all_tokens=True)
    try:
        yield
    finally:
        for module in split:
            module.__dict__["tp_axis"] = replace(module.__dict__["tp_axis"], has_all_tokens=False)


def check_styles(model: Transformer, family: str) -> None:
    """Raise ConfigError for a parameter of a module without a style, or with one that cannot be.

    What a style does to shapes shows when a block runs (features/own_family/).
    """
    own = find_family(family).styles
    # the shapes that STYLES are for, by a parameter's name within a block
    usual = attention_parameters(model.config) | feed_forward_parameters(model.config)
    for name, parameter in model.named_parameters():
        fqn = name.rpartition(".")[0]
        module = re.sub(r"^layers\.\d+\.", "", fqn)
        if is_of_experts(parameter.shape):
            continue
        style = style_of(fqn, family)
        if style is None:
            raise _no_style(name, family)
        subject = f"model.name = {shown(family)}: {name}"
        otherwise = "or use parallelism.tensor_parallel_degree = 1"
        if style.weight is not None and parameter.ndim == 1:
            raise ConfigError(
                f"{subject} is a vector, and the style of {module} splits a matrix: each rank would"
                ' see its own numbers alone; use "replicated" for a norm of each head, or'
                f" another module, {otherwise}"
            )
        shape = tuple(parameter.shape)
        expected = usual.get(name.split(".", 2)[-1], shape)
        if module not in own and shape != expected:
            raise ConfigError(
                f"{subject} is {shape}, and the style that {module} has by its name is for"
                f" {expected}; make two modules of one that has two halves, or where any part of"
                ' its results is one of a rank, give it "columns" or "rows" in `styles` of its'
                f" Family, {otherwise}"
            )
        owner = type(model.get_submodule(fqn))
        if style == ROW and owner is not nn.Linear:
            raise ConfigError(
                f"{subject} is of a {owner.__qualname__}, and the result of a module of style"
                ' "rows" is a part of a sum, which is added after its forward: it has to be a'
                " torch.nn.Linear; do the rest in the module around it,"
                f" {otherwise}"
            )


def _no_style(name: str, family: str) -> ConfigError:
    module = re.sub(r"^layers\.\d+\.", "", name.rpartition(".")[0])
    return ConfigError(
        f"model.name = {shown(family)}: {name} has no tensor-parallel style; give {module} one of"
        f" {', '.join(STYLE_NAMES)} in `styles` of its Family, or use"
        " parallelism.tensor_parallel_degree = 1"
    )


def weight_dim(fqn: str, family: str) -> int | None:
    """Return the dimension in which tensor parallelism splits the weight of a module; None: it is
    replicated.
    """
    style = style_of(fqn, family)
    return None if style is None else style.weight


def largest_shard(layout: Layout, fqn: str, shape: Sequence[int]) -> Shape:
    """Return the shape of the largest part of a parameter that a rank has."""
    part = list(shape)
    shards = layout.fsdp_degree
    if is_of_experts(shape):  # mesh.expert_mesh
        part[0] //= layout.expert_parallel
        shards = layout.expert_ranks // layout.expert_parallel
    elif (split_dim := weight_dim(fqn.rpartition(".")[0], layout.model.family)) is not None:
        part[split_dim] = chunk_size(part[split_dim], layout.degrees["tp"])
    part[0] = chunk_size(part[0], shards)
    return tuple(part)


def style_of(fqn: str, family: str) -> Style | None:
    """Return the style of a module; None if it has none."""
    for pattern, style in styles_of(family).items():
        if fnmatch.fnmatchcase(fqn, pattern):
            return style
    return None


def split_over(mesh: DeviceMesh, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
    """Return a parameter as a DTensor, split over `mesh` in dimension `dim` or replicated."""
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim)]
    local = parameter.detach()
    if dim is not None:
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        local = local.narrow(dim, min(offset[dim], parameter.shape[dim]), shape[dim]).clone()
    part = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(part, parameter.requires_grad)


def tensor_parallel(cls: type[nn.Module], style: Style) -> dict[str, object]:
    """Return the members of a module that gathers tokens, or scatters those of its output."""

    def forward(self: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
        axis: Axis = self.tp_axis  # type: ignore[assignment]
        if style.vocabulary:
            entries = VocabularyShard(self.num_embeddings, axis)  # type: ignore[arg-type]
            x = _look_up(x, self.weight, entries)  # type: ignore[arg-type]
        elif style.gathers:
            x = cls.forward(self, gather_tokens(x, axis), *others)
        else:
            x = cls.forward(self, x, *others)
        return scatter_tokens(x, axis) if style.scatters else x

    return {"forward": forward}


def _look_up(tokens: Tensor, weight: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Look up tokens in this rank's rows of the table, zero for other tokens.

    The sum over ranks is the full look-up.
    """
    own, inside = vocabulary.find(tokens)
    return F.embedding(own, weight) * inside.unsqueeze(-1)


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """All-gather tokens: (B, t, C) -> (B, T, C). Backward reduce-scatters the gradient."""
    return exchange_tokens(x, axis, all_gather_tokens, reduce_scatter_tokens)


def scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter tokens: (B, T, C) -> (B, t, C). Backward all-gathers the gradient."""
    return exchange_tokens(x, axis, reduce_scatter_tokens, all_gather_tokens)


def exchange_tokens(x: Tensor, axis: Axis, move: Move, move_back: Move) -> Tensor:
    """Run the collective `move`. Backward runs `move_back` on the gradient."""
    return _Tokens.apply(x, axis, move, move_back)


class _Tokens(torch.autograd.Function):
    """See `exchange_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, move: Move, move_back: Move) -> Tensor:  # noqa: ANN401 torch's
        ctx.axis = axis
        ctx.move_back = move_back
        return move(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 torch's
        return ctx.move_back(gradient, ctx.axis), None, None, None


# Inductor's pass for asynchronous tensor parallelism recognises cat and chunk.
def all_gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """All-gather tokens, without a gradient: (B, t, C) -> (B, T, C)."""
    if axis.has_all_tokens:
        return x
    parts = all_gather(x.contiguous(), axis.degree, axis.group)
    return torch.cat(parts.chunk(axis.degree), dim=1)


def reduce_scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter tokens, without a gradient: (B, T, C) -> (B, t, C)."""
    if axis.has_all_tokens:
        return all_reduce(x.contiguous(), "sum", axis.group)
    parts = torch.cat(x.chunk(axis.degree, dim=1))
    return reduce_scatter(parts, axis.degree, axis.group)
