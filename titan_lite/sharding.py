"""Which part of a sharded dimension is a rank's.

    chunk_size(10, parts=4)             # 3
    chunk_range(10, parts=4, index=3)   # range(9, 10); the other chunks have 3 indices each

Needs no torch: the layout of a run is computed without it.
"""


def chunk_size(size: int, parts: int) -> int:
    """Return the length of the longest chunk of `size`, cut as torch.chunk and DTensor do."""
    return (size + parts - 1) // parts


def chunk_range(size: int, parts: int, index: int) -> range:
    """Return the indices of chunk `index`. The last chunks may be shorter, or empty."""
    step = chunk_size(size, parts)
    return range(min(index * step, size), min((index + 1) * step, size))
