"""Rules of [model]: a shape that can be computed, and that of the weights a run begins with."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from titan_lite.config import KEYS, Config, ConfigError, Model
from titan_lite.config.errors import alternatives, in_toml, nearest_multiples
from titan_lite.config.families import find_family
from titan_lite.config.from_weights import FLAVOR as FROM_WEIGHTS
from titan_lite.config.from_weights import ModelOfWeights, keys_of_shape, read_model
from titan_lite.config.weights_folder import steps_in
from titan_lite.distributed.layout import Layout
from titan_lite.models.shapes import (
    derives_head_dim,
    has_experts,
    shape_of,
    sizes_without_a_kernel,
)
from titan_lite.rules.mistakes import Mistake, rule_of_keys, rule_of_layout, told_by


@rule_of_keys
def there_is_a_shape(config: Config) -> Iterator[Mistake]:
    yield from told_by("model.flavor", shape_of, config.model)


@rule_of_keys
def initial_weights_are_of_this_model(config: Config) -> Iterator[Mistake]:
    weights = initial_weights(config)
    if weights is None:
        return
    model = config.model
    theirs = keys_of_shape(dataclasses.asdict(shape_of(Model().replace(flavor="", **weights.keys))))
    ours = keys_of_shape(dataclasses.asdict(shape_of(model)))
    differing = [
        name
        for name, value in theirs.items()
        if ours.get(name, value) != value and name != "max_seq_len"  # a limit
    ]
    set_here = [name for name in differing if is_explicit(config, name)]
    for name in set_here:
        yield Mistake(
            key=f"model.{name}",
            value=ours[name],
            why=(
                f"is not that of checkpoint.initial_load_path: {weights.file} has"
                f" {in_toml(theirs[name])}"
            ),
            instead=f"{name} = {in_toml(theirs[name])}, or remove it",
        )
    of_flavor = [name for name in differing if name not in set_here]
    if of_flavor:
        words = ", ".join(
            f"{name} = {in_toml(ours[name])} (not {in_toml(theirs[name])})" for name in of_flavor
        )
        yield Mistake(
            key="model.flavor",
            value=model.flavor,
            why=f"is not that of checkpoint.initial_load_path ({weights.file}): {words}",
            instead=f'"{FROM_WEIGHTS}"',
        )


def is_explicit(config: Config, name: str) -> bool:
    """Return True if the recipe sets a key of [model] itself, instead of its flavor.

    The default of a key means the flavor's value, also where it is written. The exception is
    model.name, whose default is a family: there it counts whether the key is written.
    """
    if name == "name":
        return config.was_set("model.name")
    return getattr(config.model, name) != KEYS[f"model.{name}"].default


@rule_of_keys
def rotary_scaling_has_a_factor_and_two_bounds(config: Config) -> Iterator[Mistake]:
    model = config.model
    scaling = shape_of(model).rope_scaling
    others = ("low_freq_factor", "high_freq_factor", "original_max_seq_len")
    idle = [f"rope_scaling_{name}" for name in others if getattr(model, f"rope_scaling_{name}")]
    if scaling is None and idle:
        yield Mistake(
            key="model.rope_scaling_factor",
            value=model.rope_scaling_factor,
            why=f"leaves the rotary frequencies as they are, so {', '.join(idle)} has no effect",
            instead=f"a factor above 1, or remove {' and '.join(idle)}",
        )
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Mistake(
            key="model.rope_scaling_high_freq_factor",
            value=scaling.high_freq_factor,
            why=f"is not above rope_scaling_low_freq_factor = {scaling.low_freq_factor}",
            instead=f"at least {2 * scaling.low_freq_factor}",
        )


@rule_of_layout
def sequences_fit_the_rotary_tables(config: Config, layout: Layout) -> Iterator[Mistake]:
    longest = shape_of(config.model).max_seq_len
    if layout.seq_len > longest:
        yield Mistake(
            key="training.seq_len",
            value=layout.seq_len,
            why="is more than the model's max_seq_len",
            instead=f"at most {longest}",
        )


@rule_of_layout
def query_heads_share_key_value_heads_evenly(config: Config, layout: Layout) -> Iterator[Mistake]:
    model = layout.model
    if model.n_heads % model.n_kv_heads:
        divisors = [count for count in range(1, model.n_heads + 1) if model.n_heads % count == 0]
        yield Mistake(
            key="model.n_heads",
            value=model.n_heads,
            why=(
                f"is not a multiple of model.n_kv_heads = {model.n_kv_heads}"
                f"{_of_flavor(config, 'n_kv_heads')}, and key/value heads are shared evenly"
            ),
            instead=f"model.n_kv_heads = {alternatives(divisors)}",
        )


@rule_of_layout
def dimensions_of_a_head_rotate_in_pairs(config: Config, layout: Layout) -> Iterator[Mistake]:
    model = layout.model
    multiple = 2 * model.n_heads
    if not derives_head_dim(config.model):
        if model.head_dim % 2:
            yield Mistake(
                key="model.head_dim",
                value=model.head_dim,
                why="is odd, and a head's dimensions rotate in pairs",
                instead=f"model.head_dim = {alternatives(nearest_multiples(model.head_dim, 2))}",
            )
    elif model.dim % multiple:
        yield Mistake(
            key="model.dim",
            value=model.dim,
            why=(
                f"is not a multiple of 2 x model.n_heads = {model.n_heads}"
                f"{_of_flavor(config, 'n_heads')}, and a head's dimensions rotate in pairs"
            ),
            instead=f"model.dim = {alternatives(nearest_multiples(model.dim, multiple))}",
        )


def _of_flavor(config: Config, name: str) -> str:
    return "" if getattr(config.model, name) else " of the flavor"


@rule_of_keys
def a_token_has_no_more_experts_than_there_are(config: Config) -> Iterator[Mistake]:
    shape = shape_of(config.model)
    has_any = has_experts(find_family(config.model.name))
    if has_any and not 1 <= shape.experts_per_token <= shape.n_experts:
        yield Mistake(
            key="model.experts_per_token",
            value=shape.experts_per_token,
            why=f"is not from 1 to model.n_experts = {shape.n_experts}",
            instead=f"1 to {shape.n_experts}",
        )


@rule_of_keys
def matmuls_of_experts_have_a_kernel(config: Config) -> Iterator[Mistake]:
    dtype = config.training.mixed_precision_param
    for name, size, multiple in sizes_without_a_kernel(shape_of(config.model), dtype):
        yield Mistake(
            key=f"model.{name}",
            value=size,
            why=f"is not a multiple of {multiple}, as grouped GEMMs in {dtype} need it",
            instead=alternatives(nearest_multiples(size, multiple)),
        )


def initial_weights(config: Config) -> ModelOfWeights | None:
    """Return the model of the weights that a run starts with; None if it resumes a step of its
    own, or from torchtitan's, whose tensors are compared when they are opened. Raises ConfigError.
    """
    checkpoint = config.checkpoint
    own_steps = Path(config.job.dump_folder, checkpoint.folder)
    if not checkpoint.initial_load_path or (checkpoint.enable and steps_in(own_steps)):
        return None
    try:
        return read_model(checkpoint.initial_load_path, config.model.name)
    except ConfigError as error:
        raise ConfigError(f"{config.origin('checkpoint.initial_load_path')}: {error}") from None
