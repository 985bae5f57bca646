"""Replace an attribute of torch for a while.

with replaced(partitioners, "has_recomputable_rng_ops", lambda graph: False):
    ...
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context in which the attribute `name` of a module or class is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
