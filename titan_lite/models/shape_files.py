"""Read the shape of a model from a step's state.json. Hugging Face's is read in hf.py.

config = config_from_fields(state.identity.model, "state.json: identity.model")
"""

from typing import Any

from titan_lite.manifest import CorruptFileError, fields_of
from titan_lite.models.shapes import ModelConfig, RopeScaling

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")


def config_from_fields(given: Any, name: str) -> ModelConfig:
    """Invert `dataclasses.asdict`; fields with defaults may be missing.

    name: the beginning of errors. Raises CorruptFileError.
    """
    with fields_of(name):
        scaling = given.get("rope_scaling")
        config = ModelConfig(**{**given, "rope_scaling": scaling and RopeScaling(**scaling)})
    for field in SIZES:
        size = getattr(config, field)
        if type(size) is not int or size < 1:
            raise CorruptFileError(f"{name}.{field} = {size!r}: expected a whole number above 0")
    return config
