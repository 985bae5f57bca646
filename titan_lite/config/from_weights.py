"""Read keys of [model] from the folder that checkpoint.initial_load_path names.

    weights = read_model("Llama-3.1-8B")    # of transformers, or a step, or a run's folder
    weights.keys                            # {"dim": 4096, "n_layers": 32, "rope_theta": 5e5, ...}
    weights.file                            # Llama-3.1-8B/config.json

They are the lowest part of a recipe whose model.flavor is "from_weights" (config/load.py), and what
every other recipe is compared with (rules/model.py). config.json is read as transformers 5
reads it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_lite import manifest
from titan_lite.config.errors import ConfigError, shown
from titan_lite.config.families import FAMILIES, HuggingFace, find_family, where_it_is
from titan_lite.config.sections import Model
from titan_lite.config.weights_folder import (
    CONFIG,
    HUGGING_FACE,
    STATE,
    STEP,
    TORCHTITAN,
    folder_kind,
    steps_in,
    tokenizer_in,
    why_not_weights,
)

KEY = "checkpoint.initial_load_path"
FLAVOR = "from_weights"  # the value of model.flavor

# key of [model]: key of config.json, of families that have no other (`sizes_of`)
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
SCALING = {
    "rope_scaling_factor": "factor",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_original_max_seq_len": "original_max_position_embeddings",
}

# Keys of config.json that change no logits, by the reason. Another one may, and is refused.
HARMLESS = {
    "which program wrote the file, and when": (
        *("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype"),
        *("unsloth_fixed", "unsloth_version"),
    ),
    "which files and tokens belong to the weights, read elsewhere": (
        *("tokenizer_class", "prefix"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("cls_token_id", "mask_token_id", "decoder_start_token_id"),
    ),
    "how a token is drawn from logits": (
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
        *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"),
        *("encoder_no_repeat_ngram_size", "num_return_sequences", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens"),
    ),
    "what a call returns beside logits, and labels of other tasks": (
        *("output_hidden_states", "output_attentions", "output_scores", "return_dict"),
        *("use_return_dict", "return_dict_in_generate", "problem_type", "id2label", "label2id"),
        *("num_labels", "task_specific_params", "finetuning_task"),
    ),
    "how weights begin, and dropout of a training with transformers": (
        *("initializer_range", "attention_dropout", "gradient_checkpointing"),
    ),
    "how logits are computed, but for rounding": (
        *("use_cache", "pretraining_tp", "chunk_size_feed_forward", "torchscript"),
        *("use_bfloat16", "tf_legacy_loss", "_attn_implementation", "attn_implementation"),
        *("_attn_implementation_autoset", "_flash_attn_2_enabled"),
    ),
    "which part of an encoder and decoder it is, where it is neither": (
        *("is_decoder", "is_encoder_decoder", "add_cross_attention"),
        *("cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads"),
    ),
    "read with use_sliding_window alone, which is refused": ("sliding_window", "max_window_layers"),
}
READ = frozenset(
    (
        *("architectures", "model_type", "rms_norm_eps", "tie_word_embeddings", "layer_types"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("original_max_position_embeddings", "quantization_config"),
        *SIZES.values(),
    )
)
# Keys of MoE models that change no logits, which other models do not have.
HARMLESS_OF_EXPERTS = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
# What a config.json of any family must have, if it has it.
FIXED = {"is_causal": True, "use_sliding_window": False}


@dataclass(frozen=True)
class ModelOfWeights:
    """The model that a folder of weights is of, in keys of [model]."""

    keys: Mapping[str, Any]
    file: Path  # that says so
    tokenizer: str = ""  # its file; "": none is known


def read_model(path: str, family: str = "") -> ModelOfWeights | None:
    """Return the model of a Hugging Face folder, a step, or the newest step of a run.

    path: checkpoint.initial_load_path. family: model.name, which may be a user's own. None: a
    checkpoint of torchtitan, which does not have the shape of its model. Raises ConfigError.
    """
    folder = Path(path)
    try:
        kind = folder_kind(folder)
        if kind == HUGGING_FACE:
            return _model_of_config_json(folder, family)
        if kind:
            return _model_of_checkpoint(folder, family)
        for step in steps_in(folder):
            if folder_kind(step) in (STEP, TORCHTITAN):
                return _model_of_checkpoint(step, family)
        why = why_not_weights(folder)
        raise ConfigError(f"{why}; use a Hugging Face folder, a checkpoint or a run's folder")
    except ConfigError as error:
        raise ConfigError(f"{KEY} = {shown(path)}: {error}") from None


def _model_of_checkpoint(folder: Path, family: str) -> ModelOfWeights | None:
    if folder_kind(folder) == TORCHTITAN:
        return None
    file = folder / STATE
    content = manifest.read_json(file)
    with manifest.fields_of(file.name):
        identity = content["identity"]
        if not identity.get("model"):
            raise ConfigError(f"{file.name} does not say which model this is (identity.model)")
        keys = keys_of_shape(identity["model"])
        keys["name"] = where_it_is(keys["name"], family)
        if unknown := keys.keys() - Model.model_fields.keys():
            raise ConfigError(f"{file.name}: identity.model has {', '.join(sorted(unknown))}")
        recipe = identity.get("recipe", {})
        of_recipe = recipe.get("model", {}).get("tokenizer_path", "")
    return ModelOfWeights(keys, file, tokenizer_in(folder) or of_recipe)


def keys_of_shape(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of [model] that give a shape. fields: a ModelConfig as a dictionary."""
    keys = dict(fields)
    keys["name"] = keys.pop("family")
    keys["tied_embeddings"] = "yes" if keys.get("tied_embeddings") else "no"
    scaling = keys.pop("rope_scaling", None)
    if scaling is None:
        keys["rope_scaling_factor"] = 1.0
    else:
        keys |= {f"rope_scaling_{name}": value for name, value in scaling.items()}
    return keys


