"""PowerSGD in a run: gradients stay apart in backward, and are summed once a step."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.feature import Feature, KeptNumbers, StepPart
from titan_lite.features.powersgd.keys import PowerSGDKeys
from titan_lite.models.shapes import ITEM_BYTES

if TYPE_CHECKING:
    from titan_lite.cost.costs import Costs
    from titan_lite.cost.machine import Machine
    from titan_lite.distributed.axes import Axes
    from titan_lite.distributed.buckets import Specs
    from titan_lite.distributed.parallelize import ParallelModel
    from titan_lite.distributed.simple_fsdp import FSDPOptions


class PowerSGDFeature(Feature):
    def is_on(self, config: Config) -> bool:
        return PowerSGDKeys.of(config).replicate_compression != "none"

    def start_lines(self, config: Config, layout: Layout) -> Sequence[str]:
        from titan_lite.features.powersgd.compression import compressed_sizes

        keys = PowerSGDKeys.of(config)
        sizes = compressed_sizes(keys, layout)
        reduced = ITEM_BYTES[config.training.mixed_precision_reduce]
        uncompressed = {  # an ordered set of names with * for the layer
            re.sub(r"\.\d+\.", ".*.", fqn).removesuffix(".weight"): None
            for fqn, (_, factors) in sizes.items()
            if not factors
        }
        sent = sum(4 * factors or reduced * elements for elements, factors in sizes.values())
        before = sum(reduced * elements for elements, _ in sizes.values())
        compressed = sum(factors > 0 for _, factors in sizes.values())
        as_they_are = ", ".join(uncompressed) or "none"
        return [
            f"gradients between replicas: {compressed} of {len(sizes)} as factors of"
            f" {keys.replicate_rank} columns, {sent:,} bytes a step instead of {before:,}"
            f" (parallelism.replicate_compression); as they are: {as_they_are},"
            f" and all in the first {keys.replicate_uncompressed_steps} steps"
        ]

    def tensors_depend_on(self, config: Config, layout: Layout) -> Mapping[str, Mapping[str, int]]:
        ranks = {axis: degree for axis, degree in layout.degrees.items() if axis != "pp"}
        if layout.expert_parallel > 1:
            ranks["ep"] = layout.expert_parallel
        return {"between": {**ranks, "rank": PowerSGDKeys.of(config).replicate_rank}}

    def for_verify(self, config: Config) -> tuple[Config, str]:
        keys = PowerSGDKeys.of(config)
        how = keys.replicate_compression
        why = f'parallelism.replicate_compression = "{how}", which approximates'
        return config.replace(parallelism=keys.replace(replicate_compression="none")), why

    def turned_off_by(self, change: Mapping[str, str]) -> Mapping[str, str]:
        if change.get("parallelism.data_parallel_replicate_degree") == "1":
            return {"parallelism.replicate_compression": "none"}
        return {}

    def kept_of_shard(self, config: Config, shape: Sequence[int]) -> KeptNumbers:
        from titan_lite.features.powersgd.compression import compressed_shape

        rank = PowerSGDKeys.of(config).replicate_rank
        matrix = compressed_shape(shape[0], shape[1:], rank)
        if matrix is None:
            return KeptNumbers()
        error = math.prod(shape)
        return KeptNumbers(always=error + rank * matrix[1], before_update=error)

    def add_costs_after_backward(
        self, config: Config, costs: "Costs", specs: "Specs", machine: "Machine", axes: "Axes"
    ) -> None:
        """Nothing hides the sums over replicas: a collective of all P, one of all Q and one of all
        other gradients, and the matmuls, which read and write shards more than they compute.
        """
        import torch

        from titan_lite.distributed.axes import axis_along
        from titan_lite.features.powersgd.compression import SHARD_PASSES, factor_sizes

        rank = PowerSGDKeys.of(config).replicate_rank
        ranks = next(ranks for ranks, axis in axes.items() if axis == "dp_replicate")
        axis = axis_along(ranks, axes, of_parameters=True)
        p_bytes = q_bytes = uncompressed = 0.0
        for spec in specs.values():
            elements = spec.chunk * math.prod(spec.row_shape)
            factors = factor_sizes(spec, rank)
            if factors is None:
                uncompressed += elements * spec.reduce_dtype.itemsize
                continue
            p_bytes += 4 * factors[0]
            q_bytes += 4 * factors[1]
            flops = 8.0 * rank * elements
            costs.matmul_flops += flops
            costs.compute += max(
                machine.memory_traffic(4 * SHARD_PASSES * elements),
                flops / machine.flops(torch.float32),
            )
        for nbytes in (p_bytes, q_bytes, uncompressed):
            if nbytes:
                costs.add_collective(axis, "all_reduce", nbytes, ranks, machine)

    def fsdp_options(self, config: Config, options: "FSDPOptions") -> "FSDPOptions":
        return dataclasses.replace(options, reduce_over_replicas=False)

    def step_parts(self, model: "ParallelModel") -> Sequence[StepPart]:
        from titan_lite.features.powersgd.compression import PowerSGD

        keys = PowerSGDKeys.of(model.config)
        return [
            PowerSGD(model.stages, keys, model.config.debug.seed, without=model.tied_table.copy)
        ]


FEATURE = PowerSGDFeature()
