"""State which part of a computation each rank has: what any right layout must equal.

    place = Place({"dp_shard": 4, "tp": 2}, {"dp_shard": 3, "tp": 1})       # degrees, coordinates
    sequences(batch, place)         # of its data-parallel rank
    positions(64, place)            # of its tokens within a sequence
    part("layers.0.attention.wq.weight", weight, place)

It imports nothing of the parallel code, and is what graphs are compared with:

    sequences    cut over (dp_replicate, dp_shard)
    tokens       2 cp chunks of a sequence: chunk r and chunk 2 cp - 1 - r; equal over tp
    matrices     cut over tp in the dimension of SPLIT, then in rows over (dp_shard, cp)
    others       equal over tp, cut in rows over (dp_shard, cp)
    experts      whole experts, cut over ep, then over what is left of (dp_shard, cp, tp)
    loss         of a sequence: equal over tp, a sum over cp
    gradients    of the loss of all sequences, cut as their parameters; equal over dp_replicate

Chunks are of ceil(size / parts) rows; the last ones are shorter, or empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

# Dimension in which tensor parallelism cuts a weight (out, in), by the last word of its module's
# name: the heads and hidden units are cut, and the vocabulary.
SPLIT = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "tok_embeddings", "output"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}
STYLE_SPLIT = {"columns": 0, "rows": 1}  # styles of a family's own modules


@dataclass(frozen=True)
class Place:
    """A rank of a pipeline stage."""

    degrees: Mapping[str, int]  # dp_replicate, dp_shard, cp, tp, and ep within the last three
    coordinates: Mapping[str, int]  # along the first four

    def along(self, *axes: str) -> tuple[int, int]:
        """Return (index, number) of this rank's place along several axes, the outermost first."""
        index, number = 0, 1
        for axis in axes:
            index = index * self.degrees[axis] + self.coordinates[axis]
            number *= self.degrees[axis]
        return index, number


def modules(n_layers: int) -> list[str]:
    """Return the modules of a model in their order, of which each is in one stage."""
    return ["tok_embeddings", *(f"layers.{number}" for number in range(n_layers)), "norm", "output"]


def sequences(batch: Tensor, place: Place) -> Tensor:
    """Return the sequences of a rank: (dp, B, ...) -> (B, ...)."""
    return batch[place.along("dp_replicate", "dp_shard")[0]]


def positions(seq_len: int, place: Place) -> list[int]:
    """Return the positions within a sequence of a rank's tokens."""
    index, number = place.along("cp")
    if number == 1:
        return list(range(seq_len))
    chunk = seq_len // (2 * number)
    chunks = (index, 2 * number - 1 - index)
    return [start * chunk + offset for start in chunks for offset in range(chunk)]


def part(fqn: str, tensor: Tensor, place: Place, styles: Mapping[str, str]) -> Tensor:
    """Return a rank's shard of a parameter, or of its gradient.

    styles: of a family's own modules, by their names in a block.
    """
    return rows(fqn, unsharded(fqn, tensor, place, styles), place)


def unsharded(fqn: str, tensor: Tensor, place: Place, styles: Mapping[str, str]) -> Tensor:
    """Return what tensor or expert parallelism leaves of a parameter, before it is sharded."""
    if of_experts(tensor):
        place_in_replica, _ = place.along("dp_shard", "cp", "tp")
        return cut(tensor, 0, place_in_replica % place.degrees["ep"], place.degrees["ep"])
    dim = split_dim(fqn, styles)
    return tensor if dim is None else cut(tensor, dim, *place.along("tp"))


def rows(fqn: str, tensor: Tensor, place: Place) -> Tensor:
    """Return a rank's rows of what `unsharded` returns."""
    if of_experts(tensor):
        index, number = place.along("dp_shard", "cp", "tp")
        ep = place.degrees["ep"]
        return cut(tensor, 0, index // ep, number // ep)
    return cut(tensor, 0, *place.along("dp_shard", "cp"))


def split_dim(fqn: str, styles: Mapping[str, str]) -> int | None:
    """Return the dimension in which tensor parallelism cuts a parameter; None: it does not."""
    module = fqn.rpartition(".")[0]
    name = module.split(".", 2)[-1] if module.startswith("layers.") else module
    if name in styles:
        return STYLE_SPLIT.get(styles[name])
    return SPLIT.get(module.rpartition(".")[2])


def of_experts(tensor: Tensor) -> bool:
    return tensor.dim() == 3


def cut(tensor: Tensor, dim: int, index: int, parts: int) -> Tensor:
    """Return part `index` of a dimension."""
    size = tensor.shape[dim]
    step = -(-size // parts)
    start = min(index * step, size)
    return tensor.narrow(dim, start, min(step, size - start))


def document_starts(tokens: Tensor, bos_id: int) -> Tensor:
    """Return for each token (B, T) the position at which its document begins: the last BOS."""
    starts = tokens.new_zeros(tokens.shape)
    for position in range(1, tokens.shape[1]):
        is_first = tokens[:, position] == bos_id
        starts[:, position] = starts[:, position - 1].where(~is_first, position)
    return starts
