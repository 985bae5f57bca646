"""How far a search or a sweep is, on stderr: on a terminal one line that is rewritten, elsewhere a plain line now and then.

progress = Progress()
progress.show("planned 3 of 12", 0.25, "5,123 tokens/s a GPU: tp 8, ...")       # with the time that is left
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
        self.terminal, self.began, self.said = sys.stderr.isatty(), time.monotonic(), -EVERY

    def show(self, what: str, share: float, best: str = "") -> None:
        """share: of the work since this progress began that is done, from 0 to 1."""
        passed = time.monotonic() - self.began
        words = f"{what}, {in_units(round(passed))}"
        if share:
            words += f" of about {in_units(round(passed / share, -1))}"
        if best:
            words += f"; best so far {best}"
        if self.terminal:
            print(f"\r\033[K{words[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def in_units(*seconds: float) -> str:
    """A duration, or a range of them, in the unit that fits the longest."""
    unit = next((unit for unit, size in UNITS.items() if max(seconds) >= 2 * size), "seconds")
    return f"{' to '.join(rounded(each / UNITS[unit]) for each in seconds)} {unit}"


def rounded(number: float) -> str:
    """Three digits, and no fewer than the whole part has."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
