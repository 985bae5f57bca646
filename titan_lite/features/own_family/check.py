"""Check a user's own family before anything starts, without memory or other ranks.

    check_own_family(config, layout)       # raises ConfigError

Names and shapes of all blocks' parameters are compared with what the Family says. Then one block
runs forward and backward on the meta device, where tensors and collectives have shapes alone, as
the first rank of the layout runs it. Whether the layout computes what one process does is for
`titan-lite verify`.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.collectives import Axis
from titan_lite.config import Config, ConfigError
from titan_lite.config.errors import shown
from titan_lite.distributed.context_parallel import apply_context_parallel, causal_attention
from titan_lite.distributed.expert_parallel import check_experts
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.tensor_parallel import apply_styles, check_styles
from titan_lite.feature import features_of, low_precision
from titan_lite.models.experts import routers_of
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import parameter_shapes
from titan_lite.models.transformer import Transformer

TOKENS = 16  # of a rank between blocks: matmuls of few bits need them, context parallelism 2


def check_own_family(config: Config, layout: Layout) -> None:
    """Check the parameters of all blocks, and run one as the first rank of `layout`, forward and
    backward. Raises ConfigError.
    """
    family = layout.model.family
    subject = f"model.name = {shown(family)}"
    tokens = TOKENS * layout.degrees["tp"]  # of a rank within attention and feed-forward
    shape = replace(layout.model, max_seq_len=tokens * layout.degrees["cp"])
    instead = "return a torch.nn.Module for any shape"
    with _one_line(family, "build_block", instead), torch.device("meta"):
        model = Transformer(shape, range(tokens))
    _check_parameters(model, subject)
    for number in list(model.layers)[1:]:
        del model.layers[number]
    _check_on_rank(model, config, layout)


def _check_parameters(model: Transformer, subject: str) -> None:
    """Raise ConfigError for tensors of blocks that a run would not initialize, save or train."""
    routers = routers_of(model.layers)
    for name, _ in model.layers.named_buffers():
        if name.rpartition(".")[0] not in routers:
            raise ConfigError(
                f"{subject}: build_block's block has the buffer layers.{name}, which nothing fills"
                " or saves; compute it in forward, or make it a parameter"
            )
    expected = parameter_shapes(model.config)
    found = {fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()}
    for fqn in expected | found:
        if found.get(fqn) != expected.get(fqn):
            raise ConfigError(
                f"{subject}: {fqn} is {found.get(fqn, 'not there')}, and"
                f" {expected.get(fqn, 'not there')} by block_parameters of its Family; make all"
                " blocks alike, each with parameters of its own"
            )
    for name, parameter in model.layers.named_parameters():
        fqn = f"layers.{name}"
        if parameter.dtype != torch.float32 or not parameter.requires_grad:
            raise ConfigError(
                f"{subject}: {fqn} is {_words(parameter)}, requires_grad ="
                f" {parameter.requires_grad}; parameters are float32 and trained, and blocks"
                " compute in training.mixed_precision_param"
            )
        if not _is_initialized(fqn, parameter, model.config.n_experts):
            raise ConfigError(
                f"{subject}: {fqn} is {tuple(parameter.shape)}; a parameter is a matrix, one for"
                f" each of n_experts = {model.config.n_experts}, or a weight with norm in its name,"
                " which is a vector that starts at 1; use bias=False"
            )


def _is_initialized(fqn: str, parameter: nn.Parameter, n_experts: int) -> bool:
    """Return True for a parameter that `Transformer.init_weights` starts as it should."""
    if "norm" in fqn:
        return parameter.ndim == 1 and not fqn.endswith(".bias")
    if is_of_experts(parameter.shape):
        return parameter.shape[0] == n_experts
    return parameter.ndim == 2


def _check_on_rank(model: Transformer, config: Config, layout: Layout) -> None:
    """Run the block of `model` as the first rank of `layout`. Raises ConfigError."""
    training = config.training
    family = model.config.family
    subject = f"model.name = {shown(family)}"
    tp = Axis("", layout.degrees["tp"], 0)
    cp = Axis("", layout.degrees["cp"], 0)
    dtype = getattr(torch, training.mixed_precision_param)
    tokens = TOKENS * tp.degree
    block = model.layers["0"].to(dtype)
    with torch.device("meta"):
        x = torch.empty(1, TOKENS, model.config.dim, dtype=dtype, requires_grad=True)
        mask = torch.empty(1, 1, tokens, tokens * cp.degree, dtype=torch.bool)
    if tp.degree > 1:
        check_styles(model, family)
    if layout.expert_parallel > 1:
        check_experts(model)
    attend = _Counted()
    apply_context_parallel(model, cp, attend)
    for feature in features_of(config):
        feature.before_tensor_parallel(config, model, tp)
    if tp.degree > 1:
        apply_styles(model, tp, family, _FirstPart(tp.degree))

    conditions = _conditions(config, layout)
    instead = "return what x is"
    if tp.degree > 1:
        instead += (
            ", or give its modules other styles in `styles` of the Family (docs/contributing.md)"
        )
    operators = _Operators(mask)
    what = f"the block with {conditions}"
    with _one_line(family, what, instead), torch.device("meta"), operators:
        y = block(x, model.rope_cos, model.rope_sin, mask if training.mask_documents else None)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise TypeError(f"it returns {_words(y)} for x {_words(x)}")
        y.sum().backward()
    if operators.random:
        raise ConfigError(
            f"{subject}: its block draws random numbers by {operators.random[0]}; recomputation,"
            " the ranks of a layout and a resumed run would draw others, so leave it out: dropout"
            " and noise are not supported"
        )
    if cp.degree > 1 and not attend.calls:
        raise ConfigError(
            f"{subject}: layers.0.attention does not call self.attend, in whose place"
            f" parallelism.context_parallel_degree = {cp.degree} gathers keys and values; call it,"
            " or use parallelism.context_parallel_degree = 1"
        )
    if training.mask_documents and not operators.reads_mask:
        raise ConfigError(
            f"{subject}: its block does not read its argument mask, by which"
            " training.mask_documents = true keeps attention within documents; give it to"
            " self.attend, or use training.mask_documents = false"
        )
    for name, parameter in block.named_parameters():
        if parameter.grad is None:
            raise ConfigError(
                f"{subject}: its block computes no gradient of layers.0.{name}; all parameters are"
                " trained: use it in forward, without detach, or leave it out"
            )


@contextmanager
def _one_line(family: str, what: str, instead: str) -> Iterator[None]:
    """Return a context in which an error of the user's code is a ConfigError with its line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        file = str(Path(family).resolve())
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        place = f" in line {lines[-1]}" if lines else ""
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"model.name = {shown(family)}: {what} fails{place}: {reason}; it has to {instead}"
        ) from error


