"""No rules: a watchdog goes with all other keys."""
