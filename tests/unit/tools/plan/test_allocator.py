"""The rules of CUDA's caching allocator, each by a few requests worked out by hand."""

import itertools
import random

import pytest

from titan_lite.tools.plan.allocator import MIB, CachingAllocator, OutOfDeviceMemory, round_size

LARGE = 1000 * MIB


def figures(allocator):
    """MiB that are reserved and allocated, and segments."""
    return allocator.reserved / MIB, allocator.allocated / MIB, allocator.segments


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_a_request_is_rounded_up_to_512_bytes(nbytes, size):
    assert round_size(nbytes) == size
    allocator = CachingAllocator(LARGE)
    allocator.malloc(nbytes)
    # 1 byte to 1 MiB: from a segment of 2 MiB; above: from one of 20 MiB
    assert figures(allocator) == (2 if nbytes <= MIB else 20, size / MIB, 1)


def test_nothing_is_allocated_for_no_bytes():
    allocator = CachingAllocator(LARGE)
    allocator.free(allocator.malloc(0))
    assert figures(allocator) == (0, 0, 0)


@pytest.mark.parametrize(
    ("mib", "segment"),
    [(1, 2), (1.5, 20), (9.5, 20), (10, 10), (10.5, 12), (33, 34)],
)
def test_a_segment_for_a_request(mib, segment):
    """Up to 1 MiB 2, below 10 MiB 20, and above a multiple of 2."""
    allocator = CachingAllocator(LARGE)
    allocator.malloc(int(mib * MIB))
    assert allocator.reserved == segment * MIB


def test_small_requests_share_a_segment():
    allocator = CachingAllocator(LARGE)
    for _ in range(2 * 1024):  # 1 KiB each: 2,048 of them fill 2 MiB
        allocator.malloc(1024)
    assert figures(allocator) == (2, 2, 1)
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB


def test_what_is_left_of_a_large_block_is_split_off_above_1_mib():
    allocator = CachingAllocator(LARGE)
    allocator.malloc(
        11 * MIB
    )  # of 12 MiB 1 MiB is left, which is not more than 1 MiB: all 12 are in use
    assert figures(allocator) == (12, 12, 1)
    allocator.malloc(2 * MIB)  # of 20 MiB 18 are left
    allocator.malloc(18 * MIB)
    assert figures(allocator) == (32, 32, 2)


def test_what_is_left_of_a_small_block_is_split_off_from_512_bytes_on():
    allocator = CachingAllocator(LARGE)
    blocks = [allocator.malloc(size) for size in (MIB, MIB - 512, 512)]
    assert figures(allocator) == (2, 2, 1)
    assert [block.address for block in blocks] == [0, MIB, 2 * MIB - 512]


def test_the_smallest_block_that_is_large_enough_is_taken_and_then_the_lowest():
    allocator = CachingAllocator(LARGE)
    first, second, third = (allocator.malloc(mib * MIB) for mib in (30, 20, 20))
    for block in (first, third, second):
        allocator.free(block)
    assert (
        allocator.malloc(16 * MIB).address == second.address
    )  # 20 MiB fit better than 30, and `second` lies before `third`
    assert (
        allocator.malloc(4 * MIB).address == second.address + 16 * MIB
    )  # what was left of it fits best
    assert allocator.reserved == 70 * MIB


def test_the_pools_do_not_serve_each_other():
    allocator = CachingAllocator(LARGE)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(MIB)
    assert figures(allocator) == (22, 1, 2)


def test_free_neighbours_are_joined_and_segments_stay():
    allocator = CachingAllocator(LARGE)
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert figures(allocator) == (20, 5, 1)
    assert allocator.malloc(15 * MIB).address == 0
    assert allocator.reserved == 20 * MIB


def test_neighbours_in_use_and_segments_apart_are_not_joined():
    allocator = CachingAllocator(LARGE)
    blocks = [allocator.malloc(5 * MIB) for _ in range(8)]  # two segments
    for block in (blocks[0], blocks[2], blocks[3], blocks[4]):
        allocator.free(block)
    allocator.malloc(12 * MIB)  # free are 5, 10 and 5 MiB, and no 12
    assert allocator.reserved == 52 * MIB


