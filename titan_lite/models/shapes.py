"""Shapes of models: a family's flavors, changed by keys of [model], and shapes of their parameters.

Needs no torch, so that a recipe is checked quickly. Families are in config/families.py.

    shape_of(Model(flavor="debug", n_layers=12))      # ModelConfig(dim=256, n_layers=12, ...)
    shape_words(Model(flavor="debug", n_layers=12))   # "debug with n_layers = 12 (not 6)"
    parameter_shapes(shape_of(Model(flavor="8B")))["norm.weight"]    # (4096,)
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from titan_lite.config import ConfigError, Model
from titan_lite.config.errors import shown
from titan_lite.config.families import Family, ModelConfig, RopeScaling, Shape, find_family
from titan_lite.manifest import CorruptFileError, fields_of
from titan_lite.models.fqns import is_matrix, is_of_experts, lies_within

KERNEL_BYTES = 16  # a row of a factor of a grouped GEMM is a multiple of them
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
FLOAT32_BYTES = ITEM_BYTES["float32"]
_SCALING_FIELDS = dataclasses.fields(RopeScaling)
_REQUIRED_WITHOUT_FLAVOR = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
_SIZES = (*_REQUIRED_WITHOUT_FLAVOR, "n_kv_heads", "head_dim")
_SIZES_OR_NONE = ("n_experts", "experts_per_token")  # 0 in a dense model


def shape_of(model: Model) -> ModelConfig:
    """Return the shape of a recipe's model: its flavor, changed by keys of [model].

    Raises ConfigError for an unknown family or flavor, or without a flavor for a missing key.
    """
    family = find_family(model.name)
    changes = _changes_to_flavor(model, family)
    if model.flavor:
        flavor = _flavor_of(model, family)
        return dataclasses.replace(flavor, **changes, family=model.name)
    required = [*_REQUIRED_WITHOUT_FLAVOR, *(_SIZES_OR_NONE if has_experts(family) else ())]
    missing = [f"model.{name}" for name in required if name not in changes]
    if missing:
        raise ConfigError(
            f'model.flavor = "" needs {", ".join(missing)}; set them, or use a flavor such as'
            ' "debug"'
        )
    without_keys = {"n_kv_heads": model.n_heads, **family.defaults}
    return ModelConfig(**{**without_keys, **changes, "family": model.name})


def _flavor_of(model: Model, family: Family) -> ModelConfig:
    if model.flavor not in family.flavors:
        raise ConfigError(
            f"model.flavor = {shown(model.flavor)}: use one of {', '.join(family.flavors)} of"
            f' model.name = {shown(model.name)}, "from_weights", or "" and give the shape by'
            " keys of [model]"
        )
    return family.flavors[model.flavor]


def has_experts(family: Family) -> bool:
    """Return True for a family whose blocks have experts."""
    return any(flavor.n_experts for flavor in family.flavors.values())


def derives_head_dim(model: Model) -> bool:
    """Return True if the size of a head is dim / n_heads: no key, and not the family, sets it."""
    return not model.head_dim and "head_dim" not in find_family(model.name).defaults


def shape_words(model: Model) -> str:
    """Return the flavor's name and the values that differ from it.

    A shape that is given by keys has the name of the flavor that it is equal to, if any.
    """
    family = find_family(model.name)
    flavor = family.flavors.get(model.flavor)
    if flavor is None:
        shape = shape_of(model)
        for name, other in family.flavors.items():
            if shape == dataclasses.replace(
                other, max_seq_len=shape.max_seq_len, family=shape.family
            ):
                return name
    words = []
    for name, value in _changes_to_flavor(model, family).items():
        if name == "head_dim" and not value:
            continue  # it follows from the others
        if flavor is None:
            words.append(f"{name} = {_short(value)}")
        elif getattr(flavor, name) != value:
            words.append(f"{name} = {_short(value)} (not {_short(getattr(flavor, name))})")
    name = model.flavor or "custom"
    return f"{name} with {', '.join(words)}" if words else name


def _short(value: object) -> str:
    if not isinstance(value, RopeScaling):
        return str(value)
    others = dataclasses.astuple(value)[1:]
    usual = others == dataclasses.astuple(RopeScaling(value.factor))[1:]
    return (
        f"{value.factor:g}x" if usual else f"{value.factor:g}x with {', '.join(map(str, others))}"
    )


def _changes_to_flavor(model: Model, family: Family) -> dict[str, Any]:
    """Return the fields of ModelConfig that keys of [model] set."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(ModelConfig):
        if field.name in ("tied_embeddings", "rope_scaling", "family"):
            continue
        value = getattr(model, field.name)
        if value:  # 0: as in the flavor
            changes[field.name] = value
    if model.tied_embeddings != "flavor":
        changes["tied_embeddings"] = model.tied_embeddings == "yes"
    if any(getattr(model, f"rope_scaling_{field.name}") for field in _SCALING_FIELDS):
        changes["rope_scaling"] = _scaling_of(model, family)
    if derives_head_dim(model) and (model.dim or model.n_heads):
        changes["head_dim"] = 0  # dim / n_heads, of the other numbers
    return changes


