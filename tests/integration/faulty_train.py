"""titan_lite.train with something that happens at a chosen moment: python faulty_train.py RECIPE ...

The environment says what: FAULT='{"at": "validation", "step": 3, "rank": 1, "signal": "SIGTERM", "to": "launcher"}'

    at      start, when the trainer is built; step, in its middle; validation or save, after a step
    signal  what this rank sends itself, or "to" the "launcher" that started it; "raise" is an exception
    every   attempt of the launcher, not the first alone
"""

import functools
import json
import os
import signal
import sys

from titan_lite import train
from titan_lite.trainer import Trainer

MOMENTS = {"start": "build_loader", "step": "forward_backward", "validation": "evaluate_one", "save": "state_tensors"}
FAULT = json.loads(os.environ["FAULT"])


def happen():
    print(f"fault: {FAULT}", flush=True)
    if FAULT["signal"] == "raise":
        raise RuntimeError("a fault")
    os.kill(os.getppid() if FAULT.get("to") == "launcher" else os.getpid(), getattr(signal, FAULT["signal"]))


def with_fault(method):
    left = [1]  # times that it happens in this process

    @functools.wraps(method)
    def changed(self, *arguments, **options):
        if left and FAULT.get("step") in (None, getattr(self, "step", None)):
            left.clear()
            happen()
        return method(self, *arguments, **options)

    return changed


if os.environ["RANK"] == str(FAULT["rank"]) and (os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" or FAULT.get("every")):
    name = MOMENTS[FAULT["at"]]
    setattr(Trainer, name, with_fault(getattr(Trainer, name)))
sys.exit(train.main(sys.argv[1:]))
