"""Sum gradients over copies of the model as two thin factors, once a step (PowerSGD, arXiv
1905.13727).

    between = PowerSGD(stages, config.parallelism, seed)
    between.reduce(step)            # after the last backward: parameter.grad becomes the sum over copies
    between.settle(skip)            # keep the errors of this step, unless it is skipped
    between.state()                 # {"layers.0.attention.wq.weight.error": DTensor, ".q": DTensor, ...}

Problem. Copies (mesh axis dp_replicate) are joined by the slowest links, and sum every gradient
over them.

Solution. Each rank's shard M, (n, m), is approximated by P Q^T with r columns each, so r (n + m)
numbers travel instead of n m:

    M = gradient + error        error: of the last step, different on each copy
    P = orthogonalize(sum of M Q over copies)
    Q = sum of M^T P over copies                    the next step begins with this Q ("warm start")
    error = M - P (M^T P)^T     gradient = P Q^T    the same bits on all copies

Backward and its graphs leave dp_replicate out of their sums (`sums_copies` of simple_fsdp.py), so
that gradients of microbatches add up in the shards. All P share one all-reduce, and all Q another
one. Shards that are too small for it travel as they are, in one bucket, in reduce_dtype. Nothing
hides these collectives.
"""

import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_lite.config import Parallelism
from titan_lite.distributed.param_collectives import ShardSpec, started_last
from titan_lite.distributed.simple_fsdp import model_of
from titan_lite.dtensor import local
from titan_lite.models.fqns import block_of, last_block

# most of a shard's numbers that its factors may have; with more, the shard travels uncompressed
SHARE = 0.25
# times that a shard's numbers are read or written: M, three products with it, and the choice after
# a skipped step
PASSES = 14
TINY = 1e-30  # keeps a zero column zero


