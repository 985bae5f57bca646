"""The ranks of a pipeline stage, by coordinates along the axes of its mesh.

ranks = Ranks.of({"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 4})
ranks.axes, ranks.sizes     # ("dp_shard", "tp"), (2, 4)
ranks.coordinates(5)        # (1, 1)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_lite.distributed.layout import AXES

INNER = "'"  # at the end of the name of the part of an axis that expert parallelism has


class Divergence(Exception):
    """The graphs of the ranks do not go together: ranks wait for each other, an operator fails, or
    a graph is not as it was fitted.
    """


@dataclass(frozen=True)
class Ranks:
    """The ranks of a pipeline stage, by coordinates along the axes that have more than one.

    Expert parallelism has the innermost ranks of dp_shard x cp x tp. An axis of which it has a part
    is two axes here, and the name of the inner one ends with "'": the groups of experts are along
    axes, unless they straddle an axis, such as 4 ranks of experts beside 3 of tp.
    """

    axes: tuple[str, ...]  # the outermost first
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, degrees: Mapping[str, int], expert_parallel: int = 1) -> "Ranks":
        found: list[tuple[str, int]] = []
        inner = 1
        for axis in reversed(AXES[1:]):
            size = degrees[axis]
            cut, straddled = divmod(expert_parallel, inner)
            if axis != "dp_replicate" and not straddled and 1 < cut < size and size % cut == 0:
                found += [(axis + INNER, cut), (axis, size // cut)]
            else:
                found.append((axis, size))
            inner *= size
        found = [(axis, size) for axis, size in reversed(found) if size > 1]
        return cls(tuple(axis for axis, _ in found), tuple(size for _, size in found))

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def stride(self, axis: int) -> int:
        return math.prod(self.sizes[axis + 1 :])

    def are_straddled(self, expert_parallel: int) -> bool:
        """Return whether the groups of expert parallelism are not along axes."""
        strides = map(self.stride, range(len(self.sizes)))
        return expert_parallel not in (1, len(self), *strides)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return tuple(rank // self.stride(axis) % size for axis, size in enumerate(self.sizes))

    def rank(self, coordinates: Sequence[int]) -> int:
        return sum(index * self.stride(axis) for axis, index in enumerate(coordinates))

    def by_axis(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank along dp_replicate, dp_shard, cp and tp."""
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        found = dict(zip(self.axes, self.coordinates(rank), strict=True))
        return {
            axis: found.get(axis, 0) * sizes.get(axis + INNER, 1) + found.get(axis + INNER, 0)
            for axis in AXES[1:]
        }

    def groups_like(self, group: Sequence[int]) -> list[list[int]]:
        """Return the groups of all ranks along the same axes as `group`: it has one stride."""
        size = len(group)
        stride = group[1] - group[0] if size > 1 else 1
        if list(group) != [group[0] + index * stride for index in range(size)]:
            raise Divergence(f"the group {list(group)} is not along axes of the mesh")
        first = (rank for rank in self if rank // stride % size == 0)
        return [[start + index * stride for index in range(size)] for start in first]
