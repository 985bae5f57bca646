"""The key of the watchdog, beside the time limits of [comm]. Imports no torch."""

from typing import ClassVar

from titan_lite.config.section import Section


class WatchdogKeys(Section):
    table: ClassVar[str] = "comm"

    watchdog: bool = True
    """End a run that hangs, on all ranks, with the name of the rank that the others wait for; log a
    rank whose data is slow. false, as with a debugger: torch ends a collective after the longest of
    these limits and 30 s."""


KEYS = (WatchdogKeys,)
TENSORS: dict[str, str] = {}
