"""Rules of [float8]: layers that are computed in it, and scales, sizes and dtypes that it has."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.errors import shown
from titan_lite.config.families import ModelConfig, Shape
from titan_lite.distributed.layout import Layout
from titan_lite.features.float8.keys import Float8Keys
from titan_lite.models.fqns import is_filtered, is_matrix, is_of_experts
from titan_lite.models.shapes import parameter_shapes
from titan_lite.rules.mistakes import Mistake, rule_of_layout, rule_of_machine

DIM_MULTIPLE = 16  # each dimension of a float8 matmul is one of its multiples, on GPUs


@rule_of_layout
def weights_gathered_in_float8_have_one_scale(config: Config, layout: Layout) -> Iterator[Mistake]:
    keys = Float8Keys.of(config)
    if keys.enable and keys.all_gather and keys.recipe != "tensorwise":
        yield Mistake(
            key="float8.all_gather",
            value=True,
            why=(
                "is for tensorwise scales: backward multiplies by the columns of a weight, and"
                f' float8.recipe = "{keys.recipe}" has scales of its rows'
            ),
            instead='recipe = "tensorwise" or all_gather = false',
        )


@rule_of_layout
def float8_has_layers_to_compute(config: Config, layout: Layout) -> Iterator[Mistake]:
    keys = Float8Keys.of(config)
    if not keys.enable:
        return
    filters = keys.filter_fqns
    layers = _linear_layers(layout.model)
    for name in filters:
        if not any(is_filtered(fqn, [name]) for fqn in layers):
            yield Mistake(
                key="float8.filter_fqns",
                value=filters,
                why=f'has "{name}", which is no part of the name of a linear layer in a block',
                instead=(
                    'such as "attention.wk" or "layers.0" (embedding and output never are in'
                    " float8)"
                ),
            )
    if all(is_filtered(fqn, filters) for fqn in layers):
        why = "has nothing to do: float8.filter_fqns leaves no layer to compute in float8"
        yield Mistake("float8.enable", True, why, "false")


def _linear_layers(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the weights of the blocks' linear layers, by the FQN of the layer."""
    return {
        fqn.removesuffix(".weight"): shape
        for fqn, shape in parameter_shapes(model).items()
        if is_matrix(fqn) and not is_of_experts(shape)
    }


@rule_of_layout
def float8_matmuls_have_multiples_of_16(config: Config, layout: Layout) -> Iterator[Mistake]:
    keys = Float8Keys.of(config)
    if not keys.enable:
        return
    from titan_lite.distributed.tensor_parallel import weight_dim

    key = "float8.enable"
    needs = f"and dimensions of float8 matmuls are multiples of {DIM_MULTIPLE}"
    tokens = layout.tokens_per_microbatch
    if tokens % DIM_MULTIPLE:
        why = f"is impossible: a microbatch has {tokens} tokens on a rank, {needs}"
        yield Mistake(key, True, why, "another training.seq_len or training.local_batch_size")
    filters = keys.filter_fqns
    wrong: dict[str, str] = {}  # shape on a rank, by name in a block
    for fqn, shape in _linear_layers(layout.model).items():
        if is_filtered(fqn, filters):
            continue
        split_dim = weight_dim(fqn, layout.model.family)
        rows, columns = (
            size / layout.degrees["tp"] if dim == split_dim else size
            for dim, size in enumerate(shape)
        )
        if rows % DIM_MULTIPLE or columns % DIM_MULTIPLE:
            wrong.setdefault(fqn.split(".", 2)[2], f"{fqn}.weight is {rows:g} x {columns:g}")
    if wrong:
        lower = " or a lower tensor_parallel_degree" if layout.degrees["tp"] > 1 else ""
        yield Mistake(
            key=key,
            value=True,
            why=f"is impossible: {next(iter(wrong.values()))} on a rank, {needs}",
            instead=f"float8.filter_fqns = {shown([*filters, *wrong])}{lower}",
        )


@rule_of_machine
def float8_has_a_gpu_with_float8_matmuls(config: Config, layout: Layout) -> Iterator[Mistake]:
    import torch

    keys = Float8Keys.of(config)
    if not keys.enable or not torch.cuda.is_available():
        return
    name = torch.cuda.get_device_name()
    if torch.version.hip:
        why = f"needs an NVIDIA GPU, and here is {name}"
        yield Mistake("float8.enable", True, why, "false")
        return
    if torch.cuda.get_device_capability() < (8, 9):
        why = f"needs compute capability 8.9 or newer, such as H100, and here is {name}"
        yield Mistake("float8.enable", True, why, "false")
    elif keys.recipe != "tensorwise" and torch.cuda.get_device_capability() < (9, 0):
        why = f"needs compute capability 9.0 or newer, and here is {name}"
        yield Mistake("float8.recipe", keys.recipe, why, '"tensorwise"')
    yield from float8_has_results_on_gpus(config)


def float8_has_results_on_gpus(config: Config) -> Iterator[Mistake]:
    """Yield a mistake for float8 matmuls whose results no GPU has in the recipe's dtype.

    CPUs have them, so this is no rule of every recipe.
    """
    keys = Float8Keys.of(config)
    recipe = keys.recipe
    dtype = config.training.mixed_precision_param
    if keys.enable and recipe != "tensorwise" and dtype != "bfloat16":
        why = "has results in bfloat16 alone on GPUs"
        instead = 'training.mixed_precision_param = "bfloat16"'
        yield Mistake("float8.recipe", recipe, why, instead)
