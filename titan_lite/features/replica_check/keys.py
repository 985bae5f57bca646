"""No keys: training.compare_replicas_freq is that of fault_tolerance.replica_groups, too, and of
`verify` (config/sections.py).
"""

KEYS = ()
TENSORS: dict[str, str] = {}
