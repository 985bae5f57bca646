"""Parallel degrees of a recipe -> one DeviceMesh, the only carrier of degrees afterwards.

    degrees = resolve_degrees(config.parallelism, world_size=8)     # {"pp": 1, "dp_replicate": 2, "dp_shard": 4, ...}
    mesh = build_mesh(degrees, device_type="cuda")
    mesh["dp_shard"].size()                                        # 4

All axes always exist, size 1 included, outermost (slowest links) first; so nobody asks whether an axis is there.
"""

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_lite.config import ConfigError, Parallelism

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def resolve_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Ranks along each axis, -1 resolved; their product is world_size. Raises ConfigError before anything is started."""
    for key in ("pipeline_parallel_degree", "context_parallel_degree"):
        if getattr(parallelism, key) > 1:
            raise ConfigError(
                f"parallelism.{key} = {getattr(parallelism, key)}: this version has data and tensor parallelism "
                f"(FSDP, HSDP, DDP, TP) only; {key} = 1 works"
            )
    degrees = {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
    }
    others = math.prod(degree for degree in degrees.values() if degree != -1)
    if degrees["dp_shard"] == -1:
        if world_size % others:
            raise ConfigError(
                f"parallelism.data_parallel_shard_degree = -1 cannot be resolved: the other degrees multiply to {others}, which "
                f"does not divide {world_size} ranks; start {-(-world_size // others) * others} ranks, or lower "
                f"data_parallel_replicate_degree = {degrees['dp_replicate']} to a divisor of {world_size}"
            )
        degrees["dp_shard"] = world_size // others
    elif others != world_size:
        product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all 1"
        raise ConfigError(
            f"parallelism.data_parallel_shard_degree = {degrees['dp_shard']}: the degrees ({product}) need {others} ranks, but "
            f"{world_size} are running; start {others} ranks (NGPU={others}), or set data_parallel_shard_degree = -1"
        )
    return degrees


def check_tensor_parallel(tp: int, *, n_heads: int, n_kv_heads: int, hidden_dim: int, vocab_size: int, seq_len: int) -> None:
    """Raises ConfigError where `tp` ranks cannot share a model's heads, hidden units and vocabulary, or a sequence's tokens.

    Heads and tokens must be divisible by tp; hidden units and vocabulary need not, but every rank must get some.
    """
    wrong = f"parallelism.tensor_parallel_degree = {tp}"
    for count, what in ((n_heads, "attention heads"), (n_kv_heads, "key/value heads"), (seq_len, "tokens of training.seq_len")):
        if count % tp:
            works = [str(d) for d in range(1, tp + n_kv_heads) if not any(n % d for n in (n_heads, n_kv_heads, seq_len))]
            raise ConfigError(f"{wrong} does not divide the {count} {what}; {', '.join(works)} would work")
    for count, what in ((hidden_dim, "hidden units"), (vocab_size, "tokens of the vocabulary")):
        if (tp - 1) * -(-count // tp) >= count:
            raise ConfigError(f"{wrong} leaves a rank without any of the {count} {what}; a lower degree would work")


def build_mesh(degrees: dict[str, int], device_type: str) -> DeviceMesh:
    """The mesh of AXES; the process group must be up. device_type: "cuda" or "cpu"."""
    return init_device_mesh(device_type, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(place of this rank among those that have different data, how many these are)."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank(), replicate.size() * shard.size()


def sum_over_data(tensor: Tensor, mesh: DeviceMesh) -> None:
    """In place, over all ranks that have different data; those that share theirs have the same tensor, and do not count twice."""
    for axis in ("dp_replicate", "dp_shard"):
        if mesh[axis].size() > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
