"""Read a step's state.json, which has what is saved beside its tensors.

    state = read_state(folder / "step-50")                     # raises CorruptFileError
    state["run"]["model"], state["loader"]["positions"]["3"]        # [document, tokens used] of stream 3 in each source

A step that `convert` wrote has only the model.
"""

from pathlib import Path
from typing import Any

from titan_lite.outside import CorruptFileError, read_object

NAME = "state.json"


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state of the step in this folder. Raises CorruptFileError."""
    state = read_object(folder / NAME)
    if not isinstance(state.get("step"), int):
        raise CorruptFileError(f"{NAME} has no step")
    return state
