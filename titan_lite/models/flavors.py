"""Make the shape of a recipe's model: its flavor, changed by keys of [model].

shape_of(Model(flavor="debug", n_layers=12))      # ModelConfig(dim=256, n_layers=12, ...)
shape_words(Model(flavor="debug", n_layers=12))   # "debug with n_layers = 12 (not 6)"
"""

import dataclasses
from typing import Any

from titan_lite.config import ConfigError, Model
from titan_lite.config.errors import shown
from titan_lite.models.shapes import FLAVORS, ModelConfig, RopeScaling

_NEEDED = (
    "dim",
    "n_layers",
    "n_heads",
    "hidden_dim",
    "vocab_size",
)  # without a flavor; the others have defaults in ModelConfig


def shape_of(model: Model) -> ModelConfig:
    """Return the shape of the model.

    Raises ConfigError for an unknown flavor or an impossible shape.
    """
    if model.flavor not in ("", *FLAVORS):
        fix = 'use one of {}, or "" and give the shape by keys of [model]'
        raise ConfigError(f"model.flavor = {shown(model.flavor)}: {fix.format(', '.join(FLAVORS))}")
    written = _written(model)
    if model.flavor:
        shape = dataclasses.replace(FLAVORS[model.flavor], **written)
    elif missing := [f"model.{name}" for name in _NEEDED if name not in written]:
        raise ConfigError(
            f'model.flavor = "" needs {", ".join(missing)}; set them, or use a flavor such as'
            ' "debug"'
        )
    else:
        shape = ModelConfig(**{"n_kv_heads": model.n_heads, **written})
    _check(model, shape)
    return shape


def shape_words(model: Model) -> str:
    """Return the flavor's name and the values that differ from it."""
    flavor, written = FLAVORS.get(model.flavor), _written(model)
    words = []
    for name, value in written.items():
        before = getattr(flavor, name, value)
        if flavor is None or before != value:
            words.append(
                f"{name} = {_short(value)}" + (f" (not {_short(before)})" if flavor else "")
            )
    return (model.flavor or "of its own") + (f" with {', '.join(words)}" if words else "")


def _short(value: Any) -> str:
    return f"{value.factor:g}x" if isinstance(value, RopeScaling) else str(value)


def _written(model: Model) -> dict[str, Any]:
    """Return the fields of ModelConfig that keys of [model] set."""
    names = [
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.name not in ("tied_embeddings", "rope_scaling")
    ]
    written = {name: value for name in names if (value := getattr(model, name))}
    if model.tied_embeddings != "flavor":
        written["tied_embeddings"] = model.tied_embeddings == "yes"
    if factor := model.rope_scaling_factor:
        scaling = (FLAVORS[model.flavor].rope_scaling if model.flavor else None) or RopeScaling(
            factor
        )
        written["rope_scaling"] = (
            None if factor == 1 else dataclasses.replace(scaling, factor=factor)
        )
    return written


def _check(model: Model, shape: ModelConfig) -> None:
    """Raise ConfigError for sizes that do not fit each other."""

    def value(name: str) -> str:
        return (
            f"model.{name} = {getattr(shape, name)}"
            if getattr(model, name)
            else f"{name} = {getattr(shape, name)} of the flavor"
        )

    mistakes = []
    heads = shape.n_heads
    pair = 2 * heads
    if heads % shape.n_kv_heads:
        fix = " or ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        why = f"{value('n_heads')} is not a multiple of {value('n_kv_heads')}"
        mistakes.append(
            f"{why}, and key/value heads are shared evenly; use model.n_kv_heads = {fix}"
        )
    if shape.dim % pair:
        fix = " or ".join(
            map(str, sorted({max(pair, shape.dim // pair * pair), -(-shape.dim // pair) * pair}))
        )
        why = (
            f"{value('dim')} is not a multiple of 2 x {value('n_heads')}, and a head's dimensions"
            " rotate in pairs"
        )
        mistakes.append(f"{why}; use model.dim = {fix}")
    if mistakes:
        raise ConfigError(*mistakes)
