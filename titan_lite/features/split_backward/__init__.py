"""Backward in two halves, for pipeline schedules without bubbles (arXiv 2401.10241)."""
