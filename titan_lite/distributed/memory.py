"""Price a layout: the bytes that a rank keeps, and those of gathering weights once a step.

    steady_bytes(config, layout)                          # weights, gradients, optimizer state
    host_copy_bytes(config, layout)                       # what saves in the background keep
    gathered_once_bytes(config, layout)                   # beside them, with layout.gathers_once
    least_batch_bytes(config, layout)                     # of a local batch, a lower bound

Layout.gathers_once depends on the first and the third. What activations need, and when, are the
planner's (tools/plan/memory.py).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_lite.config import ActivationCheckpoint, Config, Float8, Training
from titan_lite.config.families import Shape
from titan_lite.models.fqns import is_filtered, is_of_experts
from titan_lite.optim.state import (
    FLOAT32_BYTES,
    Shapes,
    bytes_by_owner,
    is_matrix,
    moment_bytes,
    numbers_in,
    owner_costs,
    share_of_matrices,
)
from titan_lite.sharding import chunk_size

if TYPE_CHECKING:  # a layout is decided by these bytes
    from titan_lite.distributed.layout import Layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Bytes of a stored weight, of its gradient and of each of its moments: float32.
STORED_BYTES = FLOAT32_BYTES
TOKEN_BYTES = 8  # of a batch: int64


def itemsizes(training: Training) -> tuple[int, int]:
    """Return the bytes per element of computation, and of sums of gradients."""
    computed = ITEM_BYTES[training.mixed_precision_param]
    summed = ITEM_BYTES[training.mixed_precision_reduce]
    return computed, summed


def steady_bytes(config: Config, layout: "Layout") -> float:
    """Return the bytes that a rank keeps on its device for the whole run.

    Its shards of weights, gradients and moments, what it has as an owner of matrices, and twice the
    errors of compressed gradients. A copy of a tied table has no moments.
    """
    own = layout.parameters_of_rank / layout.fsdp_degree
    moments = _moment_bytes_of_rank(config, layout)
    copied = layout.copied_of_rank / layout.fsdp_degree
    weights_and_gradients = 2 * STORED_BYTES * (own + copied)
    errors = 2 * compression_error_bytes(config, layout)
    return weights_and_gradients + moments + (owner_bytes(config, layout) + errors)


def host_copy_bytes(config: Config, layout: "Layout") -> float:
    """Return the bytes of host memory that a rank keeps for saves in the background: a copy of its
    tensors in a checkpoint (checkpoint/host_copies.py).
    """
    if not config.checkpoint.enable or config.checkpoint.async_mode == "disabled":
        return 0.0
    weights = STORED_BYTES * layout.parameters_of_rank / layout.fsdp_degree
    moments = _moment_bytes_of_rank(config, layout)
    return weights + moments + owner_bytes(config, layout) + compression_error_bytes(config, layout)


def _moment_bytes_of_rank(config: Config, layout: "Layout") -> float:
    """Return the bytes of a rank's shards of moments."""
    own = layout.parameters_of_rank / layout.fsdp_degree
    in_matrices = own * share_of_matrices(layout.shapes_of_rank)
    return sum(moment_bytes(config.optimizer, own, in_matrices))


def owner_bytes(config: Config, layout: "Layout") -> float:
    """Return the bytes of complete matrices on the owner with most (optim/matrix_owners.py)."""
    if owner_costs(config.optimizer) is None:
        return 0.0
    ranks = layout.world_size // layout.degrees["pp"]
    return max(bytes_by_owner(config.optimizer, layout.shapes_of_rank, ranks))


def gathered_once_bytes(config: Config, layout: "Layout") -> float:
    """Return the bytes that gathering once a step needs beside the steady ones.

    Unsharded weights, the gradients of a backward, and their sums over microbatches.
    """
    computed, summed = itemsizes(config.training)
    one_byte = numbers_in(gathered_in_float8(config.float8, layout.shapes_of_rank))
    saved = (computed - 1) * one_byte / layout.degrees["tp"]
    gathered = layout.gathered_of_rank + layout.copied_of_rank
    return (2 * computed + summed) * gathered - saved


def least_batch_bytes(config: Config, layout: "Layout") -> float:
    """Return a lower bound of the bytes that a rank needs for a local batch: its tokens and labels,
    and what the blocks of its largest stage keep of a microbatch, from forward to backward.
    """
    tokens = 2 * TOKEN_BYTES * layout.local_batch_size * layout.seq_len
    modules = layout.pipeline.modules
    blocks = max(sum(name.startswith("layers.") for name in stage) for stage in modules)
    return tokens + blocks * kept_bytes_of_block(config, layout)


