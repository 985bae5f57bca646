"""Let a module be of a subclass of its class: what shards, splits or checkpoints it is then its own
forward, and its FQN and the code of the model stay as they are.

    specialize(module, "Sharded", sharded, names, False)
    type(module).__name__                                   # "ShardedLinear"
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import nn

# (class, *options) -> what a subclass of it has of its own, by name
Members = Callable[..., Mapping[str, object]]


def specialize(module: nn.Module, role: str, members: Members, *options: Hashable) -> None:
    """Give `module` a subclass of its class, named by its role, with members(class, *options).

    All modules alike have one, in every model: members must not close over a mesh.
    """
    cls: Any = type(module)
    module.__class__ = _subclass(cls, role, members, options)


@functools.cache
def _subclass(
    cls: type[nn.Module], role: str, members: Members, options: tuple[Hashable, ...]
) -> type[nn.Module]:
    own = {"__module__": cls.__module__, **members(cls, *options)}
    return type(role + cls.__name__, (cls,), own)
