"""Buckets of parameters that share collectives, outside of graphs: one per transformer block.

    weights = bucket.finish_gather(bucket.start_gather(shards, scales))
    gather_buckets(plans)           # [(parameters, Bucket), ...], in the order of their first parameters
    reduce_buckets(plans)           # the same for gradients, which may be summed over other groups

Buckets are those of SimpleFSDP's manual wrapping (arXiv 2411.00284, section 4.1). One has the
layout of a graph's bucket (compile/passes/bucketing.py): the padded shards of a rank, concatenated.

    gathered   w1 of rank 0, w2 of rank 0, w1 of rank 1, w2 of rank 1        one row per rank; a weight is a range of columns
    reduced    the same for gradients; each rank gets the sum of its row
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from titan_lite.distributed.param_collectives import InFlight, ShardSpec, pad_rows
from titan_lite.models.fqns import block_of, last_block


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that share each collective.

    plans: of one shard group, and of one dtype and sum_groups where these matter.
    """

    plans: tuple[ShardSpec, ...]

    def start_gather(
        self,
        shards: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        tables: Sequence[Tensor] = (),
    ) -> InFlight:
        """Start the gather. tables: those of `finish_gather`."""
        each = zip(self.plans, shards, scales, strict=True)
        rows = [pad_rows(plan.cast(shard, scale), plan.chunk) for plan, shard, scale in each]
        out = tables[0].view(-1) if len(tables) == 1 else None
        return self.as_one.start_gather_of(_cat([shard.reshape(-1) for shard in rows]), out)

    def finish_gather(self, started: InFlight, tables: list[Tensor] | None = None) -> list[Tensor]:
        """Return the unsharded parameters: copies, except for a single one.

        tables: where to, allocated by `tables`.
        """
        table = started.wait().view(self.plans[0].shard_degree, -1)
        if len(self.plans) == 1:
            return self.weights_of([table])
        tables = tables or self.tables(table)
        torch.split_with_sizes_copy(table, self._numels, 1, out=tables)
        return self.weights_of(tables)

    def tables(self, like: Tensor) -> list[Tensor]:
        """Allocate the padded unsharded parameters, with a row per rank, on the device of `like`."""
        first = self.plans[0]
        return [
            like.new_empty(first.shard_degree, numel, dtype=first.gather_dtype)
            for numel in self._numels
        ]

    def weights_of(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded parameters: views of `tables`."""
        return [
            columns.view(plan.chunk * plan.shard_degree, *plan.row_shape)[: plan.rows]
            for plan, columns in zip(self.plans, tables, strict=True)
        ]

    def start_reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        tables = [
            pad_rows(gradient.to(plan.reduce_dtype), plan.chunk * plan.shard_degree).reshape(
                plan.shard_degree, -1
            )
            for plan, gradient in zip(self.plans, gradients, strict=True)
        ]
        self.as_one.note()
        return self.as_one.start_reduce(_cat(tables, 1).view(-1))

    def finish_reduce(self, started: Tensor) -> list[Tensor]:
        """Return this rank's rows of every gradient: views of one tensor."""
        return self.rows_of(self.as_one.finish_reduce(started))

    def rows_of(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's rows in the result of a reduction."""
        parts = flat.split(self._numels)
        return [
            part.view(-1, *plan.row_shape)[: plan.own_rows]
            for plan, part in zip(self.plans, parts, strict=True)
        ]

    @functools.cached_property
    def _numels(self) -> list[int]:
        """Elements of each parameter's padded shard."""
        return [plan.chunk * math.prod(plan.row_shape) for plan in self.plans]

    @functools.cached_property
    def as_one(self) -> ShardSpec:
        """Plan of one flat parameter with as many elements, which needs no padding."""
        first, own = self.plans[0], sum(self._numels)
        fqn = " ".join(plan.fqn for plan in self.plans)
        return replace(first, fqn=fqn, rows=own * first.shard_degree, own_rows=own, row_shape=())


Plans = Mapping[nn.Parameter, ShardSpec]
Buckets = list[tuple[list[nn.Parameter], Bucket]]


def gather_buckets(plans: Plans) -> Buckets:
    """Return the buckets that weights are gathered in. A weight that is not sharded has its own."""
    last = last_block(plan.fqn for plan in plans.values())

    def key(plan: ShardSpec) -> Hashable:
        return (
            (block_of(plan.fqn, last), plan.shard_group, plan.gather_dtype)
            if plan.shard_degree > 1
            else plan
        )

    return _buckets(plans, key)


def gather_blocks(plans: Plans) -> dict[str, Buckets]:
    """Return the buckets that weights are gathered in, by transformer block.

    With float8 weights, it has one for other dtypes.
    """
    last, found = last_block(plan.fqn for plan in plans.values()), defaultdict[str, Buckets](list)
    for members, bucket in gather_buckets(plans):
        found[block_of(bucket.plans[0].fqn, last)].append((members, bucket))
    return found


def reduce_buckets(plans: Plans) -> Buckets:
    """Return the buckets that gradients are reduced in."""
    last = last_block(plan.fqn for plan in plans.values())
    return _buckets(
        plans,
        lambda plan: (
            block_of(plan.fqn, last),
            plan.shard_group,
            plan.sum_groups,
            plan.reduce_dtype,
        ),
    )


def _buckets(plans: Plans, key: Callable[[ShardSpec], Hashable]) -> Buckets:
    """Return one bucket for each value of `key`, in the order of their first parameters."""
    together: dict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for parameter, plan in plans.items():
        together[key(plan)].append(parameter)
    return [
        (members, Bucket(tuple(map(plans.__getitem__, members)))) for members in together.values()
    ]


def _cat(tensors: list[Tensor], dimension: int = 0) -> Tensor:
    """Concatenate without a copy of a single tensor."""
    return torch.cat(tensors, dimension) if len(tensors) > 1 else tensors[0]