def _scaling_of(model: Model, family: Family) -> RopeScaling | None:
    """Return the flavor's scaling, changed by keys of [model]; None if there is no factor."""
    scaling = _flavor_of(model, family).rope_scaling if model.flavor else None
    factor = model.rope_scaling_factor or (scaling.factor if scaling else 1)
    if factor == 1:
        return None
    values = {field.name: getattr(model, f"rope_scaling_{field.name}") for field in _SCALING_FIELDS}
    changes = {name: value for name, value in values.items() if value}
    return dataclasses.replace(scaling or RopeScaling(factor), **changes)


def config_from_fields(fields: Any, name: str) -> ModelConfig:  # noqa: ANN401 - of a JSON file
    """Return the ModelConfig that `dataclasses.asdict` wrote.

    max_seq_len is that of the family where an older version did not write it. name: of the file and
    the field in it, for errors. Raises CorruptFileError.
    """
    with fields_of(name):
        for field in _SIZES:
            size = fields.get(field, 1)
            if type(size) is not int or size < 1:
                raise CorruptFileError(
                    f"{name}.{field} = {size!r}: expected a whole number above 0"
                )
        for field in _SIZES_OR_NONE:
            size = fields.get(field, 0)
            if type(size) is not int or size < 0:
                raise CorruptFileError(
                    f"{name}.{field} = {size!r}: expected a whole number from 0 on"
                )
        scaling = fields.get("rope_scaling")
        others = {"family": fields["family"], "rope_scaling": scaling and RopeScaling(**scaling)}
        if "max_seq_len" not in fields:
            family = find_family(fields["family"])
            others["max_seq_len"] = family.defaults.get("max_seq_len", ModelConfig.max_seq_len)
        return ModelConfig(**{**fields, **others})


def module_fqns(n_layers: int) -> list[str]:
    """Return the modules that pipeline stages are made of, in the order of forward."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]


def block_parameters(config: ModelConfig) -> Mapping[str, Shape]:
    """Return the shapes of a block's parameters by their names in it.

    Raises ConfigError if the function of a user's own family fails.
    """
    return _shapes_by("block_parameters", config)


def _shapes_by(function: str, config: ModelConfig) -> Mapping[str, Shape]:
    """Return what a function of a Family returns, by its name. Raises ConfigError if it fails."""
    family = find_family(config.family)
    try:
        shapes: Mapping[str, Shape] = getattr(family, function)(config)
    except Exception as error:
        raise ConfigError(
            f"model.name = {shown(config.family)}: {function} of its Family fails:"
            f" {type(error).__name__}: {error}"
        ) from error
    return shapes


def buffer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the buffers that a checkpoint has beside parameters, by FQN."""
    of_block = _shapes_by("block_buffers", config)
    return {
        f"layers.{layer}.{name}": shape
        for layer in range(config.n_layers)
        for name, shape in of_block.items()
    }


