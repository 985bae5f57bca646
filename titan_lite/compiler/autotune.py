"""compile.bucketing = "measured": the first steps of the run try each way to bucket, and the fastest that fits memory stays.

    autotune = Autotuner(models, compile_as, config.compile, device)    # compile_as("greedy") compiles the models anew
    check_steps(config.compile, done=step, steps=training.steps)        # after resuming
    with autotune.step():                                               # around every step of training
        ...
    if autotune.just_decided:                                           # once; autotune.decided from then on
        lines = [*autotune.describe(), *describe(autotune.receipts)]

They are steps of the run like any other: buckets change no number. All ranks decide the same, on the slowest one's times. Any
other way is compiled at once, and decided after one step; where no model is compiled there are no receipts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from titan_lite.compiler.receipt import Receipt
from titan_lite.config import Compile, ConfigError

WAYS = ("none", "block", "greedy", "auto")
STEPS = 3  # of each way; the first one compiles and is not timed
FITS = 0.95  # share of a device's memory


def check_steps(config: Compile, *, done: int, steps: int) -> None:
    """Raises ConfigError where the steps after `done` do not suffice to try every way."""
    if config.bucketing == "measured" and config.compiles("model") and 0 < steps - done < STEPS * len(WAYS):
        raise ConfigError(
            f'compile.bucketing = "measured" tries {len(WAYS)} ways in {STEPS} steps each, and from step {done} on '
            f"training.steps = {steps} leaves fewer; use training.steps = {done + STEPS * len(WAYS)} or more, "
            'or bucketing = "block"'
        )


class Autotuner:
    """compile_as: compiles `models` in place, at their first call, and returns the list that their receipts will be in."""

    def __init__(
        self, models: Sequence[nn.Module], compile_as: Callable[[str], list[Receipt]], config: Compile, device: torch.device
    ):
        self.models, self.compile_as, self.device = models, compile_as, device
        self.measured = config.compiles("model") and config.bucketing == "measured"
        self.chosen = "" if self.measured else config.bucketing
        self.seconds = dict.fromkeys(WAYS, float("inf"))
        self.peaks = dict.fromkeys(WAYS, 0.0)  # bytes; zero for a CPU
        self.tried: dict[str, list[Receipt]] = {}
        self.compiled: dict[str, list] = {}
        self.steps, self.needed = 0, STEPS * len(WAYS) if self.measured else 1
        if config.compiles("model"):
            self._compile(self.chosen or WAYS[0])

    @property
    def decided(self) -> bool:
        return self.steps >= self.needed

    @property
    def just_decided(self) -> bool:
        """Only after the step that decides."""
        return self.steps == self.needed

    @property
    def receipts(self) -> list[Receipt]:
        return self.tried.get(self.chosen, [])

    def _compile(self, way: str) -> None:
        self.tried[way] = self.compile_as(way)
        self.compiled[way] = [model._compiled_call_impl for model in self.models]

    @contextmanager
    def step(self, share: float = 1.0) -> Iterator[None]:
        """Within: one step of training, which tries a way until one is decided. share: of other steps' batch, as in a ramp."""
        if not self.measured or self.decided:
            yield
            self.steps += 1
            return
        way, number, cuda = WAYS[self.steps // STEPS], self.steps % STEPS, self.device.type == "cuda"
        if way not in self.tried:
            self._compile(way)
        if cuda and number == 1:
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(self.device)
            self.peaks[way] = torch.cuda.max_memory_allocated(self.device)
        if number:
            self.seconds[way] = min(self.seconds[way], (time.perf_counter() - started) / share)
        self.steps += 1
        if self.just_decided:
            self._choose()

    def _choose(self) -> None:
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
        """A line for each way that was tried, once one is decided; none where nothing is measured."""
        lines = []
        for way in WAYS if self.measured else ():
            training = [receipt for receipt in self.tried[way] if receipt.graph != "inference"]
            before, after = sum(sum(each.before.values()) for each in training), sum(len(each.after) for each in training)
            peak = f", peak memory {self.peaks[way] / 2**30:.2f} GiB" if self.peaks[way] else ""
            stays = "; it stays" if way == self.chosen else ""
            lines.append(f'bucketing "{way}": {self.seconds[way]:.3f} s a step, {before} collectives -> {after}{peak}{stays}')
        return lines
