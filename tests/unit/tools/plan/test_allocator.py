"""The rules of CUDA's caching allocator, each by a few requests worked out by hand."""

import itertools
import random

import pytest

from titan_lite.tools.plan.allocator import MIB, CachingAllocator


def figures(allocator):
    """MiB that are reserved and allocated."""
    return allocator.reserved / MIB, allocator.allocated / MIB


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_a_request_is_rounded_up_to_512_bytes(nbytes, size):
    allocator = CachingAllocator()
    assert allocator.malloc(nbytes).size == size
    # 1 byte to 1 MiB: of a granule of 2 MiB; above: of one of 20 MiB
    assert figures(allocator) == (2 if nbytes <= MIB else 20, size / MIB)


def test_nothing_is_allocated_for_no_bytes():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(0))
    assert figures(allocator) == (0, 0)


def test_the_smallest_block_that_is_large_enough_is_taken_and_then_the_lowest():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(mib * MIB) for mib in (30, 2, 20, 2, 20, 6)]
    for number in (0, 4, 2):
        allocator.free(blocks[number])
    # 20 MiB fit better than 30, and the first 20 lie before the others
    assert allocator.malloc(16 * MIB).address == blocks[2].address
    # what was left of it fits best
    assert allocator.malloc(4 * MIB).address == blocks[2].address + 16 * MIB
    assert allocator.reserved == 80 * MIB


def test_the_pools_do_not_serve_each_other():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(MIB)
    assert figures(allocator) == (22, 1)


def test_free_neighbours_are_joined_and_memory_stays():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert figures(allocator) == (20, 5)
    assert allocator.malloc(15 * MIB).address == 0
    assert allocator.reserved == 20 * MIB


def test_a_pool_grows_by_20_mib_or_2_at_its_end():
    allocator = CachingAllocator()
    first, _ = allocator.malloc(30 * MIB), allocator.malloc(1024)
    assert figures(allocator) == (40 + 2, 30 + 1024 / MIB)
    second = allocator.malloc(25 * MIB)
    # 10 are free at the end; with 15 more, in one granule, they are enough
    assert second.address == first.address + 30 * MIB
    assert figures(allocator) == (60 + 2, 55 + 1024 / MIB)


def test_512_bytes_are_split_off():
    allocator = CachingAllocator()
    allocator.malloc(20 * MIB - 512)
    allocator.malloc(20 * MIB)
    # begins 512 bytes before the second granule, so two granules are enough
    assert figures(allocator) == (40, 40 - 512 / MIB)


def test_a_block_before_the_end_comes_first_even_if_it_is_larger():
    """The free end counts as large as it can grow."""
    allocator = CachingAllocator()
    first, _ = allocator.malloc(15 * MIB), allocator.malloc(5 * MIB)
    last = allocator.malloc(8 * MIB)  # of 20 MiB more, 12 at the end are free
    allocator.free(first)
    # free are 15 MiB and the 12 at the end
    assert allocator.malloc(11 * MIB).address == first.address
    assert allocator.malloc(11 * MIB).address == last.address + 8 * MIB
    assert allocator.reserved == 40 * MIB


def test_no_byte_is_lost_and_none_is_in_two_blocks():
    allocator, random_numbers = CachingAllocator(), random.Random(0)
    live = []
    for _ in range(5000):
        if random_numbers.random() < 0.5 or not live:
            live.append(allocator.malloc(int(10 ** random_numbers.uniform(1, 8))))
        else:
            allocator.free(live.pop(random_numbers.randrange(len(live))))
    for pool in (allocator.small, allocator.large):
        free = [block for _, _, block in pool.free]
        blocks = [*free, *(block for block in live if block.pool is pool)]
        ranges = sorted((block.address, block.address + block.size) for block in blocks)
        assert sum(block.size for block in blocks) == pool.reserved == ranges[-1][1]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert sum(block.size for block in live) == allocator.allocated
