"""Count the bytes that a rank keeps, and those that an update moves: of shards, of matrices that it
owns, of what features keep, of a block's activations.

    moment_bytes(config.optimizer, own=1e9)         # of the sharded moments
    owner_bytes(config, layout)                     # of the owner with most
    kept_bytes_of_block(config, layout)             # of a microbatch, a lower bound

When a step needs them is in memory.py.
"""

import math
from collections.abc import Mapping, Sequence

from titan_lite.config import ActivationCheckpoint, Config, Optimizer, Training
from titan_lite.config.families import Shape
from titan_lite.config.optimizers import OPTIMIZERS, Algorithm
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.tensor_parallel import largest_shard
from titan_lite.feature import KeptNumbers, OwnedWork, features_of
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import FLOAT32_BYTES, ITEM_BYTES, matrices_in, numbers_in
from titan_lite.sharding import share_out

# Bytes of a stored weight and of its gradient: float32.
STORED_BYTES = FLOAT32_BYTES
# tensors of a parameter's shape in memory while plain operations update it
PLAIN_TENSORS = 4
# those beside for each moment in bfloat16: before and after the update in float32
TENSORS_OF_BFLOAT16 = 2
# complete matrices in memory at an owner: those that it computes with, and those that two
# all-to-alls send and receive
COMPLETE_MATRICES = 8


def itemsizes(training: Training) -> tuple[int, int]:
    """Return the bytes per element of computation, and of sums of gradients."""
    computed = ITEM_BYTES[training.mixed_precision_param]
    summed = ITEM_BYTES[training.mixed_precision_reduce]
    return computed, summed


def copied_table_shard(layout: Layout) -> int:
    """Return the numbers in the largest shard of a tied table that the last stage has a copy of
    (distributed/tied_table.py); 0 without a copy.
    """
    if not layout.copies_table:
        return 0
    shape = (layout.model.vocab_size, layout.model.dim)
    return math.prod(largest_shard(layout, "tok_embeddings.weight", shape))


def kept_of_shard(config: Config, shape: Sequence[int]) -> KeptNumbers:
    """Return what features keep for a shard of this shape."""
    kept = [feature.kept_of_shard(config, shape) for feature in features_of(config)]
    return KeptNumbers(sum(each.always for each in kept), sum(each.before_update for each in kept))


def kept_by_features(config: Config, layout: Layout) -> KeptNumbers:
    """Return what features keep for all shards of a rank."""
    if not features_of(config):  # for searches, as most recipes turn none on
        return KeptNumbers()
    shards = [largest_shard(layout, *named) for named in layout.shapes_of_rank.items()]
    kept = [kept_of_shard(config, shard) for shard in shards]
    return KeptNumbers(sum(each.always for each in kept), sum(each.before_update for each in kept))


def kept_bytes_of_block(config: Config, layout: Layout) -> float:
    """Return a lower bound of the bytes that a block keeps of a microbatch, the mean of blocks."""
    model = layout.model
    tp = layout.degrees["tp"]
    by_operator = _checkpoints_by_operator(config.activation_checkpoint)
    recomputed = recomputed_share(config.activation_checkpoint)
    if config.activation_checkpoint.mode == "memory_budget":
        recomputed = 1.0  # at most
    # Inputs of matmuls, which selective checkpointing and the compiler recompute: the results of
    # two norms and of the feed-forward. The norms' are gathered for tensor parallelism, which is
    # no small operator.
    is_compiled = config.compile.enable
    hidden_dim = model.hidden_dim * max(1, model.experts_per_token)  # units of a token
    inputs = 0.0 if by_operator or is_compiled else 2 * model.dim + hidden_dim
    if tp > 1 and not by_operator:
        inputs += 2 * model.dim * (tp if is_compiled else tp - 1)
    # At least queries, keys, values, attention's result and its matmul, and both halves of the
    # feed-forward.
    heads = model.n_heads + model.n_kv_heads
    results = 2 * heads * model.head_dim + model.dim + 2 * hidden_dim
    option = config.activation_checkpoint.selective_ac_option
    saved = 0.5 if by_operator and option == "op/2" else 1.0  # share of matmuls
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


def share_of_matrices(shapes: Mapping[str, Shape]) -> float:
    """Return the share of these parameters that are in matrices within blocks."""
    return sum(map(math.prod, matrices_in(shapes))) / numbers_in(shapes)


def algorithms_of(optimizer: Optimizer) -> tuple[Algorithm, Algorithm]:
    """Return the algorithm of matrices within blocks, and that of all other parameters."""
    algorithm = OPTIMIZERS[optimizer.name]
    return algorithm, algorithm if algorithm.is_elementwise else OPTIMIZERS["AdamW"]


def moment_bytes(optimizer: Optimizer, own: float, matrices: float = 0.0) -> float:
    """Return the bytes of the sharded moments, such as exp_avg and exp_avg_sq.

    own: parameters of this rank; matrices: those of them within matrices of blocks. Step counts are
    left out, and what owners have.
    """
    of_matrices, of_others = (len(each.moments) for each in algorithms_of(optimizer))
    numbers = of_matrices * matrices + of_others * (own - matrices)
    return ITEM_BYTES[optimizer.state_dtype] * numbers


def plain_update_bytes(optimizer: Optimizer, algorithm: Algorithm) -> float:
    """Return the bytes that plain operations read and write for each element; 0: the update is one
    kernel.
    """
    if optimizer.state_dtype == "bfloat16":
        return algorithm.update_bytes_bfloat16
    return algorithm.update_bytes


def update_bytes(optimizer: Optimizer, algorithm: Algorithm) -> float:
    """Return the bytes that an update reads and writes for each element."""
    if nbytes := plain_update_bytes(optimizer, algorithm):
        return nbytes
    # it reads parameter, gradient and moments, and writes all but the gradient
    return FLOAT32_BYTES * (3.0 + 2 * len(algorithm.moments))


# Owners of matrices (features/matrix_optimizers/owners.py)


def owner_costs(config: Config) -> OwnedWork | None:
    """Return the work of an owner; None: no rank owns complete matrices."""
    found = (feature.owner_costs(config) for feature in features_of(config))
    return next(filter(None, found), None)


def owner_bytes(config: Config, layout: Layout) -> float:
    """Return the bytes of complete matrices on the owner with most."""
    costs = owner_costs(config)
    if costs is None:
        return 0.0
    ranks = layout.world_size // layout.degrees["pp"]
    owned = [0.0] * ranks
    for bucket in owner_buckets(costs, layout.shapes_of_rank, ranks):
        for owner, shape in bucket.items():
            owned[owner] += costs.kept_bytes(shape)
    return max(owned)


def owner_buckets(
    costs: OwnedWork, shapes: Mapping[str, Shape], ranks: int
) -> list[dict[int, Shape]]:
    """Return buckets of {owner: shape of its matrix}."""
    matrices = [shape for shape in matrices_in(shapes) if not is_of_experts(shape)]
    buckets = share_out([costs.flops(shape) for shape in matrices], ranks)
    return [{owner: matrices[index] for owner, index in bucket.items()} for bucket in buckets]
