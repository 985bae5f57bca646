"""No keys: [fault_tolerance] is read by the launcher, too (config/sections.py)."""

KEYS = ()
TENSORS: dict[str, str] = {}
