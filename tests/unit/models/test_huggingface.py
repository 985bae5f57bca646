"""Names and layouts of Hugging Face, by what transformers computes and writes; config.json of
models that ours is not.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from in_transformers import in_files, in_memory, in_ours
from tiny import OF_FAMILY, of_family

from titan_lite.config.families import FAMILIES, ModelConfig, RopeScaling, find_family
from titan_lite.models.huggingface import (
    config_from_hf,
    config_to_hf,
)
from titan_lite.models.transformer import Transformer

TINY = ModelConfig(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=40, vocab_size=300, max_seq_len=64
)
SCALED = RopeScaling(factor=4.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_seq_len=16)
JSON = config_to_hf(TINY, torch.float32)


def in_transformers(config):
    """The same architecture in transformers, from our config.json."""
    transformers = pytest.importorskip("transformers")
    json = config_to_hf(config, torch.float32)
    theirs = transformers.AutoConfig.for_model(**json)
    return transformers.AutoModelForCausalLM.from_config(theirs).eval()


SHAPES = [of_family(family, TINY) for family in OF_FAMILY]
SHAPES.append(dataclasses.replace(TINY, head_dim=12))


@pytest.mark.parametrize("scaling", [None, SCALED], ids=["plain rope", "scaled rope"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=pytest.mark.slow if shape != TINY else ()) for shape in SHAPES],
    ids=lambda shape: f"{shape.family}, heads of {shape.head_dim}",
)
def test_transformers_computes_the_same_logits_and_gradients(shape, tied, scaling):
    """On weights so large that attention is far from uniform, norms that are not 1, and no default's
    epsilon.
    """
    config = dataclasses.replace(shape, tied_embeddings=tied, rope_scaling=scaling, norm_eps=1e-3)
    model = Transformer(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    theirs = in_transformers(config)
    assert type(theirs).__name__ == find_family(shape.family).huggingface.architecture
    found = theirs.load_state_dict(in_memory(in_files(model, config)), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"] if tied else [], [])
    theirs.tie_weights()

    tokens = torch.randint(0, config.vocab_size, (2, 41), generator=generator)
    logits = [each(tokens[:, :-1]) for each in (model, lambda tokens: theirs(tokens).logits)]
    assert logits[0].std() > 0.5
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    for each in logits:
        F.cross_entropy(each.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = in_ours({name: each.grad for name, each in theirs.named_parameters()}, config)
    for fqn, parameter in model.named_parameters():
        difference = parameter.grad - expected[fqn]
        assert difference.norm() < 1e-5 * expected[fqn].norm(), fqn
    assert config_from_hf(theirs.config.to_dict()) == config  # as transformers itself writes it


FLAVORS = [(family, flavor) for family in FAMILIES for flavor in FAMILIES[family].flavors]


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_every_flavor_survives_its_config_json(family, flavor):
    config = FAMILIES[family].flavors[flavor]
    assert config_from_hf(config_to_hf(config, torch.bfloat16)) == config


def test_a_qwen3_without_head_dim_has_that_of_transformers():
    config = of_family("qwen3", dataclasses.replace(TINY, head_dim=128, n_kv_heads=2))
    json = config_to_hf(dataclasses.replace(config, head_dim=128), torch.float32)
    absent = ("head_dim", "max_position_embeddings")
    found = config_from_hf({key: value for key, value in json.items() if key not in absent})
    assert found == dataclasses.replace(config, head_dim=128, max_seq_len=32_768)


def test_what_is_left_out_is_as_transformers_has_it_by_default():
    absent = (
        "num_key_value_heads",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "head_dim",
    )
    found = config_from_hf({key: value for key, value in JSON.items() if key not in absent})
    assert found == dataclasses.replace(TINY, n_kv_heads=6, rope_theta=10_000.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral': expected 'llama' or 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': expected 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"head_dim": 0}, "head_dim = 0: expected a whole number above 0"),
        (
            {"num_key_value_heads": "2"},
            "num_key_value_heads = '2': expected a whole number above 0",
        ),
        (
            {"vocab_size": None},
            "vocab_size = None: expected a whole number above 0",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling: low_freq_factor = None: expected a number",
        ),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_a_model_that_ours_is_not_is_refused(change, words):
    with pytest.raises(ValueError) as error:
        config_from_hf(JSON | change)
    assert words in str(error.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ValueError) as error:
        config_from_hf(JSON | {"model_type": "x", "mlp_bias": True, "vocab_size": -1})
    assert all(name in str(error.value) for name in ("model_type", "mlp_bias", "vocab_size"))
