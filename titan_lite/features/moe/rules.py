"""Rules of [experts]; those of the shape of experts are in titan_lite/rules/model.py."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.config.errors import alternatives, shown
from titan_lite.config.families import FAMILIES, find_family
from titan_lite.distributed.layout import Layout
from titan_lite.features.moe.keys import ExpertsKeys
from titan_lite.models.shapes import has_experts
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
