"""The schedules that split backward. Imports no torch."""

from typing import Any

KEYS = ()
TENSORS: dict[str, str] = {}
SCHEDULES: dict[str, dict[str, Any]] = {
    "InterleavedZeroBubble": dict(
        about="two or more, split backward",
        stages_per_rank=2,
        goes_round=True,
        splits_backward=True,
    ),
    "ZBVZeroBubble": dict(
        about="two, split backward",
        stages_per_rank=2,
        is_v_shaped=True,
        splits_backward=True,
    ),
    "DualPipeV": dict(
        about="two, partly split backward",
        stages_per_rank=2,
        is_v_shaped=True,
        splits_backward=True,
    ),
}
