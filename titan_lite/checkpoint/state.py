"""Read a step's state.json, which has what is saved beside its tensors, and check its form.

    state = read_state(folder / "step-50")                     # raises Damaged
    state["run"]["model"], state["loader"]["rows"]["3"]        # [windows taken, [ordinal, tokens used] of each source]

A step that `convert` wrote has only the model. A recipe's values may have any type, since another version may have written it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_lite.outside import (
    ANY,
    BYTES,
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    TOKENS,
    WORD,
    Damaged,
    Form,
    maybe,
    optional,
    read_json,
)

NAME = "state.json"


def _is_place(value: Any) -> bool:
    """Return True for [windows taken, [ordinal, tokens used] of each source]."""
    if (
        type(value) is not list
        or len(value) < 2
        or not all(type(pair) is list and len(pair) == 2 for pair in value[1:])
    ):
        return False
    return BYTES.holds(value[0]) and all(
        COUNT.holds(number) for pair in value[1:] for number in pair
    )


_RECIPE = {
    "model": optional({"tokenizer_path": optional(WORD), WORD: ANY}),
    Form(
        "a name that can be printed", lambda value: type(value) is str and value.isprintable()
    ): OBJECT,
}
_RUN = {
    "model": optional(OBJECT),
    "tokenizer": optional(WORD),
    "total_steps": optional(COUNT),
    "rows": optional(COUNT),
    "shares": optional([NUMBER]),
    "between": optional(OBJECT),
    WORD: ANY,
}
_STATE = {
    "step": COUNT,
    "tensors": optional([WORD]),
    "recipe": optional(_RECIPE),
    "run": optional(_RUN),
    "tokens_seen": optional(COUNT),
    "validation_due": optional(FLAG),
    "skipped_steps": optional(COUNT),
    "skipped_in_a_row": optional(COUNT),
    "spikes": optional({"accepted": [NUMBER], "skipped": [OBJECT]}),  # losses may be infinite
    "loader": optional(
        {
            "windows": optional(BYTES),
            "rows": {WORD: Form("[windows, [ordinal, tokens], ...]", _is_place)},
            "of": COUNT,
        }
    ),
    "tokens_by_source": optional({WORD: COUNT}),
    "special_tokens": optional({"bos_token_id": maybe(TOKENS), "eos_token_id": maybe(TOKENS)}),
    WORD: ANY,
}


def merge_loaders(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the loader states of all ranks into one, which any rank of any number of ranks can load."""
    return {
        **states[0],
        "rows": {row: place for state in states for row, place in state["rows"].items()},
    }


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state of the step in this folder. Raises Damaged."""
    state = read_json(folder / NAME, _STATE)
    if "model" not in state.get("tensors", ["model"]):
        raise Damaged(f"{NAME}: tensors has no model")
    if (loader := state.get("loader")) is not None:
        rows, run = loader["rows"], state.get("run", {})
        widths = {len(row) for row in rows.values()}
        expected = loader["of"], {1 + len(run["shares"])} if "shares" in run else widths
        if (
            expected != (len(rows), widths)
            or len(widths) != 1
            or rows.keys() != set(map(str, range(len(rows))))
        ):
            raise Damaged(
                f"{NAME}: loader does not have the position of each row of the run in each source"
            )
    return state
