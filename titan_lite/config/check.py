"""What only the model, the data, the machine and the number of ranks show to be wrong with a recipe; needs no process group.

model_config, tokenizer, degrees, pipeline = check(config, world_size=8)
"""

import dataclasses
import functools
import importlib.util
import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from titan_lite import __version__
from titan_lite.checkpoint.resume import compare, explain, git_revision, position, refuse
from titan_lite.checkpoint.saving import Checkpointer
from titan_lite.checkpoint.weights import check_fit, open_weights
from titan_lite.compiler.autotune import STEPS, WAYS
from titan_lite.compiler.fqns import parameters_within
from titan_lite.compiler.hardware import PROFILES, load_machine, profile_of
from titan_lite.compiler.stage import check_backend
from titan_lite.config import KEYS, Config, ConfigError, Parallelism, gradient_accumulation_steps
from titan_lite.data.dataset import check_data, fingerprint
from titan_lite.data.prepared import SPLITS, PreparedSource, check_prepared
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer
from titan_lite.distributed.activation_checkpoint import recomputes
from titan_lite.distributed.mesh import check_context_parallel, check_tensor_parallel, resolve_degrees
from titan_lite.distributed.pipeline_plan import PipelinePlan, plan_pipeline
from titan_lite.logging import logger
from titan_lite.models.llama3 import FLAVORS, ModelConfig, Transformer


def check_layout(config: Config, world_size: int) -> tuple[ModelConfig, dict[str, int], PipelinePlan]:
    """The model's shape, the degrees (mesh.py) and stages of a recipe that can run in such a world: what needs no data, no
    tokenizer and none of this machine. Raises ConfigError."""
    check_flavor(config.model.flavor)
    flavor = FLAVORS[config.model.flavor]
    if config.training.seq_len > flavor.max_seq_len:
        raise ConfigError(
            f"training.seq_len = {config.training.seq_len} is more than flavor {config.model.flavor} was made for; "
            f"at most {flavor.max_seq_len} works"
        )
    degrees = resolve_degrees(config.parallelism, world_size)
    check_context_parallel(degrees["cp"], seq_len=config.training.seq_len, tp=degrees["tp"])
    check_tensor_parallel(
        degrees["tp"],
        n_heads=flavor.n_heads,
        n_kv_heads=flavor.n_kv_heads,
        hidden_dim=flavor.hidden_dim,
        vocab_size=flavor.vocab_size,
        seq_len=config.training.seq_len,
    )
    pipeline = plan_pipeline(
        config.parallelism,
        n_layers=flavor.n_layers,
        tied=flavor.tied_embeddings,
        local_batch_size=config.training.local_batch_size,
        compiled=config.compile.compiles("model") or config.compile.compiles("loss"),
        checkpointed=config.activation_checkpoint.mode != "none",
    )
    accumulation = gradient_accumulation_steps(config.training, degrees["dp_replicate"] * degrees["dp_shard"])
    check_names("parallelism.fsdp_keep_gathered", config.parallelism.fsdp_keep_gathered, config.model.flavor)
    microbatches = accumulation * pipeline.microbatches
    check_schedule(config, microbatches)
    if gathers_once(config.parallelism, microbatches) and config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" has no effect with fsdp_communication = "step", which keeps '
            f'weights gathered for a step of {microbatches} microbatches; fsdp_communication = "microbatch" would work'
        )
    return dataclasses.replace(flavor, max_seq_len=config.training.seq_len), degrees, pipeline