def test_a_full_device_gets_unused_segments_back_but_no_split_ones():
    allocator = CachingAllocator(64 * MIB)
    unused, split = allocator.malloc(30 * MIB), allocator.malloc(5 * MIB)
    allocator.free(unused)
    allocator.malloc(
        40 * MIB
    )  # 50 are reserved, 14 left; the 30 go back, the 20 of which 5 are in use do not
    assert figures(allocator) == (60, 45, 2)
    assert allocator.most_reserved == 60 * MIB
    allocator.free(split)
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(30 * MIB)
    assert allocator.reserved == 40 * MIB  # those 20 went back, too


def test_an_expandable_segment_grows_by_20_mib_or_2_at_its_end():
    allocator = CachingAllocator(LARGE, expandable=True)
    first, small = allocator.malloc(30 * MIB), allocator.malloc(1024)
    assert figures(allocator) == (40 + 2, 30 + 1024 / MIB, 2)
    second = allocator.malloc(
        25 * MIB
    )  # 10 are free at the end; with 15 more, in one granule, they are enough
    assert second.address == first.address + 30 * MIB
    assert figures(allocator) == (60 + 2, 55 + 1024 / MIB, 2)
    assert not first.small
    assert small.small


def test_in_an_expandable_segment_512_bytes_are_split_off():
    allocator = CachingAllocator(LARGE, expandable=True)
    allocator.malloc(20 * MIB - 512)
    allocator.malloc(
        20 * MIB
    )  # begins 512 bytes before the second granule, so two granules are enough
    assert figures(allocator) == (40, 40 - 512 / MIB, 1)


def test_a_block_before_the_end_comes_first_even_if_it_is_larger():
    """The free end counts as large as it can grow."""
    allocator = CachingAllocator(LARGE, expandable=True)
    first, _ = allocator.malloc(15 * MIB), allocator.malloc(5 * MIB)
    last = allocator.malloc(8 * MIB)  # of 20 MiB more, 12 at the end are free
    allocator.free(first)
    assert (
        allocator.malloc(11 * MIB).address == first.address
    )  # free are 15 MiB and the 12 at the end
    assert allocator.malloc(11 * MIB).address == last.address + 8 * MIB
    assert allocator.reserved == 40 * MIB


def test_gaps_that_need_a_segment_each_otherwise_are_filled_by_an_expandable_one():
    """Ever larger requests, freed each time: fixed segments are too small for the next one, an
    expandable one is extended.
    """
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(LARGE, expandable)
        for mib in (40, 60, 80):
            allocator.free(allocator.malloc(mib * MIB))
        reserved[expandable] = allocator.reserved / MIB
    assert reserved == {False: 40 + 60 + 80, True: 80}


def test_a_full_device_gets_whole_granules_of_an_expandable_segment_back():
    allocator = CachingAllocator(120 * MIB, expandable=True)
    blocks = [
        allocator.malloc(mib * MIB) for mib in (10, 40, 10)
    ]  # granules 0 to 2; the 40 touch all three
    small = [allocator.malloc(MIB) for _ in range(38)]  # 19 granules of 2 MiB
    assert allocator.reserved == (60 + 38) * MIB
    allocator.free(blocks[1])
    for block in small[:20]:
        allocator.free(block)
    # 41 MiB are free nowhere, and 3 granules more would be 158. Granule 1 and ten small ones go
    # back: 58. Between the blocks in use there are 10 + 20 + 10 MiB, so the new block is at the
    # end.
    assert allocator.malloc(41 * MIB).address == 60 * MIB
    assert allocator.reserved == (60 - 20 + 38 - 20 + 60) * MIB
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(40 * MIB)  # granule 1 again would be 138


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("device", [LARGE * MIB, 3000 * MIB])
def test_no_byte_is_lost_and_none_is_in_two_blocks(device, expandable):
    allocator, random_numbers = CachingAllocator(device, expandable), random.Random(0)
    live = []
    for _ in range(5000):
        if random_numbers.random() < 0.5 or not live:
            try:
                live.append(allocator.malloc(int(10 ** random_numbers.uniform(1, 8))))
            except OutOfDeviceMemory:
                assert device < LARGE * MIB
        else:
            allocator.free(live.pop(random_numbers.randrange(len(live))))
    free = [block for pool in allocator.pools.values() for _, _, block in pool.free]
    assert sum(block.size for block in live) == allocator.allocated
    assert sum(block.size for block in (*free, *live)) == allocator.reserved <= device
    ranges = sorted((block.address, block.address + block.size) for block in (*free, *live))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
