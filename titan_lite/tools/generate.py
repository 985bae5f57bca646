"""Generate text from a checkpoint.

python -m titan_lite generate outputs/debug_model --prompt "def main("
"""

import dataclasses
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.checkpoint.weights import (
    TOKENIZER_FILES,
    Weights,
    check_tokenizer,
    load,
    open_weights,
)
from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer
from titan_lite.logging import init_logging
from titan_lite.models.llama3 import Attention, Mask, ModelConfig, Transformer, rope_tables


class CachedAttention(Attention):
    """Attention with a cache of keys and values, for at most config.max_seq_len tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.max_tokens, self.tokens = config.max_seq_len, 0
        self.keys = self.values = torch.empty(0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        return super().forward(x, cos[self.tokens :], sin[self.tokens :], mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attend from q (B, t, H, D) to the cache and k, v (B, t, K, D), which join it -> (B, t, H,
        D).
        """
        if not self.tokens:
            self.keys, self.values = (
                x.new_empty(x.shape[0], self.max_tokens, *x.shape[2:]) for x in (k, v)
            )
        before, self.tokens = self.tokens, self.tokens + k.shape[1]
        self.keys[:, before : self.tokens], self.values[:, before : self.tokens] = k, v
        if not before:
            return super().attend(q, k, v, mask)
        past = None  # a single token attends to all
        if q.shape[1] > 1:
            past = torch.ones(q.shape[1], self.tokens, dtype=torch.bool, device=q.device).tril(
                before
            )
        q, k, v = (
            x.transpose(1, 2)
            for x in (q, self.keys[:, : self.tokens], self.values[:, : self.tokens])
        )
        return F.scaled_dot_product_attention(q, k, v, past, enable_gqa=True).transpose(1, 2)


class Decoder(Transformer):
    """Transformer with a cache: each call computes the next tokens only, at most config.max_seq_len
    over all calls.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        for layer in self.layers.values():
            layer.attention = CachedAttention(config)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, *others: Tensor | None, **more: Tensor | None) -> Tensor:
        """Return logits (B, V) of the token after tokens (B, t)."""
        assert self.tok_embeddings is not None
        assert self.norm is not None
        assert self.output is not None
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.rope_cos, self.rope_sin)
        return self.output(self.norm(x[:, -1]))


def build_decoder(
    weights: Weights, max_tokens: int, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Return an unsharded model with a cache for `max_tokens` tokens. Raises ConfigError."""
    if max_tokens > weights.config.max_seq_len:
        raise ConfigError(
            f"prompt and --max-new-tokens are {max_tokens} tokens together; use at most"
            f" {weights.config.max_seq_len}, the model's max_seq_len"
        )
    with torch.device("meta"):
        decoder = Decoder(dataclasses.replace(weights.config, max_seq_len=max_tokens)).to(dtype)
    decoder.to_empty(device=device)
    if weights.config.tied_embeddings:
        decoder.output.weight = decoder.tok_embeddings.weight  # type: ignore[union-attr]
    load(weights, dict(decoder.named_parameters()))
    decoder.rope_cos, decoder.rope_sin = rope_tables(weights.config, range(max_tokens), device)
    return decoder


def sample(
    logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int, top_p: float
) -> int:
    """Draw a token from logits (V,).

    temperature 0: return the likeliest token, of equals the first.
    """
    if temperature == 0:
        return int(logits.argmax())
    logits, tokens = (logits / temperature).sort(descending=True, stable=True)
    probabilities = logits.softmax(0)
    keep = probabilities.cumsum(0) - probabilities < top_p  # includes the token that reaches top_p
    keep[0] = True
    if top_k:
        keep[top_k:] = False
    return int(tokens[torch.multinomial(probabilities * keep, 1, generator=generator)])


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    vocab_size: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[int]:
    """Yield tokens below vocab_size that continue the prompt, up to and including the first one in
    `stop`.

    Draws on the CPU in float32, so that a seed has the same random numbers on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    device, tokens = decoder.rope_cos.device, list(prompt)
    for _ in range(max_new_tokens):
        logits = decoder(torch.tensor([tokens], device=device))[0, :vocab_size].float().cpu()
        tokens = [sample(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p)]
        yield tokens[0]
        if tokens[0] in stop:
            return


def text_of(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield pieces of text as their characters are complete: one may span several tokens."""
    shown: list[
        int
    ] = []  # the last tokens yielded: the text of a token may depend on the one before
    fresh: list[int] = []
    for token in tokens:
        fresh.append(token)
        text = tokenizer.decode([*shown, *fresh])[len(tokenizer.decode(shown)) :]
        if not text.endswith("\ufffd") or len(fresh) == 4:  # the most bytes of a character
            yield text
            shown, fresh = fresh, []
    if fresh:
        yield text


