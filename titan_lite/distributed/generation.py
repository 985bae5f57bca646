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

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_lite.collectives import all_gather
from titan_lite.config import ConfigError
from titan_lite.distributed.context_parallel import whole_sequences
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.distributed.pipeline import Pipeline
from titan_lite.distributed.process_group import all_gather_objects, max_over_ranks
from titan_lite.distributed.tensor_parallel import all_tokens_on_each_rank, axis_of
from titan_lite.models.decoder import Decoder, Sampling, decoding
from titan_lite.sharding import chunk_size

GREEDY = Sampling(temperature=0)
NO_NUMBER = -1  # in the place of a token, where a logit is NaN or infinite


class GenerationStopped(Exception):
    """Generation has ended within texts, on all ranks after the same token."""


def generate(  # noqa: PLR0913  what a request says, as plain values
    model: ParallelModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int] = (),
    is_complete: Callable[[int, Sequence[int]], bool] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
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
    interrupted: is asked after each token; if a rank answers True, all raise GenerationStopped.
    sampling: greedy unless said. Numbers are drawn on the CPU, by a generator for each prompt.
    seeds: added to sampling.seed, of each prompt: with the prompt's number among all requests, a
    text does not depend on the layout. None: the index within `prompts`.
    batch_size: prompts at a time on a rank; equal on all ranks. Its memory is that of keys and
    values.
    vocab_size: only tokens below it are chosen; None: all that the model has.

    Raises ConfigError on all ranks for a prompt that is empty or does not fit, and for logits that
    are no numbers.
    """
    mesh = model.mesh
    cp_rank, cp = mesh["cp"].get_local_rank(), mesh["cp"].size()
    own = range(cp_rank, len(prompts), cp)
    room = model.layout.model.max_seq_len - max_new_tokens
    of_ranks = all_gather_objects((_why_not(prompts, room), len(own)))
    for why_not, _ in of_ranks:
        if why_not:
            raise ConfigError(why_not)
    most = max(count for _, count in of_ranks)

    def ends(index: int, text: Sequence[int]) -> bool:
        return (
            len(text) == max_new_tokens
            or text[-1] in stop
            or (is_complete is not None and is_complete(index, text))
        )

    texts: dict[int, list[int]] = {}
    for start in range(0, most, batch_size):
        batch = own[start : start + batch_size]
        rows = min(batch_size, most - start)
        generators = [
            torch.Generator().manual_seed((sampling.seed + (seeds[i] if seeds else i)) % 2**63)
            for i in batch
        ]

        def choose(logits: Tensor, generators: Sequence[torch.Generator] = generators) -> list[int]:
            logits = logits[:, :vocab_size].float().cpu()
            return [
                sampling.draw(row, generator) if row.isfinite().all() else NO_NUMBER
                for row, generator in zip(logits, generators, strict=False)  # others are empty
            ]

        new = _generate_batch(
            model,
            [prompts[i] for i in batch],
            batch,
            rows,
            max_new_tokens,
            choose,
            ends,
            interrupted,
        )
        texts |= zip(batch, new, strict=True)
    for of_rank in all_gather_objects(texts, mesh.get_group("cp")) if cp > 1 else ():
        texts |= of_rank
    return [texts[i] for i in range(len(prompts))]


def _why_not(prompts: Sequence[Sequence[int]], room: int) -> str:
    """Return what is wrong with prompts; "" if nothing is. room: the most tokens of a prompt."""
    for prompt in prompts:
        if not 0 < len(prompt) <= room:
            return (
                f"a prompt to continue has {len(prompt)} tokens; use 1 to {room}, the model's"
                " max_seq_len without the new tokens"
            )
    return ""


def _generate_batch(  # noqa: PLR0913  what `generate` was asked for
    model: ParallelModel,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    rows: int,
    max_new_tokens: int,
    choose: Callable[[Tensor], list[int]],
    ends: Callable[[int, Sequence[int]], bool],
    interrupted: Callable[[], bool],
) -> list[list[int]]:
    """Return the new tokens of up to `rows` prompts, also of none. A collective of all ranks.

    choose: logits (B, V) -> a token for each prompt. ends: (index, new tokens) -> True if a text is
    complete. interrupted: as in `generate`.
    """
    device = model.device
    (width,) = max_over_ranks(max(map(len, prompts), default=1))
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    padded += [[0] * width] * (rows - len(prompts))
    lengths = [*map(len, prompts), *[width] * (rows - len(prompts))]
    padding = width - torch.tensor(lengths, device=device)
    tokens = torch.tensor(padded, device=device)
    texts: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    with ExitStack() as contexts:
        decoders = []
        for stage in model.stages:
            contexts.enter_context(whole_sequences(stage.model))
            contexts.enter_context(all_tokens_on_each_rank(stage.model))
            decoders.append(
                contexts.enter_context(
                    decoding(
                        stage.model,
                        width + max_new_tokens,
                        padding if min(lengths) < width else None,
                    )
                )
            )
        state = 1
        while state:
            chosen = _next_tokens(model, decoders, tokens, len(prompts), choose)
            for row in [*open_rows]:
                texts[row].append(chosen[row])
                if ends(indices[row], texts[row]):
                    open_rows.remove(row)
            # 3: there is no token; 2: stop; 1: go on; 0: all texts of all ranks are complete
            state = 2 if interrupted() else int(bool(open_rows))
            (state,) = max_over_ranks(3 if NO_NUMBER in chosen else state)
            if state == 2:
                raise GenerationStopped
            if state == 3:
                raise ConfigError(
                    "there is no next token: the model's logits are NaN or infinite;"
                    " use an earlier checkpoint"
                )
            tokens = torch.tensor([*chosen, *[0] * (rows - len(chosen))], device=device)[:, None]
    return texts


@torch.no_grad()
def _next_tokens(
    model: ParallelModel,
    decoders: Sequence[Decoder],
    tokens: Tensor,
    prompts: int,
    choose: Callable[[Tensor], list[int]],
) -> list[int]:
    """Return the token after tokens (B, t) in each row, of which the first `prompts` have one."""
    runner = model.runner
    if not isinstance(runner, Pipeline):
        return choose(_all_logits(model, decoders[0](tokens)))
    hidden = (*tokens.shape, model.layout.model.dim)
    output, sends = runner.forward(decoders, tokens, hidden)
    chosen = torch.zeros(prompts, dtype=torch.int64, device=model.device)
    if runner.has_last:
        chosen = torch.tensor(
            choose(_all_logits(model, output)), dtype=torch.int64, device=model.device
        )
    last = runner.split.rank_of[runner.last_stage]
    dist.broadcast(chosen, group=runner.group, group_src=last)
    for work, _ in sends:
        work.wait()
    return chosen.tolist()


def _all_logits(model: ParallelModel, logits: Tensor) -> Tensor:
    """Return logits (B, V) from those of this rank's entries of the vocabulary, (B, 1, v)."""
    tp = axis_of(model.mesh["tp"])
    own = logits[:, 0]
    if tp.degree == 1:
        return own
    vocab_size = model.layout.model.vocab_size
    entries = chunk_size(vocab_size, tp.degree)
    by_entry = F.pad(own, (0, entries - own.shape[1])).t().contiguous()  # the last may have fewer
    return all_gather(by_entry, tp.degree, tp.group)[:vocab_size].t()
