"""compile.bucketing = "measured": the first steps of the run try each way to bucket, and the fastest that fits memory stays.

    trial = Trial(models, compile_as)          # compile_as("greedy") compiles all models anew, that way
    with trial.step():                         # of training, while trial.chosen is empty
        ...

They are steps of the run like any other: buckets change no number. All ranks decide the same, on the slowest one's times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from titan_lite.compiler.receipt import Receipt

WAYS = ("none", "block", "greedy", "auto")
STEPS = 3  # of each way; the first one compiles and is not timed
FITS = 0.95  # share of a device's memory


class Trial:
    """compile_as: compiles `models` in place and returns what will be their receipts."""

    def __init__(self, models: Sequence[nn.Module], compile_as: Callable[[str], list[Receipt]], device: torch.device):
        self.models, self.compile_as, self.device = models, compile_as, device
        self.chosen = ""
        self.receipts: dict[str, list[Receipt]] = {}
        self.seconds = dict.fromkeys(WAYS, float("inf"))
        self.peaks = dict.fromkeys(WAYS, 0.0)  # bytes; of a CPU they are not known
        self.compiled: dict[str, list] = {}
        self.steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within: one step of training. After the last of all ways, `chosen` is the one that stays."""
        way, number = WAYS[self.steps // STEPS], self.steps % STEPS
        if number == 0:
            self.receipts[way] = self.compile_as(way)
            self.compiled[way] = [model._compiled_call_impl for model in self.models]
        if self.device.type == "cuda" and number == 1:
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peaks[way] = torch.cuda.max_memory_allocated(self.device)
        if number:
            self.seconds[way] = min(self.seconds[way], time.perf_counter() - started)
        self.steps += 1
        if self.steps == STEPS * len(WAYS):
            self.choose()

    def choose(self) -> None:
        figures = torch.tensor([[self.seconds[way], self.peaks[way]] for way in WAYS], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(figures, dist.ReduceOp.MAX)
        for way, (seconds, peak) in zip(WAYS, figures.tolist(), strict=True):
            self.seconds[way], self.peaks[way] = seconds, peak
        memory = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else float("inf")
        fitting = [way for way in WAYS if self.peaks[way] <= FITS * memory] or [min(WAYS, key=self.peaks.__getitem__)]
        self.chosen = min(fitting, key=self.seconds.__getitem__)
        for model, compiled in zip(self.models, self.compiled[self.chosen], strict=True):
            model._compiled_call_impl = compiled
        self.compiled.clear()

    def describe(self) -> list[str]:
        """A line for each way, once it is decided."""
        lines = []
        for way in WAYS:
            counts = [(sum(receipt.before.values()), len(receipt.after)) for receipt in self.receipts[way]]
            before, after = (sum(column) for column in zip(*counts, strict=True))
            peak = f", peak memory {self.peaks[way] / 2**30:.2f} GiB" if self.peaks[way] else ""
            stays = "; it stays" if way == self.chosen else ""
            lines.append(f'bucketing "{way}": {self.seconds[way]:.3f} s a step, {before} collectives -> {after}{peak}{stays}')
        return lines
