"""Shapes of Llama 3 models: flavors, changed by keys of [model], and shapes of their parameters.

Needs no torch, so that a recipe is checked quickly.

    FLAVORS["8B"].dim                                 # 4096
    shape_of(Model(flavor="debug", n_layers=12))      # ModelConfig(dim=256, n_layers=12, ...)
    shape_words(Model(flavor="debug", n_layers=12))   # "debug with n_layers = 12 (not 6)"
    parameter_shapes(FLAVORS["8B"])["norm.weight"]    # (4096,)
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titan_lite.config import ConfigError, Model
from titan_lite.config.errors import shown
from titan_lite.manifest import CorruptFileError, fields_of
from titan_lite.models.fqns import lies_within

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of low rotary frequencies, for contexts beyond `original_max_seq_len`."""

    factor: float  # divisor of the low frequencies
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128_256
    tied_embeddings: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    max_seq_len: int = 131_072  # tokens in the rotary tables

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


FLAVORS = {
    "debug": ModelConfig(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048
    ),
    "1B": ModelConfig(
        2048, 16, 32, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
    ),
    "3B": ModelConfig(
        3072, 28, 24, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
    ),
    "8B": ModelConfig(4096, 32, 32, 8, 14336, rope_scaling=RopeScaling(factor=8.0)),
    "70B": ModelConfig(8192, 80, 64, 8, 28672, rope_scaling=RopeScaling(factor=8.0)),
    "405B": ModelConfig(16384, 126, 128, 8, 53248, rope_scaling=RopeScaling(factor=8.0)),
}


_SCALING_FIELDS = dataclasses.fields(RopeScaling)
_REQUIRED_WITHOUT_FLAVOR = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
_SIZES = (*_REQUIRED_WITHOUT_FLAVOR, "n_kv_heads")


def shape_of(model: Model) -> ModelConfig:
    """Return the shape of a recipe's model: its flavor, changed by keys of [model].

    Raises ConfigError for an unknown flavor, or without a flavor for a missing key.
    """
    if model.flavor not in ("", *FLAVORS):
        raise ConfigError(
            f"model.flavor = {shown(model.flavor)}: use one of {', '.join(FLAVORS)},"
            ' "from_weights", or "" and give the shape by keys of [model]'
        )
    changes = _changes_to_flavor(model)
    if model.flavor:
        return dataclasses.replace(FLAVORS[model.flavor], **changes)
    missing = [f"model.{name}" for name in _REQUIRED_WITHOUT_FLAVOR if name not in changes]
    if missing:
        raise ConfigError(
            f'model.flavor = "" needs {", ".join(missing)}; set them, or use a flavor such as'
            ' "debug"'
        )
    return ModelConfig(**{"n_kv_heads": model.n_heads, **changes})


def shape_words(model: Model) -> str:
    """Return the flavor's name and the values that differ from it.

    A shape that is given by keys has the name of the flavor that it is equal to, if any.
    """
    flavor = FLAVORS.get(model.flavor)
    if flavor is None:
        shape = shape_of(model)
        for name, other in FLAVORS.items():
            if shape == dataclasses.replace(other, max_seq_len=shape.max_seq_len):
                return name
    words = []
    for name, value in _changes_to_flavor(model).items():
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


def _changes_to_flavor(model: Model) -> dict[str, Any]:
    """Return the fields of ModelConfig that keys of [model] set."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(ModelConfig):
        if field.name in ("tied_embeddings", "rope_scaling"):
            continue
        value = getattr(model, field.name)
        if value:  # 0: as in the flavor
            changes[field.name] = value
    if model.tied_embeddings != "flavor":
        changes["tied_embeddings"] = model.tied_embeddings == "yes"
    if any(getattr(model, f"rope_scaling_{field.name}") for field in _SCALING_FIELDS):
        changes["rope_scaling"] = _scaling_of(model)
    return changes


def _scaling_of(model: Model) -> RopeScaling | None:
    """Return the flavor's scaling, changed by keys of [model]; None if there is no factor."""
    scaling = FLAVORS[model.flavor].rope_scaling if model.flavor else None
    factor = model.rope_scaling_factor or (scaling.factor if scaling else 1)
    if factor == 1:
        return None
    values = {field.name: getattr(model, f"rope_scaling_{field.name}") for field in _SCALING_FIELDS}
    changes = {name: value for name, value in values.items() if value}
    return dataclasses.replace(scaling or RopeScaling(factor), **changes)


def config_from_fields(fields: Any, name: str) -> ModelConfig:  # noqa: ANN401 - of a JSON file
    """Return the ModelConfig that `dataclasses.asdict` wrote; fields with defaults may be missing.

    name: of the file and the field in it, for errors. Raises CorruptFileError.
    """
    with fields_of(name):
        scaling = fields.get("rope_scaling")
        config = ModelConfig(**{**fields, "rope_scaling": scaling and RopeScaling(**scaling)})
    for field in _SIZES:
        size = getattr(config, field)
        if type(size) is not int or size < 1:
            raise CorruptFileError(f"{name}.{field} = {size!r}: expected a whole number above 0")
    return config


def module_fqns(n_layers: int) -> list[str]:
    """Return the modules that pipeline stages are made of, in the order of forward."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]


def parameter_shapes(config: ModelConfig, modules: Iterable[str] = ()) -> dict[str, Shape]:
    """Return the shapes of the parameters by FQN, in the model's order; within `modules`, or all.

    They are those of models/llama3.Transformer, without torch. A tied weight has its first name,
    and is within "output" too.
    """
    width = config.dim
    kv_width = config.n_kv_heads * config.head_dim
    of_block = {
        "attention.wq": (config.n_heads * config.head_dim, width),
        "attention.wk": (kv_width, width),
        "attention.wv": (kv_width, width),
        "attention.wo": (width, config.n_heads * config.head_dim),
        "feed_forward.w1": (config.hidden_dim, width),
        "feed_forward.w2": (width, config.hidden_dim),
        "feed_forward.w3": (config.hidden_dim, width),
        "attention_norm": (width,),
        "ffn_norm": (width,),
    }
    table = (config.vocab_size, width)
    shapes: dict[str, Shape] = {"tok_embeddings.weight": table}
    for layer in range(config.n_layers):
        for name, shape in of_block.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    shapes["norm.weight"] = (width,)
    if not config.tied_embeddings:
        shapes["output.weight"] = table
    modules = tuple(modules)
    if not modules:
        return shapes
    if config.tied_embeddings and lies_within("output.weight", modules):
        modules = (*modules, "tok_embeddings")
    return {fqn: shape for fqn, shape in shapes.items() if lies_within(fqn, modules)}
