"""Copies in host memory: of their own, in memory that is kept while shapes stay."""

import pytest
import torch

from titan_lite.checkpoint.host_copies import HostCopies


def addresses(staged):
    return {name: copy.data_ptr() for name, copy in staged.items()}


def test_memory_of_another_shape_or_dtype_or_of_no_tensor_is_not_kept():
    copies = HostCopies(pinned=False)
    before = copies.update({name: torch.ones(4, 4) for name in ("same", "shape", "dtype", "gone")})
    live = {
        "same": torch.zeros(4, 4),
        "shape": torch.full((2, 8), 2.0),
        "dtype": torch.full((4, 4), 3.0, dtype=torch.bfloat16),
        "new": torch.full((1,), 4.0),
    }
    staged = copies.update(live)
    assert staged.keys() == live.keys() == copies.copies.keys()
    for name, tensor in live.items():
        assert staged[name].dtype == tensor.dtype
        assert torch.equal(staged[name], tensor)
    assert staged["same"].data_ptr() == before["same"].data_ptr()
    # what is not used again stays as it was
    for name in ("shape", "dtype", "gone"):
        assert torch.equal(before[name], torch.ones(4, 4))


def test_nothing_is_kept_where_memory_is_too_small(monkeypatch):
    copies = HostCopies(pinned=False)
    copies.update({"v": torch.zeros(4)})
    too_much = torch.empty(1).expand(2**50)
    with pytest.raises(RuntimeError, match="alloc"):
        copies.update({"v": torch.zeros(4), "w": too_much})
    assert copies.copies == {}


@pytest.mark.gpu
def test_copies_of_a_gpu_are_pinned():
    live = {"w": torch.randn(1000, 1000, device="cuda"), "step": torch.tensor(1.0)}
    copies = HostCopies(pinned=True)
    places = addresses(copies.update(live))
    staged = copies.update(live)
    live["w"].zero_()
    assert addresses(staged) == places
    assert all(copy.is_pinned() for copy in staged.values())
    assert staged["w"].abs().sum() > 0
