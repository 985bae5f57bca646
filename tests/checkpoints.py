"""Read what a checkpoint has, and damage it: tensors = tensors_of(folder / "checkpoint/step-4").
Weights in memory, to write some: write_hf(folder, Given(config, tensors)).
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_lite.checkpoint.weights import shapes
from titan_lite.models.shapes import buffer_shapes


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


class Given:
    """Weights in memory, in the form of those of a folder.

    tensors: by FQN; buffers may be absent. special_tokens: those of BOS and EOS.
    """

    def __init__(self, config, tensors, special_tokens=(None, None)):
        self.folder = Path("given")
        self.config = config
        self.tensors = {fqn: tensor.detach() for fqn, tensor in tensors.items()}
        self.special_tokens = dict(
            zip(("bos_token_id", "eos_token_id"), special_tokens, strict=True)
        )
        self.shapes = shapes(config)
        self.dtypes = {fqn: tensors[fqn].dtype for fqn in self.shapes}
        buffers = buffer_shapes(config).items()
        self.buffers = {fqn: torch.Size(shape) for fqn, shape in buffers if fqn in tensors}

    def read(self, fqn):
        return self.tensors[fqn]
