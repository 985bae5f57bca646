"""Rules of this machine: its GPUs, its memory, and the weights that a run begins with.

    tokenizer = check_machine(config, layout)      # before a process group is made

`check_machine` applies all other rules first. Only this file of the folder imports torch, so it is
imported where torch is there anyway.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from titan_lite.checkpoint.run_identity import ListingsOfRun
from titan_lite.checkpoint.steps import SavedSteps
from titan_lite.checkpoint.weights import open_weights
from titan_lite.config import Config, ConfigError
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.device import device_memory, host_memory
from titan_lite.distributed.layout import Layout, least_batch_bytes, least_state_bytes
from titan_lite.distributed.process_group import all_equal
from titan_lite.logging import logger
from titan_lite.models.attention import check_kernel
from titan_lite.models.shapes import FLOAT32_BYTES, shape_words
from titan_lite.rules import mistakes_in_recipe, read_inputs
from titan_lite.rules.fault_tolerance import missing_lighthouse
from titan_lite.rules.mistakes import (
    RULES_OF_MACHINE,
    Mistake,
    apply,
    is_first_rank,
    raise_mistakes,
    rule_of_machine,
    told_by,
)


def check_machine(
    config: Config, layout: Layout, listings: ListingsOfRun | None = None
) -> Tokenizer:
    """Check a recipe against all rules and what is here. Return its tokenizer.

    listings: of its documents; None to list them now. Raises one ConfigError with all mistakes.
    """
    mistakes = mistakes_in_recipe(config, layout)
    tokenizer, of_inputs = read_inputs(config, layout, listings)
    mistakes += of_inputs
    mistakes += mistakes_here(config, layout)
    raise_mistakes(config, mistakes)
    assert tokenizer is not None
    return tokenizer


def mistakes_here(config: Config, layout: Layout) -> list[Mistake]:
    return apply(RULES_OF_MACHINE, config, layout)


@rule_of_machine
def initial_weights_fit_the_model(config: Config, layout: Layout) -> Iterator[Mistake]:
    """On the first rank alone: all ranks would open ranks x files."""
    key = "checkpoint.initial_load_path"
    path = config.checkpoint.initial_load_path
    if not path or not is_first_rank():
        return
    step = SavedSteps(config.checkpoint, Path(config.job.dump_folder)).step_to_load()
    if step is None:
        yield from told_by(key, lambda: open_weights(path, key, model=layout.model))
    else:
        logger.info(f'{key} = "{path}" has no effect: the run resumes from its own step-{step}')


@rule_of_machine
def the_compiler_is_here(config: Config, layout: Layout) -> Iterator[Mistake]:
    if not config.compile.enable:
        return
    from titan_lite.compile.compile import check_backend  # with Inductor, a second to import

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    yield from told_by("compile.backend", check_backend, config.compile, device_type)


@rule_of_machine
def groups_have_a_lighthouse(config: Config, layout: Layout) -> Iterator[Mistake]:
    yield from missing_lighthouse(config)


# GPUs


@rule_of_machine
def the_kernel_of_attention_is_here(config: Config, layout: Layout) -> Iterator[Mistake]:
    kernel = config.training.attention_kernel
    yield from told_by("training.attention_kernel", check_kernel, kernel)


@rule_of_machine
def memory_snapshots_have_gpus(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.profiling.enable_memory_snapshot and not torch.cuda.is_available():
        yield Mistake(
            key="profiling.enable_memory_snapshot",
            value=True,
            why="takes snapshots of CUDA memory, and there is none here",
            instead="enable_memory_snapshot = false",
        )


@rule_of_machine
def deterministic_runs_have_a_deterministic_kernel(
    config: Config, layout: Layout
) -> Iterator[Mistake]:
    if config.debug.deterministic and config.training.attention_kernel == "cudnn":
        yield Mistake(
            key="training.attention_kernel",
            value="cudnn",
            why="sums gradients in any order, but debug.deterministic = true",
            instead='"FA2"',
        )


# Memory

CERTAINLY = 2  # times the memory: what a lower bound says cannot be


@rule_of_machine
def a_rank_fits_into_memory(config: Config, layout: Layout) -> Iterator[Mistake]:
    yield from does_not_fit(config, layout, device_memory(), host_memory())


def does_not_fit(
    config: Config, layout: Layout, device_bytes: float, host_bytes: float = math.inf
) -> Iterator[Mistake]:
    """Yield mistakes if what a rank keeps alone exceeds its memory.

    device_bytes: of its GPU, infinite without one; host_bytes: of the host's memory per rank.
    """
    steady = least_state_bytes(config, layout)
    if device_bytes == math.inf and steady > host_bytes:
        yield Mistake(
            "model.flavor",
            line=(
                f"no GPU found, and {shape_words(config.model)} on {layout.world_size} CPU ranks"
                " does not fit in this machine's memory: weights, gradients and optimizer state"
                f" need {steady / 2**30:.0f} GiB a rank, and a rank has"
                f" {host_bytes / 2**30:.0f}; `titan-lite plan RECIPE --world-size 8` predicts what"
                " GPUs need, or use a smaller model.flavor"
            ),
        )
        return
    once = steady + layout.gathered_bytes
    if steady > device_bytes:
        shards = math.ceil(layout.degrees["dp_shard"] * steady / device_bytes)
        yield Mistake(
            key="parallelism.data_parallel_shard_degree",
            value=layout.degrees["dp_shard"],
            why=(
                f"shards too little: {shape_words(config.model)} on {layout.world_size} ranks:"
                f" weights, gradients and optimizer state need at least {steady / 2**30:.0f} GiB a"
                f" rank, and a rank has {device_bytes / 2**30:.0f}"
            ),
            instead=f"parallelism.data_parallel_shard_degree = {shards} or more",
        )
    elif layout.gathers_once and once > device_bytes:
        yield Mistake(
            key="parallelism.fsdp_communication",
            value="step",
            why=(
                f"needs {once / 2**30:.0f} GiB a rank before any activation, and a rank has"
                f" {device_bytes / 2**30:.0f}"
            ),
            instead='"microbatch" or "auto"',
        )
    memory = host_bytes if device_bytes == math.inf else device_bytes
    batch = least_batch_bytes(config, layout)
    if steady + batch > CERTAINLY * memory:
        sequences = layout.local_batch_size
        share = max(0.0, memory - steady) / batch  # which fits, by the lower bound
        fewer = int(share * sequences)
        shorter = int(share * layout.seq_len)
        yield Mistake(
            key="training.local_batch_size",
            value=sequences,
            why=(
                f"needs at least {batch / 2**30:,.0f} GiB a rank for its tokens of"
                f" {layout.seq_len:,} a sequence and their activations, and a rank has"
                f" {memory / 2**30:,.0f}"
            ),
            instead=f"at most {fewer}" if fewer else f"training.seq_len below {shorter:,}",
        )
    saves_beside = config.checkpoint.enable and config.checkpoint.async_mode != "disabled"
    copy = steady - FLOAT32_BYTES * layout.own_parameters  # all but gradients
    on_host = copy + steady if device_bytes == math.inf else copy
    if saves_beside and on_host > host_bytes:
        beside = ", beside them" if on_host > copy else ""
        yield Mistake(
            key="checkpoint.async_mode",
            value=config.checkpoint.async_mode,
            why=(
                f"keeps a copy of weights and optimizer state in host memory{beside}:"
                f" {on_host / 2**30:.0f} GiB a rank, and a rank has {host_bytes / 2**30:.0f}"
            ),
            instead='"disabled"',
        )


def check_agreement(layout: Layout) -> None:
    """Raise ConfigError if GPUs of different memory would gather weights at different times.

    Needs a process group.
    """
    if not all_equal(str(layout.gathers_once)):
        raise ConfigError(
            'parallelism.fsdp_communication = "auto": GPUs of different memory would disagree; use'
            ' "step" or "microbatch"'
        )