def check(config: Config, world_size: int) -> tuple[ModelConfig, Tokenizer, dict[str, int], PipelinePlan]:
    """The model's shape, its tokenizer, the degrees (mesh.py) and stages of a recipe that can run here. Raises ConfigError."""
    model, degrees, pipeline = check_layout(config, world_size)
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f'model.tokenizer_path = "{config.model.tokenizer_path}" has {tokenizer.vocab_size} tokens, but flavor '
            f"{config.model.flavor} has room for {model.vocab_size}; use that flavor's tokenizer, or a flavor with room"
        )
    check_data(config.data)
    for _, part in config.data.mixture():
        if part.dataset == "prepared":
            check_prepared(part, tokenizer.sha256)
            for split in SPLITS if config.validation.enable else SPLITS[:1]:
                PreparedSource(part, split, seed=0)
    check_async_tensor_parallel(config)
    check_backend(config.compile, "cuda" if torch.cuda.is_available() else "cpu")
    if config.profiling.enable_memory_snapshot and not torch.cuda.is_available():
        raise ConfigError("profiling.enable_memory_snapshot = true: snapshots are of CUDA memory, and there is none; set false")
    if config.metrics.enable_wandb and not is_installed("wandb"):
        raise ConfigError(
            "metrics.enable_wandb = true: Weights & Biases is not installed here; pip install wandb, or enable_wandb = false"
        )
    check_writable(Path(config.job.dump_folder))
    checkpointer = Checkpointer(config.checkpoint, Path(config.job.dump_folder))
    step = checkpointer.step_to_load()
    if step is not None:
        state = checkpointer.read_state(step)
        differences = compare(state, describe_run(config, degrees, tokenizer))
        refuse(differences, checkpointer.path_of(step), config.checkpoint, done=state["step"] >= config.training.steps)
    path = config.checkpoint.initial_load_path
    if path and step is None:
        check_fit(
            open_weights(path, "checkpoint.initial_load_path"), FLAVORS[config.model.flavor], "checkpoint.initial_load_path"
        )
    elif path:
        logger.info(f'checkpoint.initial_load_path = "{path}" has no effect: the run goes on from its own step {step}')
    return model, tokenizer, degrees, pipeline


def describe_run(config: Config, degrees: dict[str, int], tokenizer: Tokenizer, git: str = "") -> dict[str, Any]:
    """What a checkpoint of this run says of it, in JSON's types and tuples; `resume.compare` tells what became of it."""
    data_parallel = degrees["dp_replicate"] * degrees["dp_shard"]
    accumulation = gradient_accumulation_steps(config.training, data_parallel)
    shape = dataclasses.asdict(FLAVORS[config.model.flavor])
    del shape["max_seq_len"]  # an upper limit; parameters are of any length
    return {
        "recipe": dataclasses.asdict(config),
        "run": {
            "model": shape,
            "tokenizer": tokenizer.sha256,
            "rows": config.training.local_batch_size * data_parallel * accumulation,
            "documents": fingerprint(config.data),
            "shares": [share for share, _ in config.data.mixture()],
            "total_steps": config.total_steps,
            "world_size": math.prod(degrees.values()),
            "mesh": degrees,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {"titan_lite": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
            "git": git,
        },
    }


def explain_resume(config: Config, world_size: int) -> None:
    """Print which step a run on so many ranks would load, and what that means; ConfigError where it cannot work."""
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, explain=False))
    checkpointer = Checkpointer(config.checkpoint, Path(config.job.dump_folder))
    step = checkpointer.step_to_load()
    if step is None:
        why = f"{checkpointer.folder} has none" if config.checkpoint.enable else "checkpoint.enable = false"
        path = config.checkpoint.initial_load_path
        print(f"no step is loaded ({why}): the run starts from the beginning" + (f", with the weights of {path}" if path else ""))
        return
    why = "the newest" if config.checkpoint.load_step == -1 else "as checkpoint.load_step says"
    for other in checkpointer.present():
        if fault := checkpointer.fault(other):
            print(f"step-{other} cannot be loaded: {fault}")
    of = ", ".join(map(str, checkpointer.steps()))
    print(f"{checkpointer.folder}/step-{step} is loaded, {why} of {of}, if every byte of its tensors is as it was saved")
    check_flavor(config.model.flavor)
    degrees = resolve_degrees(config.parallelism, world_size)
    state = checkpointer.read_state(step)
    now = describe_run(config, degrees, load_tokenizer(config.model.tokenizer_path), git_revision())
    differences = compare(state, now)
    print("\n".join((position(state), *explain(differences, state, now))))
    refuse(differences, checkpointer.path_of(step), config.checkpoint, done=state["step"] >= config.training.steps)


