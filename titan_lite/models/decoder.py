"""Compute a text token by token, with cached keys and values, in plain torch.

    with decoding(model, max_tokens=64) as decoder:
        logits = decoder(prompts)           # (B, t) int64 -> (B, 1, V), of the token after them
        logits = decoder(next_tokens)       # (B, 1): the text before is not read again

Dimensions: as in models/transformer.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.models.transformer import (
    Transformer,
    attend,
    attention_mask,
    attentions_of,
    rope_tables,
)


class CachedAttention:
    """In place of an attention's function `attend`, with keys and values of up to `max_tokens`."""

    def __init__(self, max_tokens: int, name: str):
        """name: of the family and the attention, for errors."""
        self.name = name
        self.max_tokens = max_tokens
        self.tokens = 0  # in the cache
        self.keys = torch.empty(0)  # (B, max_tokens, K, D) from the first call on
        self.values = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Add k and v (B, t, K, D) to the cache, and attend from q (B, t, H, D) to all of it.

        mask: (B, 1, t, T), T tokens in the cache with these; None: causal.
        """
        if self.tokens == 0:
            self.keys = k.new_empty(k.shape[0], self.max_tokens, *k.shape[2:])
            self.values = v.new_empty(v.shape[0], self.max_tokens, *v.shape[2:])
        past = self.tokens
        self.tokens += k.shape[1]
        self.check_tokens(min(self.tokens, self.max_tokens))
        self.keys[:, past : self.tokens] = k
        self.values[:, past : self.tokens] = v
        if past == 0:
            return attend(q, k, v, mask)
        if mask is None and q.shape[1] > 1:  # a single token attends to all
            ones = torch.ones(q.shape[1], self.tokens, dtype=torch.bool, device=q.device)
            mask = ones.tril(past)
        keys = self.keys[:, : self.tokens].transpose(1, 2)
        values = self.values[:, : self.tokens].transpose(1, 2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
        return out.transpose(1, 2)

    def check_tokens(self, expected: int) -> None:
        """Raise ConfigError unless the cache has so many tokens."""
        if self.tokens != expected:
            raise ConfigError(
                f"{self.name} does not call self.attend once in a forward, and generate keeps the"
                " keys and values of one call; call it once"
            )


class Decoder:
    """A model, or a pipeline stage of it, that computes the next tokens only; see `decoding`."""

    def __init__(self, model: Transformer, max_tokens: int, padding: Tensor | None):
        """padding: (B,), or None as in `decoding`."""
        self.model = model
        self.padding = padding
        self.tokens = 0  # so far
        self.rope = rope_tables(model.config, range(max_tokens), self.device)
        self.caches = {
            number: CachedAttention(
                max_tokens,
                f"model.name = {shown(model.config.family)}: layers.{number}.attention",
            )
            for number in attentions_of(model, "generate keeps keys and values")
        }

    @property
    def device(self) -> torch.device:
        return self.model.rope_cos.device

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return logits (B, 1, V) of the token after tokens x (B, t).

        A stage takes or returns hidden states (B, t, C) instead.
        """
        model, past = self.model, self.tokens
        self.tokens += x.shape[1]
        cos, sin = (table[past : self.tokens] for table in self.rope)
        mask = self._mask(past)
        if model.tok_embeddings is not None:
            x = model.tok_embeddings(x)
        for number, layer in model.layers.items():
            x = layer(x, cos, sin, mask)
            self.caches[number].check_tokens(self.tokens)
        x = x if model.norm is None else model.norm(x)
        return x if model.output is None else model.output(x[:, -1:])

    def _mask(self, past: int) -> Tensor | None:
        """Return the mask of tokens from `past` on: (B, 1, t, T), T = self.tokens."""
        if self.padding is None:
            return None
        positions = torch.arange(past, self.tokens, device=self.padding.device)
        # padding attends to padding: a row of a mask that is all False would give NaN
        padding = self.padding[:, None]
        return attention_mask(padding.where(positions >= padding, 0), positions, self.tokens)


@contextmanager
def decoding(
    model: Transformer, max_tokens: int, padding: Tensor | None = None
) -> Iterator[Decoder]:
    """Return a Decoder of `model`, whose attention has a cache of `max_tokens` tokens meanwhile.

    The model is in the mode of evaluation meanwhile. padding: (B,) int64, how many tokens at the
    beginning of each sequence are none of it; None: no sequence has some. Raises ConfigError for a
    family whose attention is not `attend`, called once.
    """
    decoder = Decoder(model, max_tokens, padding)
    attentions = attentions_of(model, "generate keeps keys and values")
    was_training = model.training
    model.eval()
    for number, attention in attentions.items():
        attention.__dict__["attend"] = decoder.caches[number]
    try:
        yield decoder
    finally:
        for attention in attentions.values():
            attention.__dict__["attend"] = attend
        model.train(was_training)


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
