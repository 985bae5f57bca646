"""Read the shape of a model from a step's state.json. Hugging Face's is read in hf.py.

config = config_from_fields(state["run"]["model"], "state.json: run.model")
"""

from dataclasses import fields
from typing import Any

from titan_lite.models.shapes import ModelConfig, RopeScaling
from titan_lite.outside import (
    ANY,
    FLAG,
    NO_OTHER,
    POSITIVE,
    SIZE,
    check_form,
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


def config_from_fields(given: Any, name: str) -> ModelConfig:
    """Invert `dataclasses.asdict`; fields with defaults may be missing. name: the beginning of errors. Raises Damaged."""
    scaling = check_form(given, _FIELDS, name).get("rope_scaling")
    return ModelConfig(**{**given, "rope_scaling": scaling and RopeScaling(**scaling)})
