"""Measure the seconds of each part of a start on a rank, to the end of the first step.

times = StartTimes()
times.begin("imports")
times.begin("first step")
times.end()
times.seconds                           # {"imports": 2.9, "first step": 1.4}
"""

from time import perf_counter


class StartTimes:
    """The parts of a start, in order; a part ends where the next one begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of the parts that have ended
        self._part = ""
        self._began = perf_counter()

    def begin(self, part: str) -> None:
        """End the present part, and begin another one. Parts of one name are added up."""
        self.end()
        self._part = part

    def end(self) -> None:
        """End the present part."""
        now = perf_counter()
        if self._part:
            self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._began
        self._part = ""
        self._began = now

    def describe(self) -> str:
        """Return "3.5 s: imports 2.1, first step 1.4"."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"
