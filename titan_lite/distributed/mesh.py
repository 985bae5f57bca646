"""Parallel degrees of a recipe -> one DeviceMesh, the only carrier of degrees afterwards.

    degrees = resolve_degrees(config.parallelism, world_size=8)     # {"pp": 1, "dp_replicate": 2, "dp_shard": 4, ...}
    mesh = build_mesh(degrees, device_type="cuda")
    mesh["dp_shard"].size()                                        # 4

All axes always exist, size 1 included, outermost (slowest links) first; so nobody asks whether an axis is there.
"""

import functools
import math
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_lite.config import ConfigError, Parallelism
from titan_lite.distributed.gloo import gather_without_coalescing
from titan_lite.ranks import gather_objects

DEGREES = {  # axis: the key of its degree in [parallelism]
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
AXES = tuple(DEGREES)
PARAMETER_AXES = ("dp_replicate", "dp_shard", "tp")


def resolve_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Ranks along each axis, -1 resolved; their product is world_size. Raises ConfigError before anything is started."""
    degrees: dict[str, int] = {axis: getattr(parallelism, key) for axis, key in DEGREES.items()}
    others = math.prod(degree for degree in degrees.values() if degree != -1)
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all 1"
    if degrees["dp_shard"] == -1:
        if world_size % others:
            raise ConfigError(
                f"parallelism.data_parallel_shard_degree = -1 cannot be resolved: the other degrees ({product}) multiply to "
                f"{others}, which does not divide {world_size} ranks; start {-(-world_size // others) * others} ranks, or lower "
                f"degrees until they multiply to a divisor of {world_size}"
            )
        degrees["dp_shard"] = world_size // others
    elif others != world_size:
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


def check_context_parallel(cp: int, *, seq_len: int, tp: int) -> None:
    """Raises ConfigError where `cp` ranks cannot have two chunks of a sequence each, which `tp` ranks can share."""
    if cp > 1 and seq_len % (2 * cp * tp):
        step = 2 * cp * tp
        nearest = sorted({max(step, seq_len // step * step), -(-seq_len // step) * step})
        raise ConfigError(
            f"parallelism.context_parallel_degree = {cp}: training.seq_len = {seq_len} cannot be cut into 2 x {cp} chunks"
            f"{f' that {tp} tensor-parallel ranks share' if tp > 1 else ''}; "
            f"seq_len = {' or '.join(map(str, nearest))} would work"
        )


def build_mesh(degrees: dict[str, int], device_type: str) -> DeviceMesh:
    """The mesh of AXES; the process group must be up. device_type: "cuda" or "cpu"."""
    if device_type == "cpu":
        gather_without_coalescing()
    return init_device_mesh(device_type, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)


def parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this rank's parameters are placed on: PARAMETER_AXES, where dp_shard has the ranks of cp as well.

    Those see other tokens of the same sequences, so they hold other shards of the same parameters, and add up their gradients.
    Call it once: it may make process groups, which all ranks do together.
    """
    if mesh["cp"].size() == 1:
        return mesh[PARAMETER_AXES]
    ranks = mesh.mesh.flatten(AXES.index("dp_shard"), AXES.index("cp"))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("pp", *PARAMETER_AXES))[PARAMETER_AXES]


@functools.cache
def stage_exchange(mesh: DeviceMesh) -> Callable[[str], dict[int, str]]:
    """A function that shows a word to all ranks of this rank's pipeline stage, together, and returns theirs by rank.

    It may make process groups, which all ranks do together.
    """
    stage = mesh.mesh.select(0, mesh["pp"].get_local_rank()).flatten()
    group = None
    if mesh["pp"].size() > 1:
        group = DeviceMesh(mesh.device_type, mesh.mesh.flatten(1), mesh_dim_names=("pp", "stage"))["stage"].get_group()

    def exchange(word: str) -> dict[int, str]:
        return dict(zip(stage.tolist(), gather_objects(word, group), strict=True))

    return exchange


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(place of this rank among those that have different sequences, how many these are)."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank(), replicate.size() * shard.size()


def sum_over_tokens(tensor: Tensor, mesh: DeviceMesh) -> None:
    """In place, over all ranks with different tokens; those that share theirs have the same tensor, and do not count twice."""
    _sum(tensor, mesh, ("dp_replicate", "dp_shard", "cp"))


def sum_of_losses(tensor: Tensor, mesh: DeviceMesh) -> None:
    """The same for what only the last pipeline stage has, and the others have zeros for."""
    _sum(tensor, mesh, ("pp", "dp_replicate", "dp_shard", "cp"))


def sum_of_flags(tensor: Tensor, mesh: DeviceMesh) -> None:
    """After `sum_of_losses` also over the ranks of tensor parallelism: what any rank has set is set on all."""
    _sum(tensor, mesh, ("tp",))


def _sum(tensor: Tensor, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
