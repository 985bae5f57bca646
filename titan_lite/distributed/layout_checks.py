"""Check what a layout has to be for a recipe's keys to have their effect; distributed/layout.py
calls it. Needs no process group.

check_layout(config, layout)            # raises ConfigError
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config, ConfigError, Float8
from titan_lite.distributed.pipeline_schedule import module_fqns
from titan_lite.models.flavors import shape_words
from titan_lite.models.shapes import ModelConfig
from titan_lite.optim.state import Shapes, is_matrix
from titan_lite.sharding import chunk_size

if TYPE_CHECKING:
    from titan_lite.distributed.layout import Layout
    from titan_lite.models.llama3 import Transformer


def check_layout(config: Config, layout: "Layout") -> None:
    """Raise ConfigError for a key that cannot have its effect on this layout."""
    training, parallelism = config.training, config.parallelism
    check_names(
        "parallelism.fsdp_keep_gathered",
        parallelism.fsdp_keep_gathered,
        shape_words(config.model),
        layout.model,
    )
    check_float8(config, layout)
    check_schedule(config, layout)
    check_compression(config, layout)
    check_chunks(config, layout)
    name = config.optimizer.name
    if name != "AdamW" and config.compile.compiles("optimizer"):
        raise ConfigError(
            f'compile.components has the optimizer, and the update of optimizer.name = "{name}" is'
            " not compiled, as most of it is products of large matrices; use compile.components ="
            ' ["model", "loss"]'
        )
    if name == "Shampoo" and config.optimizer.start_preconditioning_step > training.steps:
        raise ConfigError(
            f"optimizer.start_preconditioning_step = {config.optimizer.start_preconditioning_step}"
            " is after the last of "
            f'training.steps = {training.steps}, and optimizer.name = "Shampoo" would be AdamW'
            " alone; use at most "
            f'{training.steps}, or name = "AdamW"'
        )
    if layout.gathers_once and parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" has no effect with'
            ' fsdp_communication = "step", which keeps weights gathered for a step of'
            f' {layout.microbatches} microbatches; use fsdp_communication = "microbatch"'
        )


def check_chunks(config: Config, layout: "Layout") -> None:
    """Raise ConfigError for chunks that do not divide the tokens of a tensor-parallel rank, since
    nothing would be cut.
    """
    chunks, tp = config.compile.tensor_parallel_chunks, layout.degrees["tp"]
    tokens = layout.seq_len // layout.degrees["cp"] // tp
    if tp > 1 and config.compile.compiles("model") and tokens % chunks:
        divisors = [number for number in range(1, tokens + 1) if tokens % number == 0]
        near = [
            max(number for number in divisors if number < chunks),
            *[number for number in divisors if number > chunks][:1],
        ]
        raise ConfigError(
            f"compile.tensor_parallel_chunks = {chunks} does not divide the {tokens:,} tokens of a"
            f" sequence that a tensor-parallel rank has; use {' or '.join(map(str, near))}"
        )


def check_names(key: str, names: Sequence[str], flavor: str, model: ModelConfig) -> None:
    """Raise ConfigError for a name of no parameter or module with parameters in the model, over all
    pipeline stages.
    """
    for name in names:
        if name not in module_fqns(model.n_layers) and not parameters_of(model, [name]):
            raise ConfigError(
                f'{key} = [{", ".join(names)}]: "{name}" has no parameter in flavor {flavor}; use'
                f" tok_embeddings, layers.0 to layers.{model.n_layers - 1}, norm, output or modules"
                " within them"
            )


def parameters_of(model: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return the FQNs of the parameters of these modules."""
    from titan_lite.models.fqns import parameters_within

    return parameters_within(on_meta_device(model), names)


