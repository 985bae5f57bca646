"""Show the progress of a search or a sweep on stderr: one rewritten line on a terminal, elsewhere a line at intervals.

progress = Progress()
progress.show("planned 3 of 12", 0.25, "5,123 tokens/s per GPU: tp 8, ...")     # adds the estimated time
progress.close()
in_units(52000, 67000)                                                        # 14.4 to 18.6 hours
"""

import shutil
import sys
import time

EVERY = 10.0  # seconds from one plain line to the next
UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


class Progress:
    def __init__(self) -> None:
        self.terminal, self.began, self.shown = sys.stderr.isatty(), time.monotonic(), -EVERY

    def show(self, what: str, share: float, best: str = "") -> None:
        """Show a state. share: fraction of the work that is done, from 0 to 1."""
        passed = time.monotonic() - self.began
        words = f"{what}, {in_units(round(passed))}"
        if share:
            words += f" of about {in_units(round(passed / share, -1))}"
        if best:
            words += f"; best so far {best}"
        if self.terminal:
            print(
                f"\r\033[K{words[: shutil.get_terminal_size().columns - 1]}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        elif time.monotonic() - self.shown >= EVERY:
            self.shown = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def in_units(*seconds: float) -> str:
    """Return a duration, or a range of durations, in the unit that fits the longest."""
    unit = next((unit for unit, size in UNITS.items() if max(seconds) >= 2 * size), "seconds")
    return f"{' to '.join(rounded(each / UNITS[unit]) for each in seconds)} {unit}"


def rounded(number: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
