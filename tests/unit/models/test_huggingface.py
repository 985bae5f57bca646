"""Names and layouts of Hugging Face, by what transformers computes and writes; config.json of
models that ours is not.
"""

import dataclasses

import pytest
import torch

from titan_lite.config.families import LLAMA3, ModelConfig, RopeScaling
from titan_lite.models.huggingface import config_from_hf, config_to_hf, from_hf, hf_names, to_hf
from titan_lite.models.transformer import Transformer

TINY = ModelConfig(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=40, vocab_size=300, max_seq_len=64
)
SCALED = RopeScaling(factor=4.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_seq_len=16)
JSON = config_to_hf(TINY, torch.float32)


@pytest.mark.parametrize("scaling", [None, SCALED], ids=["plain rope", "scaled rope"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_transformers_computes_the_same_from_our_names_layout_and_config(tied, scaling):
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(TINY, tied_embeddings=tied, rope_scaling=scaling)
    model = Transformer(config)
    model.init_weights(seed=0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig.from_dict(config_to_hf(config, torch.float32))
    ).eval()
    weights = {
        name: to_hf(fqn, model.get_parameter(fqn), config) for fqn, name in hf_names(config).items()
    }
    found = theirs.load_state_dict(weights, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"] if tied else [], [])
    tokens = torch.randint(
        0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert config_from_hf(theirs.config.to_dict()) == config  # as transformers itself writes it


@pytest.mark.parametrize("name", ["wq", "wk", "wv", "wo"])
def test_only_rotary_weights_are_permuted_and_come_back_to_the_bit(name):
    heads = TINY.n_heads if name in ("wq", "wo") else TINY.n_kv_heads
    weight = torch.randn(heads * TINY.head_dim, TINY.dim)
    fqn = f"layers.1.attention.{name}.weight"
    theirs = to_hf(fqn, weight, TINY)
    assert torch.equal(theirs, weight) == (name in ("wv", "wo"))
    assert theirs.is_contiguous()
    assert torch.equal(from_hf(fqn, theirs, TINY), weight)
    # Within its head, row 2i goes to i and row 2i + 1 to i + D/2.
    if name in ("wq", "wk"):
        for row in range(TINY.head_dim):
            assert torch.equal(
                theirs[TINY.head_dim + row // 2 + row % 2 * TINY.head_dim // 2],
                weight[TINY.head_dim + row],
            )


@pytest.mark.parametrize("flavor", LLAMA3.flavors)
def test_every_flavor_survives_its_config_json(flavor):
    assert (
        config_from_hf(config_to_hf(LLAMA3.flavors[flavor], torch.bfloat16))
        == LLAMA3.flavors[flavor]
    )


@pytest.mark.parametrize("flavor", ["debug", "1B"])
def test_every_parameter_has_a_name_of_its_own(flavor):
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(LLAMA3.flavors[flavor], max_seq_len=1))
    names = hf_names(LLAMA3.flavors[flavor])
    assert list(names) == [fqn for fqn, _ in model.named_parameters()]
    assert len(set(names.values())) == len(names)


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
        ({"model_type": "mistral"}, "model_type = 'mistral': expected 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': expected 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"head_dim": 0}, "head_dim = 0: expected a whole number above 0"),
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers = 0: expected a whole number above 0",
        ),
        (
            {"num_key_value_heads": "2"},
            "num_key_value_heads = '2': expected a whole number above 0",
        ),
        (
            {"vocab_size": None},
            "vocab_size = None: expected a whole number above 0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling: low_freq_factor = None: expected a number",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
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
