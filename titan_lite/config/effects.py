"""Marks in the type of a key's field: the effect of another value on a run that resumes.

    shuffle: RestartsData[bool] = True                     # in sections.py
    shuffle_buffer: Annotated[RestartsData[int], OnlyWith("data.shuffle", True)] = 10_000

    effect_of(KEYS["data.shuffle"], was, now)              # Effect.RESTARTS_DATA

A key without a mark simply has its new value (NOTED). Shapes, documents and the mesh need no marks:
a resume compares them themselves, whichever keys they follow from (checkpoint/resume.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic.fields import FieldInfo

T = TypeVar("T")


class Effect(Enum):
    """The effect of a difference on a resume; those that matter most come first."""

    # the values begin lines of the log and errors
    REFUSED = "it cannot resume"
    RESTARTS_DATA = "the data restarts"
    RESTARTS_OPTIMIZER = "the optimizer restarts"
    RESTARTS_TENSORS = "tensors begin anew"
    ROUNDING = "results differ by floating-point rounding"
    NOTED = "changed"


# The key of [checkpoint] without which an effect is an error, and what the key does.
ACCEPTED_BY = {
    Effect.RESTARTS_DATA: ("restart_data", "starts the recipe's data at its first document"),
    Effect.RESTARTS_OPTIMIZER: ("accept_model_only", "starts with moments of zero"),
}

RestartsData = Annotated[T, Effect.RESTARTS_DATA]  # other documents, or in another order
RestartsOptimizer = Annotated[T, Effect.RESTARTS_OPTIMIZER]  # its state does not fit
Rounding = Annotated[T, Effect.ROUNDING]  # the same sums by other kernels or in another order


@dataclass(frozen=True)
class OnlyWith:
    """Marks a key that has no effect unless another key has this value."""

    key: str  # such as "data.shuffle"
    value: object

    def holds(self, recipe: Mapping[str, Any]) -> bool:
        """Return True if a recipe, {section: {name: value}}, has the value."""
        section, _, name = self.key.partition(".")
        return recipe.get(section, {}).get(name) == self.value


def effect_of(field: FieldInfo, *recipes: Mapping[str, Any]) -> Effect:
    """Return the effect of a key on which these recipes, {section: {name: value}}, differ."""
    for mark in field.metadata:
        if isinstance(mark, OnlyWith) and not any(map(mark.holds, recipes)):
            return Effect.NOTED
    return next((mark for mark in field.metadata if isinstance(mark, Effect)), Effect.NOTED)
