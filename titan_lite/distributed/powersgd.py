"""Send gradients between copies of the model as two thin factors, once a step (PowerSGD, arXiv 1905.13727).

    between = PowerSGD(stages, config.parallelism, seed)
    between.begin(step, 4)          # before the first forward of 4 microbatches
    between.reduce(step)            # after the last backward: parameter.grad becomes the sum over copies
    between.settle(skip)            # keep the errors of this step, unless it is skipped
    between.state()                 # {"layers.0.attention.wq.weight.error": DTensor, ".q": DTensor, ...}

Problem. Copies (mesh axis dp_replicate) are joined by the slowest links, and sum every gradient over them.

Solution. Each rank's shard M, (n, m), is approximated by P Q^T with r columns each, so r (n + m) numbers travel instead of n m:

    M = gradient + error        error: of the last step, different on each copy
    P = orthogonalize(sum of M Q over copies)
    Q = sum of M^T P over copies                    the next step begins with this Q ("warm start")
    error = M - P (M^T P)^T     gradient = P Q^T    the same bits on all copies

Backward and its graphs leave dp_replicate out of their sums (`sums_copies` of simple_fsdp.py), so that gradients of microbatches
add up in the shards. The factors of a transformer block share one all-reduce for P and one for Q. Shards that are too small for
it travel as they are, in one bucket, in reduce_dtype.

Overlap. Blocks go in the order of backward, the last one first. In the last backward of a step, a block starts when it has all
gradients. Then the blocks before it go on to their next collective. So each travels while another block is computed. The rest
goes after backward. The order is the same on all ranks. Limit: all gradients of a compiled stage arrive at the end of its graph,
unless weights are gathered once a step.
"""

import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils.rnn import pad_sequence

from titan_lite.compiler.fqns import block_of, last_block
from titan_lite.config import Parallelism
from titan_lite.distributed.eager import is_in_flight
from titan_lite.distributed.gather import GatherPlan, started_last
from titan_lite.distributed.simple_fsdp import model_of
from titan_lite.sharding import local

SHARE = 0.25  # most of a shard's numbers that its factors may have; with more, the shard travels uncompressed
PASSES = 14  # times that a shard's numbers are read or written: M, three products with it, and the choice after a skipped step
TINY = 1e-30  # keeps a zero column zero