def parameter_shapes(config: ModelConfig, modules: Iterable[str] = ()) -> dict[str, Shape]:
    """Return the shapes of the parameters by FQN, in the model's order; within `modules`, or all.

    They are those of models/transformer.Transformer, without torch. A tied weight has its first
    name, and is within "output" too.
    """
    of_block = block_parameters(config)
    of_table = {"weight": (config.vocab_size, config.dim)}
    by_module: dict[str, Mapping[str, Shape]] = {"tok_embeddings": of_table}
    by_module |= {f"layers.{layer}": of_block for layer in range(config.n_layers)}
    by_module["norm"] = {"weight": (config.dim,)}
    if not config.tied_embeddings:
        by_module["output"] = of_table
    wanted = {*modules}
    if config.tied_embeddings and lies_within("output.weight", wanted):
        wanted.add("tok_embeddings")
    # most callers name whole modules
    others = wanted - by_module.keys()
    shapes: dict[str, Shape] = {}
    for module, of_module in by_module.items():
        is_whole = not wanted or module in wanted
        for name, shape in of_module.items():
            fqn = f"{module}.{name}"
            if is_whole or (others and lies_within(fqn, others)):
                shapes[fqn] = shape
    return shapes


def check_block(
    config: ModelConfig, parameters: Mapping[str, Shape], buffers: Mapping[str, Shape]
) -> None:
    """Raise ConfigError unless a block has the parameters and saved buffers that its family says.

    parameters, buffers: their shapes by their names in the block.
    """
    for function, found in (("block_parameters", parameters), ("block_buffers", buffers)):
        said = _shapes_by(function, config)
        mistakes = [
            f"{name} is {tuple(found[name]) if name in found else 'not'} in build_block's block,"
            f" and {tuple(said[name]) if name in said else 'not'} in {function} of its Family"
            for name in dict.fromkeys((*said, *found))
            if tuple(said.get(name, ())) != tuple(found.get(name, ()))
        ]
        if not mistakes and list(said) != list(found):
            mistakes = [
                f"{function} of its Family has another order than build_block's block, which has"
                f" {', '.join(found)}"
            ]
        if mistakes:
            lines = "; ".join(mistakes)
            raise ConfigError(f"model.name = {shown(config.family)}: {lines}; make the two agree")


@dataclasses.dataclass(frozen=True)
class BlockWeights:
    """The elements in the weights of matmuls of a block."""

    dense: int  # of matrices that every token is multiplied by
    experts: int  # of all experts
    active_experts: int  # of those that a token is multiplied by


def block_weights(config: ModelConfig) -> BlockWeights:
    shapes = block_parameters(config).values()
    experts = sum(math.prod(shape) for shape in shapes if is_of_experts(shape))
    active = experts // max(1, config.n_experts) * config.experts_per_token
    dense = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    return BlockWeights(dense, experts, active)


def numbers_in(shapes: Mapping[str, Shape]) -> int:
    """Return the number of elements of parameters, by FQN."""
    return sum(map(math.prod, shapes.values()))


def active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that a token is computed with: of the experts, those that it
    chooses.
    """
    weights = block_weights(config)
    total = numbers_in(parameter_shapes(config))
    return total - config.n_layers * (weights.experts - weights.active_experts)


def flops_per_token(config: ModelConfig, seq_len: int, *, full_attention: bool = False) -> int:
    """Return the operations of forward and backward for one token, without recomputation.

    6 for each weight of a matmul (the output projection, tied or not, but not the embedding
    look-up; of experts those that a token chooses), and 6 H D T per layer for causal attention with
    H heads of D numbers: a token attends to T / 2 others on average. full_attention: 12 H D T, as
    if every token attended to all T; PaLM (arXiv 2204.02311, appendix B) and torchtitan count so.
    """
    of_block = block_weights(config)
    in_blocks = config.n_layers * (of_block.dense + of_block.active_experts)
    weights = in_blocks + config.dim * config.vocab_size
    attended = config.n_layers * config.n_heads * config.head_dim * seq_len
    return 6 * weights + (12 if full_attention else 6) * attended


def sizes_without_a_kernel(shape: ModelConfig, dtype: str) -> list[tuple[str, int, int]]:
    """Return (name, size, multiple) of the sizes of experts that are no multiple of what grouped
    matmuls in this dtype need; [] of a dense model.
    """
    if not shape.n_experts:
        return []
    multiple = KERNEL_BYTES // ITEM_BYTES[dtype]
    sizes = {"dim": shape.dim, "hidden_dim": shape.hidden_dim}
    return [(name, size, multiple) for name, size in sizes.items() if size % multiple]


def matrices_in(shapes: Mapping[str, Shape]) -> list[Shape]:
    """Return the shapes of the matrices within blocks, in the order of their names. Those of all
    experts are one.
    """
    return [shape for fqn, shape in shapes.items() if is_matrix(fqn)]
