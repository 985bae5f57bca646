"""Model PyTorch's CUDA caching allocator: the bytes that it reserves for a sequence of allocations
and frees.

    allocator = CachingAllocator()
    block = allocator.malloc(3 * MIB)
    allocator.free(block)
    allocator.reserved, allocator.allocated, allocator.most_allocated         # bytes

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with `expandable_segments`,
which launch.py sets; each docstring names the function there. The model has one stream, and a
device without a limit: each pool has one segment, which grows and is never given back.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_GRANULE = 2 * MIB  # kSmallBuffer: the bytes that the small pool grows by
LARGE_GRANULE = 20 * MIB  # kLargeBuffer


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses of a pool, in use or free."""

    pool: "Pool" = field(repr=False)
    address: int
    size: int
    in_use: bool = False
    previous: "Block | None" = field(default=None, repr=False)
    next: "Block | None" = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class Pool:
    """A segment of blocks, and the free ones by size, then address (BlockComparatorSize)."""

    granule: int
    reserved: int = 0  # bytes
    last: Block | None = None
    free: list[tuple[int, int, Block]] = field(default_factory=list)

    def take(self, size: int) -> Block:
        """Take the smallest free block that is large enough, at the lowest address
        (`get_free_block`).

        The last block counts as large as it can grow, so that a larger block comes before it.
        """
        index = bisect_left(self.free, (size,))
        if index + 1 < len(self.free) and self.free[index][2] is self.last:
            index += 1
        if index < len(self.free):
            return self.free.pop(index)[2]
        return self.grow(size)

    def grow(self, size: int) -> Block:
        """Extend the last block by whole granules, or make one behind it
        (`try_allocate_expandable_block`).
        """
        block = self.last
        if block is None or block.in_use:
            block = Block(self, self.reserved, 0, previous=self.last)
            if self.last is not None:
                self.last.next = block
            self.last = block
        else:
            self.remove(block)
        missing = _up(size - block.size, self.granule)
        block.size += missing
        self.reserved += missing
        return block

    def add(self, block: Block) -> None:
        """Add a block to the free ones, joined with free neighbours (`free_block`)."""
        block.in_use = False
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.in_use:
                self.remove(neighbour)
                block.address = min(block.address, neighbour.address)
                block.size += neighbour.size
                if neighbour is block.previous:
                    self.link(neighbour.previous, block)
                else:
                    self.link(block, neighbour.next)
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def split(self, block: Block, size: int) -> None:
        """Cut a block after `size` bytes, and add the rest to the free ones."""
        rest = Block(self, block.address + size, block.size - size)
        self.link(rest, block.next)
        self.link(block, rest)
        block.size = size
        insort(self.free, (rest.size, rest.address, rest))

    def link(self, one: Block | None, other: Block | None) -> None:
        """Make two blocks neighbours; None: there is none on this side."""
        if one is not None:
            one.next = other
        if other is not None:
            other.previous = one
        else:
            self.last = one


class CachingAllocator:
    """The allocator of one device. allocated: bytes now; most_allocated: their peak."""

    def __init__(self) -> None:
        self.small = Pool(SMALL_GRANULE)
        self.large = Pool(LARGE_GRANULE)
        self.allocated = 0
        self.most_allocated = 0

    @property
    def reserved(self) -> int:
        """Bytes of both pools, which only grow."""
        return self.small.reserved + self.large.reserved

    def malloc(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes`; None for no bytes (`malloc`)."""
        if not nbytes:
            return None
        size = _up(nbytes, MIN_BLOCK)
        pool = self.small if size <= SMALL_SIZE else self.large
        block = pool.take(size)
        block.in_use = True
        if block.size > size:
            pool.split(block, size)
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        """Return a block to its pool."""
        if block is not None:
            self.allocated -= block.size
            block.pool.add(block)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
