"""Checksums see every bit and every place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_lite import checksum as module
from titan_lite.checksum import examine


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """So that a few numbers are several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CHUNK, "cpu", 8)
        module._weights.cache_clear()
        yield
    module._weights.cache_clear()


def checksum(tensor):
    return examine(tensor)[0]


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=40), st.data())
def test_it_sees_one_number_that_changes_and_two_that_change_places(numbers, data):
    bits = torch.tensor(numbers, dtype=torch.int32)
    before = checksum(bits.view(torch.float32))
    first, second = (data.draw(st.integers(0, len(numbers) - 1)) for _ in range(2))
    swapped = bits.clone()
    swapped[first], swapped[second] = bits[second], bits[first]
    assert bool(checksum(swapped.view(torch.float32)) == before) == torch.equal(swapped, bits)
    changed = bits.clone()
    changed[first] = data.draw(st.integers(-(2**31), 2**31 - 1))
    assert bool(checksum(changed.view(torch.float32)) == before) == torch.equal(changed, bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_of_the_numbers_in_their_order_and_not_of_their_strides(dtype):
    numbers = (100 * torch.randn(7, 5)).to(dtype)
    assert checksum(numbers.t().contiguous().t()) == checksum(numbers)
    assert checksum(numbers.t()) != checksum(numbers)
    assert checksum(numbers).dtype == torch.int64


def test_of_a_shard_without_rows_and_of_a_scalar():
    assert checksum(torch.empty(0, 8)) == 0
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))


def test_several_changes_do_not_cancel():
    # as they do in a sum of numbers times their places: +1 -2 +1
    change, zeros = torch.tensor([1, -2, 1], dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    found = {int(checksum(torch.cat((zeros[:at], change, zeros[at + 3 :])))) for at in range(14)}
    assert 0 not in found
