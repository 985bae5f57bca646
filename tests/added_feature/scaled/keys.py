"""Its keys."""

from typing import ClassVar

from pydantic import Field

from titan_lite.config.section import Section


class ScaledKeys(Section):
    """Gradients times a factor."""

    table: ClassVar[str] = "scaled"

    factor: float = Field(1.0, gt=0)
    """Factor of all gradients; 1: off."""


KEYS = (ScaledKeys,)
TENSORS = {"scaled": "steps that were scaled (scaled.factor)"}
