"""Generate text with cached keys and values, on the sharded model as it trains.

    texts = generate(parallel_model, prompts, max_new_tokens=64, stop={eos_id})     # on all ranks

All prompts of a batch are read at once, then one token at a time is. Rows of a batch are padded at
their beginning, so that all have their last token at the same place:

    prompts [5, 6, 7], [8]      | 5 6 7 | a b c
                                | . . 8 | d e f         a, b, c and d, e, f: new tokens

Positions are those in the padded row. Rotary embeddings and attention depend on differences of
positions alone, and padding is masked: it changes a text by floating-point rounding at most.

Each axis of the mesh does what is simplest there. Weights are gathered for each forward, as in
validation. Data-parallel and context-parallel ranks have rows of their own: no sequence is cut.
Tensor-parallel ranks have the keys and values of their own heads, and all tokens between blocks,
since a single one cannot be cut. Pipeline stages have the keys and values of their own blocks;
hidden states go from stage to stage, and the last one returns logits to all. All experts have room
for all rows. Modules run in eager mode, whatever the recipe compiles, on the same parameters.

Dimensions: as in models/transformer.py; S, the places of a row: its padding, prompt, new tokens.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_lite.collectives import all_gather
from titan_lite.config import ConfigError
from titan_lite.distributed.context_parallel import ContextParallelAttention
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.distributed.pipeline import Pipeline
from titan_lite.distributed.process_group import all_gather_objects
from titan_lite.distributed.tensor_parallel import axis_of, whole_tokens
from titan_lite.models.loss import VocabularyShard
from titan_lite.models.transformer import Mask, Transformer, attention_mask, rope_tables


@dataclass(frozen=True)
class Sampling:
    """The choice of a token. Defaults are those of the command line."""

    temperature: float = 0.8  # below 1 favors likely tokens; 0: the likeliest, of equals the first
    top_k: int = 0  # only the likeliest tokens, so many; 0: all
    top_p: float = 0.95  # only the likeliest tokens, up to this total probability
    seed: int = 0

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token from logits (V,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        logits, tokens = (logits / self.temperature).sort(descending=True, stable=True)
        probabilities = logits.softmax(0)
        before = probabilities.cumsum(0) - probabilities
        keep = before < self.top_p  # includes the token that reaches top_p
        keep[0] = True
        if self.top_k:
            keep[self.top_k :] = False
        return int(tokens[torch.multinomial(probabilities * keep, 1, generator=generator)])


GREEDY = Sampling(temperature=0)


def generate(
    model: ParallelModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int] = (),
    is_complete: Callable[[int, Sequence[int]], bool] | None = None,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    batch_size: int = 8,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt. A collective of all ranks of the mesh.

    prompts: those of this data-parallel rank, of any number, also none, and of any lengths above 0.
    Ranks of a data-parallel rank (pp, cp, tp) pass the same ones and get the same result.
    max_new_tokens: the most for a prompt; with the longest prompt they fit into max_seq_len.
    stop: a token of these is the last of its text, and in the result.
    is_complete: (index of a prompt, its new tokens so far) -> True if its text ends here, such as
    with a stop string, or a limit of its own. It has to answer alike on the ranks of a
    data-parallel rank.
    sampling: greedy unless said. Numbers are drawn on the CPU, by a generator for each prompt.
    seeds: added to sampling.seed, of each prompt: with the prompt's number among all requests, a
    text does not depend on the layout. None: the index within `prompts`.
    batch_size: prompts at a time on a rank; equal on all ranks. Its memory is that of keys and
    values.
    vocab_size: only tokens below it are chosen; None: all that the model has.

    Raises ConfigError on all ranks for a prompt that is empty or does not fit, and for logits that
    are no numbers.
    """
    raise NotImplementedError
