"""Convert names, weights and config.json to and from the format of Hugging Face's transformers.

    hf_names(config)["norm.weight"]       # "model.norm.weight"
    theirs = to_hf(fqn, weight, config)   # the same tensor, but for rotary weights
    config = config_from_hf(config_json)  # and back: config_to_hf

In a head of D dimensions, rotary pairs are (2i, 2i+1) here and (i, i + D/2) there, so rows of wq
and wk, and what else a family has for each dimension of a head, are permuted per head. Tied weights
are one tensor in both, under the embedding's name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_lite.config import ConfigError, Model
from titan_lite.config.errors import shown
from titan_lite.config.families import HuggingFace, ModelConfig, find_family
from titan_lite.config.from_weights import (
    SCALING,
    SIZES,
    keys_of_config_json,
    keys_of_shape,
)
from titan_lite.models.shapes import parameter_shapes, shape_of

_MODULES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
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
    """Return {our name: name in transformers} of every parameter, in the model's order.

    Raises ConfigError for a family without such names.
    """
    in_a_layer = _IN_A_LAYER | dict(_format_of(config).names)
    names: dict[str, str] = {}
    for fqn in parameter_shapes(config):
        module, parameter = fqn.rsplit(".", 1)
        theirs = _MODULES.get(module)
        if theirs is None:
            number, name = module.removeprefix("layers.").split(".", 1)
            if name not in in_a_layer:
                raise ConfigError(
                    f"model.name = {shown(config.family)}: {fqn} has no name in Hugging Face's"
                    f' files; give {name} one in HuggingFace(names={{"{name}": ...}}) of its Family'
                )
            theirs = f"model.layers.{number}.{in_a_layer[name]}"
        names[fqn] = f"{theirs}.{parameter}"
    return names


def _format_of(config: ModelConfig) -> HuggingFace:
    format = find_family(config.family).huggingface
    if format is None:
        raise ConfigError(
            f"model.name = {shown(config.family)}: its Family has no huggingface, so no config.json"
            " and no names; give it HuggingFace(...)"
        )
    return format


def to_hf(fqn: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Return parameter `fqn` in Hugging Face's layout: itself, or with rotary rows a permuted
    copy.
    """
    if not _is_rotary(fqn, config):
        return weight
    return weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def from_hf(fqn: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Invert `to_hf`. fqn: the name in titan_lite."""
    if not _is_rotary(fqn, config):
        return weight
    return weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _is_rotary(fqn: str, config: ModelConfig) -> bool:
    """Return True if rows of a parameter are the dimensions of heads, in rotary pairs."""
    if not fqn.startswith("layers."):
        return False
    module = fqn.split(".", 2)[2].rpartition(".")[0]
    return module in _format_of(config).rotary


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the model's part of a config.json, in the keys that transformers 4 and 5 both read.

    Raises ConfigError for a family without such a file.
    """
    format = _format_of(config)
    keys = keys_of_shape(dataclasses.asdict(config))
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3"}
        scaling |= {theirs: keys[ours] for ours, theirs in SCALING.items()}
    return {
        "architectures": [format.architecture],
        "model_type": format.model_type,
        **format.fixed,
        **{theirs: keys[ours] for ours, theirs in SIZES.items()},
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def config_from_hf(json: Mapping[str, Any], family: str = "") -> ModelConfig:
    """Return the shape of the model that a config.json describes.

    family: a user's own, which may be that of the file. Raises ValueError with all values that are
    not supported.
    """
    return shape_of(Model().replace(flavor="", **keys_of_config_json(json, family)))
