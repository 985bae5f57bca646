"""The schedules that split backward. Imports no torch."""

from typing import Any

KEYS = ()
TENSORS: dict[str, str] = {}
SCHEDULES: dict[str, dict[str, Any]] = {
    "InterleavedZeroBubble": dict(
        about="two or more, backward split into gradients of inputs and of weights",
        stages_per_rank=2,
        goes_round=True,
        splits_backward=True,
    ),
    "ZBVZeroBubble": dict(
        about="two, backward split",
        stages_per_rank=2,
        is_v_shaped=True,
        splits_backward=True,
    ),
    "DualPipeV": dict(
        about="two, some backwards split",
        stages_per_rank=2,
        is_v_shaped=True,
        splits_backward=True,
    ),
}