def as_matrix(rows: int, row_shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return the (rows, columns) of a shard that travels as factors of `rank` columns, or None for
    one that does not.
    """
    if not row_shape:
        return None
    columns = torch.Size(row_shape).numel()
    return (rows, columns) if rank * (rows + columns) <= SHARE * rows * columns else None


def factors_of(plan: ShardSpec, parallelism: Parallelism) -> tuple[int, int] | None:
    """Return the numbers of P and Q of a parameter's largest shard, on which all ranks agree, or
    None if it travels as it is.
    """
    if parallelism.replicate_compression == "none":
        return None
    rank = parallelism.replicate_rank
    matrix = as_matrix(plan.chunk, plan.row_shape, rank)
    return None if matrix is None else (rank * matrix[0], rank * matrix[1])


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices, (k, n, r), with orthonormal columns by Gram-Schmidt, as in the paper.

    A zero column stays zero.

    Each column is projected twice: the rest of one that depends on those before is rounding, which
    one projection leaves oblique. If the second one takes more than half of it, it lies among those
    before and becomes zero (Kahan's rule: Parlett, The Symmetric Eigenvalue Problem, section 6.9).
    Products are elementwise, since those of matrices may be in TF32.
    """
    done = torch.zeros_like(matrices)
    for number, column in enumerate(matrices.unbind(-1)):
        before = done[..., :number]
        for _ in range(2):
            last = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
            column = column - (before * (before * column[..., None]).sum(-2, keepdim=True)).sum(-1)
        size = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        done[..., number] = torch.where(size > last / 2, column / size.clamp(min=TINY), 0.0)
    return done


def orthogonalize_each(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return each matrix, (n, r), with orthonormal columns.

    Those of one shape go together, in as many kernels as one of them.
    """
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        alike[matrix.shape].append(number)
    result = list(matrices)
    for numbers in alike.values():
        stacked = orthogonalize(torch.stack([matrices[number] for number in numbers]))
        for number, matrix in zip(numbers, stacked, strict=True):
            result[number] = matrix
    return result


def start(q: Tensor, rows: int, key: str) -> Tensor:
    """Fill Q, (m, r), at random, the same for the same `key`.

    Columns that a shard of so few `rows` cannot use are zero.
    """
    made = torch.randn(q.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
    made[:, min(rows, len(q)) :] = 0
    return q.copy_(made)


class Part(NamedTuple):
    """A parameter whose gradient is summed."""

    fqn: str
    parameter: nn.Parameter
    plan: ShardSpec

    def gradient(self) -> Tensor:
        """Return this rank's rows of the gradient, to be changed in place."""
        assert self.parameter.grad is not None
        rows = local(self.parameter.grad)
        return rows.wait() if isinstance(rows, AsyncCollectiveTensor) else rows


class PowerSGD:
    """The sums of gradients over copies, with the state of the compression.

    All of it is empty without compression.

    seed: of the first Q. The first replicate_uncompressed_steps steps sum gradients as they are.
    """

    def __init__(self, stages: Sequence[nn.Module], parallelism: Parallelism, seed: int):
        self.uncompressed_steps = parallelism.replicate_uncompressed_steps
        self.blocks: dict[str, list[Part]] = defaultdict(list)
        self.errors: dict[str, Tensor] = {}  # float32, of the shape of this rank's shard, by FQN
        self.qs: dict[str, Tensor] = {}  # float32, (m, r)
        self.pending: dict[str, tuple[Tensor, Tensor]] = {}  # (error, Q) after this step
        if parallelism.replicate_compression == "none":
            return
        for model in map(model_of, stages):
            last = last_block(plan.fqn for plan in model.plans.values())
            for parameter, plan in model.plans.items():
                self.blocks[block_of(plan.fqn, last)].append(Part(plan.fqn, parameter, plan))
                factors = factors_of(plan, parallelism)
                if factors is None:
                    continue
                shard = local(parameter.detach())
                self.errors[plan.fqn] = torch.zeros_like(shard, dtype=torch.float32)
                rank = parallelism.replicate_rank
                q = torch.empty(factors[1] // rank, rank, device=shard.device)
                self.qs[plan.fqn] = start(q, plan.own_rows, f"{seed} {plan.fqn}")

    @torch.no_grad()
    def reduce(self, step: int) -> None:
        """Replace each gradient by its sum over copies. step: the first one is 1."""
        if step <= self.uncompressed_steps:
            for block in self.blocks.values():  # all at once would take a copy of all gradients
                self._sum([part for part in block if part.parameter.grad is not None])
            return
        parts = [part for block in self.blocks.values() for part in block]
        parts = [part for part in parts if part.parameter.grad is not None]
        self._sum([part for part in parts if part.fqn not in self.qs])
        self._sum_factors([part for part in parts if part.fqn in self.qs])

    def _sum(self, parts: Sequence[Part]) -> None:
        """Sum gradients as they are, in reduce_dtype."""
        gradients = [part.gradient() for part in parts]
        sent = [
            gradient.to(part.plan.reduce_dtype)
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        for gradient, total in zip(gradients, _sum_over_copies(sent, parts), strict=True):
            gradient.copy_(total)

    def _sum_factors(self, parts: Sequence[Part]) -> None:
        """Sum gradients as factors, and keep what these leave out as this copy's errors."""
        gradients = [part.gradient() for part in parts]
        old_qs = [self.qs[part.fqn] for part in parts]
        matrices = []  # M
        for part, gradient, q in zip(parts, gradients, old_qs, strict=True):
            corrected = self.errors[part.fqn] + gradient
            matrices.append(corrected.view(len(gradient), len(q)))

        own_ps = [matrix @ q for matrix, q in zip(matrices, old_qs, strict=True)]
        ps = orthogonalize_each(_sum_over_copies(own_ps, parts))
        own_qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        qs = _sum_over_copies(own_qs, parts)

        for number, part in enumerate(parts):
            p, q, gradient = ps[number], qs[number], gradients[number]
            error = matrices[number].addmm_(p, own_qs[number].T, alpha=-1)
            gradient.copy_((p @ q.T).view_as(gradient))
            norm = torch.linalg.vector_norm(q, dim=0)
            # a zero column would stay zero: it begins the next step as it began this one
            next_q = torch.where(norm > 0, q / norm.clamp(min=TINY), old_qs[number])
            self.pending[part.fqn] = error.view_as(gradient), next_q

    def settle(self, skip: Tensor) -> None:
        """Keep the errors and Qs of this step.

        skip: a scalar on the device, not read on the host: 1 to change nothing.
        """
        stays = skip.bool()
        while self.pending:
            fqn, (error, q) = self.pending.popitem()
            self.errors[fqn] = torch.where(stays, self.errors[fqn], error)
            self.qs[fqn] = torch.where(stays, self.qs[fqn], q)

    def state(self) -> dict[str, Tensor]:
        """Return {"FQN.error": with a dimension for the copy before those of the parameter,
        "FQN.q": with dimensions for the rank along dp_shard and tp before (m, r)}, DTensors of the
        live tensors.
        """
        found: dict[str, Tensor] = {}
        for part in [part for block in self.blocks.values() for part in block]:
            if part.fqn not in self.qs:
                continue
            parameter = part.parameter.detach()
            assert isinstance(parameter, DTensor)
            mesh = parameter.device_mesh
            shape = torch.Size((mesh.size(0), *parameter.shape))
            found[f"{part.fqn}.error"] = DTensor.from_local(
                self.errors[part.fqn][None],
                mesh,
                (Shard(0), *map(_one_further, parameter.placements[1:])),
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
            by_rank = (Replicate(), Shard(0), Shard(1))
            found[f"{part.fqn}.q"] = DTensor.from_local(
                self.qs[part.fqn][None, None], mesh, by_rank, run_check=False
            )
        return found


def _sum_over_copies(tensors: Sequence[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """Return the sum of each tensor over copies, by one all-reduce; the watchdog can name the
    parameters.
    """
    if not tensors:
        return []
    parameter = parts[0].parameter
    assert isinstance(parameter, DTensor)
    group = parameter.device_mesh.get_group("dp_replicate")
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    started_last.append((time.time_ns(), group.group_name, " ".join(part.fqn for part in parts)))
    dist.all_reduce(flat, group=group)
    sums = flat.split([tensor.numel() for tensor in tensors])
    return [total.view(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]


def _one_further(placement: Placement) -> Placement:
    """Return the placement for a tensor with one more dimension in front."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement
