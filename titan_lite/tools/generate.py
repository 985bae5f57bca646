"""Generate text from a checkpoint.

titan-lite generate outputs/debug_model --prompt "def main("
"""

import dataclasses
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lite.checkpoint.weights import (
    Weights,
    check_tokenizer,
    load,
    open_weights,
)
from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import ModelConfig
from titan_lite.config.weights_folder import TOKENIZER_FILES
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer
from titan_lite.logging import init_logging
from titan_lite.models.shapes import sizes_without_a_kernel
from titan_lite.models.transformer import Mask, Transformer, attentions_of, saved_buffers
from titan_lite.text import first_names

Attend = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]  # as models/transformer.attend


class CachedAttention:
    """An attention's function `attend` with a cache of keys and values, for `max_tokens` tokens."""

    def __init__(self, attend: Attend, max_tokens: int, name: str):
        """name: of the family and the attention, for errors."""
        self.attend = attend
        self.name = name
        self.max_tokens = max_tokens
        self.tokens = 0  # in the cache
        self.keys = torch.empty(0)  # (B, max_tokens, K, D) from the first call on
        self.values = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Add k and v (B, t, K, D) to the cache, and attend from q (B, t, H, D) to all of it."""
        if self.tokens == 0:
            self.keys = k.new_empty(k.shape[0], self.max_tokens, *k.shape[2:])
            self.values = v.new_empty(v.shape[0], self.max_tokens, *v.shape[2:])
        past = self.tokens
        self.tokens += k.shape[1]
        self.check_tokens(min(self.tokens, self.max_tokens))
        self.keys[:, past : self.tokens] = k
        self.values[:, past : self.tokens] = v
        if past == 0:
            return self.attend(q, k, v, mask)
        causal = None  # a single token attends to all
        if q.shape[1] > 1:
            ones = torch.ones(q.shape[1], self.tokens, dtype=torch.bool, device=q.device)
            causal = ones.tril(past)
        keys = self.keys[:, : self.tokens].transpose(1, 2)
        values = self.values[:, : self.tokens].transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, causal, enable_gqa=True
        )
        return out.transpose(1, 2)

    def check_tokens(self, expected: int) -> None:
        """Raise ConfigError unless the cache has so many tokens."""
        if self.tokens != expected:
            raise ConfigError(
                f"{self.name} does not call self.attend once in a forward, and generate keeps the"
                " keys and values of one call; call it once"
            )


class Decoder(Transformer):
    """Transformer with a cache: each call computes the next tokens only.

    All calls together take at most config.max_seq_len tokens. Raises ConfigError for a family
    whose attention is not `attend`, called once.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.tokens = 0  # so far
        self.caches: dict[str, CachedAttention] = {}
        for number, attention in attentions_of(self, "generate keeps keys and values").items():
            name = f"model.name = {shown(config.family)}: layers.{number}.attention"
            attention.attend = CachedAttention(attention.attend, config.max_seq_len, name)
            self.caches[number] = attention.attend
        self.eval()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, *others: Tensor | None, **more: Tensor | None) -> Tensor:
        """Return logits (B, V) of the token after tokens (B, t)."""
        assert self.tok_embeddings is not None
        assert self.norm is not None
        assert self.output is not None
        x = self.tok_embeddings(tokens)
        cos, sin = self.rope_cos[self.tokens :], self.rope_sin[self.tokens :]
        self.tokens += tokens.shape[1]
        for number, layer in self.layers.items():
            x = layer(x, cos, sin, None)
            self.caches[number].check_tokens(self.tokens)
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
    check_experts(weights.config, dtype)
    with torch.device("meta"):
        decoder = Decoder(dataclasses.replace(weights.config, max_seq_len=max_tokens)).to(dtype)
    decoder.to_empty(device=device)
    if weights.config.tied_embeddings:
        decoder.output.weight = decoder.tok_embeddings.weight  # type: ignore[union-attr]
    decoder.init_buffers()
    buffers = {fqn: decoder.get_buffer(fqn) for fqn in saved_buffers(decoder)}
    load(weights, {**dict(decoder.named_parameters()), **buffers})
    return decoder


def check_experts(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError if the experts of an MoE model cannot be computed in this dtype."""
    words = str(dtype).removeprefix("torch.")
    for name, size, multiple in sizes_without_a_kernel(config, words):
        in_float32 = words != "float32" and not sizes_without_a_kernel(config, "float32")
        raise ConfigError(
            f"model.{name} = {size} is not a multiple of {multiple}, as grouped GEMMs of experts"
            f" in {words} need it; use {'--dtype float32' if in_float32 else 'another model'}"
        )


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


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    vocab_size: int,
    sampling: Sampling = Sampling(),
) -> Iterator[int]:
    """Yield tokens below vocab_size that continue the prompt, the first in `stop` as the last.

    Draws on the CPU in float32, so that a seed has the same random numbers on every device. Raises
    ConfigError for logits that are no numbers.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    device = decoder.rope_cos.device
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        logits = decoder(torch.tensor([tokens], device=device))[0, :vocab_size].float().cpu()
        if not logits.isfinite().all():
            raise ConfigError(_why_no_token(decoder))
        token = sampling.draw(logits, generator)
        yield token
        if token in stop:
            return
        tokens = [token]


def _why_no_token(decoder: Decoder) -> str:
    """Return what is wrong with a model whose logits have NaN or infinity."""
    wrong = [fqn for fqn, each in decoder.named_parameters() if not each.isfinite().all()]
    if wrong:
        return (
            f"there is no next token, since weights are NaN or infinite: {first_names(wrong, 3)};"
            " use another checkpoint"
        )
    return (
        "there is no next token: the model's logits are NaN or infinite, and its weights are not;"
        " use --dtype float32, or another checkpoint"
    )


def text_of(tokens: Iterable[int], tokenizer: Tokenizer, prompt: Sequence[int]) -> Iterator[str]:
    """Yield the text of tokens after those of a prompt, without BOS, in pieces.

    Together they are the end of decode(prompt + tokens) after decode(prompt). A piece ends where a
    character does: one may span several tokens.
    """
    before = prompt  # tokens of the piece before: the text of a token may depend on them
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = _text_after(before, pending, tokenizer)
        if not text.endswith("\ufffd"):
            yield text
            before = pending
            pending = []
    if pending:
        yield _text_after(before, pending, tokenizer)


def _text_after(before: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of tokens that come after others."""
    start = tokenizer.decode(before)
    text = tokenizer.decode([*before, *tokens])
    if text.startswith(start):
        return text[len(start) :]
    # With tokens for single bytes, one that completes no character also breaks those before it.
    return tokenizer.decode(tokens)


def prompt_as_read(prompt: str, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return a prompt without the spaces at its end, if the tokenizer has left them out."""
    words = prompt.rstrip()
    spaces = prompt[len(words) :]
    return prompt if tokenizer.decode(tokens).endswith(spaces) else words


def find_tokenizer(weights: Weights, path: str) -> Tokenizer:
    """Return the tokenizer at `path`, or else the model's.

    Raises ConfigError if it is not the one of the model.
    """
    if not path:
        files = weights.tokenizer_files()
        readable = [file for file in files if file == files[0] or file.name in TOKENIZER_FILES[:2]]
        if not find_spec("tokenizers"):  # needed for a .json
            readable.sort(key=lambda file: file.suffix == ".json")
        if not readable:
            raise ConfigError(
                f"{weights.folder} has no tokenizer that can be read; use --tokenizer FILE"
            )
        path = str(readable[0])
    tokenizer = load_tokenizer(path, "--tokenizer")
    check_tokenizer(weights, path, tokenizer.vocab_size, tokenizer.sha256)
    return tokenizer


def stop_tokens(weights: Weights, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end a text, by the tokenizer and by the folder."""
    stop = {tokenizer.eos_id}
    of_folder = weights.special_tokens["eos_token_id"]
    if isinstance(of_folder, list):
        stop.update(of_folder)
    elif of_folder is not None:
        stop.add(of_folder)
    return stop


def find_device(name: str) -> torch.device:
    """Return the device, or for "" a GPU where there is one. Raises ConfigError."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).cpu()  # there and back: meta keeps nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name}: {reason}; use cpu") from None
    return device


def build_parser() -> Parser:
    parser = Parser(__doc__)
    default = "(default %(default)s)"
    parser.add_argument(
        "checkpoint",
        help="a run's folder (its newest complete one), a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue (default: none, the beginning of a document)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help=f"the most tokens to generate {default}",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        metavar="T",
        help=f"below 1: favors likely tokens; 0: always takes the likeliest {default}",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=Sampling.top_k,
        metavar="K",
        help=f"only the K likeliest tokens; 0: all {default}",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=Sampling.top_p,
        metavar="P",
        help=f"only the likeliest tokens, up to a total probability of P {default}",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=Sampling.seed,
        metavar="N",
        help=f"seed of the random numbers {default}",
    )
    parser.add_argument(
        "--device",
        default="",
        metavar="NAME",
        help="cpu, cuda, cuda:1 (default: a GPU where there is one)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: as stored)")
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="FILE",
        help="in tiktoken's format, or a tokenizer.json (default: the recipe's, or the folder's)",
    )
    return parser


def check_options(options: Namespace) -> None:
    """Raise ConfigError for a number that is out of range."""

    def need(name: str, is_right: bool, expected: str) -> None:
        if not is_right:
            value = getattr(options, name)
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {expected}")

    need("max_new_tokens", options.max_new_tokens >= 1, "1 or more")
    need("temperature", 0 <= options.temperature < math.inf, "0 or more")
    need("top_k", options.top_k >= 0, "0 or more")
    need("top_p", 0 < options.top_p <= 1, "above 0, at most 1")
    need("seed", 0 <= options.seed < 2**63, "0 or more, below 2^63")


@command()
def main(arguments: Sequence[str]) -> None:
    options = build_parser().parse_args(arguments)
    init_logging(stream=sys.stderr)  # the text alone is standard output
    check_options(options)
    device = find_device(options.device)
    weights = open_weights(options.checkpoint, every_byte=True)
    tokenizer = find_tokenizer(weights, options.tokenizer)
    prompt = tokenizer.encode(options.prompt)
    dtype = weights.dtypes["tok_embeddings.weight"]
    if options.dtype:
        dtype = getattr(torch, options.dtype)
    document = [tokenizer.bos_id, *prompt]
    decoder = build_decoder(weights, len(document) + options.max_new_tokens, device, dtype)
    stop = stop_tokens(weights, tokenizer)
    tokens = generate(
        decoder,
        document,
        max_new_tokens=options.max_new_tokens,
        stop=stop,
        vocab_size=tokenizer.vocab_size,
        sampling=Sampling(options.temperature, options.top_k, options.top_p, options.seed),
    )
    print(
        f"{weights.folder}, {weights.kind}; {device}, {str(dtype).removeprefix('torch.')}",
        file=sys.stderr,
    )
    print(prompt_as_read(options.prompt, prompt, tokenizer), end="", flush=True)
    started = time.perf_counter()
    drawn: list[int] = []

    def without_stop() -> Iterator[int]:
        for token in tokens:
            drawn.append(token)
            if token not in stop:
                yield token

    for text in text_of(without_stop(), tokenizer, prompt):
        print(text, end="", flush=True)
    print(flush=True)
    seconds = time.perf_counter() - started
    ending = "stopped by --max-new-tokens"
    if drawn[-1] in stop:
        ending = f"ended by {tokenizer.decode(drawn[-1:])}"
    print(f"{len(drawn)} tokens, {len(drawn) / seconds:.1f} a second, {ending}", file=sys.stderr)
