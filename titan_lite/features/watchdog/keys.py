"""The key of the watchdog, beside the time limits of [comm]. Imports no torch."""

from typing import ClassVar

from titan_lite.config.section import Section


class WatchdogKeys(Section):
    table: ClassVar[str] = "comm"

    watchdog: bool = True
    """End a run that hangs, and name the rank that the others wait for; log a rank whose data is
    slow. false, for a debugger: torch ends a collective 30 s after the longest limit."""


KEYS = (WatchdogKeys,)
TENSORS: dict[str, str] = {}
