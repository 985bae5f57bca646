"""Hugging Face's LlamaForCausalLM: its names, its layout of rotary pairs and its config.json, and how they become ours and back.

    names = hf_names(config)              # {"layers.0.attention.wq.weight": "model.layers.0.self_attn.q_proj.weight", ...}
    theirs = to_hf(fqn, weight, config)   # the same tensor, but for wq and wk
    config = config_from_hf(config_json)  # and back: config_to_hf

Of a head of D dimensions, (2i, 2i+1) rotate together here and (i, i + D/2) there: rows of wq and wk change places within a head.
Tied weights are one tensor in both, under the embedding's name.
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
    """Our name of every parameter -> theirs, in the model's order."""
    modules = {"tok_embeddings": "model.embed_tokens"}
    for i in range(config.n_layers):
        modules |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _IN_A_LAYER.items()}
    modules |= {"norm": "model.norm"} if config.tied_embeddings else {"norm": "model.norm", "output": "lm_head"}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}


def to_hf(fqn: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Our parameter of this name in their layout: itself, or for wq and wk a permuted copy. (rows, columns) both."""
    heads = _rotary_heads(fqn, config)
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else weight


def from_hf(fqn: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `to_hf`; fqn is our name."""
    heads = _rotary_heads(fqn, config)
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else weight


def _rotary_heads(fqn: str, config: ModelConfig) -> int:
    """Heads whose rows have pairs in them; 0: it is no such parameter."""
    if fqn.endswith(".wq.weight"):
        return config.n_heads
    return config.n_kv_heads if fqn.endswith(".wk.weight") else 0


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The model's part of a config.json, in the words that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()}},
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def is_size(value: Any) -> bool:
    """A whole number above 0, of which a product of two is one that torch can count."""
    return type(value) is int and 0 < value < 1 << 30


def misread(given: Mapping[str, Any], sizes: Iterable[str] = (), numbers: Iterable[str] = ()) -> list[str]:
    """A line for every value, by its name, that is absent or no size, or no number above 0."""
    faults = [(name, "a whole number above 0 and below 2**30") for name in sizes if not is_size(given.get(name))]
    faults += [
        (name, "a number above 0 and below 1e18")
        for name in numbers
        if type(given.get(name)) not in (int, float) or not 0 < given[name] < 1e18  # nan is neither
    ]
    return [f"{name} = {given.get(name)!r}, where {kind} is what works" for name, kind in faults]


def config_from_hf(json: Mapping[str, Any]) -> ModelConfig:
    """The shape of the model that a config.json describes. Raises ValueError with all that this model cannot be."""
    given = {
        "num_key_value_heads": json.get("num_attention_heads", 1),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        **json,
    }
    # transformers 5 writes rope_parameters, where 4 had rope_scaling beside rope_theta
    rope, wrong = {"rope_theta": json.get("rope_theta", 10_000.0)}, []
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(json.get(name) or {}, dict):
            rope |= json.get(name) or {}
        else:
            wrong.append(f"{name} = {json[name]!r}, where an object or null is what works")
    wrong += misread(given, _SIZES.values(), ["rms_norm_eps"]) + misread(rope, numbers=["rope_theta"])
    if not wrong and json.get("head_dim", None) not in (None, json["hidden_size"] // json["num_attention_heads"]):
        wrong.append(f"head_dim = {json['head_dim']}, where hidden_size / num_attention_heads is what works")
    wrong += [
        f"{name} = {json[name]!r}, where {works!r} is what works"
        for name, works in _FIXED.items()
        if json.get(name, works) != works
    ]
    kind, scaling = rope.get("rope_type", rope.get("type", "default")), None
    if kind not in ("default", "llama3"):
        wrong.append(f"rope_type = {kind!r}, where 'default' or 'llama3' is what works")
    if kind == "llama3":
        wrong += [f"rope_scaling: {line}" for line in misread(rope, numbers=_SCALING.values())]
    if json.get("quantization_config"):
        wrong.append("quantization_config: weights that are quantized cannot be read")
    if wrong:
        raise ValueError("; ".join(wrong))
    if kind == "llama3":
        scaling = RopeScaling(**{ours: rope[theirs] for ours, theirs in _SCALING.items()})
    return ModelConfig(
        **{ours: given[theirs] for ours, theirs in _SIZES.items()},
        tied_embeddings=bool(json.get("tie_word_embeddings", False)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        norm_eps=given["rms_norm_eps"],
    )
