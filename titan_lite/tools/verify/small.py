"""Make a recipe small, with its own degrees: what `verify` traces.

    small = small_recipe(config, Layout.from_config(config, world_size))
    small.config, small.layout, small.chain

Sizes are as even and as uneven as the recipe's: rows that its shards divide are divided, and a
vocabulary whose last shard is shorter has one here. A pipeline becomes a chain of its kinds of
stages (such as first, middle, last) with two blocks each: blocks are equal, and so are stages with
equal modules beside them.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_lite.config import KEYS_OF_MODULES, Config
from titan_lite.config.families import FAMILIES, ModelConfig
from titan_lite.distributed.layout import DEGREES, Layout
from titan_lite.distributed.parallelize import kept_gathered
from titan_lite.feature import features_of, low_precision
from titan_lite.sharding import chunk_size
from titan_lite.tools.plan.trace import blocks_in, checkpointing_period, kinds_of_stages
from titan_lite.tools.verify.specification import document_starts

BLOCKS = 2  # of a stage: the first and the last one, and what is between two
LARGEST_BLOCKS = 4  # for checkpointing that repeats after more blocks
SEQUENCES = 2  # of a microbatch, or some more (`_batch`)
MOST_MORE_SEQUENCES = 4
TOKENS = 8  # of a sequence on a rank, between blocks
MANY_RANKS = 256  # of a stage; with more, a sequence has half as many tokens
BOS, NO_TOKEN = 0, 1  # a token that begins a document, and one that no sequence has
IGNORED = -100  # a label that is not counted


@dataclass(frozen=True)
class SmallRecipe:
    """A recipe that is small but for its degrees, without its pipeline ranks."""

    config: Config
    layout: Layout  # of the ranks of one pipeline stage
    chain: Sequence[Sequence[str]]  # the modules of each kind of stage, in the order of the model
    backwards: Sequence[frozenset[str]]  # of each, as in `backwards_of`
    without: Sequence[str]  # what of the recipe is not in it, in words

    @functools.cached_property
    def batch(self) -> dict[str, Tensor]:
        """Random arguments of the model in a step, (data-parallel ranks, B, T) each, by name."""
        layout = self.layout
        generator = torch.Generator().manual_seed(0)
        shape = (layout.dp_degree, layout.microbatch_size, layout.seq_len + 1)
        data = torch.randint(NO_TOKEN + 1, layout.model.vocab_size, shape, generator=generator)
        with_documents = self.config.training.mask_documents
        if with_documents:
            data[torch.rand(shape, generator=generator) < 0.15] = BOS
        tokens = data[..., :-1].contiguous()
        labels = data[..., 1:].clone()
        # Uncounted ones, more on later ranks: a local count is not a share of the global one.
        share = torch.arange(shape[0]).view(-1, 1, 1) / shape[0] * 0.6 + 0.1
        labels[torch.rand(labels.shape, generator=generator) < share] = IGNORED
        batch = {"tokens": tokens, "labels": labels}
        if with_documents:
            starts = document_starts(tokens.flatten(0, 1), BOS)
            batch["doc_starts"] = starts.view(tokens.shape)
        return batch


def small_recipe(config: Config, real: Layout) -> SmallRecipe:
    """Return the small version of a recipe with the layout `real`."""
    chain, backwards = _chain_of(config, real)
    n_layers = sum(map(blocks_in, chain))
    model = dataclasses.replace(_model(real), n_layers=n_layers)
    batch = _batch(config, real, model)
    config = with_existing_blocks(config, n_layers).replace(
        training=config.training.replace(
            seq_len=model.max_seq_len,
            local_batch_size=batch,
            global_batch_size=-1,
            loss_chunk_tokens=loss_chunk(real, model.max_seq_len, batch),
            attention_kernel="auto",
        ),
        parallelism=config.parallelism.without_pipeline().replace(
            data_parallel_shard_degree=real.degrees["dp_shard"],
            fsdp_communication="step" if real.gathers_once else "microbatch",
        ),
        compile=config.compile.replace(
            enable=True,
            backend="aot_eager",
        ),
    )
    config, without = _exact(config)
    layout = Layout.from_config(config, real.world_size // real.degrees["pp"], model)
    layout = dataclasses.replace(layout, gathers_once=real.gathers_once)
    return SmallRecipe(config, layout, chain, backwards, without)


def with_data_parallelism_alone(small: SmallRecipe) -> SmallRecipe:
    """Return a small recipe for as many ranks as its layout has data-parallel ones."""
    layout = small.layout
    degrees = dict.fromkeys(DEGREES.values(), 1)
    degrees[DEGREES["dp_replicate"]] = layout.dp_degree
    config = small.config.replace(
        parallelism=small.config.parallelism.replace(
            **degrees, expert_parallel_degree=1, fsdp_communication="microbatch"
        ),
        compile=small.config.compile.replace(bucketing="none"),
    )
    plain = Layout.from_config(config, layout.dp_degree, layout.model)
    return dataclasses.replace(small, config=config, layout=plain)


def _exact(config: Config) -> tuple[Config, list[str]]:
    """Return the recipe with what only approximates left out, and what that is."""
    without = []
    for feature in features_of(config):
        config, why = feature.for_verify(config)
        without += [why] if why else []
    low = low_precision(config)
    if low is not None:
        without.append(f"{low.name}, its scales and its gathers: blocks multiply in float64")
        config = low.without
    return config, without


def _chain_of(config: Config, real: Layout) -> tuple[list[list[str]], list[frozenset[str]]]:
    """Return the modules of each kind of stage, with blocks numbered through, and its kinds of
    backward.
    """
    stages = kinds_of_stages(config, real.pipeline)
    blocks = min(LARGEST_BLOCKS, max(BLOCKS, checkpointing_period(config)))
    numbers = itertools.count()
    chain = []
    for beside, (depths, _) in stages.items():
        layers = [f"layers.{next(numbers)}" for _ in range(blocks if max(depths) else 0)]
        chain.append([*beside, *layers])
    return chain, [backwards for _, backwards in stages.values()]


def _batch(config: Config, real: Layout, model: ModelConfig) -> int:
    """Return the sequences of a microbatch: as many as it takes to save for backward what the
    recipe saves.

    The partitioner saves either the gradient of the logits, or the gradients of the hidden states
    and of the output's weight, whichever are smaller. With the gradient of the logits, backward
    reads that weight, and gathers it again if it is not kept.
    """
    kept = kept_gathered(config.parallelism)
    if kept is None or "output" in kept:
        return SEQUENCES
    tp, cp = real.degrees["tp"], real.degrees["cp"]

    def saves_logits(tokens: int, model: ModelConfig) -> bool:
        entries = chunk_size(model.vocab_size, tp)
        return tokens * entries <= (tokens + entries) * model.dim

    return first_alike(
        range(SEQUENCES, SEQUENCES + MOST_MORE_SEQUENCES + 1),
        lambda batch: saves_logits(batch * model.max_seq_len // cp, model),
        saves_logits(real.tokens_per_microbatch, real.model),
    )


def _model(real: Layout) -> ModelConfig:
    """Return small sizes that the degrees divide as they divide the real ones."""
    shape = real.model
    tp, cp, shards = real.degrees["tp"], real.degrees["cp"], real.fsdp_degree
    is_large = real.world_size // real.degrees["pp"] > MANY_RANKS
    tokens = TOKENS // 2 if is_large else TOKENS
    heads_of_rank = min(4, shape.n_kv_heads // tp)
    kv_heads = tp * heads_of_rank
    heads = kv_heads * min(2, shape.n_heads // shape.n_kv_heads)
    dim = _rows_alike(shape.dim, shards, least=16, step=8)
    head_dim = first_alike(
        range(4, 4 * shards + 8, 4),
        lambda size: [size % shards == 0, size * heads_of_rank % shards == 0],
        [shape.head_dim % shards == 0, shape.n_kv_heads // tp * shape.head_dim % shards == 0],
    )
    if shape.family not in FAMILIES and shape.dim == shape.n_heads * shape.head_dim:
        # a family of one's own may compute one from the other
        dim = math.lcm(dim, heads * 4)
        head_dim = dim // heads
    # logits are larger than hidden states, which decides what is saved for backward
    entries = _rows_alike(chunk_size(shape.vocab_size, tp), shards, math.ceil(4 * dim / tp))
    sizes: dict[str, Any] = {
        "hidden_dim": tp * _rows_alike(chunk_size(shape.hidden_dim, tp), shards, least=8)
    }
    if shape.n_experts:
        sizes = {"n_experts": _experts(real), "experts_per_token": 2, "hidden_dim": 16}
    return dataclasses.replace(
        shape,
        dim=dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=tp * entries - (shape.vocab_size % tp > 0),
        max_seq_len=tokens * cp * tp,
        **sizes,
    )


def _rows_alike(real: int, shards: int, least: int, step: int = 1) -> int:
    """Return a small number of rows that `shards` cut evenly if they do so with `real` rows.

    Of uneven shards some are complete, one is shorter and some are empty, if there are enough.
    """
    if real % shards:
        least = max(least, shards + shards // 4 + 1)
    start = math.ceil(least / step) * step
    sizes = range(start, start + step * shards + 1, step)
    return first_alike(sizes, lambda size: size % shards == 0, real % shards == 0)


def _experts(real: Layout) -> int:
    """Return a small number of experts, for tables of routers and for shards of experts."""
    ep, shards = real.expert_parallel, real.fsdp_degree

    def divided(experts: int) -> list[bool]:
        return [experts % shards == 0, experts // ep % (real.expert_ranks // ep) == 0]

    least = math.ceil(4 / ep) * ep
    sizes = range(least, least + ep * real.expert_ranks + 1, ep)
    return first_alike(sizes, divided, divided(real.model.n_experts))


def first_alike(sizes: Iterable[int], what: Callable[[int], object], wanted: object) -> int:
    """Return the first size of which `what` is as wanted, or the first one."""
    sizes = list(sizes)
    return next((size for size in sizes if what(size) == wanted), sizes[0])


def loss_chunk(real: Layout, seq_len: int, batch: int) -> int:
    """Return tokens for three chunks, of which the last one is smaller; -1: the recipe has none."""
    tokens = seq_len // real.degrees["cp"] * batch
    return max(1, tokens * 2 // 5) if real.loss_chunk else -1


def with_existing_blocks(config: Config, n_layers: int) -> Config:
    """Return a recipe whose keys that name blocks name those that there are."""
    for key in KEYS_OF_MODULES:
        table, name = key.split(".")
        section = getattr(config, table)
        fqns = (
            re.sub(r"(?<=^layers\.)\d+", lambda number: str(min(int(number[0]), n_layers - 1)), fqn)
            for fqn in getattr(section, name)
        )
        renamed = tuple(dict.fromkeys(fqns))
        config = config.replace(**{table: section.replace(**{name: renamed})})
    return config