def as_matrix(rows: int, row_shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return the (rows, columns) of a shard that travels as factors of `rank` columns, or None for one that does not."""
    if not row_shape:
        return None
    columns = torch.Size(row_shape).numel()
    return (rows, columns) if rank * (rows + columns) <= SHARE * rows * columns else None


def factors_of(plan: GatherPlan, parallelism: Parallelism) -> tuple[int, int] | None:
    """Return the numbers of P and Q of a parameter's largest shard, on which all ranks agree, or None if it travels as it is."""
    rank = parallelism.replicate_rank
    matrix = (
        as_matrix(plan.chunk, plan.row_shape, rank)
        if parallelism.replicate_compression != "none"
        else None
    )
    return matrix and (rank * matrix[0], rank * matrix[1])


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices, (k, n, r), with orthonormal columns by Gram-Schmidt, as in the paper. A zero column stays zero.

    Each column is projected twice: the rest of one that depends on those before is rounding, which one projection leaves oblique.
    If the second one takes more than half of it, it lies among those before and becomes zero (Kahan's rule: Parlett, The
    Symmetric Eigenvalue Problem, section 6.9). Products are elementwise, since those of matrices may be in TF32.
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


def start(q: Tensor, rows: int, key: str) -> Tensor:
    """Fill Q, (m, r), at random, the same for the same `key`. Columns that a shard of so few `rows` cannot use are zero."""
    made = torch.randn(q.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
    made[:, min(rows, len(q)) :] = 0
    return q.copy_(made)


class Part(NamedTuple):
    """A parameter whose gradient is summed."""

    fqn: str
    parameter: nn.Parameter
    plan: GatherPlan

    def gradient(self) -> Tensor:
        """Return this rank's rows of the gradient, to be changed in place."""
        assert self.parameter.grad is not None
        rows = local(self.parameter.grad)
        return rows.wait() if isinstance(rows, AsyncCollectiveTensor) else rows


class PowerSGD:
    """The sums of gradients over copies, with the state of the compression. All of it is empty without compression.

    seed: of the first Q. The first replicate_uncompressed_steps steps sum gradients as they are.
    """

    def __init__(self, stages: Sequence[nn.Module], parallelism: Parallelism, seed: int):
        self.uncompressed = parallelism.replicate_uncompressed_steps
        self.blocks: dict[str, list[Part]] = defaultdict(list)
        self.errors: dict[str, Tensor] = {}  # float32, of the shape of this rank's shard, by FQN
        self.qs: dict[str, Tensor] = {}  # float32, (m, r)
        self.pending: dict[str, tuple[Tensor, Tensor]] = {}  # (error, Q) after this step
        self.microbatches = 0  # of this step; 0 between steps
        self.added: Counter[nn.Parameter] = (
            Counter()
        )  # backwards of this step that have added to a gradient
        self.waiting: deque[tuple[Callable[[Sequence[Part]], Iterator[None]], list[Part]]] = (
            deque()
        )  # sums that have not started
        self.under_way: deque[Iterator[None]] = deque()
        if parallelism.replicate_compression == "none":
            return
        for model in map(model_of, stages):
            last, model.added = last_block(plan.fqn for plan in model.plans.values()), self._add
            for parameter, plan in model.plans.items():
                parameter.register_post_accumulate_grad_hook(self._add)
                self.blocks[block_of(plan.fqn, last)].append(Part(plan.fqn, parameter, plan))
                if (factors := factors_of(plan, parallelism)) is not None:
                    shard, rank = local(parameter.detach()), parallelism.replicate_rank
                    self.errors[plan.fqn] = torch.zeros_like(shard, dtype=torch.float32)
                    q = torch.empty(factors[1] // rank, rank, device=shard.device)
                    self.qs[plan.fqn] = start(q, plan.own_rows, f"{seed} {plan.fqn}")

    def begin(self, step: int, microbatches: int) -> None:
        """Let sums start in backward, when `microbatches` backwards have added to each gradient. step: the first one is 1."""
        self.microbatches, blocks = microbatches, list(self.blocks.values())
        if step <= self.uncompressed:
            self.waiting.extend((self._whole, block) for block in reversed(blocks))
            return
        large = [[part for part in block if part.fqn in self.qs] for block in reversed(blocks)]
        self.waiting.extend((self._factors, block) for block in large if block)
        self.waiting.append(
            (self._whole, [part for block in blocks for part in block if part.fqn not in self.qs])
        )

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        """Start all sums whose turn it is, after a backward has added to the gradient of a parameter."""
        self.added[parameter] += 1
        while self.waiting and all(self._is_there(part) for part in self.waiting[0][1]):
            self._start_next()

    def _is_there(self, part: Part) -> bool:
        gradient = part.parameter.grad
        return (
            gradient is not None
            and self.added[part.parameter] == self.microbatches
            and not is_in_flight(local(gradient))
        )

    def _start_next(self) -> None:
        how, parts = self.waiting.popleft()
        if parts := [part for part in parts if part.parameter.grad is not None]:
            self._go_on(how(parts))

    def _go_on(self, *started: Iterator[None]) -> None:
        """Run a sum to its first collective, then those that started before it to their next one."""
        self.under_way = deque(one for one in (*started, *self.under_way) if next(one, one) is None)

    @torch.no_grad()
    def reduce(self, step: int) -> None:
        """Replace each gradient by its sum over copies, as far as backward has not. step: the first one is 1."""
        if not self.microbatches:
            self.begin(step, 1)
        while self.waiting:
            self._start_next()
        while self.under_way:
            self._go_on()
        self.microbatches = 0
        self.added.clear()

    def _whole(self, parts: Sequence[Part]) -> Iterator[None]:
        """Sum gradients as they are, in one bucket. Yields while it is in flight."""
        rows = [part.gradient() for part in parts]
        flat = torch.cat(
            [
                each.reshape(-1).to(part.plan.reduce_dtype)
                for each, part in zip(rows, parts, strict=True)
            ]
        )
        work = self._start(flat, parts)
        yield
        work.wait()
        for each, total in zip(rows, flat.split([each.numel() for each in rows]), strict=True):
            each.copy_(total.view_as(each))

    def _factors(self, parts: Sequence[Part]) -> Iterator[None]:
        """Sum gradients as factors. Yields while those of P, then those of Q are in flight."""
        rows = [part.gradient() for part in parts]
        qs = [self.qs[part.fqn] for part in parts]
        errors = [
            self.errors[part.fqn] + each for part, each in zip(parts, rows, strict=True)
        ]  # M, until it is an error
        matrices = [each.view(len(each), len(q)) for each, q in zip(errors, qs, strict=True)]
        flat = torch.cat([(matrix @ q).view(-1) for matrix, q in zip(matrices, qs, strict=True)])
        work = self._start(flat, parts)
        yield
        work.wait()
        ps = [
            each.view(-1, qs[0].shape[1])
            for each in flat.split([len(each) * qs[0].shape[1] for each in matrices])
        ]
        stacked = orthogonalize(pad_sequence(ps, batch_first=True))
        ps = [p[: len(matrix)] for p, matrix in zip(stacked, matrices, strict=True)]
        mine = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        flat = torch.cat([each.reshape(-1) for each in mine])
        work = self._start(flat, parts)
        for matrix, p, q in zip(matrices, ps, mine, strict=True):
            matrix.addmm_(p, q.T, alpha=-1)
        yield
        work.wait()
        sums = flat.split([q.numel() for q in qs])
        for part, each, error, before, p, total in zip(
            parts, rows, errors, qs, ps, sums, strict=True
        ):
            q = total.view_as(before)
            each.copy_((p @ q.T).view_as(each))
            norm = torch.linalg.vector_norm(q, dim=0)
            self.pending[part.fqn] = (
                error,
                torch.where(norm > 0, q / norm.clamp(min=TINY), before),
            )  # zero would stay zero

    def _start(self, flat: Tensor, parts: Sequence[Part]) -> dist.Work:
        """Start to sum over copies, in place, and let the watchdog know of which parameters."""
        parameter = parts[0].parameter
        assert isinstance(parameter, DTensor)
        group = parameter.device_mesh.get_group("dp_replicate")
        started_last.append(
            (time.time_ns(), group.group_name, " ".join(part.fqn for part in parts))
        )
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return work

    def settle(self, skip: Tensor) -> None:
        """Keep the errors and Qs of this step. skip: a scalar on the device, not read on the host: 1 to change nothing."""
        stays = skip.bool()
        while self.pending:
            fqn, (error, q) = self.pending.popitem()
            self.errors[fqn] = torch.where(stays, self.errors[fqn], error)
            self.qs[fqn] = torch.where(stays, self.qs[fqn], q)

    def state(self) -> dict[str, Tensor]:
        """Return {"FQN.error": with a dimension for the copy before those of the parameter, "FQN.q": with dimensions for the rank
        along dp_shard and tp before (m, r)}, DTensors of the live tensors."""
        found: dict[str, Tensor] = {}
        for part in (
            part for block in self.blocks.values() for part in block if part.fqn in self.qs
        ):
            parameter = part.parameter.detach()
            assert isinstance(parameter, DTensor)
            mesh, shape = (
                parameter.device_mesh,
                torch.Size((parameter.device_mesh.size(0), *parameter.shape)),
            )
            placements = (Shard(0), *map(_one_further, parameter.placements[1:]))
            stride = torch.empty(shape, device="meta").stride()
            error = self.errors[part.fqn][None]
            found[f"{part.fqn}.error"] = DTensor.from_local(
                error, mesh, placements, run_check=False, shape=shape, stride=stride
            )
            by_rank = (Replicate(), Shard(0), Shard(1))
            found[f"{part.fqn}.q"] = DTensor.from_local(
                self.qs[part.fqn][None, None], mesh, by_rank, run_check=False
            )
        return found


def _one_further(placement: Placement) -> Placement:
    """Return the placement for a tensor with one more dimension in front."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement
