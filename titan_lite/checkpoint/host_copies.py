"""Copy a step's tensors to host memory, so that training goes on while they are written.

    copies = HostCopies(pinned=torch.cuda.is_available())
    staged = copies.update(tensors)     # {name: this rank's part, on the host}
    ...                                 # write what is staged, while the tensors change
    staged = copies.update(tensors)     # of the next step, in the same memory

Memory that a process has just allocated costs several times the copy itself: the kernel clears each
page at its first use, and a GPU's driver pins it. So the copies stay allocated from save to save.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_lite.dtensor import local


class HostCopies:
    """Copies of this rank's parts of tensors, in memory that is kept.

    pinned: in page-locked memory, to which a GPU copies at the speed of its bus. torch rounds its
    blocks up to powers of two.
    """

    def __init__(self, *, pinned: bool):
        self.pinned = pinned
        self.copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors, and return the copies by the same names.

        What the last call returned is overwritten: it must have been written. Memory of a name that
        is not among the tensors, or has another shape or dtype now, is freed. Raises RuntimeError
        if there is too little memory; nothing is kept then.
        """
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        self.copies = {
            name: copy
            for name, copy in self.copies.items()
            if name in parts and _is_alike(copy, parts[name])
        }
        try:
            for name, part in parts.items():
                if name not in self.copies:
                    self.copies[name] = torch.empty(
                        part.shape, dtype=part.dtype, device="cpu", pin_memory=self.pinned
                    )
                self.copies[name].copy_(part, non_blocking=self.pinned)
            if self.pinned:
                torch.cuda.synchronize()
        except Exception:
            self.copies = {}
            raise
        return dict(self.copies)


def _is_alike(copy: Tensor, part: Tensor) -> bool:
    return copy.shape == part.shape and copy.dtype == part.dtype
