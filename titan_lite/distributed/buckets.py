"""Buckets of parameters that share collectives, outside of graphs: one per transformer block.

    weights = bucket.finish_gather(bucket.start_gather())
    rows = bucket.finish_reduce(bucket.start_reduce(gradients))
    gather_buckets(specs)           # in the order of their first parameters
    reduce_buckets(specs)           # the same for gradients, which may be summed over other groups

Buckets are those of SimpleFSDP's manual wrapping (arXiv 2411.00284, section 4.1). One has the
layout of a graph's bucket (compile/passes/bucketing.py): the padded shards of a rank, concatenated.

    gathered   w1 of rank 0, w2 of rank 0      a row per rank; a weight is a range of columns
               w1 of rank 1, w2 of rank 1
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
from titan_lite.dtensor import local
from titan_lite.models.fqns import block_of, last_block

Specs = Mapping[nn.Parameter, ShardSpec]  # of the parameters of a model; one of a tied weight


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that share each collective: of one shard group, and of one dtype and sum_groups
    where these matter.
    """

    parameters: tuple[nn.Parameter, ...]
    specs: tuple[ShardSpec, ...]  # of the parameters

    def start_gather(self, tables: Sequence[Tensor] = ()) -> InFlight:
        """Start the gather. tables: those that `finish_gather` will get."""
        shards = []
        for parameter, spec in zip(self.parameters, self.specs, strict=True):
            shards.append(pad_rows(spec.to_send(local(parameter)), spec.chunk).reshape(-1))
        out = tables[0].view(-1) if len(tables) == 1 else None
        return self.as_one.start_gather_of(_cat(shards), out)

    def finish_gather(self, started: InFlight, tables: list[Tensor] | None = None) -> list[Tensor]:
        """Return the unsharded parameters: copies, except for a single one.

        tables: memory for the copies, from `allocate_tables`.
        """
        gathered = started.wait().view(self.specs[0].axis.degree, -1)
        if len(self.specs) == 1:
            return self.weights_of([gathered])
        if tables is None:
            tables = self.allocate_tables()
        torch.split_with_sizes_copy(gathered, self._numels, 1, out=tables)
        return self.weights_of(tables)

    def allocate_tables(self) -> list[Tensor]:
        """Allocate the padded unsharded parameters, (ranks, elements of a padded shard) each."""
        first = self.specs[0]
        device = local(self.parameters[0]).device
        return [
            torch.empty(first.axis.degree, numel, dtype=first.gather_dtype, device=device)
            for numel in self._numels
        ]

    def weights_of(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return the unsharded parameters: views of `tables`."""
        return [
            table.view(spec.chunk * spec.axis.degree, *spec.row_shape)[: spec.rows]
            for spec, table in zip(self.specs, tables, strict=True)
        ]

    def start_reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """Start to sum unsharded gradients over the first group, as one flat tensor."""
        tables = []
        for spec, gradient in zip(self.specs, gradients, strict=True):
            padded = pad_rows(gradient.to(spec.reduce_dtype), spec.chunk * spec.axis.degree)
            tables.append(padded.reshape(spec.axis.degree, -1))
        self.as_one.record()
        return self.as_one.start_reduce(_cat(tables, 1).view(-1))

    def finish_reduce(self, started: Tensor) -> list[Tensor]:
        """Return this rank's rows of every gradient: views of one tensor."""
        return self.rows_of(self.as_one.finish_reduce(started))

    def rows_of(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's rows in the result of a reduction."""
        parts = flat.split(self._numels)
        return [
            part.view(-1, *spec.row_shape)[: spec.own_rows]
            for spec, part in zip(self.specs, parts, strict=True)
        ]

    @functools.cached_property
    def _numels(self) -> list[int]:
        """Elements of each parameter's padded shard."""
        return [spec.chunk * math.prod(spec.row_shape) for spec in self.specs]

    @functools.cached_property
    def as_one(self) -> ShardSpec:
        """Spec of one flat parameter with as many elements, which needs no padding."""
        first = self.specs[0]
        return replace(
            first,
            fqn=" ".join(spec.fqn for spec in self.specs),
            rows=sum(self._numels) * first.axis.degree,
            row_shape=(),
        )


def gather_buckets(specs: Specs) -> list[Bucket]:
    """Return the buckets that weights are gathered in. A weight that is not sharded has its own."""
    last = last_block(spec.fqn for spec in specs.values())

    def key(spec: ShardSpec) -> Hashable:
        if spec.axis.degree == 1:
            return spec
        return block_of(spec.fqn, last), spec.axis.group, spec.gather_dtype

    return _buckets(specs, key)


def gather_blocks(specs: Specs) -> dict[str, list[Bucket]]:
    """Return the buckets that weights are gathered in, by transformer block.

    A block has one for each dtype in which its weights travel.
    """
    last = last_block(spec.fqn for spec in specs.values())
    blocks: dict[str, list[Bucket]] = defaultdict(list)
    for bucket in gather_buckets(specs):
        blocks[block_of(bucket.specs[0].fqn, last)].append(bucket)
    return dict(blocks)


def reduce_buckets(specs: Specs) -> list[Bucket]:
    """Return the buckets that gradients are reduced in."""
    last = last_block(spec.fqn for spec in specs.values())

    def key(spec: ShardSpec) -> Hashable:
        return block_of(spec.fqn, last), spec.axis.group, spec.sum_groups, spec.reduce_dtype

    return _buckets(specs, key)


def _buckets(specs: Specs, key: Callable[[ShardSpec], Hashable]) -> list[Bucket]:
    """Return one bucket for each value of `key`, in the order of their first parameters."""
    groups: dict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for parameter, spec in specs.items():
        groups[key(spec)].append(parameter)
    return [
        Bucket(tuple(parameters), tuple(specs[parameter] for parameter in parameters))
        for parameters in groups.values()
    ]


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate without a copy of a single tensor."""
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]
