"""Read what a checkpoint has, and damage it: tensors = tensors_of(folder / "checkpoint/step-4")."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors_of(step: Path) -> dict[str, torch.Tensor]:
    """Return every parameter and tensor of the optimizer's state, complete, by name."""
    reader = dcp.FileSystemReader(step)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def flip(path: Path) -> None:
    """Flip the lowest bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
