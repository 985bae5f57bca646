"""What cannot be together with the keys of mixtures of experts, those of their shape included."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.errors import alternatives, nearest_multiples, shown
from titan_lite.config.families import FAMILIES, find_family
from titan_lite.distributed.layout import Layout
from titan_lite.features.moe.keys import ExpertsKeys
from titan_lite.models.shapes import has_experts, shape_of, sizes_without_a_kernel
from titan_lite.rules.mistakes import Mistake, keys_set, rule_of_keys, rule_of_layout

READ_BY = {  # key: values of experts.balance that read it
    "experts.balance_coefficient": ("step", "sequence"),
    "experts.bias_update_rate": ("bias",),
}


@rule_of_keys
def experts_are_of_a_family_that_has_them(config: Config) -> Iterator[Mistake]:
    if has_experts(find_family(config.model.name)):
        return
    with_experts = [name for name, family in FAMILIES.items() if has_experts(family)]
    keys = [
        *("model.n_experts", "model.experts_per_token", "parallelism.expert_parallel_degree"),
        *(f"experts.{name}" for name in ExpertsKeys.model_fields),
    ]
    for key, value in keys_set(config, keys).items():
        yield Mistake(
            key=key,
            value=value,
            why=f'has no effect with model.name = "{config.model.name}", a dense family',
            instead=f"model.name = {alternatives(map(shown, with_experts))}, or remove it",
        )


@rule_of_keys
def keys_are_read_by_the_balance(config: Config) -> Iterator[Mistake]:
    experts = ExpertsKeys.of(config)
    if not has_experts(find_family(config.model.name)):
        return
    for key, value in keys_set(config, READ_BY).items():
        if experts.balance not in READ_BY[key]:
            yield Mistake(
                key=key,
                value=value,
                why=f'has no effect with experts.balance = "{experts.balance}"',
                instead=f"experts.balance = {alternatives(map(shown, READ_BY[key]))}, or remove it",
            )


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
def products_of_experts_have_a_kernel(config: Config) -> Iterator[Mistake]:
    dtype = config.training.mixed_precision_param
    for name, size, multiple in sizes_without_a_kernel(shape_of(config.model), dtype):
        yield Mistake(
            key=f"model.{name}",
            value=size,
            why=f"is not a multiple of {multiple}, as grouped GEMMs in {dtype} need it",
            instead=alternatives(nearest_multiples(size, multiple)),
        )


@rule_of_layout
def a_capacity_can_be_exceeded(config: Config, layout: Layout) -> Iterator[Mistake]:
    factor = ExpertsKeys.of(config).capacity_factor
    model = layout.model
    if not factor or not model.n_experts:
        return
    most = min(layout.expert_parallel, model.n_experts / model.experts_per_token)
    if factor >= most:
        yield Mistake(
            key="experts.capacity_factor",
            value=factor,
            why=(
                "has no effect with parallelism.expert_parallel_degree ="
                f" {layout.expert_parallel}: the experts of a rank never have more than {most:g}"
                " times the tokens of equally loaded ones"
            ),
            instead="0" if most == 1 else f"0, or a number below {most:g}",
        )