# config.json


def sizes_of(format: HuggingFace) -> dict[str, tuple[str, ...]]:
    """Return {key of [model]: keys of config.json that have it}, of which the first is written."""
    return {ours: (theirs,) for ours, theirs in SIZES.items()} | dict(format.sizes)


def _model_of_config_json(folder: Path, family: str) -> ModelOfWeights:
    file = folder / CONFIG
    try:
        keys = keys_of_config_json(manifest.read_json(file), family)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{file.name}: {error}") from None
    return ModelOfWeights(keys, file, tokenizer_in(folder))


def keys_of_config_json(json: Mapping[str, Any], family: str = "") -> dict[str, Any]:
    """Return the keys of [model] that a config.json of transformers has.

    family: a user's own, which may be that of the file. Raises ValueError with all values that are
    not supported.
    """
    name, mistakes = _family_of(json, family)
    format = find_family(name).huggingface
    assert format is not None  # it has a model_type
    architectures = json.get("architectures")
    if architectures and not mistakes and architectures != [format.architecture]:
        mistakes.append(
            f"architectures = {architectures!r:.60}: expected {[format.architecture]!r} with"
            f" model_type = {format.model_type!r}"
        )
    given = {**format.defaults, **json}
    given = {key: value for key, value in given.items() if value is not None}
    given.setdefault("num_key_value_heads", json.get("num_attention_heads"))
    fixed = {**FIXED, **format.fixed}
    or_default = {**format.defaults, **json}
    mistakes += [
        f"{key} = {or_default[key]!r:.60}: expected {value!r}"
        for key, value in fixed.items()
        if or_default.get(key, value) != value
    ]
    sizes = sizes_of(format)
    known = READ.union(fixed, format.defaults, *HARMLESS.values(), *sizes.values())
    if "n_experts" in sizes:
        known |= {*HARMLESS_OF_EXPERTS}
    or_declare = "" if name in FAMILIES else ", or give it to HuggingFace(fixed=...) of the family"
    mistakes += [
        f"{key} = {value!r:.60}: may change what the model computes, and is not known here; remove"
        f" it if it does not{or_declare}"
        for key, value in json.items()
        if key not in known and value is not None
    ]
    mistakes += [
        f"layer_types has {each!r:.60}: expected 'full_attention' for all layers"
        for each in dict.fromkeys(json.get("layer_types") or ())
        if each != "full_attention"
    ]
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    if "head_dim" not in given and not _not_sizes(given, ["num_attention_heads", "hidden_size"]):
        given["head_dim"] = width // heads  # type: ignore[operator]
    # {key of [model]: the key of config.json that has it, else one that has a default}
    found = {
        ours: min(names, key=lambda name: (json.get(name) is None, name not in given))
        for ours, names in sizes.items()
    }
    mistakes += _not_sizes(given, found.values())
    mistakes += _not_numbers(given, ["rms_norm_eps"])
    if json.get("quantization_config"):
        mistakes.append("quantization_config: quantized weights cannot be read")
    rope, rope_mistakes = _rope_of(json)
    if mistakes + rope_mistakes:
        raise ValueError("; ".join(mistakes + rope_mistakes))
    return {
        "name": name,
        **{ours: given[theirs] for ours, theirs in found.items()},
        "tied_embeddings": "yes" if json.get("tie_word_embeddings") else "no",
        "norm_eps": float(given["rms_norm_eps"]),
        **rope,
    }


