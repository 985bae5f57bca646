"""Sum gradients over replicas as low-rank factors, once a step (PowerSGD, arXiv
1905.13727).

    powersgd = PowerSGD(model.stages, PowerSGDKeys.of(config), seed)
    powersgd.after_backward(step)       # sum parameter.grad over replicas
    powersgd.before_update(skip)        # keep the errors of the step, unless it is skipped
    powersgd.state_tensors()            # {"between.output.weight.error": DTensor, ...}

Problem. Replicas (mesh axis dp_replicate) are joined by the slowest links, and sum every gradient
over them.

Solution. Each rank's shard M, (n, m), is approximated by P Q^T with r columns each, so r (n + m)
numbers travel instead of n m:

    M = gradient + error        error: of the last step, different on each replica
    P = orthogonalize(sum of M Q over replicas)
    Q = sum of M^T P over replicas                  the next step begins with this Q ("warm start")
    error = M - P (M^T P)^T     gradient = P Q^T    the same bits on all replicas

Backward and its graphs leave dp_replicate out of their sums (`reduce_over_replicas` of
simple_fsdp.py), so that gradients of microbatches add up in the shards. All P share one all-reduce,
and all Q another one. Shards that are too small for it travel as they are, in one bucket, in
reduce_dtype. Nothing hides these collectives.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_lite.distributed.layout import Layout
from titan_lite.distributed.param_collectives import ShardSpec, record_start
from titan_lite.distributed.stage import Stage
from titan_lite.distributed.tensor_parallel import largest_shard
from titan_lite.dtensor import gradient_shard, local
from titan_lite.feature import StepPart
from titan_lite.features.powersgd.keys import PowerSGDKeys
from titan_lite.models.fqns import block_of, last_block

# largest share of a shard's numbers that its factors may have; with more, it travels uncompressed
MAX_FACTOR_SHARE = 0.25
# times that a shard's numbers are read or written: M, three matmuls with it, and the choice after
# a skipped step
SHARD_PASSES = 14
TINY = 1e-30  # keeps a zero column zero


def compressed_shape(rows: int, row_shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return the (rows, columns) of a shard that travels as factors of `rank` columns, or None for
    one that does not.
    """
    if not row_shape:
        return None
    columns = torch.Size(row_shape).numel()
    pays = rank * (rows + columns) <= MAX_FACTOR_SHARE * rows * columns
    return (rows, columns) if pays else None


def compressed_sizes(keys: PowerSGDKeys, layout: Layout) -> dict[str, tuple[int, int]]:
    """Return (elements of a rank's shard, elements of its PowerSGD factors) by FQN.

    Without factors (0) the gradient travels between replicas as it is.
    """
    rank = keys.replicate_rank
    sizes = {}
    for fqn, shape in layout.shapes_of_rank.items():
        shard = largest_shard(layout, fqn, shape)
        matrix = compressed_shape(shard[0], shard[1:], rank)
        sizes[fqn] = (math.prod(shard), rank * sum(matrix) if matrix else 0)
    return sizes


