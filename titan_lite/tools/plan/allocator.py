"""Model PyTorch's CUDA caching allocator: the bytes that it reserves for a sequence of allocations
and frees.

    allocator = CachingAllocator(device=80 * GIB, expandable=True)
    block = allocator.malloc(3 * MIB)
    allocator.free(block)
    allocator.reserved, allocator.most_reserved, allocator.most_allocated         # bytes

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13, without `max_split_size_mb`);
each docstring names the function there. The model has one stream. Memory that a communication
stream holds is freed later by the caller (replay.py).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise

MIB = 2**20
MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_BUFFER = 2 * MIB  # kSmallBuffer
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc
LARGE_BUFFER = 20 * MIB  # kLargeBuffer
ROUND_LARGE = 2 * MIB  # kRoundLarge


class OutOfDeviceMemory(Exception):
    """A request that fits nowhere, even after all unused segments are given back."""


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses: in use, free, or (in an expandable segment) without memory."""

    small: bool  # pool
    address: int
    size: int
    in_use: bool = False
    mapped: bool = True
    previous: "Block | None" = field(default=None, repr=False)  # in the same segment
    next: "Block | None" = field(default=None, repr=False)


@dataclass(slots=True)
class Pool:
    """Free blocks by size, then address (BlockComparatorSize), and blocks without memory by
    address.
    """

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """The allocator of one device.

    device: bytes of memory that segments may take; expandable: with `expandable_segments:True`.
    reserved, allocated: bytes now;
    most_reserved, most_allocated: their peaks; segments: number of segments that cudaMalloc
    returned, or of expandable ones.
    """

    def __init__(self, device: int, expandable: bool = False):
        self.device = device
        self.expandable = expandable
        self.pools = {small: Pool(small) for small in (True, False)}
        self.reserved = 0
        self.most_reserved = 0
        self.allocated = 0
        self.most_allocated = 0
        self.segments = 0
        self._end = 0  # of all addresses so far

    def malloc(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes`; None for no bytes. Raises OutOfDeviceMemory.

        `malloc`: a free block, else a new segment, else the same after all unused segments are
        given back.
        """
        if not nbytes:
            return None
        size = round_size(nbytes)
        pool = self.pools[size <= SMALL_SIZE]
        block = self._free_block(pool, size) or self._new_block(pool, size)
        if block is None:
            self._release_cached()
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfDeviceMemory(f"{nbytes} bytes, {self.device - self.reserved} are left")
        if self._should_split(block, size):
            _split(block, size)
            assert block.next is not None
            pool.add(block.next)
        block.in_use = True
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        """Return True if what a block has beyond `size` becomes a block of its own.

        `should_split`: of a large block only what is worth it, except in an expandable segment.
        """
        rest = block.size - size
        if block.small or self.expandable:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE

    def free(self, block: Block | None) -> None:
        """Return a block to its pool, joined with free neighbours.

        Its segment stays (`free_block`).
        """
        if block is None:
            return
        self.allocated -= block.size
        block.in_use = False
        pool = self.pools[block.small]
        _merge(block, pool)
        pool.add(block)

    def _free_block(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough, at the lowest address
        (`get_free_block`).

        In an expandable segment the last block counts as large as it can grow, so that a larger
        block before it comes first.
        """
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        if self.expandable:
            for (*_, here), (*_, following) in pairwise(pool.free[index:]):
                if _can_grow_to(following) >= _can_grow_to(here):
                    break
                index += 1
        return pool.free.pop(index)[2]

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Return a block of new memory, at least `size` bytes; None if the device is full
        (`alloc_block`).
        """
        if self.expandable:
            return self._expand(pool, size)
        nbytes = _segment_bytes(size, small=pool.small)
        if self.reserved + nbytes > self.device:
            return None
        self._reserve(nbytes)
        self.segments += 1
        return Block(pool.small, self._addresses(nbytes), nbytes)

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map memory at the lowest address with room for `size` bytes, after a free block before it
        (`try_allocate_expandable_block`, `find_expandable_block`)."""
        block = next(filter(None, (_with_room(block, size) for _, block in pool.unmapped)), None)
        if block is None:
            self.segments += 1  # address space for 9/8 of the device
            nbytes = _up(max(self.device + self.device // 8, size), _granule(pool))
            block = Block(pool.small, self._addresses(nbytes), nbytes, mapped=False)
            insort(pool.unmapped, (block.address, block), key=_address_of)
        if not block.mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(pool, following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _map(self, pool: Pool, block: Block, size: int) -> bool:
        """Give memory to the first `size` bytes of a block, in whole granules (`map_block`)."""
        nbytes = _up(size, _granule(pool))
        if self.reserved + nbytes > self.device:
            return False
        self._reserve(nbytes)
        pool.remove(block)
        if nbytes < block.size:
            _split(block, nbytes)
            assert block.next is not None
            insort(pool.unmapped, (block.next.address, block.next), key=_address_of)
        block.mapped = True
        _merge(block, pool)
        pool.add(block)
        return True

    def _release_cached(self) -> None:
        """Give back segments without a block in use, or the whole free granules of expandable ones
        (`release_cached_blocks`).
        """
        for pool in self.pools.values():
            for *_, block in list(pool.free):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size
                    self.segments -= 1

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Take the memory of a free block's whole granules; what is left on both sides stays free
        (`unmap_block`).
        """
        granule = _granule(pool)
        begin = _up(block.address, granule)
        end = (block.address + block.size) // granule * granule
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            _split(block, begin - block.address)
            pool.add(block)
            assert block.next is not None
            block = block.next
        if block.size > end - begin:
            _split(block, end - begin)
            assert block.next is not None
            pool.add(block.next)
        block.mapped = False
        self.reserved -= block.size
        _merge(block, pool)
        insort(pool.unmapped, (block.address, block), key=_address_of)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _addresses(self, nbytes: int) -> int:
        """Return the start of a new range of addresses, which touches no other and suits every
        granule.
        """
        start = self._end
        self._end = _up(start + nbytes, LARGE_BUFFER) + LARGE_BUFFER
        return start


def round_size(nbytes: int) -> int:
    """Return the size of the block for a request (`round_size`)."""
    return _up(nbytes, MIN_BLOCK)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _granule(pool: Pool) -> int:
    """Return the bytes that an expandable segment grows by."""
    return SMALL_BUFFER if pool.small else LARGE_BUFFER


def _address_of(entry: tuple[int, Block]) -> int:
    return entry[0]


def _can_grow_to(block: Block) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _with_room(block: Block, size: int) -> Block | None:
    """Return the block, or a free one before it, if unused addresses from there on suffice."""
    first = block.previous if block.previous is not None and not block.previous.in_use else block
    room = 0
    unused: Block | None = first
    while room < size and unused is not None and not unused.in_use:
        room += unused.size
        unused = unused.next
    return first if room >= size else None


def _segment_bytes(size: int, *, small: bool) -> int:
    """Return the bytes of a new segment for a block of `size` (`get_allocation_size`)."""
    if small:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return _up(size, ROUND_LARGE)


def _split(block: Block, size: int) -> None:
    """Cut a block after `size` bytes. The rest is its next block, as mapped as the block is."""
    rest = Block(
        small=block.small,
        address=block.address + size,
        size=block.size - size,
        in_use=False,
        mapped=block.mapped,
        previous=block,
        next=block.next,
    )
    if block.next is not None:
        block.next.previous = rest
    block.next = rest
    block.size = size


def _merge(block: Block, pool: Pool) -> None:
    """Join a block, which is in no pool, with neighbours that are not in use either
    (`try_merge_blocks`).
    """
    before, after = block.previous, block.next
    if before is not None and not before.in_use and before.mapped == block.mapped:
        pool.remove(before)
        block.address = before.address
        block.size += before.size
        block.previous = before.previous
        if block.previous is not None:
            block.previous.next = block
    if after is not None and not after.in_use and after.mapped == block.mapped:
        pool.remove(after)
        block.size += after.size
        block.next = after.next
        if block.next is not None:
            block.next.previous = block
