"""Let a module be of a subclass of its class: what shards, splits or checkpoints it is then its own
forward, and its FQN and the code of the model stay as they are.

    specialize(module, sharded, names, False)
    type(module).__name__                       # "Linear", as before
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import nn

# (class, *options) -> what a subclass of it has of its own, by name
Members = Callable[..., Mapping[str, object]]


def specialize(module: nn.Module, members: Members, *options: Hashable) -> None:
    """Give `module` a subclass of its class, of the same name, with members(class, *options).

    All modules alike have one, in every model: members must not close over a mesh.
    """
    cls: Any = type(module)
    module.__class__ = _subclass(cls, members, options)


@functools.cache
def _subclass(
    cls: type[nn.Module], members: Members, options: tuple[Hashable, ...]
) -> type[nn.Module]:
    own = {"__module__": cls.__module__, **members(cls, *options)}
    return type(cls.__name__, (cls,), own)
