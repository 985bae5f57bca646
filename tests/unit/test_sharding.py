"""The chunks of a sharded dimension are those of torch.chunk, with empty ones after them."""

import pytest
import torch

from titan_lite.dtensor import local
from titan_lite.sharding import chunk_range, chunk_size


@pytest.mark.parametrize("size", [1, 5, 8, 10, 97])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 12])
def test_chunks_are_those_of_torch(size, parts):
    ours = [list(chunk_range(size, parts, index)) for index in range(parts)]
    torchs = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    assert ours == torchs + [[]] * (parts - len(torchs))
    assert chunk_size(size, parts) == len(torchs[0])


def test_a_plain_tensor_is_local():
    tensor = torch.ones(3)
    assert local(tensor) is tensor
