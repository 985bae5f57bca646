"""Measure the throughput of training in windows from one log line to the next.

throughput = Throughput(layout.tokens_until, ranks=8, flops_per_token=(6.0e9, 6.8e9),
peak_flops=989e12)
throughput.start(step)                          # training begins
with throughput.waiting(): batch = next(loader)
with throughput.exclude(): save()               # not training
values |= throughput.figures(step)              # {"tps": ..., "tflops": ..., "data_wait": ..., "step_time": ..., "mfu": ...}
throughput.start(step)                          # the next window begins, after these are logged
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """The throughput of the current window.

    tokens_until: (step) -> tokens of all steps up to it, on all ranks. flops_per_token: with
    attention counted as causal, and as full. peak_flops: FLOP/s of one device; None if unknown,
    which omits mfu.
    """

    def __init__(
        self,
        tokens_until: Callable[[int], int],
        *,
        ranks: int,
        flops_per_token: tuple[float, float],
        peak_flops: float | None,
    ):
        self.tokens_until, self.ranks, self.peak_flops = tokens_until, ranks, peak_flops
        self.causal, self.full = flops_per_token
        self.start(0)

    def start(self, step: int) -> None:
        """Begin a window after `step`."""
        self.began, self.first, self.waited = time.perf_counter(), step, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context whose time counts as data_wait."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Return a context whose time does not count, such as validation or a save."""
        started = time.perf_counter()
        yield
        self.began += time.perf_counter() - started

    def figures(self, step: int) -> dict[str, float]:
        """Return the values of the window up to and including `step`, by their names in figures.py."""
        seconds, steps = time.perf_counter() - self.began, step - self.first
        tps = (self.tokens_until(step) - self.tokens_until(self.first)) / self.ranks / seconds
        values = {
            "tps": tps,
            "tflops": tps * self.causal / 1e12,
            "data_wait": 100 * self.waited / seconds,
            "step_time": seconds / steps,
        }
        if self.peak_flops is not None:
            values["mfu"] = 100 * tps * self.causal / self.peak_flops
            values["mfu_full_attention"] = 100 * tps * self.full / self.peak_flops
        return values
