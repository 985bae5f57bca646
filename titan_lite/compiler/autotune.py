"""Choose a bucketing method in the first steps of a run (compile.bucketing = "measured"): try each, keep the fastest.

    autotune = Autotuner(models, compile_as, config.compile, device)    # compile_as("greedy") recompiles the models
    check_steps(config.compile, done=step, steps=training.steps)        # after resuming
    with autotune.step():                                               # around every training step
        ...
    if autotune.just_decided:                                           # once; autotune.decided stays True
        lines = [*autotune.describe(), *describe(autotune.receipts)]

Buckets change no value, so these steps train as usual. All ranks choose the same method, by the times of the slowest rank. With
another compile.bucketing, models are compiled at once and the first step decides. Uncompiled models have no receipts.

A method that does not fit in memory is not run. Its peak memory is estimated before its graphs run: the measured peak of
METHODS[0], plus the difference between the two graphs' peaks. If it is too high on one rank, all ranks with that graph run
METHODS[0] instead, and no rank keeps the method. The estimate omits fragmentation and workspaces of kernels. Running out of
memory within a step ends the run, since other ranks may wait in a collective.
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

METHODS = ("none", "block", "greedy", "auto")
STEPS = 3  # per method; the first step compiles and is not timed
FITS = 0.95  # usable share of a device's memory


def check_steps(config: Compile, *, done: int, steps: int) -> None:
    """Raise ConfigError if the steps after `done` are too few to try every method."""
    if (
        config.bucketing == "measured"
        and config.compiles("model")
        and 0 < steps - done < STEPS * len(METHODS)
    ):
        raise ConfigError(
            f'compile.bucketing = "measured" tries {len(METHODS)} methods for {STEPS} steps each, and from step {done} on '
            f"training.steps = {steps} leaves fewer; use training.steps = {done + STEPS * len(METHODS)} or more"
        )


class Autotuner:
    """Time each bucketing method and keep the fastest.

    compile_as: compile `models` in place at their first call, and return the list that will hold their receipts. It calls `fits`
    with each receipt before the graph runs; if one rank returns False, the model's call raises DoesNotFit.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        compile_as: Callable[..., list[Receipt]],
        config: Compile,
        device: torch.device,
    ):
        self.models, self.compile_as, self.device = models, compile_as, device
        self.measured = config.compiles("model") and config.bucketing == "measured"
        self.chosen = "" if self.measured else config.bucketing
        self.seconds = dict.fromkeys(METHODS, float("inf"))
        self.peaks = dict.fromkeys(METHODS, 0.0)  # bytes; 0 on CPUs
        self.refused: set[str] = (
            set()
        )  # methods that this rank does not run; their peaks are estimates
        self.tried: dict[str, list[Receipt]] = {}
        self.compiled: dict[str, list] = {}
        self.steps, self.needed = 0, STEPS * len(METHODS) if self.measured else 1
        if config.compiles("model"):
            self._compile(self.chosen or METHODS[0])

    @property
    def decided(self) -> bool:
        return self.steps >= self.needed

    @property
    def just_decided(self) -> bool:
        return self.steps == self.needed

    @property
    def receipts(self) -> list[Receipt]:
        return self.tried.get(self.chosen, [])

    def _compile(self, method: str) -> None:
        has_baseline = METHODS[0] in self.tried
        self.tried[method] = self.compile_as(
            method, fits=functools.partial(self._fits, method) if has_baseline else None
        )
        self.compiled[method] = [model._compiled_call_impl for model in self.models]
        if has_baseline:
            for model, *calls in zip(
                self.models, self.compiled[method], self.compiled[METHODS[0]], strict=True
            ):
                model._compiled_call_impl = functools.partial(self._call, method, *calls)

    def _call(
        self, method: str, compiled: Callable, baseline: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        if method not in self.refused:
            try:
                return compiled(*args, **kwargs)
            except DoesNotFit:
                self.refused.add(method)
        return baseline(*args, **kwargs)

    def _fits(self, method: str, receipt: Receipt) -> bool:
        """Return whether a step fits in this rank's memory. The receipt is the last one in self.tried[method]."""
        number = sum(each.graph == receipt.graph for each in self.tried[method]) - 1
        baseline = [
            each.timeline for each in self.tried[METHODS[0]] if each.graph == receipt.graph
        ][number : number + 1]
        if self.decided or not baseline or baseline[0] is None or receipt.timeline is None:
            return True
        more = receipt.timeline.peak_bytes - baseline[0].peak_bytes
        self.peaks[method] = max(self.peaks[method], self.peaks[METHODS[0]] + more)
        return self.peaks[method] <= FITS * memory_of(self.device)

    @contextmanager
    def step(self, share: float = 1.0) -> Iterator[None]:
        """Run one training step and time it, until a method is chosen. share: batch size relative to a full step (batch ramp)."""
        if not self.measured or self.decided:
            yield
            self.steps += 1
            return
        method, number, cuda = (
            METHODS[self.steps // STEPS],
            self.steps % STEPS,
            self.device.type == "cuda",
        )
        if method not in self.tried:
            self._compile(method)
        if cuda and number == 1:
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError as error:
            if method == METHODS[0]:
                raise
            wrong = f'compile.bucketing = "measured" ran out of memory with "{method}"'
            raise CompileError(f'{wrong}; use bucketing = "{METHODS[0]}", which fitted') from error
        if cuda:
            torch.cuda.synchronize(self.device)
        if method not in self.refused:
            self.peaks[method] = torch.cuda.max_memory_allocated(self.device) if cuda else 0.0
            if number:
                self.seconds[method] = min(
                    self.seconds[method], (time.perf_counter() - started) / share
                )
        self.steps += 1
        if self.just_decided:
            self._choose()

    def _choose(self) -> None:
        memory = memory_of(self.device)
        mine = [
            [self.seconds[method], self.peaks[method], self.peaks[method] / memory]
            for method in METHODS
        ]
        figures = torch.tensor(mine, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(figures, dist.ReduceOp.MAX)
        used: dict[str, float] = {}  # largest share of a device's memory
        for method, found in zip(METHODS, figures.tolist(), strict=True):
            self.seconds[method], self.peaks[method], used[method] = found
        timed = [method for method in METHODS if self.seconds[method] < float("inf")]
        fitting = [method for method in timed if used[method] <= FITS] or [
            min(timed, key=used.__getitem__)
        ]
        self.chosen = min(fitting, key=self.seconds.__getitem__)
        for model, compiled in zip(self.models, self.compiled[self.chosen], strict=True):
            model._compiled_call_impl = compiled
        self.compiled.clear()

    def describe(self) -> list[str]:
        """Return a line per method after the choice, or no lines if nothing was measured."""
        lines = []
        for method, seconds in self.seconds.items() if self.measured else ():
            if seconds == float("inf"):
                lines.append(
                    f'bucketing "{method}": not run, as it would need {self.peaks[method] / 2**30:.2f} GiB'
                )
                continue
            training = [receipt for receipt in self.tried[method] if receipt.graph != "inference"]
            before, after = (
                sum(sum(each.before.values()) for each in training),
                sum(len(each.after) for each in training),
            )
            peak = (
                f", peak memory {self.peaks[method] / 2**30:.2f} GiB" if self.peaks[method] else ""
            )
            stays = "; it stays" if method == self.chosen else ""
            lines.append(
                f'bucketing "{method}": {seconds:.3f} s a step, {before} collectives -> {after}{peak}{stays}'
            )
        return lines


def memory_of(device: torch.device) -> float:
    """Return a device's memory in bytes, or infinity for a CPU."""
    return (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else float("inf")
    )
