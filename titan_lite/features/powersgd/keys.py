"""The keys of PowerSGD. Imports no torch."""

from typing import ClassVar, Literal

from pydantic import Field

from titan_lite.config.section import Section


class PowerSGDKeys(Section):
    table: ClassVar[str] = "parallelism"

    replicate_compression: Literal["none", "powersgd"] = "none"
    """powersgd: gradients between replicas travel as low-rank factors, once a step after backward,
    with error feedback (memory: two float32 shards of them)."""

    replicate_rank: int = Field(8, ge=1)
    """powersgd: columns of the factors; a shard that shrinks less than fourfold is not
    compressed."""

    replicate_uncompressed_steps: int = Field(100, ge=0)
    """powersgd: first steps, which are not compressed."""


KEYS = (PowerSGDKeys,)
TENSORS = {"between": "errors of compressed gradients (parallelism.replicate_compression)"}
