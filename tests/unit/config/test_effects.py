"""Marks of keys at a resume: a key that changes the optimizer's state, or the order of documents,
has the mark that says so.
"""

import json
from itertools import islice

import pytest
from tiny import UNTIED

from titan_lite.config import KEYS, Config, Corpus, Data, Optimizer
from titan_lite.config.effects import Effect, OnlyWith, effect_of
from titan_lite.config.sections import choices_of, kind_of
from titan_lite.data.documents import build_source
from titan_lite.models.transformer import Transformer
from titan_lite.optim.build import build_optimizer


def other_value(field):
    """A value of a field that is not its default."""
    kind = kind_of(field.annotation)
    if choices := choices_of(field.annotation):
        return next(choice for choice in choices if choice != field.default)
    if kind is bool:
        return not field.default
    return {int: 7, float: 0.25, str: "other", tuple: ("other",)}[kind]


def test_a_key_has_one_effect_and_depends_on_a_value_that_another_key_can_have():
    for key, field in KEYS.items():
        effects = [mark for mark in field.metadata if isinstance(mark, Effect)]
        conditions = [mark for mark in field.metadata if isinstance(mark, OnlyWith)]
        assert len(conditions) <= len(effects) <= 1, key
        for condition in conditions:
            other = KEYS[condition.key].annotation
            assert condition.value in (choices_of(other) or [True, False]), key


def test_a_key_has_its_effect_if_either_recipe_has_the_value_that_it_needs():
    field = KEYS["optimizer.max_preconditioner_dim"]
    adamw, shampoo = {"optimizer": {"name": "AdamW"}}, {"optimizer": {"name": "Shampoo"}}
    assert effect_of(field, adamw, adamw) is Effect.NOTED
    assert effect_of(field, adamw, shampoo) is Effect.RESTARTS_OPTIMIZER
    assert effect_of(field, shampoo, adamw) is Effect.RESTARTS_OPTIMIZER
    assert effect_of(KEYS["metrics.log_freq"], adamw, shampoo) is Effect.NOTED


def state_of(optimizer):
    """The shape of each tensor of an optimizer's state; another dtype is converted."""
    model = Transformer(UNTIED)
    model.init_weights(0)
    state = build_optimizer(
        Config(optimizer=optimizer), dict(model.named_parameters())
    ).state_tensors()
    return {name: tensor.shape for name, tensor in state.items()}


@pytest.mark.parametrize("optimizer", choices_of(KEYS["optimizer.name"].annotation))
@pytest.mark.parametrize("name", Optimizer.model_fields)
def test_a_key_that_changes_the_optimizers_state_restarts_it(name, optimizer):
    config = Optimizer(name=optimizer)
    field = Optimizer.model_fields[name]
    value = other_value(field)
    other = config.replace(**{name: "AdamW" if config.name == value else value})
    recipes = [{"optimizer": section.model_dump()} for section in (config, other)]
    restarts = effect_of(field, *recipes) is Effect.RESTARTS_OPTIMIZER
    begins_roots = (optimizer, name) == ("Shampoo", "start_preconditioning_step")  # zeros before
    assert restarts is (begins_roots or state_of(other) != state_of(config))


@pytest.fixture
def data(tmp_path):
    for name in ("a", "b", "c"):
        lines = [json.dumps({"text": f"{name} {n}", "words": f"{n} {name}"}) for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return Data(dataset="local", path=str(tmp_path / "*.jsonl"))


def first_documents(data, seed=0):
    source = build_source(data, split="train", seed=seed)
    return [str(document) for _, document in islice(source.documents(0, lambda _: True), 200)]


CHOOSES_DOCUMENTS = {*Corpus.model_fields, "sources"}  # by the identity of documents


@pytest.mark.parametrize("name", sorted(Data.model_fields.keys() - CHOOSES_DOCUMENTS))
def test_a_key_that_changes_which_documents_come_or_their_order_restarts_the_data(name, data):
    field = Data.model_fields[name]
    other = data.replace(**{name: other_value(field)})
    recipes = [{"data": section.model_dump()} for section in (data, other)]
    restarts = effect_of(field, *recipes) is Effect.RESTARTS_DATA
    assert restarts is (first_documents(other) != first_documents(data))


@pytest.mark.parametrize("shuffle", [True, False])
def test_another_seed_is_other_data_if_documents_are_shuffled(shuffle, data):
    data = data.replace(shuffle=shuffle)
    recipe = {"data": data.model_dump()}
    restarts = effect_of(KEYS["debug.seed"], recipe, recipe) is Effect.RESTARTS_DATA
    assert restarts is shuffle
    assert (first_documents(data, seed=7) != first_documents(data)) is shuffle
