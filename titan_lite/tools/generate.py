"""Generate text from a checkpoint.

titan-lite generate outputs/debug_model --prompt "def main("
"""

import dataclasses
import math
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from titan_lite.checkpoint.weights import (
    Weights,
    find_tokenizer,
    load,
    open_weights,
)
from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.config.families import ModelConfig
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.logging import init_logging
from titan_lite.models.decoder import Decoder, Sampling, decoding
from titan_lite.models.shapes import sizes_without_a_kernel
from titan_lite.models.transformer import Transformer, saved_buffers
from titan_lite.text import first_names


def build_model(
    weights: Weights, max_tokens: int, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """Return an unsharded model for up to `max_tokens` tokens. Raises ConfigError."""
    if max_tokens > weights.config.max_seq_len:
        raise ConfigError(
            f"prompt and --max-new-tokens are {max_tokens} tokens together; use at most"
            f" {weights.config.max_seq_len}, the model's max_seq_len"
        )
    check_experts(weights.config, dtype)
    with torch.device("meta"):
        config = dataclasses.replace(weights.config, max_seq_len=max_tokens)
        model = Transformer(config).to(dtype)
    model.to_empty(device=device)
    if weights.config.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight  # type: ignore[union-attr]
    model.init_buffers()
    buffers = {fqn: model.get_buffer(fqn) for fqn in saved_buffers(model)}
    load(weights, {**dict(model.named_parameters()), **buffers})
    return model


def check_experts(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError if the experts of an MoE model cannot be computed in this dtype."""
    words = str(dtype).removeprefix("torch.")
    for name, size, multiple in sizes_without_a_kernel(config, words):
        in_float32 = words != "float32" and not sizes_without_a_kernel(config, "float32")
        raise ConfigError(
            f"model.{name} = {size} is not a multiple of {multiple}, as grouped GEMMs of experts"
            f" in {words} need it; use {'--dtype float32' if in_float32 else 'another model'}"
        )


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    vocab_size: int,
    sampling: Sampling,
) -> Iterator[int]:
    """Yield tokens below vocab_size that continue the prompt, the first in `stop` as the last.

    Draws on the CPU in float32, so that a seed has the same random numbers on every device. Raises
    ConfigError for logits that are no numbers.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        logits = decoder(torch.tensor([tokens], device=decoder.device))[0, -1]
        logits = logits[:vocab_size].float().cpu()
        if not logits.isfinite().all():
            raise ConfigError(_why_no_token(decoder.model))
        token = sampling.draw(logits, generator)
        yield token
        if token in stop:
            return
        tokens = [token]


def _why_no_token(model: Transformer) -> str:
    """Return what is wrong with a model whose logits have NaN or infinity."""
    wrong = [fqn for fqn, each in model.named_parameters() if not each.isfinite().all()]
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
    parser.add_options_of_checkpoint()
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
    max_tokens = len(document) + options.max_new_tokens
    model = build_model(weights, max_tokens, device, dtype)
    stop = stop_tokens(weights, tokenizer)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    with decoding(model, max_tokens) as decoder:
        tokens = generate(
            decoder,
            document,
            max_new_tokens=options.max_new_tokens,
            stop=stop,
            vocab_size=tokenizer.vocab_size,
            sampling=sampling,
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