def _family_of(json: Mapping[str, Any], own: str) -> tuple[str, list[str]]:
    """Return the name of the family that a config.json is of, and a line if no family here has that
    model_type.

    own: a user's own family, or one of FAMILIES. Without a model_type, the file is of Llama.
    """
    names = dict.fromkeys((*FAMILIES, own) if own else FAMILIES)
    by_type = {}
    for name in names:
        format = find_family(name).huggingface
        if format is not None:
            by_type[format.model_type] = name
    kind = json.get("model_type", "llama")
    if isinstance(kind, str) and kind in by_type:
        return by_type[kind], []
    known = " or ".join(map(repr, by_type))
    return by_type["llama"], [f"model_type = {kind!r:.60}: expected {known}"]


def _rope_of(json: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the rotary keys of [model], and a line for each setting that is not supported.

    As in transformers 5, rope_scaling (of transformers 4) stands instead of rope_parameters.
    """
    name = "rope_scaling" if json.get("rope_scaling") else "rope_parameters"
    settings = json.get(name) or {}
    rope = {"rope_theta": json.get("rope_theta", 10_000.0), **settings}
    mistakes = _not_numbers(rope, ["rope_theta"])
    if any(isinstance(value, dict) for value in settings.values()):
        mistakes.append(f"{name}: expected the same settings for all layers")
    fraction = rope.get("partial_rotary_factor", json.get("partial_rotary_factor"))
    if fraction not in (None, 1):
        mistakes.append(f"partial_rotary_factor = {fraction!r:.60}: expected 1")
    kind = rope.get("rope_type", rope.get("type", "default"))  # "type" is its earlier name
    keys = {"rope_theta": rope["rope_theta"], "rope_scaling_factor": 1.0}
    if kind == "llama3":
        scaling, scaling_mistakes = _llama3_scaling(json, rope, name)
        keys |= scaling
        mistakes += scaling_mistakes
    elif kind != "default":
        mistakes.append(f"rope_type = {kind!r:.60}: expected 'default' or 'llama3'")
    if not mistakes:
        keys = {
            key: value if key == "rope_scaling_original_max_seq_len" else float(value)
            for key, value in keys.items()
        }
    return keys, mistakes


def _llama3_scaling(
    json: Mapping[str, Any], rope: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of Llama 3.1's scaling, and a line for each value that it cannot have.

    name: of the object in config.json that has the settings `rope`.
    """
    length = "original_max_position_embeddings"
    # As transformers: the one beside the settings, if any, else the one in them.
    original = json.get(length, rope.get(length, json.get("max_position_embeddings", 2048)))
    given = {**rope, length: original}
    lines = _not_numbers(given, ("factor", "low_freq_factor", "high_freq_factor"))
    lines += _not_sizes(given, [length])
    if not lines and given["factor"] < 1:
        lines.append(f"factor = {given['factor']!r}: expected a number at least 1")
    if not lines and given["high_freq_factor"] <= given["low_freq_factor"]:
        lines.append("high_freq_factor is not above low_freq_factor")
    keys = {ours: given.get(theirs) for ours, theirs in SCALING.items()}
    if not lines and given["factor"] == 1:  # which scales nothing
        keys = {"rope_scaling_factor": 1.0}
    return keys, [f"{name}: {line}" for line in lines]


def _not_sizes(given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a line for each of these values that is no size."""
    return [
        f"{name} = {given.get(name)!r:.60}: expected a whole number above 0"
        for name in names
        if type(given.get(name)) is not int or given[name] < 1
    ]


def _not_numbers(given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a line for each of these values that is no finite number above 0."""
    return [
        f"{name} = {given.get(name)!r:.60}: expected a number above 0"
        for name in names
        if type(given.get(name)) not in (int, float)
        or not 0 < given[name] < math.inf  # of JSON also NaN and Infinity
    ]