def factor_sizes(spec: ShardSpec, rank: int) -> tuple[int, int] | None:
    """Return the numbers of P and Q of a parameter's largest shard, on which all ranks agree, or
    None if it travels as it is. rank: columns of the factors.
    """
    shape = compressed_shape(spec.chunk, spec.row_shape, rank)
    if shape is None:
        return None
    rows, columns = shape
    return rank * rows, rank * columns


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices, (k, n, r), with orthonormal columns by Gram-Schmidt, as in the paper.

    A zero column stays zero.

    Each column is projected twice: the rest of one that depends on those before is rounding, which
    one projection leaves oblique. If the second one takes more than half of it, it lies among those
    before and becomes zero (Kahan's rule: Parlett, The Symmetric Eigenvalue Problem, section 6.9).
    Products are elementwise, since those of matrices may be in TF32.
    """
    result = torch.zeros_like(matrices)
    for index, column in enumerate(matrices.unbind(-1)):
        before = result[..., :index]
        for _ in range(2):
            last = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
            column = column - (before * (before * column[..., None]).sum(-2, keepdim=True)).sum(-1)
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        result[..., index] = torch.where(norm > last / 2, column / norm.clamp(min=TINY), 0.0)
    return result


def orthogonalize_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return each matrix, (n, r), with orthonormal columns.

    Those of one shape go together, in as many kernels as one of them.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    result = list(matrices)
    for indices in by_shape.values():
        stacked = orthogonalize(torch.stack([matrices[index] for index in indices]))
        for index, matrix in zip(indices, stacked, strict=True):
            result[index] = matrix
    return result


def fill_first_q(q: Tensor, rows: int, key: str) -> Tensor:
    """Fill Q, (m, r), at random, the same for the same `key`.

    Columns that a shard of so few `rows` cannot use are zero.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    values = torch.randn(q.shape, generator=generator)
    values[:, min(rows, len(q)) :] = 0
    return q.copy_(values)


class ShardedParameter(NamedTuple):
    """A parameter whose gradient is summed over replicas."""

    fqn: str
    parameter: nn.Parameter
    spec: ShardSpec

    def gradient(self) -> Tensor:
        """Return this rank's shard of the gradient, to be changed in place."""
        return gradient_shard(self.parameter)


class PowerSGD(StepPart):
    """The sums of gradients over replicas, with the state of the compression.

    seed: of the first Q. without: a parameter that has no gradient after backward, as the copy of a
    tied table. The first replicate_uncompressed_steps steps sum gradients as they are.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        keys: PowerSGDKeys,
        seed: int,
        without: nn.Parameter | None = None,
    ):
        self.rank = keys.replicate_rank  # columns of the factors
        self.uncompressed_steps = keys.replicate_uncompressed_steps
        self.blocks: dict[str, list[ShardedParameter]] = defaultdict(list)  # in the order of reads
        self.errors: dict[str, Tensor] = {}  # float32, of the shape of this rank's shard, by FQN
        self.qs: dict[str, Tensor] = {}  # float32, (m, r), by FQN
        self.uncommitted: dict[str, tuple[Tensor, Tensor]] = {}  # (error, Q) after this step
        for stage in stages:
            specs = stage.sharding.specs
            last = last_block(spec.fqn for spec in specs.values())
            for parameter, spec in specs.items():
                if parameter is without:
                    continue
                sharded = ShardedParameter(spec.fqn, parameter, spec)
                self.blocks[block_of(spec.fqn, last)].append(sharded)
                self._make_state(sharded, seed)

    def _make_state(self, sharded: ShardedParameter, seed: int) -> None:
        """Make the error and the first Q of a parameter, if its gradient is compressed."""
        fqn, parameter, spec = sharded
        sizes = factor_sizes(spec, self.rank)
        if sizes is None:
            return
        shard = local(parameter.detach())
        self.errors[fqn] = torch.zeros_like(shard, dtype=torch.float32)
        q = torch.empty(sizes[1] // self.rank, self.rank, device=shard.device)
        self.qs[fqn] = fill_first_q(q, spec.own_rows, f"{seed} {fqn}")

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        """Replace each gradient by its sum over replicas. step: the first one is 1."""
        blocks = [
            [sharded for sharded in block if sharded.parameter.grad is not None]
            for block in self.blocks.values()
        ]
        if step <= self.uncompressed_steps:
            for block in blocks:  # all at once would take a copy of all gradients
                self._sum(block)
            return
        parameters = [sharded for block in blocks for sharded in block]
        self._sum([sharded for sharded in parameters if sharded.fqn not in self.qs])
        self._sum_factors([sharded for sharded in parameters if sharded.fqn in self.qs])

    def _sum(self, parameters: Sequence[ShardedParameter]) -> None:
        """Sum gradients as they are, in reduce_dtype."""
        gradients = [sharded.gradient() for sharded in parameters]
        sent = [
            gradient.to(sharded.spec.reduce_dtype)
            for sharded, gradient in zip(parameters, gradients, strict=True)
        ]
        sums = _sum_over_replicas(sent, parameters)
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total)

    def _sum_factors(self, parameters: Sequence[ShardedParameter]) -> None:
        """Sum gradients as factors, and keep what these leave out as this replica's errors."""
        gradients = [sharded.gradient() for sharded in parameters]
        old_qs = [self.qs[sharded.fqn] for sharded in parameters]
        matrices = []  # M
        for sharded, gradient, q in zip(parameters, gradients, old_qs, strict=True):
            corrected = self.errors[sharded.fqn] + gradient
            matrices.append(corrected.view(len(gradient), len(q)))

        own_ps = [matrix @ q for matrix, q in zip(matrices, old_qs, strict=True)]
        ps = orthogonalize_all(_sum_over_replicas(own_ps, parameters))
        own_qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        qs = _sum_over_replicas(own_qs, parameters)

        for index, sharded in enumerate(parameters):
            p = ps[index]
            q = qs[index]
            gradient = gradients[index]
            error = matrices[index].addmm_(p, own_qs[index].T, alpha=-1)
            gradient.copy_((p @ q.T).view_as(gradient))
            norm = torch.linalg.vector_norm(q, dim=0)
            # a zero column would stay zero: it begins the next step as it began this one
            next_q = torch.where(norm > 0, q / norm.clamp(min=TINY), old_qs[index])
            self.uncommitted[sharded.fqn] = error.view_as(gradient), next_q

    def before_update(self, skip: Tensor) -> None:
        """Keep the errors and Qs of a step.

        skip: a scalar on the device, not read on the host; if it is 1, those before the step stay.
        """
        skipped = skip.bool()
        while self.uncommitted:
            fqn, (error, q) = self.uncommitted.popitem()
            self.errors[fqn] = torch.where(skipped, self.errors[fqn], error)
            self.qs[fqn] = torch.where(skipped, self.qs[fqn], q)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state, which a checkpoint is loaded into, as DTensors.

        "between.FQN.error" has a dimension for the replica before those of the parameter,
        "between.FQN.q" dimensions for the rank along dp_shard and tp, of experts ep, before (m, r).
        """
        tensors: dict[str, Tensor] = {}
        for sharded in [sharded for block in self.blocks.values() for sharded in block]:
            fqn = sharded.fqn
            if fqn not in self.qs:
                continue
            parameter = sharded.parameter.detach()
            assert isinstance(parameter, DTensor)
            mesh = parameter.device_mesh
            shape = torch.Size((mesh.size(0), *parameter.shape))
            tensors[f"between.{fqn}.error"] = DTensor.from_local(
                self.errors[fqn][None],
                mesh,
                (Shard(0), *map(_one_further, parameter.placements[1:])),
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
            by_rank = (Replicate(), Shard(0), Shard(1))
            q = self.qs[fqn][None, None]
            tensors[f"between.{fqn}.q"] = DTensor.from_local(q, mesh, by_rank, run_check=False)
        return tensors


def _sum_over_replicas(
    tensors: Sequence[Tensor], parameters: Sequence[ShardedParameter]
) -> list[Tensor]:
    """Return the sum of each tensor over replicas, by one all-reduce; the watchdog can name the
    parameters.
    """
    if not tensors:
        return []
    parameter = parameters[0].parameter
    assert isinstance(parameter, DTensor)
    group = parameter.device_mesh.get_group("dp_replicate")
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    fqns = " ".join(sharded.fqn for sharded in parameters)
    record_start(group.group_name, fqns)
    dist.all_reduce(flat, group=group)
    sums = flat.split([tensor.numel() for tensor in tensors])
    return [total.view(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]


def _one_further(placement: Placement) -> Placement:
    """Return the placement for a tensor with one more dimension in front."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement
