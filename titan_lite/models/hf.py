"""Hugging Face's LlamaForCausalLM: its names, its layout of rotary pairs and its config.json, and how they become ours and back.

    names = hf_names(config)              # {"layers.0.attention.wq.weight": "model.layers.0.self_attn.q_proj.weight", ...}
    theirs = to_hf(fqn, weight, config)   # the same tensor, but for wq and wk
    config = config_from_hf(config_json)  # and back: config_to_hf

Of a head of D dimensions, (2i, 2i+1) rotate together here and (i, i + D/2) there: rows of wq and wk change places within a head.
Tied weights are one tensor in both, under the embedding's name.
"""

from collections.abc import Mapping
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
}


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
    """What config.json says of the model, in the words that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def is_size(value: Any) -> bool:
    """A whole number above 0, of which a product of two is one that torch can count."""
    return type(value) is int and 0 < value < 1 << 30


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e18


def config_from_hf(json: Mapping[str, Any]) -> ModelConfig:
    """The shape of the model that a config.json describes. Raises ValueError with all that this model cannot be."""
    # transformers 5 writes rope_parameters, where 4 had rope_scaling beside rope_theta
    rope, wrong = {"rope_theta": json.get("rope_theta", 10_000.0)}, []
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(json.get(name) or {}, dict):
            rope |= json.get(name) or {}
        else:
            wrong.append(f"{name} = {json[name]!r}, where an object or null is what works")
    kind = rope.get("rope_type", rope.get("type", "default"))
    wrong += [
        f"{name} = {json.get(name)!r}, which is no size"
        for name in (*_SIZES.values(), *(name for name in ("num_key_value_heads", "max_position_embeddings") if name in json))
        if not is_size(json.get(name))
    ]
    wrong += [
        f"{name} = {value!r}, where a number above 0 is what works"
        for name, value in (("rope_theta", rope["rope_theta"]), ("rms_norm_eps", json.get("rms_norm_eps", 1e-6)))
        if not is_number(value)
    ]
    if not wrong and json.get("head_dim", None) not in (None, json["hidden_size"] // json["num_attention_heads"]):
        wrong.append(f"head_dim = {json['head_dim']}, where hidden_size / num_attention_heads is what works")
    for name, works in (("model_type", "llama"), ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if json.get(name, works) != works:
            wrong.append(f"{name} = {json[name]!r}, where {works!r} is what works")
    if kind not in ("default", "llama3"):
        wrong.append(f"rope_type = {kind!r}, where 'default' or 'llama3' is what works")
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        wrong += [f"rope_scaling has no {name}" for name in names if name not in rope]
        wrong += [
            f"rope_scaling: {name} = {rope[name]!r}, where a number above 0 is what works"
            for name in names
            if name in rope and not is_number(rope[name])
        ]
    if json.get("quantization_config"):
        wrong.append("quantization_config: weights that are quantized cannot be read")
    if wrong:
        raise ValueError("; ".join(wrong))
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )
    return ModelConfig(
        **{ours: json[theirs] for ours, theirs in _SIZES.items()},
        n_kv_heads=json.get("num_key_value_heads", json["num_attention_heads"]),
        tied_embeddings=bool(json.get("tie_word_embeddings", False)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        norm_eps=json.get("rms_norm_eps", 1e-6),
        max_seq_len=json.get("max_position_embeddings", 2048),
    )
