"""The keys of PowerSGD. Imports no torch."""

from typing import ClassVar, Literal

from pydantic import Field

from titan_lite.config.section import Section


class PowerSGDKeys(Section):
    table: ClassVar[str] = "parallelism"

    replicate_compression: Literal["none", "powersgd"] = "none"
    """Compression of gradients between replicas. none: they travel as they are, in backward;
    powersgd: once a step after backward, as low-rank factors of each large shard, with error
    feedback (memory: two float32 shards of these)."""

    replicate_rank: int = Field(8, ge=1)
    """powersgd: columns of these factors. A shard whose factors would have more than a quarter of
    its numbers travels as it is."""

    replicate_uncompressed_steps: int = Field(100, ge=0)
    """powersgd: first steps, in which gradients change fast and travel as they are."""


KEYS = (PowerSGDKeys,)
TENSORS = {"between": "errors of compressed gradients (parallelism.replicate_compression)"}
