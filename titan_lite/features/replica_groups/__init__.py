"""Replica groups that train one run together, of which some may be lost."""
