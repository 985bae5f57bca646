"""Read the shape of a model from a step's state.json (our fields) or from Meta's params.json. Hugging Face's is read in hf.py.

config = config_from_fields(state["run"]["model"], "state.json: run.model")
config = config_from_meta(params, tied=False)
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from titan_lite.models.shapes import FLAVORS, ModelConfig, RopeScaling
from titan_lite.outside import (
    ANY,
    FLAG,
    NO_OTHER,
    POSITIVE,
    SIZE,
    Damaged,
    check_form,
    faults,
    maybe,
    optional,
)

_FIELDS: dict[Any, Any] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size"), SIZE),
    "tied_embeddings": optional(FLAG),
    "rope_theta": optional(POSITIVE),
    "rope_scaling": maybe(
        dict.fromkeys((field.name for field in fields(RopeScaling)), POSITIVE) | {NO_OTHER: ANY}
    ),
    "norm_eps": optional(POSITIVE),
    "max_seq_len": optional(SIZE),
    NO_OTHER: ANY,
}
_PARAMS = {
    **dict.fromkeys(
        ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "vocab_size"), SIZE
    ),
    **dict.fromkeys(("norm_eps", "ffn_dim_multiplier", "rope_theta"), POSITIVE),
    "rope_scaling_factor": optional(POSITIVE),
    "use_scaled_rope": optional(FLAG),
}


def config_from_fields(given: Any, name: str) -> ModelConfig:
    """Invert `dataclasses.asdict`; fields with defaults may be missing. name: the beginning of errors. Raises Damaged."""
    scaling = check_form(given, _FIELDS, name).get("rope_scaling")
    return ModelConfig(**{**given, "rope_scaling": scaling and RopeScaling(**scaling)})


def config_from_meta(params: Mapping[str, Any], tied: bool) -> ModelConfig:
    """Return the shape of the model that a params.json describes. Raises Damaged."""
    absent = {
        "n_kv_heads": params.get("n_heads", 1),
        "rope_theta": 10_000.0,
        "ffn_dim_multiplier": 1.0,
    }
    given = {**absent, **{name: value for name, value in params.items() if value is not None}}
    if wrong := [*faults(given, _PARAMS)]:  # such as Llama 2's vocab_size = -1
        raise Damaged(f"params.json does not describe a Llama 3: {'; '.join(wrong)}")
    unit = given["multiple_of"]
    hidden = math.ceil(int(given["ffn_dim_multiplier"] * (8 * given["dim"] // 3)) / unit) * unit
    if not SIZE.holds(hidden):
        raise Damaged(
            f"params.json: ffn_dim_multiplier = {given['ffn_dim_multiplier']} makes a feed_forward of {hidden} rows"
        )
    config = ModelConfig(
        **{
            name: given[name]
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps")
        },
        hidden_dim=hidden,
        tied_embeddings=tied,
        rope_theta=float(given["rope_theta"]),
        max_seq_len=8192,
    )
    if not params.get("use_scaled_rope"):
        return config
    # The file may lack the scaling factor, which is 8 in Llama 3.1 and 32 in 3.2; the size of the model decides.
    computed: dict[str, Any] = dict(rope_theta=1.0, rope_scaling=None, norm_eps=1.0, max_seq_len=1)
    sizes = {replace(flavor, **computed): flavor.rope_scaling for flavor in FLAVORS.values()}
    known = sizes.get(replace(config, **computed)) or RopeScaling(factor=8.0)
    factor = given.get("rope_scaling_factor", known.factor)
    return replace(config, rope_scaling=RopeScaling(factor=float(factor)), max_seq_len=131_072)
