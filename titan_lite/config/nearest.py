"""Name the key to use in place of one that does not exist.

    nearest_key("training.stepz")      # "; did you mean training.steps?"
    nearest_key("training.compile")    # "; use compile.enable": the key is torchtitan's
    nearest_section("profiler")        # "; did you mean profiling?"

Imports no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from titan_lite.config.errors import did_you_mean
from titan_lite.config.sections import KEYS, SECTIONS
from titan_lite.features import part_of_each

# in other programs
NAMES_OF_VALIDATION = ("val", "valid", "validator", "eval", "evaluation", "dev", "test")
NAMES_OF_PATH = ("dataset_path", "data_path")
NAMES_OF_LR = ("learning_rate", "peak_lr", "max_lr")

_RECIPE = "name the recipe by a variable: CONFIG_FILE=llama3_8b ./run_train.sh"
_PRINTED = "use the option --print-config; a run has it in config.toml in job.dump_folder"
_TOKENIZER = "use model.tokenizer_path, the path of a tokenizer.json or tokenizer.model"
_OWN_FAMILY = "use model.name, which may be the path of a Python file"

# Keys of earlier versions: their names now. Checkpoints of then have these.
RENAMED = {
    "compile.defer_products": "compile.defer_weight_grads",
    "fault_tolerance.copies": "fault_tolerance.replica_groups",
    "fault_tolerance.min_copies": "fault_tolerance.min_replica_groups",
    "training.compare_copies_freq": "training.compare_replicas_freq",
}


class Gone(NamedTuple):
    """A key of earlier versions that no longer exists."""

    defaults: Sequence[object]  # values that did nothing: a recipe with one is read without the key
    instead: str


GONE = {
    "compile.components": Gone(
        (["model"], ["model", "loss"]),
        "a compiled model has its loss in the same graph; without its model, use"
        " compile.enable = false",
    ),
    "training.global_batch_ramp": Gone(
        ([],), "use [[phases]] that change training.global_batch_size"
    ),
}

# Keys and tables of torchtitan, of its TOML files and of its Python configurations, and what to use
# in their place. Those that the nearest name explains are left out. A table stands for all in it.
OF_TORCHTITAN = {
    "checkpoint.create_seed_checkpoint": (
        "not needed: debug.seed gives the same weights on every layout"
    ),
    "checkpoint.export_dtype": "use the option --dtype of titan-lite convert",
    "checkpoint.initial_load_in_hf": (
        "not needed: checkpoint.initial_load_path may be a Hugging Face folder"
    ),
    "checkpoint.initial_load_model_only": (
        "not needed: of checkpoint.initial_load_path only the model is read"
    ),
    "checkpoint.last_save_in_hf": (
        "use titan-lite convert, which writes a checkpoint as a Hugging Face folder"
    ),
    "checkpoint.model_weights_only": "use checkpoint.last_save_model_only",
    "comm.mode": "use titan-lite recipe RECIPE --world-size N, which checks a layout without GPUs",
    "comm.save_traces_folder": "not needed: it is flight_recorder/ in job.dump_folder",
    "config": _RECIPE,
    "config_file": _RECIPE,
    "debug.print_config": _PRINTED,
    "debug.save_config_file": _PRINTED,
    "experimental": f"{_OWN_FAMILY}, and [parallelism] for degrees and schedules",
    "fault_tolerance.enable": "use fault_tolerance.replica_groups, their number",
    "fault_tolerance.group_size": "use fault_tolerance.replica_groups",
    "fault_tolerance.process_group_timeout_ms": "use fault_tolerance.timeout_seconds",
    "fault_tolerance.replica_id": "use a variable: COPY=0 ./run_train.sh",
    "hf_assets_path": _TOKENIZER,
    "job.config_file": _RECIPE,
    "job.custom_config_module": _OWN_FAMILY,
    "job.print_args": _PRINTED,
    "job.print_config": _PRINTED,
    "job.save_config_file": _PRINTED,
    "job.save_config_folder": _PRINTED,
    "lr_scheduler.decay_ratio": 'use lr_scheduler.decay_length, such as "20%" or a number of steps',
    "lr_scheduler.lr_min": "use lr_scheduler.min_lr_factor",
    "lr_scheduler.total_steps": (
        "use lr_scheduler.decay_begin and decay_length, steps that do not depend on training.steps"
    ),
    "memory_estimation": "use titan-lite plan, which needs no GPU",
    "metrics.disable_color_printing": "use a variable: NO_COLOR=1 ./run_train.sh",
    "metrics.enable_color_printing": "use a variable for none: NO_COLOR=1 ./run_train.sh",
    "metrics.save_tb_folder": "not needed: it is tb/ in job.dump_folder",
    "model.hf_assets_path": _TOKENIZER,
    "module": f"{_RECIPE}; its model is model.name and model.flavor",
    "optimizer.implementation": "not needed: the update of AdamW is fused",
    "parallelism.context_parallel_load_balancer": "not needed: a rank has a head and a tail chunk",
    "parallelism.context_parallel_rotate_method": "not needed: keys and values are gathered",
    "parallelism.enable_sequence_parallel": "not needed: tensor parallelism has it",
    "parallelism.module_fqns_per_model_part": "use parallelism.pipeline_parallel_split_points",
    "parallelism.num_pp_microbatches": (
        "use parallelism.pipeline_parallel_microbatch_size, which is training.local_batch_size"
        " divided by it"
    ),
    "profiling.memory_snapshot_freq": "use profiling.profile_freq",
    "profiling.save_memory_snapshot_folder": (
        "not needed: it is memory_snapshots/ in job.dump_folder"
    ),
    "profiling.save_traces_folder": "not needed: it is profile_traces/ in job.dump_folder",
    "training.compile": "use compile.enable",
    "training.data_parallel_degree": "use parallelism.data_parallel_shard_degree",
    "training.dataloader": "use data.num_workers and data.prefetch",
    "training.dataset_path": "use data.path",
    "training.max_context_length": "use training.seq_len",
    "training.num_tokens_per_microbatch_per_dp_rank": (  # torchtitan 4121
        "use training.local_batch_size, in sequences of training.seq_len tokens; in a pipeline it"
        " is that of all microbatches"
    ),
    "training.num_tokens_per_train_step": (
        "use training.global_batch_size, in sequences of training.seq_len tokens"
    ),
    # what is trained on must not change with these
    "validation.dataloader": "not needed: validation has the loader's settings of [data]",
    "validation.local_batch_size": "not needed: validation has the batches of training",
    "validation.seq_len": "not needed: validation has the sequences of training",
}
for _keys in part_of_each("keys"):
    OF_TORCHTITAN |= getattr(_keys, "OF_TORCHTITAN", {})


def nearest_key(key: str) -> str:
    """Return the end of a message about an unknown key: what to use in its place, keys of that
    name, the nearest, or all.
    """
    section, _, name = key.partition(".")
    if section in NAMES_OF_VALIDATION and name:
        section = "validation"
        key = f"{section}.{name}"
    if in_its_place := _in_place_of(key):
        return in_its_place
    if section not in SECTIONS:
        return did_you_mean(key, KEYS if name else (), otherwise=nearest_section(section))
    known = SECTIONS[section].model_fields
    if name in NAMES_OF_PATH and "path" in known:
        name = "path"
    if name in NAMES_OF_LR:
        name = "lr"
    if name in known:
        return f"; did you mean {section}.{name}?"
    longer = [f"{section}.{each}" for each in known if name and each.endswith(f"_{name}")]
    if longer:
        return f"; did you mean {' or '.join(longer)}?"
    same_name = [each for each in KEYS if each.endswith(f".{name}")]
    if section == "validation":  # what is trained on must not change with it
        same_name = [each for each in same_name if not each.startswith(("data.", "training."))]
    if same_name:
        return f"; did you mean {' or '.join(same_name)}?"
    otherwise = f"; [{section}] has {', '.join(known)}"
    return did_you_mean(name, known, within=f"{section}.", otherwise=otherwise)


def nearest_section(section: str) -> str:
    """Return the end of a message about an unknown section: a key of that name, or sections."""
    if section in NAMES_OF_VALIDATION:
        return "; did you mean validation?"
    if in_its_place := _in_place_of(section):
        return in_its_place
    same_name = [known for known in KEYS if known.endswith(f".{section}")]
    if same_name:
        return f"; {section} is a key: {' or '.join(same_name)}"
    if section in NAMES_OF_PATH:
        return "; did you mean data.path?"
    with_underscore = [known for known in KEYS if known.replace(".", "_") == section]
    if with_underscore:
        return f"; did you mean {' or '.join(with_underscore)}?"
    prefix = section.partition("_")[0]
    name = section.removeprefix(f"{prefix}_")
    if prefix in NAMES_OF_VALIDATION and name:
        return nearest_key(f"validation.{name}")
    return did_you_mean(section, SECTIONS, otherwise=f"; known sections: {', '.join(SECTIONS)}")


def _in_place_of(key: str) -> str:
    """Return the end of a message about a key of an earlier version, or a key or table of
    torchtitan; "" for others.
    """
    if key in RENAMED:
        return f"; use {RENAMED[key]}"
    if key in GONE:
        return f"; {GONE[key].instead}"
    while key and key not in OF_TORCHTITAN:
        key = key.rpartition(".")[0]
    return f"; {OF_TORCHTITAN[key]}" if key else ""
