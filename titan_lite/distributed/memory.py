"""Price a layout: the bytes that a rank keeps, and those of gathering weights once a step.

    steady_bytes(config, layout)                          # weights, gradients, optimizer state
    host_copy_bytes(config, layout)                       # what saves in the background keep
    gathered_once_bytes(config, layout)                   # beside them, with layout.gathers_once

Layout.gathers_once depends on both. Bytes of activations, and when they are needed, are the
planner's (tools/plan/memory.py).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config, Float8, Training
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