def is_installed(module: str) -> bool:
    """A folder without sources, such as the one where wandb keeps its files, is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def check_flavor(flavor: str) -> None:
    """Raises ConfigError for a flavor that there is not."""
    if flavor not in FLAVORS:
        raise ConfigError(f'model.flavor = "{flavor}": known flavors are {", ".join(FLAVORS)}')


def check_names(key: str, names: Sequence[str], flavor: str) -> None:
    """Raises ConfigError for a name in which the model, all pipeline stages together, has no parameter."""
    model = _on_no_device(flavor)
    for name in names:
        if not parameters_within(model, [name]):
            raise ConfigError(
                f'{key} = [{", ".join(names)}]: "{name}" has no parameter in flavor {flavor}; '
                f"tok_embeddings, layers.0 to layers.{len(model.layers) - 1}, norm and output have, and modules within"
            )


@functools.cache
def _on_no_device(flavor: str) -> Transformer:
    with torch.device("meta"):
        return Transformer(dataclasses.replace(FLAVORS[flavor], max_seq_len=1))


def check_schedule(config: Config, microbatches: int) -> None:
    """Raises ConfigError where the compile stage could not bucket as the recipe says."""
    stage = config.compile
    if stage.machine:
        load_machine(stage.machine)
    if not stage.compiles("model"):
        return
    if stage.bucketing == "plan":
        names = [name for bucket in stage.buckets for name in bucket.split()]
        check_names("compile.buckets", names, config.model.flavor)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(f'compile.buckets: "{twice[0]}" stands in it twice; a parameter has one bucket')
        model = _on_no_device(config.model.flavor)
        if all(len(parameters_within(model, bucket.split())) < 2 for bucket in stage.buckets):
            raise ConfigError(
                f"compile.buckets = [{', '.join(stage.buckets)}]: none has two parameters, so nothing would be merged; "
                '"layers.0 layers.1" would work, or compile.bucketing = "none"'
            )
    if stage.bucketing in ("greedy", "auto", "measured") and not stage.machine and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        if profile_of(device) is None:
            raise ConfigError(
                f'compile.bucketing = "{stage.bucketing}" prices collectives, and "{device}" is not known: compile.machine = '
                f'{", ".join(PROFILES)} or a .toml file, or bucketing = "block" would work'
            )
    if stage.bucketing not in ("none", "block") and gathers_once(config.parallelism, microbatches):
        raise ConfigError(
            f'compile.bucketing = "{stage.bucketing}" has nothing to bucket: parallelism.fsdp_communication = "step" gathers '
            f'once for {microbatches} microbatches; fsdp_communication = "microbatch" or bucketing = "block" would work'
        )
    if stage.bucketing == "measured" and config.training.steps < len(WAYS) * STEPS:
        raise ConfigError(
            f'compile.bucketing = "measured" tries {len(WAYS)} ways in {STEPS} steps each, and training.steps = '
            f'{config.training.steps}; {len(WAYS) * STEPS} steps or bucketing = "block" would work'
        )


def check_async_tensor_parallel(config: Config) -> None:
    """Raises ConfigError where it is asked for and there is nothing to overlap, or nothing that would do it."""
    if not config.parallelism.enable_async_tensor_parallel:
        return
    wrong = "parallelism.enable_async_tensor_parallel = true"
    if config.parallelism.tensor_parallel_degree == 1:
        raise ConfigError(f"{wrong} needs tensor_parallel_degree of 2 or more (it is 1); set that, or false")
    if not config.compile.compiles("model") or config.compile.backend != "inductor":
        raise ConfigError(
            f'{wrong} is a pass of Inductor on the model: set compile.enable = true, compile.backend = "inductor" and "model" in '
            "compile.components, or false"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"{wrong} needs GPUs that reach each other's memory, and this machine has none; set false")


def without_effect(config: Config, microbatches: int) -> list[str]:
    """The keys that a recipe sets and that do nothing in it, where a step has so many microbatches, each with the reason."""
    parallelism, checkpointing = config.parallelism, config.activation_checkpoint
    pipeline = [f"parallelism.{f.name}" for f in dataclasses.fields(Parallelism) if f.name.startswith("pipeline_parallel_")]
    passes = [f"compile.{name}" for name in ("bucketing", "buckets", "bucket_memory", "reordering", "machine", "dump_graphs")]
    kinds = {part.dataset for _, part in config.data.mixture()}
    idle: list[tuple[bool, str, list[str]]] = [
        (parallelism.pipeline_parallel_degree == 1, "pipeline_parallel_degree = 1", pipeline),
        (
            bool(parallelism.pipeline_parallel_split_points),
            "pipeline_parallel_split_points are given",
            ["parallelism.pipeline_parallel_first_stage_less_layers", "parallelism.pipeline_parallel_last_stage_less_layers"],
        ),
        (
            bool(parallelism.pipeline_parallel_schedule_csv),
            "pipeline_parallel_schedule_csv is given",
            ["parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_stages_per_rank"],
        ),
        (
            parallelism.fsdp_reshard_after_forward == "never",
            'fsdp_reshard_after_forward = "never"',
            ["parallelism.fsdp_keep_gathered"],
        ),
        (
            gathers_once(parallelism, microbatches) and parallelism.fsdp_reshard_after_forward == "default",
            f'fsdp_communication = "step" keeps all weights gathered for the {microbatches} microbatches of a step',
            ["parallelism.fsdp_keep_gathered"],
        ),
        (
            checkpointing.mode != "selective",
            f'mode = "{checkpointing.mode}"',
            ["activation_checkpoint.selective_ac_option"],
        ),
        (checkpointing.mode != "memory_budget", f'mode = "{checkpointing.mode}"', ["activation_checkpoint.memory_budget"]),
        (
            not config.compile.enable,
            "compile.enable = false",
            ["compile.backend", "compile.components", "comm.compile_timeout_seconds", *passes],
        ),
        (config.compile.enable and not config.compile.compiles("model"), "the model is not in compile.components", passes),
        (
            config.compile.compiles("model") and config.compile.bucketing != "plan",
            f'bucketing = "{config.compile.bucketing}"',
            ["compile.buckets"],
        ),
        (
            config.compile.compiles("model") and config.compile.bucketing not in ("greedy", "measured"),
            f'bucketing = "{config.compile.bucketing}"',
            ["compile.bucket_memory"],
        ),
        (kinds == {"prepared"}, 'dataset = "prepared"', ["data.validation_fraction"]),
        (
            kinds <= {"stdlib", "prepared"},
            "dataset = " + " and ".join(f'"{kind}"' for kind in sorted(kinds)),
            ["data.text_field", "data.shuffle_buffer", "data.max_document_mib", "data.on_bad_document", "data.max_bad_documents"],
        ),
        (
            config.data.on_bad_document == "error" and not kinds <= {"stdlib", "prepared"},
            'on_bad_document = "error"',
            ["data.max_bad_documents"],
        ),
        (config.training.spike_window == 0, "spike_window = 0", ["training.spike_sigmas"]),
        (config.data.num_workers == 0, "num_workers = 0", ["data.prefetch"]),
        (not config.checkpoint.enable, "checkpoint.enable = false", ["checkpoint.restart_data", "checkpoint.accept_model_only"]),
    ]
    lines = []
    for applies, why, keys in idle:
        for key in keys if applies else ():
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            if value != KEYS[key].default:
                lines.append(f"{key} = {value} has no effect: {why}")
    if parallelism.fsdp_reshard_after_forward == "default" and not gathers_once(parallelism, microbatches):
        for prefix in parallelism.fsdp_keep_gathered:
            if why := _not_kept(prefix, config):
                lines.append(f"parallelism.fsdp_keep_gathered: {prefix} has no effect: {why}")
    return lines


def _not_kept(prefix: str, config: Config) -> str:
    """Why backward does not find weights that forward was to keep; empty: it does."""
    name, *inside = prefix.split(".")
    if name == "tok_embeddings" and not FLAVORS[config.model.flavor].tied_embeddings:
        return "backward of a look-up needs no weight"
    if name == "layers":
        mode, option = config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option
        blocks = [int(inside[0])] if inside else [0, 1]  # where both are recomputed, all are
        if all(recomputes(block, mode, option) for block in blocks):
            return f'activation_checkpoint.mode = "{mode}" reads its weights again in backward, and so gathers them again'
    return ""


def gathers_once(parallelism: Parallelism, microbatches: int) -> bool:
    """Whether weights are gathered and gradients reduced once for the `microbatches` of an optimizer step."""
    return microbatches > 1 and parallelism.fsdp_communication == "step"


def check_writable(folder: Path) -> None:
    """Raises ConfigError where job.dump_folder cannot be made or written. Makes nothing."""
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "may not be written" if existing.is_dir() else "is no folder"
        raise ConfigError(f'job.dump_folder = "{folder}": {existing} {why}; name a folder that can be made or written')
