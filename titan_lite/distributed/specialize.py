"""Give a module a subclass of its class, whose properties or forward shard, split or checkpoint it.

Its FQN and the model's code stay as they are.

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

    Modules with the same class, members and options share a subclass, in every model: members must
    not close over a mesh.
    """
    cls: Any = type(module)
    module.__class__ = _subclass(cls, members, options)


@functools.cache
def _subclass(
    cls: type[nn.Module], members: Members, options: tuple[Hashable, ...]
) -> type[nn.Module]:
    own = {"__module__": cls.__module__, **members(cls, *options)}
    return type(cls.__name__, (cls,), own)
