"""The optimizers of a recipe: the keys that each reads, and what it keeps. Needs no torch.

    OPTIMIZERS["Lion"].moments            # ("exp_avg",)

An elementwise optimizer is a row here and the file optim/NAME.py, in lower case, whose function
`update` has the update of one parameter (optim/elementwise.py). All else follows from the row:
memory and seconds of a plan, state in checkpoints, keys that have no effect. An optimizer of
matrices has a row here, its class in optim/build.py, what owners compute in optim/state.py and what
they keep in tools/plan/rank_bytes.py.
"""

from dataclasses import dataclass

ADAMW_KEYS = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class Algorithm:
    """An optimizer, but for its arithmetic."""

    # keys of [optimizer] that it reads, beside name, lr and weight_decay
    keys: tuple[str, ...]
    # names of the float32 tensors that it keeps of a parameter, with its shape and shards; of an
    # optimizer of matrices, those of a matrix within a block, as other parameters are AdamW's
    moments: tuple[str, ...]
    # bytes that an update of plain operations reads and writes for each element; of an optimizer
    # of matrices, beside its products; 0: it is one kernel, which reads and writes everything once
    update_bytes: float = 0.0


OPTIMIZERS = {  # by optimizer.name
    "AdamW": Algorithm(keys=ADAMW_KEYS, moments=("exp_avg", "exp_avg_sq")),
    "Lion": Algorithm(keys=("beta1", "beta2"), moments=("exp_avg",), update_bytes=84.0),
    "Muon": Algorithm(
        keys=(*ADAMW_KEYS, "momentum", "nesterov", "ns_steps", "ns_dtype"),
        moments=("momentum_buffer",),
        update_bytes=92.0,
    ),
    "Shampoo": Algorithm(
        keys=(
            *ADAMW_KEYS,
            "max_preconditioner_dim",
            "precondition_frequency",
            "start_preconditioning_step",
            "preconditioner_eps",
        ),
        moments=(),  # an owner has all state
        update_bytes=190.0,
    ),
}
