"""titan_lite.train with one rank to which something happens at a chosen moment.

    FAULT='{"rank": 1, "at": "validation_batch", "step": 3, "signal": "SIGTERM"}' python tests/faulty.py RECIPE [options]

The fault is a JSON object:

    rank    to which it happens
    at      a method of Hook without "on_", such as "validation_batch"; or "layer" with the layer's
            number in "layer"
    step    in this step alone, and once
    sleep   seconds; or hold: seconds in a library that lets no other Python thread
            run; or raise: an error's message; or signal: one that the rank sends to itself, or "to" the "launcher" that
            started it, or to "nobody": the test sends it. The rank goes on when it has received it.
    every   true: in every attempt of the launcher, not in the first alone
"""

import ctypes
import json
import os
import signal
import sys
import time

from titan_lite.features.watchdog import watchdog
from titan_lite.hooks import Hook
from titan_lite.logging import events
from titan_lite.resilience import shared_errors, signals
from titan_lite.resilience.exit_code import end_with
from titan_lite.train import main

FAULT = json.loads(os.environ["FAULT"])
happened = []  # the steps, in this process
# A rank to which one of these happens answers the others, on a busy machine after a while.
if {"sleep", "raise"} & FAULT.keys():
    for module in (shared_errors, watchdog):
        module.GRACE = module.GRACE_AFTER_LOST_CONNECTION = 60.0


def happen():
    print(f"fault: {FAULT}", flush=True)
    if "sleep" in FAULT:
        time.sleep(FAULT["sleep"])
    elif "hold" in FAULT:
        ctypes.PyDLL(None).usleep(int(FAULT["hold"] * 1e6))
    elif "raise" in FAULT:
        raise ValueError(FAULT["raise"])
    else:
        if FAULT.get("to") != "nobody":
            os.kill(
                os.getppid() if FAULT.get("to") == "launcher" else os.getpid(),
                getattr(signal, FAULT["signal"]),
            )
        while not signals.received():
            time.sleep(0.01)


def happen_if_due(step):
    if not happened and FAULT.get("step") in (None, step):
        happened.append(step)
        happen()


class Fault(Hook):
    def on_train_start(self, trainer):
        if FAULT["at"] == "layer":
            for stage in trainer.model.stages:
                if str(FAULT["layer"]) in stage.model.layers:
                    layer = stage.model.layers[str(FAULT["layer"])]
                    layer.register_forward_pre_hook(lambda *inputs: happen_if_due(events.step))


if FAULT["at"] != "layer":
    setattr(Fault, f"on_{FAULT['at']}", lambda self, *_: happen_if_due(events.step))


if __name__ == "__main__":
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    here = os.environ["RANK"] == str(FAULT["rank"]) and (first or FAULT.get("every"))
    end_with(lambda: main(sys.argv[1:], hooks=[Fault()] if here else []))
