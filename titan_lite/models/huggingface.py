"""Convert names, weights and config.json to and from Hugging Face's LlamaForCausalLM.

    hf_names(config)["norm.weight"]       # "model.norm.weight"
    theirs = to_hf(fqn, weight, config)   # the same tensor, but for wq and wk
    config = config_from_hf(config_json)  # and back: config_to_hf

In a head of D dimensions, rotary pairs are (2i, 2i+1) here and (i, i + D/2) there, so rows of wq
and wk are permuted per head. Tied weights are one tensor in both, under the embedding's name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_lite.config import Model
from titan_lite.config.from_weights import (
    FIXED,
    SCALING,
    SIZES,
    keys_of_config_json,
    keys_of_shape,
)
from titan_lite.models.llama3 import ModelConfig
from titan_lite.models.shapes import shape_of

_IN_A_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hf_names(config: ModelConfig) -> dict[str, str]:
    """Return {our name: name in transformers} of every parameter, in the model's order."""
    modules = {"tok_embeddings": "model.embed_tokens"}
    for i in range(config.n_layers):
        for ours, theirs in _IN_A_LAYER.items():
            modules[f"layers.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    modules["norm"] = "model.norm"
    if not config.tied_embeddings:
        modules["output"] = "lm_head"
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}


def to_hf(fqn: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Return parameter `fqn` in Hugging Face's layout: itself, or for wq and wk a permuted copy."""
    heads = _rotary_heads(fqn, config)
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else weight


def from_hf(fqn: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Invert `to_hf`. fqn: the name in titan_lite."""
    heads = _rotary_heads(fqn, config)
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else weight


def _rotary_heads(fqn: str, config: ModelConfig) -> int:
    """Return the number of heads whose rotary pairs are rows; 0 for all but wq and wk."""
    if fqn.endswith(".wq.weight"):
        return config.n_heads
    return config.n_kv_heads if fqn.endswith(".wk.weight") else 0


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the model's part of a config.json, in the keys that transformers 4 and 5 both read."""
    keys = keys_of_shape(dataclasses.asdict(config))
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3"}
        scaling |= {theirs: keys[ours] for ours, theirs in SCALING.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        **FIXED,
        **{theirs: keys[ours] for ours, theirs in SIZES.items()},
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def config_from_hf(json: Mapping[str, Any]) -> ModelConfig:
    """Return the shape of the model that a config.json describes.

    Raises ValueError with all values that are not supported.
    """
    return shape_of(Model().replace(flavor="", **keys_of_config_json(json)))
