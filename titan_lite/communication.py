"""Decide what FSDP communicates where a recipe leaves it open; layout.py asks. Standard library only, unless a recipe names a
machine.

gathers_once(config, layout, memory)            # True: weights once a step, and not once a microbatch
columns, why = embedding_sharding(config, layout, sizes)       # True: rows of tokens, and not the embedding's table
"""

import math
from typing import TYPE_CHECKING

from titan_lite.config import Config, ConfigError

if TYPE_CHECKING:
    from titan_lite.layout import Layout

FILLED = (
    0.6  # share of a device's memory that fsdp_communication = "auto" may fill, without activations
)
# Links of H100, where compile.machine names no machine: GB/s of a rank within a node and of its network card, ranks of a node.
# The device itself does not count, since a run and its plan decide alike.
LINKS = (450.0, 50.0, 8)
EFFICIENCY = 0.8  # of links
START, RANK = 30e-6, 2e-6  # seconds of a collective, and of each of its ranks


def gathers_once(config: Config, layout: "Layout", memory: float) -> bool:
    """Return True if fsdp_communication = "auto" gathers once a step: it fits, and no key buckets or reshards."""
    stage = config.compile
    buckets = stage.compiles("model") and stage.bucketing not in ("none", "block")
    fits = (
        memory == math.inf
        or layout.steady_bytes(config) + layout.step_bytes(config) <= FILLED * memory
    )
    return fits and not buckets and config.parallelism.fsdp_reshard_after_forward != "always"


def embedding_sharding(
    config: Config, layout: "Layout", sizes: tuple[int, int]
) -> tuple[bool, str]:
    """Return (True for columns (distributed/embedding.py), the reason in words). Raises ConfigError for impossible columns.

    sizes: bytes of an element in computation, and in sums of gradients.
    """
    key, impossible = config.parallelism.embedding_sharding, _impossible(config, layout)
    if key == "columns" and impossible:
        raise ConfigError(
            f'parallelism.embedding_sharding = "columns": {impossible}; use "auto" or "rows"'
        )
    if key != "auto" or impossible:
        return key == "columns", impossible or "parallelism.embedding_sharding says so"
    rows, columns = (1e3 * each for each in _seconds(config.compile.machine, layout, *sizes))
    ways = "to send ids and rows of tokens", "to gather the table and reduce its gradient"
    return columns < rows, f"estimated {columns:.2g} ms a step {ways[0]}, {rows:.2g} {ways[1]}"


def _ranks(layout: "Layout") -> int:
    return layout.degrees["dp_shard"] * layout.degrees["cp"]


def _impossible(config: Config, layout: "Layout") -> str:
    """Return why an embedding cannot be sharded by columns, or "" if it can."""
    if _ranks(layout) == 1:
        return "it is not sharded (data_parallel_shard_degree = 1)"
    if layout.model.tied_embeddings:
        return "the output has the same weights, and needs them whole"
    if layout.model.dim % _ranks(layout):
        return f"{_ranks(layout)} ranks do not divide its {layout.model.dim:,} columns"
    buckets = config.compile.buckets if config.compile.bucketing == "plan" else ()
    if any(
        name.partition(".")[0] == "tok_embeddings" for bucket in buckets for name in bucket.split()
    ):
        return "compile.buckets names it, and columns are not gathered"
    return ""


def _seconds(machine: str, layout: "Layout", computed: int, summed: int) -> tuple[float, float]:
    """Return the seconds of communication of a step for rows and for columns. Ids and rows of tokens travel in each microbatch.

    A ring uses the cards of all its ranks in a node. An all-to-all sends each part over the rank's own card.
    """
    inside, card, per_node = LINKS
    if machine:
        from titan_lite.compiler.profiles import load_machine

        known = load_machine(machine)
        inside, card, per_node = (
            known.intra_node.bandwidth,
            known.inter_node.bandwidth,
            known.ranks_per_node,
        )
    ranks, tp = _ranks(layout), layout.degrees["tp"]
    near = max(1, min(ranks, per_node // tp))  # ranks of a group in a node
    ring = inside if near == ranks else min(inside, near * card)
    latency, speed = START + ranks * RANK, EFFICIENCY * 1e9
    tokens = layout.sequences * layout.seq_len // layout.degrees["cp"]
    rows = 2 * latency + layout.model.vocab_size * layout.model.dim / tp * (computed + summed) / (
        ring * speed
    )
    sent = (
        tokens * layout.model.dim / tp * (computed + min(computed, summed)) / ranks
    )  # to each rank
    columns = 3 * latency + sent * max((near - 1) / inside, (ranks - near) / card) / speed
    columns += 4 * ranks * tokens / (ring * speed)  # ids are int32
    return rows * (1 if layout.gathers_once else layout.microbatches), columns * layout.microbatches
