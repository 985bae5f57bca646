"""Families: what a row of the table says is what the family's blocks are, and the published numbers."""

import dataclasses
import re

import pytest
import torch
from tiny import OF_FAMILY, ROOT

from titan_lite.config import Model
from titan_lite.config.families import FAMILIES, QWEN3
from titan_lite.models.shapes import flops_per_token, parameter_shapes, shape_of, shape_words
from titan_lite.models.transformer import Transformer


def test_every_family_is_in_the_table_of_tests():
    assert OF_FAMILY.keys() == FAMILIES.keys()


def test_no_other_file_names_a_module_that_one_family_alone_has():
    """So most layouts need only one family's run: they cannot treat another's parameters apart."""
    package = ROOT / "titan_lite"
    own = {"config/families.py", *(f"models/{family}.py" for family in FAMILIES)}
    modules = {name.rpartition(".")[2] for each in FAMILIES.values() for name in each.styles}
    modules.remove("router")  # of models/experts.py, which any family may have
    assert {"q_norm", "k_norm"} <= modules
    for path in package.rglob("*.py"):
        if str(path.relative_to(package)) not in own:
            assert modules.isdisjoint(re.findall(r"\w+", path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_without_torch_are_those_of_the_model(family):
    for name, flavor in FAMILIES[family].flavors.items():
        config = dataclasses.replace(flavor, n_layers=2, max_seq_len=1)
        with torch.device("meta"):
            model = Transformer(config)
        found = {fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()}
        assert list(found.items()) == list(parameter_shapes(config).items())
        assert shape_of(Model(name=family, flavor=name)) == flavor
        assert shape_words(Model(name=family, flavor=name)) == name


@pytest.mark.parametrize(
    ("flavor", "parameters", "tied"),
    [  # of the files that Qwen published
        ("0.6B", 596_049_920, True),
        ("1.7B", 1_720_574_976, True),
        ("4B", 4_022_468_096, True),
        ("8B", 8_190_735_360, False),
        ("14B", 14_768_307_200, False),
        ("32B", 32_762_123_264, False),
    ],
)
def test_a_flavor_of_qwen3_has_the_published_number_of_parameters(flavor, parameters, tied):
    config = QWEN3.flavors[flavor]
    shapes = parameter_shapes(config)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
    assert (config.head_dim, config.n_kv_heads, config.tied_embeddings) == (128, 8, tied)
    assert (config.rope_theta, config.norm_eps, config.max_seq_len) == (1e6, 1e-6, 40_960)
    assert (config.vocab_size, config.rope_scaling) == (151_936, None)


def test_heads_of_another_size_count_in_operations_of_attention():
    config, seq_len = QWEN3.flavors["0.6B"], 4096
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    attention = 28 * 16 * 128 * seq_len  # heads are twice as wide as the model
    assert flops_per_token(config, seq_len) == 6 * (596_049_920 - norms) + 6 * attention


def test_a_shape_of_qwen3_by_keys_has_the_familys_defaults():
    sizes = dict(dim=96, n_layers=3, n_heads=6, hidden_dim=128, vocab_size=2048)
    config = shape_of(Model(name="qwen3", flavor="", **sizes))
    assert (config.family, config.head_dim, config.n_kv_heads) == ("qwen3", 128, 6)
    assert (config.rope_theta, config.norm_eps, config.max_seq_len) == (1e6, 1e-6, 40_960)
    assert shape_of(Model(name="qwen3", flavor="0.6B", dim=512)).head_dim == 128
    assert shape_of(Model(name="qwen3", flavor="0.6B", head_dim=64)).head_dim == 64