def find_tokenizer(weights: Weights, path: str) -> Tokenizer:
    """Return the tokenizer at `path`, or else the model's.

    Raises ConfigError if it is not the one of the model.
    """
    files = weights.tokenizer_files()
    found = [str(file) for file in files if file == files[0] or file.name in TOKENIZER_FILES[:2]]
    if not find_spec("tokenizers"):  # needed for a .json
        found.sort(key=lambda file: file.endswith(".json"))
    path = path or next(iter(found), "")
    if not path:
        raise ConfigError(
            f"{weights.folder} has no tokenizer that can be read; use --tokenizer FILE"
        )
    tokenizer = load_tokenizer(path, "--tokenizer")
    check_tokenizer(weights, path, tokenizer.vocab_size, tokenizer.sha256)
    return tokenizer


def stop_tokens(weights: Weights, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end a text, by the tokenizer and by the folder."""
    ends = weights.special_tokens["eos_token_id"]
    return {tokenizer.eos_id} | set(
        ends if isinstance(ends, list) else [] if ends is None else [ends]
    )


def find_device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).cpu()  # there and back: meta keeps nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name}: {reason}; use cpu") from None
    return device


@command()
def main(arguments: Sequence[str]) -> None:
    parser = Parser(__doc__)
    add, which = parser.add_argument, "(default %(default)s)"
    add(
        "checkpoint",
        help="a run's folder (its newest whole step), a step, or a Hugging Face folder",
    )
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue (default: none, the beginning of a document)",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help=f"the most tokens to generate {which}",
    )
    likelier = f"below 1: favors likely tokens; 0: always takes the likeliest {which}"
    add("--temperature", type=float, default=0.8, metavar="T", help=likelier)
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help=f"only the K likeliest tokens; 0: all {which}",
    )
    likeliest = f"only the likeliest tokens, up to a total probability of P {which}"
    add("--top-p", type=float, default=0.95, metavar="P", help=likeliest)
    add("--seed", type=int, default=0, metavar="N", help=f"seed of the random numbers {which}")
    add(
        "--device",
        default="",
        metavar="NAME",
        help="cpu, cuda, cuda:1 (default: a GPU where there is one)",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="(default: as stored)")
    where = "in tiktoken's format, or a tokenizer.json (default: the recipe's, or the folder's)"
    add("--tokenizer", default="", metavar="FILE", help=where)
    options = parser.parse_args(arguments)
    init_logging(stream=sys.stderr)  # the text alone is standard output
    for name, fits, works in (
        ("max_new_tokens", options.max_new_tokens >= 1, "1 or more"),
        ("temperature", 0 <= options.temperature < float("inf"), "0 or more"),
        ("top_k", options.top_k >= 0, "0 or more"),
        ("top_p", 0 < options.top_p <= 1, "above 0, at most 1"),
        ("seed", 0 <= options.seed < 2**63, "0 or more, below 2^63"),
    ):
        if not fits:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: expected {works}"
            )
    device = find_device(options.device)
    weights = open_weights(options.checkpoint, every_byte=True)
    tokenizer = find_tokenizer(weights, options.tokenizer)
    prompt = tokenizer.encode(options.prompt, bos=True)
    dtype = (
        getattr(torch, options.dtype) if options.dtype else weights.dtypes["tok_embeddings.weight"]
    )
    decoder = build_decoder(weights, len(prompt) + options.max_new_tokens, device, dtype)
    stop = stop_tokens(weights, tokenizer)
    asked = {
        name: getattr(options, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    }
    tokens = generate(decoder, prompt, stop=stop, vocab_size=tokenizer.vocab_size, **asked)
    print(
        f"{weights.folder}, {weights.kind}; {device}, {str(dtype).removeprefix('torch.')}",
        file=sys.stderr,
    )
    print(options.prompt, end="", flush=True)
    started, drawn = time.perf_counter(), list[int]()

    def shown() -> Iterator[int]:
        for token in tokens:
            drawn.append(token)
            if token not in stop:
                yield token

    for text in text_of(shown(), tokenizer):
        print(text, end="", flush=True)
    print(flush=True)
    seconds = time.perf_counter() - started
    end = (
        f"ended by {tokenizer.decode(drawn[-1:])}"
        if drawn[-1] in stop
        else "stopped by --max-new-tokens"
    )
    print(f"{len(drawn)} tokens, {len(drawn) / seconds:.1f} a second, {end}", file=sys.stderr)
