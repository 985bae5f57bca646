"""Convert names, weights and config.json to and from the format of Hugging Face's transformers.

    hf_names(config)["norm.weight"]       # "model.norm.weight"
    theirs = to_hf(fqn, weight, config)   # {name: the same tensor, but for rotary weights}
    sources = sources_of(config, names_in_files)    # of which tensors a parameter is made
    ours = sources[fqn].join(tensors, config)
    config = config_from_hf(config_json)  # and back: config_to_hf

In a head of D dimensions, rotary pairs are (2i, 2i+1) here and (i, i + D/2) there, so rows of wq
and wk, and what else a family has for each dimension of a head, are permuted per head. Tied weights
are one tensor in both, under the embedding's name. Matrices of experts are one tensor here. There
each expert has its own; transformers 5 has them fused in memory, as some folders have them on disk:
gate and up are one tensor, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_lite.config import ConfigError, Model
from titan_lite.config.errors import shown
from titan_lite.config.families import HuggingFace, ModelConfig, Shape, find_family
from titan_lite.config.from_weights import (
    SCALING,
    keys_of_config_json,
    keys_of_shape,
    sizes_of,
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


@functools.cache
def hf_names(config: ModelConfig) -> dict[str, str]:
    """Return {our name: name in transformers} of every parameter, in the model's order. That of
    experts has "*" for an expert's number.

    Raises ConfigError for a family without such names.
    """
    in_a_layer = _IN_A_LAYER | dict(_format_of(config).names)
    names: dict[str, str] = {}
    for fqn in parameter_shapes(config):
        module, parameter = fqn.rsplit(".", 1)
        theirs = _MODULES.get(module)
        if theirs is None:
            number, name = module.removeprefix("layers.").split(".", 1)
            if f"{name}.{parameter}" in in_a_layer:  # of experts
                names[fqn] = f"model.layers.{number}.{in_a_layer[f'{name}.{parameter}']}"
                continue
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


def to_hf(fqn: str, weight: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Return parameter `fqn` by its name in Hugging Face's files and in their layout: itself, with
    rotary rows a permuted copy, and of experts a copy of each.
    """
    name = hf_names(config)[fqn]
    if "*" in name:
        return {name.replace("*", str(number)): each.clone() for number, each in enumerate(weight)}
    if not _is_rotary(fqn, config):
        return {name: weight}
    return {name: to_halves(weight, config.head_dim)}


def to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Return a copy with rotary pairs (i, i + D/2) in each head, which are (2i, 2i+1) here."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Invert `to_halves`."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Source:
    """The tensors in Hugging Face's files that a parameter is made of."""

    fqn: str  # ours
    names: tuple[str, ...]  # of one tensor; of experts that are apart, those of each
    shape: Shape  # of each of them
    part: slice | None = None  # in dimension 1 of a fused tensor

    def join(self, read: Callable[[str], Tensor], config: ModelConfig, own: slice) -> Tensor:
        """Return the rows `own` of a parameter in dimension 0. read: returns a tensor by its name
        in the files; of experts that are apart, those in `own` alone are read.
        """
        if len(self.names) > 1:
            experts = [read(name) for name in self.names[own]]
            if not experts:
                return read(self.names[0]).new_empty(0, *self.shape)
            dtype = functools.reduce(torch.promote_types, [each.dtype for each in experts])
            return torch.stack([each.to(dtype) for each in experts])
        (name,) = self.names
        weight = read(name)
        if self.part is not None:
            return weight[own, self.part]
        if _is_rotary(self.fqn, config):
            weight = to_pairs(weight, config.head_dim)
        return weight[own]


def sources_of(config: ModelConfig, stored: Collection[str]) -> dict[str, Source]:
    """Return the Source of every parameter by our name. stored: the names in the files.

    Raises ConfigError for a family without such names, and ValueError for fused experts whose
    layout is not certain.
    """
    fused = _fused_parts(config)
    sources = {}
    shapes = parameter_shapes(config)
    for fqn, name in hf_names(config).items():
        shape = shapes[fqn]
        if fqn in fused and fused[fqn].names[0] in stored:
            sources[fqn] = fused[fqn]
            _, rows, columns = fused[fqn].shape
            if rows == columns:
                raise ValueError(
                    f"{fused[fqn].names[0]} {list(fused[fqn].shape)} has experts in one tensor,"
                    " whose rows and columns could be the other way round; save each expert apart"
                )
        elif "*" in name:
            if config.n_experts > len(stored):
                raise ValueError(
                    f"there are {config.n_experts:,} experts, but {len(stored):,} tensors"
                )
            numbered = (name.replace("*", str(number)) for number in range(config.n_experts))
            sources[fqn] = Source(fqn, (*numbered,), shape[1:])
        else:
            sources[fqn] = Source(fqn, (name,), shape)
    return sources


def _fused_parts(config: ModelConfig) -> dict[str, Source]:
    """Return the Source of each parameter that a fused tensor may have, by our name."""
    shapes = parameter_shapes(config)
    found = {}
    for name, parts in _format_of(config).fused.items():
        for layer in range(config.n_layers):
            start = 0
            fqns = [f"layers.{layer}.{part}" for part in parts]
            experts, _, columns = shapes[fqns[0]]
            rows = sum(shapes[fqn][1] for fqn in fqns)
            for fqn in fqns:
                stop = start + shapes[fqn][1]
                found[fqn] = Source(
                    fqn,
                    (f"model.layers.{layer}.{name}",),
                    (experts, rows, columns),
                    slice(start, stop),
                )
                start = stop
    return found


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
        **{theirs: keys[ours] for ours, (theirs, *_) in sizes_of(format).items()},
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