class _Operators(TorchDispatchMode):
    """A context that notes operators which draw random numbers, and whether one reads the mask."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.mask = mask
        self.reads_mask = False
        self.random: list[OpOverload] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,  # noqa: ANN401 torch's
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 torch's
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random.append(func)
        self.reads_mask |= any(leaf is self.mask for leaf in pytree.tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


class _Counted:
    """Causal attention that counts its calls."""

    calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        self.calls += 1
        return causal_attention(q, k, v, mask)


class _FirstPart:
    """Split a parameter, as `apply_styles` asks, into the part of the first rank."""

    def __init__(self, degree: int):
        self.degree = degree

    def __call__(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        if dim is None:
            return parameter
        length = -(-parameter.shape[dim] // self.degree)
        return nn.Parameter(parameter.detach().narrow(dim, 0, length))


def _conditions(config: Config, layout: Layout) -> str:
    """Return what makes a rank's block another one than the family's, keys for the most part."""
    keys = [f"training.mixed_precision_param = {shown(config.training.mixed_precision_param)}"]
    if low := low_precision(config):
        keys.append(f"matmuls in {low.name}")
    for axis, name in (("cp", "context"), ("tp", "tensor")):
        if layout.degrees[axis] > 1:
            keys.append(f"parallelism.{name}_parallel_degree = {layout.degrees[axis]}")
    return ", ".join(keys)


def _words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
