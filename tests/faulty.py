"""Trains as `python -m titan_lite.train` does, but for one rank with something wrong:

FAULT="in_layer 1 2 3 60" python tests/faulty.py RECIPE [options]     # the function below, and its numbers: the rank first
"""

import ctypes
import os
import sys
import time

from titan_lite import train, trainer
from titan_lite.compiler import stage


def at_start(seconds):
    """Before the process group is made."""
    init_device = trainer.init_device

    def late(config):
        time.sleep(seconds)
        return init_device(config)

    trainer.init_device = late


def in_compile(seconds):
    partition = stage.min_cut_rematerialization_partition

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return partition(*args, **kwargs)

    stage.min_cut_rematerialization_partition = slow


def in_layer(layer, step, seconds):
    """From that step on, before the layer reads its weights."""
    before_layer(layer, step, lambda: time.sleep(seconds))


def holding_the_interpreter(step, seconds):
    """In a library that lets no other Python thread run."""
    before_layer(0, step, lambda: ctypes.PyDLL(None).usleep(int(seconds * 1e6)))


def raising(step):
    def fail():
        raise ValueError("a fault of this rank alone\nand more lines")

    before_layer(0, step, fail)


def in_data(step, seconds):
    next_batch = trainer.Trainer.next_batch

    def slow(self):
        if self.step >= step:
            time.sleep(seconds)
        return next_batch(self)

    trainer.Trainer.next_batch = slow


def before_layer(layer, step, function):
    def loop(self):
        def hook(module, inputs):
            if self.step >= step:
                function()

        for model in self.stages:
            if str(int(layer)) in model.layers:
                model.layers[str(int(layer))].register_forward_pre_hook(hook)
        run(self)

    run, trainer.Trainer.loop = trainer.Trainer.loop, loop


if __name__ == "__main__":
    name, rank, *numbers = os.environ["FAULT"].split()
    if os.environ["RANK"] == rank:
        globals()[name](*map(float, numbers))
    sys.exit(train.main(sys.argv[1:]))
