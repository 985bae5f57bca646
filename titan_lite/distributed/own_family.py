"""Run a block of a user's own family as a rank of the layout does, without memory or other ranks.

    check_on_rank(layout, config.float8, "bfloat16")       # raises ConfigError

What a rank replaces in a block (attention, linear layers, modules with a style) and how it splits
weights and tokens show on the meta device, where collectives only have shapes.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from titan_lite.config import ConfigError, Float8
from titan_lite.config.errors import shown
from titan_lite.distributed.context_parallel import apply_context_parallel, causal_attention
from titan_lite.distributed.expert_parallel import check_experts
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.tensor_parallel import Axis, apply_styles, check_styles
from titan_lite.models.float8 import DIM_MULTIPLE, Float8Linear, apply_float8, check_layers
from titan_lite.models.own_family import RunningModules, replace_reads
from titan_lite.models.transformer import Transformer

TOKENS = DIM_MULTIPLE  # of a rank between blocks; even, as context parallelism needs it


def check_on_rank(layout: Layout, float8: Float8, param_dtype: str) -> None:
    """Run a block as the first rank of `layout`, forward and backward. Raises ConfigError.

    param_dtype: training.mixed_precision_param.
    """
    conditions = _conditions(layout, float8, param_dtype)
    family = layout.model.family
    tp = Axis("", layout.degrees["tp"], 0)
    cp = Axis("", layout.degrees["cp"], 0)
    dtype = getattr(torch, param_dtype)
    tokens = TOKENS * tp.degree  # of a rank within attention and feed-forward
    shape = replace(layout.model, n_layers=1, max_seq_len=tokens * cp.degree)
    with torch.device("meta"):
        model = Transformer(shape, range(tokens))
        x = torch.empty(1, TOKENS, shape.dim, dtype=dtype, requires_grad=True)
    block = model.layers["0"].to(dtype)
    if tp.degree > 1:
        check_styles(model, family)
    if layout.expert_parallel > 1:
        check_experts(model)
    attend = _Counted()
    apply_context_parallel(model, cp, attend)
    if float8.enable:
        check_layers(model, family, float8.filter_fqns)
        apply_float8(model, float8.recipe, float8.filter_fqns)
    if tp.degree > 1:
        apply_styles(model, tp, family, _FirstPart(tp.degree))

    running = RunningModules(model.layers)
    _refuse_reads_of_scaled_weights(model, running, family)
    try:
        with torch.device("meta"):
            y = block(x, model.rope_cos, model.rope_sin, None)
            y.sum().backward()
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise _does_not_fit(layout, conditions, f"{running.innermost} fails: {reason}") from error
    if cp.degree > 1 and not attend.calls:
        raise ConfigError(
            f"model.name = {shown(family)}: layers.0.attention does not call self.attend, in whose"
            f" place parallelism.context_parallel_degree = {cp.degree} gathers keys and values;"
            " call it, or use parallelism.context_parallel_degree = 1"
        )
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        found = f"{_words(y)} for x {_words(x)}"
        raise _does_not_fit(layout, conditions, f"layers.0 returns {found}")


def _words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def _refuse_reads_of_scaled_weights(
    model: Transformer, running: RunningModules, family: str
) -> None:
    """Let weights that a rank gathers with a scale raise ConfigError where another module than
    their own reads them.
    """

    def read(fqn: str, module: nn.Module, name: str) -> Tensor | None:
        if running.innermost != fqn:
            raise ConfigError(
                f"model.name = {shown(family)}: {running.innermost} reads {fqn}.{name}, which"
                ' float8.enable = true with recipe = "tensorwise" gathers with a scale, for the'
                f" product of {fqn} alone; call the module, or use float8.filter_fqns ="
                f' ["{fqn.split(".", 2)[2]}"]'
            )
        return module._parameters[name]

    for fqn, module in model.named_modules():
        if isinstance(module, Float8Linear) and module.recipe == "tensorwise":
            replace_reads(module, ["weight"], partial(read, fqn))


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


def _conditions(layout: Layout, float8: Float8, param_dtype: str) -> str:
    """Return the keys that make a rank's block another one than the family's."""
    keys = [f"training.mixed_precision_param = {shown(param_dtype)}"]
    if float8.enable:
        keys.append("float8.enable = true")
    for axis, name in (("cp", "context"), ("tp", "tensor")):
        if layout.degrees[axis] > 1:
            keys.append(f"parallelism.{name}_parallel_degree = {layout.degrees[axis]}")
    return ", ".join(keys)


def _does_not_fit(layout: Layout, conditions: str, what: str) -> ConfigError:
    instead = "make the block compute there, and return what x is"
    if layout.degrees["tp"] > 1:
        instead = (
            "give its modules other styles in `styles` of the Family (docs/contributing.md), or use"
            " parallelism.tensor_parallel_degree = 1"
        )
    return ConfigError(
        f"model.name = {shown(layout.model.family)}: with {conditions}, {what}; {instead}"
    )