def kept_bytes_of_block(config: Config, layout: "Layout") -> float:
    """Return a lower bound of the bytes that a block keeps of a microbatch, the mean of blocks."""
    model = layout.model
    tp = layout.degrees["tp"]
    by_operator = _checkpoints_by_operator(config.activation_checkpoint)
    recomputed = recomputed_share(config.activation_checkpoint)
    if config.activation_checkpoint.mode == "memory_budget":
        recomputed = 1.0  # at most
    # Inputs of products, which selective checkpointing and the compiler recompute: the results of
    # two norms and of the feed-forward. The norms' are gathered for tensor parallelism, which is
    # no small operator.
    is_compiled = config.compile.compiles("model")
    hidden_dim = model.hidden_dim * max(1, model.experts_per_token)  # units of a token
    inputs = 0.0 if by_operator or is_compiled else 2 * model.dim + hidden_dim
    if tp > 1 and not by_operator:
        inputs += 2 * model.dim * (tp if is_compiled else tp - 1)
    # At least queries, keys, values, attention's result and its product, and both halves of the
    # feed-forward.
    heads = model.n_heads + model.n_kv_heads
    results = 2 * heads * model.head_dim + model.dim + 2 * hidden_dim
    option = config.activation_checkpoint.selective_ac_option
    saved = 0.5 if by_operator and option == "op/2" else 1.0  # share of products
    numbers = recomputed * model.dim + (1 - recomputed) * (saved * results + inputs)
    computed, _ = itemsizes(config.training)
    return computed * layout.tokens_per_microbatch / tp * numbers


def recomputed_share(checkpointing: ActivationCheckpoint) -> float:
    """Return the share of blocks that run twice."""
    if checkpointing.mode == "full":
        return 1.0
    if checkpointing.mode == "selective" and not _checkpoints_by_operator(checkpointing):
        return 1 / int(checkpointing.selective_ac_option)
    return 0.0


def _checkpoints_by_operator(checkpointing: ActivationCheckpoint) -> bool:
    is_of_operators = checkpointing.selective_ac_option in ("op", "op/2")
    return checkpointing.mode == "selective" and is_of_operators


def gathered_in_float8(float8: Float8, shapes: Shapes) -> dict[str, Shape]:
    """Return the parameters that are gathered as one byte an element."""
    if not (float8.enable and float8.all_gather):
        return {}
    return {
        fqn: shape
        for fqn, shape in shapes.items()
        if is_matrix(fqn) and len(shape) == 2 and not is_filtered(fqn, float8.filter_fqns)
    }


def compressed_sizes(config: Config, layout: "Layout") -> dict[str, tuple[int, int]]:
    """Return (elements of a rank's shard, elements of its PowerSGD factors) by FQN.

    Without factors (0) the gradient travels between replicas as it is.
    """
    from titan_lite.distributed.powersgd import compressed_shape  # imports torch

    rank = config.parallelism.replicate_rank
    sizes = {}
    for fqn, shape in layout.shapes_of_rank.items():
        shard = largest_shard(layout, fqn, shape)
        matrix = compressed_shape(shard[0], shard[1:], rank)
        sizes[fqn] = (math.prod(shard), rank * sum(matrix) if matrix else 0)
    return sizes


def largest_shard(layout: "Layout", fqn: str, shape: Sequence[int]) -> Shape:
    """Return the shape of the largest part of a parameter that a rank has."""
    from titan_lite.distributed.tensor_parallel import weight_dim  # imports torch

    part = list(shape)
    shards = layout.fsdp_degree
    if is_of_experts(shape):  # mesh.expert_mesh
        part[0] //= layout.expert_parallel
        shards = layout.expert_ranks // layout.expert_parallel
    elif (split_dim := weight_dim(fqn.rpartition(".")[0], layout.model.family)) is not None:
        part[split_dim] = chunk_size(part[split_dim], layout.degrees["tp"])
    part[0] = chunk_size(part[0], shards)
    return tuple(part)


def copied_table_shard(layout: "Layout") -> int:
    """Return the numbers in the largest shard of a tied table that the last stage has a copy of
    (distributed/tied_table.py); 0 without a copy.
    """
    if not layout.copies_table:
        return 0
    shape = (layout.model.vocab_size, layout.model.dim)
    return math.prod(largest_shard(layout, "tok_embeddings.weight", shape))


def compression_error_bytes(config: Config, layout: "Layout") -> int:
    """Return the bytes of a rank's errors of compressed gradients; a step has them twice."""
    if config.parallelism.replicate_compression == "none":
        return 0
    sizes = compressed_sizes(config, layout).values()
    return STORED_BYTES * sum(elements for elements, factors in sizes if factors)
