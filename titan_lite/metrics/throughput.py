"""Measure the throughput of training in windows from one log line to the next.

throughput = Throughput(layout.tokens_until, ranks=8, flops_per_token=6.0e9, ...)
throughput.start(step)                          # training begins
with throughput.waiting(): batch = next(loader)
with throughput.exclude(): save()               # not training
values = throughput.values(step)                # {"tps": ..., "step_time": ..., "mfu": ..., ...}
throughput.start(step)                          # the next window begins, after these are logged
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """The throughput of the current window.

    tokens_until: (step) -> tokens of all steps up to it, on all ranks. flops_per_token: with
    causal attention counted as half of full attention; flops_per_token_full_attention: with all of
    it. peak_flops: FLOP/s of one device; None if unknown, which omits mfu.
    """

    def __init__(
        self,
        tokens_until: Callable[[int], int],
        *,
        ranks: int,
        flops_per_token: float,
        flops_per_token_full_attention: float,
        peak_flops: float | None,
    ):
        self.tokens_until = tokens_until
        self.ranks = ranks
        self.flops_per_token = flops_per_token
        self.flops_per_token_full_attention = flops_per_token_full_attention
        self.peak_flops = peak_flops
        self.start(0)

    def start(self, step: int) -> None:
        """Begin a window after `step`."""
        self.window_start = step
        self.started = time.perf_counter()  # later by what does not count
        self.waited = 0.0  # seconds for data

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
        self.started += time.perf_counter() - started

    def values(self, step: int) -> dict[str, float]:
        """Return the metrics of the window up to and including `step` (names: writer.py)."""
        seconds = time.perf_counter() - self.started
        steps = step - self.window_start
        tokens = self.tokens_until(step) - self.tokens_until(self.window_start)
        tps = tokens / self.ranks / seconds
        values = {
            "tps": tps,
            "tflops": tps * self.flops_per_token / 1e12,
            "data_wait": 100 * self.waited / seconds,
            "step_time": seconds / steps,
        }
        if self.peak_flops is not None:
            values["mfu"] = 100 * tps * self.flops_per_token / self.peak_flops
            full = tps * self.flops_per_token_full_attention
            values["mfu_full_attention"] = 100 * full / self.peak_flops
        return values
