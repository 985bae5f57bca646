"""Convert names, weights and config.json to and from Hugging Face's LlamaForCausalLM.

    hf_names(config)["norm.weight"]       # "model.norm.weight"
    theirs = to_hf(fqn, weight, config)   # the same tensor, but for wq and wk
    config = config_from_hf(config_json)  # and back: config_to_hf

In a head of D dimensions, rotary pairs are (2i, 2i+1) here and (i, i + D/2) there, so rows of wq
and wk are permuted per head. Tied weights are one tensor in both, under the embedding's name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from titan_lite.models.llama3 import ModelConfig, RopeScaling

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
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


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
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3"}
        for ours, theirs in _SCALING.items():
            scaling[theirs] = getattr(config.rope_scaling, ours)
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
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
    given = {
        "num_key_value_heads": json.get("num_attention_heads"),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        **json,
    }
    mistakes = [
        f"{key} = {json[key]!r:.60}: expected {value!r}"
        for key, value in _FIXED.items()
        if json.get(key, value) != value
    ]
    mistakes += _not_sizes(given, _SIZES.values())
    mistakes += _not_numbers(given, ["rms_norm_eps"])
    rope, rope_mistakes = _rope_of(json)
    mistakes += rope_mistakes
    if json.get("quantization_config"):
        mistakes.append("quantization_config: quantized weights cannot be read")
    if mistakes:
        raise ValueError("; ".join(mistakes))
    head_dim = json["hidden_size"] // json["num_attention_heads"]
    if json.get("head_dim") not in (None, head_dim):
        raise ValueError(
            f"head_dim = {json['head_dim']!r:.60}: expected hidden_size / num_attention_heads"
        )
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(**{ours: rope[theirs] for ours, theirs in _SCALING.items()})
    return ModelConfig(
        **{ours: given[theirs] for ours, theirs in _SIZES.items()},
        tied_embeddings=bool(json.get("tie_word_embeddings", False)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        norm_eps=given["rms_norm_eps"],
    )


def _rope_of(json: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the rotary settings, and a line for each that is not supported."""
    rope: dict[str, Any] = {"rope_theta": json.get("rope_theta", 10_000.0), "rope_type": "default"}
    mistakes = []
    # transformers 5 writes rope_parameters, where 4 had rope_scaling beside rope_theta
    for key in ("rope_scaling", "rope_parameters"):
        settings = json.get(key) or {}
        if not isinstance(settings, dict):
            mistakes.append(f"{key} = {settings!r:.60}: expected an object or null")
            continue
        if "type" in settings:  # its earlier name
            rope["rope_type"] = settings["type"]
        rope.update(settings)
    mistakes += _not_numbers(rope, ["rope_theta"])
    if rope["rope_type"] not in ("default", "llama3"):
        mistakes.append(f"rope_type = {rope['rope_type']!r:.60}: expected 'default' or 'llama3'")
    elif rope["rope_type"] == "llama3":
        mistakes += [f"rope_scaling: {line}" for line in _not_numbers(rope, _SCALING.values())]
    return rope, mistakes


def _not_sizes(given: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return a line for each of these values that is no size."""
    return [
        f"{key} = {given.get(key)!r:.60}: expected a whole number above 0"
        for key in keys
        if type(given.get(key)) is not int or given[key] < 1
    ]


def _not_numbers(given: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Return a line for each of these values that is no number above 0."""
    return [
        f"{key} = {given.get(key)!r:.60}: expected a number above 0"
        for key in keys
        if type(given.get(key)) not in (int, float) or not given[key] > 0
    ]