def shapes_of(model: ModelConfig, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of these modules, by FQN."""
    return {
        fqn: tuple(on_meta_device(model).get_parameter(fqn).shape)
        for fqn in parameters_of(model, names)
    }


@functools.cache
def on_meta_device(model: ModelConfig) -> "Transformer":
    import torch

    from titan_lite.models.llama3 import Transformer

    with torch.device("meta"):
        return Transformer(dataclasses.replace(model, max_seq_len=1))


def check_compression(config: Config, layout: "Layout") -> None:
    """Raise ConfigError for a compression of gradients between copies that would do nothing, or
    whose gradients are elsewhere.
    """
    training, parallelism = config.training, config.parallelism
    if parallelism.replicate_compression == "none":
        return
    key = f'parallelism.replicate_compression = "{parallelism.replicate_compression}"'
    if layout.degrees["dp_replicate"] == 1:
        raise ConfigError(
            f"{key} has no effect with data_parallel_replicate_degree = 1; use 2 or more"
        )
    if parallelism.replicate_uncompressed_steps >= training.steps:
        raise ConfigError(
            f"parallelism.replicate_uncompressed_steps = {parallelism.replicate_uncompressed_steps}"
            " is all of training.steps = "
            f"{training.steps}, and {key} would do nothing; use fewer, or replicate_compression ="
            ' "none"'
        )
    if not any(factors for _, factors in sent_between_copies(config, layout).values()):
        raise ConfigError(
            f"parallelism.replicate_rank = {parallelism.replicate_rank}: the factors of every shard"
            " would have more than a "
            f"quarter of its numbers, so all would travel as they are; use a smaller rank, or"
            f' replicate_compression = "none"'
        )


def sent_between_copies(config: Config, layout: "Layout") -> dict[str, tuple[int, int]]:
    """Return (numbers of the shard, numbers of its factors or 0 if it travels as it is) of a rank's
    parameters, by FQN.
    """
    from titan_lite.distributed.powersgd import as_matrix

    found, rank = {}, config.parallelism.replicate_rank
    for fqn, sizes in layout.shapes_of_rank.items():
        rows, *others = largest_shard(layout, fqn, sizes)
        matrix = as_matrix(rows, others, rank)
        found[fqn] = rows * math.prod(others), rank * sum(matrix) if matrix else 0
    return found


def largest_shard(layout: "Layout", fqn: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the largest part of a parameter of these `sizes` that a rank has."""
    from titan_lite.distributed.tensor_parallel import weight_dim

    shards = layout.degrees["dp_shard"] * layout.degrees["cp"]
    split = weight_dim(fqn.removesuffix(".weight"))
    of_tp_rank = list(sizes)
    if split is not None:
        of_tp_rank[split] = chunk_size(sizes[split], layout.degrees["tp"])
    return chunk_size(of_tp_rank[0], shards), *of_tp_rank[1:]


def error_bytes(config: Config, layout: "Layout") -> int:
    """Return the bytes of a rank's errors of gradients that are compressed between copies; a step
    has them twice.
    """
    if config.parallelism.replicate_compression == "none":
        return 0
    return 4 * sum(
        numbers for numbers, factors in sent_between_copies(config, layout).values() if factors
    )


def check_float8(config: Config, layout: "Layout") -> None:
    """Raise ConfigError for float8 products that layers of the model cannot have on a rank."""
    if not config.float8.enable:
        return
    if config.parallelism.enable_async_tensor_parallel:
        wrong = (
            "parallelism.enable_async_tensor_parallel = true: Inductor does not overlap collectives"
            " with float8 products"
        )
        raise ConfigError(f"{wrong}; use false, or float8.enable = false")
    from titan_lite.distributed.tensor_parallel import weight_dim
    from titan_lite.models.float8 import check_sizes, linear_layers

    sizes = {}
    for fqn, module in linear_layers(on_meta_device(layout.model)):
        split = weight_dim(fqn)
        sizes[fqn] = [
            n / layout.degrees["tp"] if dim == split else n
            for dim, n in enumerate(module.weight.shape)
        ]
    check_sizes(config.float8, sizes, layout.sequences * layout.seq_len // layout.degrees["cp"])


def check_float8_results(config: Config) -> None:
    """Raise ConfigError for float8 products whose results GPUs have not in the recipe's dtype."""
    recipe = config.float8.recipe
    if (
        config.float8.enable
        and recipe != "tensorwise"
        and config.training.mixed_precision_param != "bfloat16"
    ):
        raise ConfigError(
            f'float8.recipe = "{recipe}" has results in bfloat16 alone on GPUs; use'
            ' training.mixed_precision_param = "bfloat16"'
        )


def gathered_in_float8(float8: Float8, shapes: Shapes) -> Shapes:
    """Return the parameters that are gathered as one byte an element."""
    if not (float8.enable and float8.all_gather):
        return {}
    from titan_lite.models.float8 import is_filtered

    return {
        fqn: shape
        for fqn, shape in shapes.items()
        if is_matrix(fqn) and not is_filtered(fqn, float8.filter_fqns)
    }


def check_schedule(config: Config, layout: "Layout") -> None:
    """Raise ConfigError if the compile stage cannot bucket as the recipe says."""
    stage = config.compile
    if stage.machine:
        from titan_lite.cost.profiles import load_machine

        load_machine(stage.machine)
    if not stage.compiles("model"):
        return
    if stage.bucketing == "listed":
        names = [name for bucket in stage.buckets for name in bucket.split()]
        check_names("compile.buckets", names, shape_words(config.model), layout.model)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(
                f'compile.buckets: "{twice[0]}" is in it twice, but a parameter has one bucket; use'
                " it once"
            )
        if all(len(parameters_of(layout.model, bucket.split())) < 2 for bucket in stage.buckets):
            raise ConfigError(
                f"compile.buckets = [{', '.join(stage.buckets)}]: none has two parameters, so"
                ' nothing would be merged; use such as "layers.0 layers.1", or compile.bucketing'
                ' = "none"'
            )
    if stage.bucketing not in ("block", "none") and layout.gathers_once:
        raise ConfigError(
            f'compile.bucketing = "{stage.bucketing}" has nothing to bucket:'
            f' parallelism.fsdp_communication = "step" gathers once for {layout.microbatches}'
            ' microbatches; use fsdp_communication = "microbatch" or bucketing = "block"'
        )
