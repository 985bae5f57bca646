"""Measure the throughput of training in windows from one log line to the next.

throughput = Throughput(layout.tokens, ranks=8, flops_per_token=6.0e9, ...)
throughput.start(step)                          # training begins
with throughput.waiting(): batch = next(loader)
with throughput.exclude("saving"): save()       # not training
values = throughput.values(step)                # {"tps": ..., "step_time": ..., "mfu": ..., ...}
throughput.start(step)                          # the next window begins, after these are logged
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from titan_lite.metrics.goodput import SECONDS_OF


class Throughput:
    """The throughput of the current window.

    tokens_per_step: on all ranks. flops_per_token: with causal attention counted as half of full
    attention; flops_per_token_full_attention: with all of it. peak_flops: FLOP/s of one device;
    None if unknown, which omits mfu.
    """

    def __init__(
        self,
        tokens_per_step: int,
        *,
        ranks: int,
        flops_per_token: float,
        flops_per_token_full_attention: float,
        peak_flops: float | None,
    ):
        self.tokens_per_step = tokens_per_step
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
        self.excluded: dict[str, float] = defaultdict(float)  # seconds, by their cause

    def skip_to(self, step: int) -> None:
        """Begin a window after `step`, which others have done; what was excluded still counts."""
        excluded = self.excluded
        self.start(step)
        self.excluded = excluded

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context whose time counts as data_wait."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    @contextmanager
    def exclude(self, cause: str) -> Iterator[None]:
        """Return a context whose time does not count, such as validation or a save."""
        started = time.perf_counter()
        yield
        self.exclude_since(started, cause)

    def exclude_since(self, started: float, cause: str) -> None:
        """Have the time since a moment of `time.perf_counter` not count."""
        seconds = time.perf_counter() - started
        self.started += seconds
        self.excluded[cause] += seconds

    def excluded_values(self) -> dict[str, float]:
        """Return the seconds of the window that do not count, by their cause (goodput.py)."""
        return {
            f"{SECONDS_OF}{cause}": round(seconds, 3) for cause, seconds in self.excluded.items()
        }

    def values(self, step: int) -> dict[str, float]:
        """Return the metrics of the window up to and including `step` (names: writer.py)."""
        seconds = time.perf_counter() - self.started
        steps = step - self.window_start
        tps = steps * self.tokens_per_step / self.ranks / seconds
        values = {
            "tps": tps,
            "tflops": tps * self.flops_per_token / 1e12,
            "data_wait": 100 * self.waited / seconds,
            "step_time": seconds / steps,
            **self.excluded_values(),
        }
        if self.peak_flops is not None:
            values["mfu"] = 100 * tps * self.flops_per_token / self.peak_flops
            full = tps * self.flops_per_token_full_attention
            values["mfu_full_attention"] = 100 * full / self.peak_flops
        return values
