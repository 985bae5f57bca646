"""titan_lite.train with one rank to which something happens at a chosen moment.

FAULT='{"rank": 1, "at": "validation", "step": 3, "signal": "SIGTERM", "to": "launcher"}' python tests/faulty.py RECIPE [options]

at      device, before the process group is made; model, when it gets its memory; compile; start, when the data is opened;
        data, layer (with its number in "layer") and step, within a step; validation or save, after one
step    in that one alone, and once; from: in every one from it on
sleep   what happens: seconds; or hold, seconds in a library that lets no other Python thread run; or raise, a message;
        or signal, that the rank sends to itself, or "to" the "launcher" that started it
every   attempt of the launcher, not the first alone
"""

import ctypes
import functools
import json
import os
import signal
import sys
import time

from titan_lite import train, trainer
from titan_lite.compiler import stage
from titan_lite.trainer import Trainer

FAULT = json.loads(os.environ["FAULT"])
MOMENTS = {
    "device": (trainer, "init_device"),
    "model": (trainer, "materialize"),
    "compile": (stage, "min_cut_rematerialization_partition"),
    "start": (Trainer, "build_loader"),
    "data": (Trainer, "next_batch"),
    "step": (Trainer, "forward_backward"),
    "validation": (Trainer, "evaluate_one"),
    "save": (Trainer, "state_tensors"),
}
happened = []  # steps, of this process


def happen():
    print(f"fault: {FAULT}", flush=True)
    if "sleep" in FAULT:
        time.sleep(FAULT["sleep"])
    elif "hold" in FAULT:
        ctypes.PyDLL(None).usleep(int(FAULT["hold"] * 1e6))
    elif "raise" in FAULT:
        raise ValueError(FAULT["raise"])
    else:
        os.kill(os.getppid() if FAULT.get("to") == "launcher" else os.getpid(), getattr(signal, FAULT["signal"]))


def happen_if_due(step):
    if step >= FAULT["from"] if "from" in FAULT else not happened and FAULT.get("step") in (None, step):
        happened.append(step)
        happen()


def change(owner, name):
    """Have the function call happen_if_due() before it does its work."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def changed(*arguments, **options):
        happen_if_due(getattr(arguments[0], "step", None) if owner is Trainer else None)
        return function(*arguments, **options)

    setattr(owner, name, changed)


def change_layer(number):
    """Have one layer call it before it reads its weights."""
    loop = Trainer.loop

    def changed(self):
        for model in self.stages:
            if str(number) in model.layers:
                model.layers[str(number)].register_forward_pre_hook(lambda *inputs: happen_if_due(self.step))
        return loop(self)

    Trainer.loop = changed


if __name__ == "__main__":
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if os.environ["RANK"] == str(FAULT["rank"]) and (first or FAULT.get("every")):
        if FAULT["at"] == "layer":
            change_layer(FAULT["layer"])
        else:
            change(*MOMENTS[FAULT["at"]])
    sys.exit(train.main(sys.argv[1:]))
