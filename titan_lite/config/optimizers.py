"""The optimizers of a recipe: the keys that each reads, and what it keeps. Needs no torch.

    OPTIMIZERS["Lion"].moments            # ("exp_avg",)

An elementwise optimizer is a row here and the file optim/NAME.py, in lower case, whose function
`update` has the update of one parameter (optim/elementwise.py). All else follows from the row:
memory and seconds of a plan, state in checkpoints, keys that have no effect. Features have other
optimizers, whose rows they add (OPTIMIZERS in their keys.py).
"""

from dataclasses import dataclass

from titan_lite.features import part_of_each

ADAMW_KEYS = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class Algorithm:
    """An optimizer, but for its arithmetic."""

    about: str  # what moves parameters, and which ones; for the help
    # keys of [optimizer] that it reads, beside name, lr and weight_decay
    keys: tuple[str, ...]
    # names of the tensors that it keeps of a parameter, with its shape and shards
    moments: tuple[str, ...]
    # bytes that an update of plain operations reads and writes for each element, beside matmuls of
    # matrices; 0: it is one kernel, which reads and writes everything once
    update_bytes: float = 0.0
    # the same with moments in bfloat16, of one that reads optimizer.state_dtype
    update_bytes_bfloat16: float = 0.0
    is_elementwise: bool = True  # else it is for matrices within blocks, and AdamW has the others


OPTIMIZERS = {  # by optimizer.name
    "AdamW": Algorithm(
        about="two moments",
        keys=(*ADAMW_KEYS, "state_dtype"),
        moments=("exp_avg", "exp_avg_sq"),
        update_bytes_bfloat16=144.0,
    ),
    "Lion": Algorithm(
        about="sign of a momentum",
        keys=("beta1", "beta2", "state_dtype"),
        moments=("exp_avg",),
        update_bytes=84.0,
        update_bytes_bfloat16=90.0,
    ),
}
for _keys in part_of_each("keys"):
    OPTIMIZERS |= getattr(_keys, "OPTIMIZERS", {})
