"""Buckets by the cost model in a compiled run."""

from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.feature import Feature
from titan_lite.features.cost_buckets.keys import VALUES

if TYPE_CHECKING:
    from titan_lite.compile.graph_passes import Pass


class CostBuckets(Feature):
    def is_on(self, config: Config) -> bool:
        compile = config.compile
        return compile.enable and compile.bucketing in VALUES["compile.bucketing"]

    def passes(self, config: Config, passes: list["Pass"]) -> list["Pass"]:
        from titan_lite.compile.passes.bucketing import bucket_by_block

        if config.compile.bucketing == "greedy":
            from titan_lite.features.cost_buckets.greedy import bucket_greedily

            return [bucket_greedily if each is bucket_by_block else each for each in passes]
        from titan_lite.compile.passes.reordering import overlap_collectives
        from titan_lite.features.cost_buckets.inductor_overlap import overlap_by_inductor

        others = [each for each in passes if each is not overlap_collectives]
        return [overlap_by_inductor if each is bucket_by_block else each for each in others]

    def for_verify(self, config: Config) -> tuple[Config, str]:
        # gathered once a step, there is nothing to bucket
        parallelism = config.parallelism.replace(fsdp_communication="microbatch")
        return config.replace(parallelism=parallelism), ""


FEATURE = CostBuckets()
