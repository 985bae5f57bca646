"""compile.bucketing = "measured": the first steps of the run try each way to bucket, and the fastest that fits memory stays.

    autotune = Autotuner(models, compile_as, config.compile, device)    # compile_as("greedy") compiles the models anew
    check_steps(config.compile, done=step, steps=training.steps)        # after resuming
    with autotune.step():                                               # around every step of training
        ...
    if autotune.just_decided:                                           # once; autotune.decided from then on
        lines = [*autotune.describe(), *describe(autotune.receipts)]

They are steps of the run like any other: buckets change no number. All ranks decide the same, on the slowest one's times. Any
other way is compiled at once, and decided after one step; where no model is compiled there are no receipts.

A way that would not fit memory is not run. Its graphs are known before the first of them runs, and WAYS[0] was measured before:
by as much as a graph holds more at once than the one of WAYS[0], the step's peak is taken to be higher. Where that is too much
for one rank, all that have the graph run WAYS[0] in its place, and no rank keeps the way. Nothing is caught in the middle of a
step: ranks that wait in a collective for one that has run out of memory cannot be called back. So where the estimate is too low,
as it does not know kernels' workspaces or gaps between blocks, the run still ends, with an error that names the way; and so does
one that runs out of memory with WAYS[0], or while code is generated.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_lite.compiler.receipt import DoesNotFit, Receipt
from titan_lite.compiler.stage import CompileError
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
    """compile_as: compiles `models` in place, at their first call, and returns the list that their receipts will be in. Its
    argument `fits` is asked about each receipt, before the graph has run; where one rank says no, the call raises DoesNotFit."""

    def __init__(
        self, models: Sequence[nn.Module], compile_as: Callable[..., list[Receipt]], config: Compile, device: torch.device
    ):
        self.models, self.compile_as, self.device = models, compile_as, device
        self.measured = config.compiles("model") and config.bucketing == "measured"
        self.chosen = "" if self.measured else config.bucketing
        self.seconds = dict.fromkeys(WAYS, float("inf"))
        self.peaks = dict.fromkeys(WAYS, 0.0)  # bytes; zero for a CPU
        self.refused: set[str] = set()  # ways that this rank does not run, and whose peak is an estimate
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
        first = WAYS[0] in self.tried
        fits = functools.partial(self._fits, way) if first else None
        self.tried[way] = self.compile_as(way, fits=fits)
        self.compiled[way] = [model._compiled_call_impl for model in self.models]
        for model, *calls in zip(self.models, self.compiled[way], self.compiled[WAYS[0]], strict=True) if first else ():
            model._compiled_call_impl = functools.partial(self._call, way, *calls)

    def _call(self, way: str, compiled: Callable, otherwise: Callable, *args: Any, **named: Any) -> Any:
        try:
            return compiled(*args, **named) if way not in self.refused else otherwise(*args, **named)
        except DoesNotFit:
            self.refused.add(way)
            return otherwise(*args, **named)

    def _fits(self, way: str, receipt: Receipt) -> bool:
        """False where the step would need more than this rank's memory. The receipt is the last in self.tried[way]."""
        number = sum(each.graph == receipt.graph for each in self.tried[way]) - 1
        measured = [each.timeline for each in self.tried[WAYS[0]] if each.graph == receipt.graph][number:][:1]
        if self.decided or not measured or measured[0] is None or receipt.timeline is None:
            return True
        more = receipt.timeline.peak_bytes - measured[0].peak_bytes
        self.peaks[way] = max(self.peaks[way], self.peaks[WAYS[0]] + more)
        return self.peaks[way] <= FITS * memory_of(self.device)

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
        try:
            yield
        except torch.OutOfMemoryError as error:
            if way == WAYS[0]:
                raise
            wrong = f'compile.bucketing = "measured" ran out of memory with "{way}"'
            raise CompileError(f'{wrong}; use bucketing = "{WAYS[0]}", which fitted') from error
        if cuda:
            torch.cuda.synchronize(self.device)
        if way not in self.refused:
            self.peaks[way] = torch.cuda.max_memory_allocated(self.device) if cuda else 0.0
        if number and way not in self.refused:
            self.seconds[way] = min(self.seconds[way], (time.perf_counter() - started) / share)
        self.steps += 1
        if self.just_decided:
            self._choose()

    def _choose(self) -> None:
        memory = memory_of(self.device)
        mine = [[self.seconds[way], self.peaks[way], self.peaks[way] / memory] for way in WAYS]
        figures = torch.tensor(mine, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(figures, dist.ReduceOp.MAX)
        filled: dict[str, float] = {}
        for way, found in zip(WAYS, figures.tolist(), strict=True):
            self.seconds[way], self.peaks[way], filled[way] = found
        run = [way for way in WAYS if self.seconds[way] < float("inf")]
        fitting = [way for way in run if filled[way] <= FITS] or [min(run, key=filled.__getitem__)]
        self.chosen = min(fitting, key=self.seconds.__getitem__)
        for model, compiled in zip(self.models, self.compiled[self.chosen], strict=True):
            model._compiled_call_impl = compiled
        self.compiled.clear()

    def describe(self) -> list[str]:
        """A line for each way that was tried, once one is decided; none where nothing is measured."""
        lines = []
        for way in WAYS if self.measured else ():
            if self.seconds[way] == float("inf"):
                lines.append(f'bucketing "{way}": not run, as it would need {self.peaks[way] / 2**30:.2f} GiB')
                continue
            training = [receipt for receipt in self.tried[way] if receipt.graph != "inference"]
            before, after = sum(sum(each.before.values()) for each in training), sum(len(each.after) for each in training)
            peak = f", peak memory {self.peaks[way] / 2**30:.2f} GiB" if self.peaks[way] else ""
            stays = "; it stays" if way == self.chosen else ""
            lines.append(f'bucketing "{way}": {self.seconds[way]:.3f} s a step, {before} collectives -> {after}{peak}{stays}')
        return lines


def memory_of(device: torch.device) -> float:
    """Bytes; infinite for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")
