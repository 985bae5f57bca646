"""Read a step's state.json, which has what is saved beside its tensors.

    state = read_state(folder / "step-50")                     # raises CorruptFileError
    state["run"]["model"], state["loader"]["rows"]["3"]        # [windows taken, [ordinal, tokens used] of each source]

A step that `convert` wrote has only the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_lite.outside import CorruptFileError, read_object

NAME = "state.json"


def merge_loaders(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the loader states of all ranks into one, which any rank of any number of ranks can
    load.
    """
    rows = {row: place for state in states for row, place in state["rows"].items()}
    return {**states[0], "rows": rows}


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state of the step in this folder. Raises CorruptFileError."""
    state = read_object(folder / NAME)
    if not isinstance(state.get("step"), int):
        raise CorruptFileError(f"{NAME} has no step")
    return state
