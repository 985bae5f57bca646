"""Check a recipe against this machine, its data and its checkpoints. Needs no process group.

tokenizer = check(config, layout)
"""

import importlib.util
import math
import os
from pathlib import Path

import torch

from titan_lite import rules
from titan_lite.checkpoint.identity import run_identity
from titan_lite.checkpoint.manager import Checkpointer
from titan_lite.checkpoint.resume import compare
from titan_lite.checkpoint.weights import check_fit, open_weights
from titan_lite.compile.compile import check_backend
from titan_lite.config import Compile, Config, ConfigError
from titan_lite.cost.profiles import PROFILES, profile_of
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.memory import (
    compression_error_bytes,
    gathered_once_bytes,
    steady_bytes,
)
from titan_lite.distributed.process_group import alike, device_memory, host_memory
from titan_lite.inputs import check_inputs
from titan_lite.logging import logger
from titan_lite.models.attention import check_kernel
from titan_lite.models.shapes import shape_words
from titan_lite.rules import float8_has_results_on_gpus, raise_mistakes


def check(config: Config, layout: Layout) -> Tokenizer:
    """Return the tokenizer of a recipe that can run here. Raises ConfigError."""
    rules.check(config, layout)
    tokenizer = check_inputs(config, layout)
    check_machine(config)
    check_memory(config, layout, device_memory(), host_memory())
    check_prices(config.compile)
    check_backend(config.compile, "cuda" if torch.cuda.is_available() else "cpu")
    check_writable(Path(config.job.dump_folder))
    if os.environ.get("RANK", "0") != "0":
        # the first rank alone looks at the files of a step: all ranks would open ranks x files
        return tokenizer
    checkpointer = Checkpointer(config.checkpoint, Path(config.job.dump_folder))
    step = checkpointer.step_to_load()
    if step is not None:
        changes = compare(checkpointer.read_state(step), run_identity(config, layout, tokenizer))
        changes.refuse_unless_accepted(config.checkpoint)
    path = config.checkpoint.initial_load_path
    if path and step is None:
        check_fit(
            open_weights(path, "checkpoint.initial_load_path", model=layout.model),
            layout.model,
            "checkpoint.initial_load_path",
        )
    elif path:
        logger.info(
            f'checkpoint.initial_load_path = "{path}" has no effect: the run goes on from its own'
            f" step {step}"
        )
    return tokenizer


def is_installed(module: str) -> bool:
    """Return True if a module can be imported.

    A folder without sources, such as wandb's output, cannot.
    """
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def check_machine(config: Config) -> None:
    """Raise ConfigError for a key that needs a GPU or a package that is missing here."""
    check_kernel(config.training.attention_kernel)
    check_float8(config)
    if config.training.attention_kernel == "cudnn" and config.debug.deterministic:
        raise ConfigError(
            'debug.deterministic = true: attention_kernel = "cudnn" sums gradients in any order;'
            ' use "FA2"'
        )
    check_gpu(config)
    if config.metrics.enable_wandb and not is_installed("wandb"):
        raise ConfigError(
            "metrics.enable_wandb = true: wandb is not installed here; pip install wandb, or"
            " enable_wandb = false"
        )


def check_gpu(config: Config) -> None:
    """Raise ConfigError for a key that needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    if config.parallelism.enable_async_tensor_parallel:
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true: its ranks write to each other's GPU"
            " memory, and there is none here; use enable_async_tensor_parallel = false"
        )
    if config.profiling.enable_memory_snapshot:
        raise ConfigError(
            "profiling.enable_memory_snapshot = true: snapshots are of CUDA memory, and there is"
            " none here; use enable_memory_snapshot = false"
        )


def check_float8(config: Config) -> None:
    """Raise ConfigError if this machine's GPU has no float8 products of the recipe's kind."""
    if not config.float8.enable or not torch.cuda.is_available():
        return
    name, recipe = torch.cuda.get_device_name(), config.float8.recipe
    if torch.version.hip:
        raise ConfigError(
            f"float8.enable = true needs an NVIDIA GPU, and here is {name}; use false"
        )
    if torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(
            "float8.enable = true needs compute capability 8.9 or newer, such as H100, and here is"
            f" {name}; use false"
        )
    if recipe != "tensorwise" and torch.cuda.get_device_capability() < (9, 0):
        raise ConfigError(
            f'float8.recipe = "{recipe}" needs compute capability 9.0 or newer, and here is {name};'
            ' use "tensorwise"'
        )
    raise_mistakes(config, float8_has_results_on_gpus(config))


def check_memory(config: Config, layout: Layout, memory: float, host: float = math.inf) -> None:
    """Raise ConfigError if weights, gradients and optimizer state alone exceed a rank's memory.

    memory: bytes of its GPU, infinite without one; host: bytes of the host's memory per rank.
    """
    steady, step = steady_bytes(config, layout), gathered_once_bytes(config, layout)
    if steady > (limit := memory if memory < math.inf else host):
        shards = math.ceil(layout.degrees["dp_shard"] * steady / limit)
        errors = (
            ", their errors (parallelism.replicate_compression)"
            if compression_error_bytes(config, layout)
            else ""
        )
        raise ConfigError(
            f"{shape_words(config.model)} on {layout.world_size} ranks: weights, gradients{errors}"
            f" and optimizer state need {steady / 2**30:.0f} GiB a rank, and a rank has"
            f" {limit / 2**30:.0f}; use parallelism.data_parallel_shard_degree = {shards} or more"
        )
    if layout.gathers_once and steady + step > memory:
        raise ConfigError(
            f'parallelism.fsdp_communication = "step" needs {(steady + step) / 2**30:.0f} GiB a'
            f' rank before any activation, and a rank has {memory / 2**30:.0f}; use "microbatch" or'
            ' "auto"'
        )


def check_agreement(layout: Layout) -> None:
    """Raise ConfigError if GPUs of different memory would gather weights at different times.

    Needs a process group.
    """
    if not alike(str(layout.gathers_once)):
        key = "parallelism.fsdp_communication"
        raise ConfigError(
            f'{key} = "auto": GPUs of different memory would disagree; use "step" or "microbatch"'
        )


def check_prices(stage: Compile) -> None:
    """Raise ConfigError if the compile stage would estimate collectives of an unknown GPU."""
    if stage.compiles("model") and stage.bucketing in ("greedy", "auto") and not stage.machine:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        if device and profile_of(device) is None:
            raise ConfigError(
                f'compile.bucketing = "{stage.bucketing}" prices collectives, and "{device}" is not'
                f" known; use compile.machine = {', '.join(PROFILES)} or a .toml file, or bucketing"
                ' = "block"'
            )


def check_writable(folder: Path) -> None:
    """Raise ConfigError if job.dump_folder cannot be created or written. Creates nothing."""
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "may not be written" if existing.is_dir() else "is no folder"
        raise ConfigError(
            f'job.dump_folder = "{folder}": {existing} {why}; use a folder that can be created and'
            " written"
        )
