"""No keys: training.compare_copies_freq is that of fault_tolerance.copies, too, and of `verify`
(config/sections.py).
"""

KEYS = ()
TENSORS: dict[str, str] = {}
