"""Ranks among themselves: objects gathered over all of them, and errors that are about another one."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank of the group (None: of all), by rank; without a process group, this one's alone."""
    if not dist.is_initialized():
        return [value]
    everyone = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    return everyone


def is_communication(error: BaseException | None) -> bool:
    """Whether it, or what it came from, is about another rank rather than this one. gloo's are plain RuntimeErrors."""
    if error is None:
        return False
    gloo = type(error) is RuntimeError and "gloo" in str(error)
    return gloo or isinstance(error, dist.DistError) or is_communication(error.__cause__)
