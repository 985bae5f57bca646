"""Text <-> token ids, from a file in tiktoken's format, by the rules of Llama 3.

    tokenizer = load_tokenizer("assets/tokenizer/debug.model")
    tokenizer.encode("import os", bos=True)      # [1792, 759, 665]
    tokenizer.decode([759, 665])                 # "import os"

A line of the file is a token's bytes in base64, a space and its rank: the order in which byte-pair encoding merges, and
the token's id. Llama 3's own `tokenizer.model` is such a file. 256 special tokens follow the ranks, so that a file of
1,792 ranks makes a vocabulary of 2,048. Names, ids and the splitting pattern are those of
https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Sequence

import tiktoken

from titan_lite.config import ConfigError

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# fmt: off
_NAMED = [
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id", "step_id",
    "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image",
]
# fmt: on
SPECIAL_TOKENS = [f"<|{name}|>" for name in _NAMED + [f"reserved_special_token_{i}" for i in range(2, 246)]]

# tiktoken's matcher recurses: it panics on very long texts, and its time grows with the square of a run of one class
# (https://github.com/openai/tiktoken/issues/195). Cut where Llama 3's tokenizer cuts, so that the ids are the same.
_MAX_CHARS, _MAX_RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1},}}|(?<!\s)\s{{{_MAX_RUN + 1},}}")
# A long run fills one of the stretches of half its length that start at multiples of it: looking there costs next to nothing.
_HALF = _MAX_RUN // 2
_HALF_RUN = re.compile(rf"\S{{{_HALF}}}|\s{{{_HALF}}}")


class Tokenizer:
    """`vocab_size` tokens, `bos_id` and `eos_id` among them; `sha256` of the file tells tokenizers apart. Pickles."""

    def __init__(self, ranks: dict[bytes, int], sha256: str):
        special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.ranks, self.special_tokens = ranks, special
        self._encoding = tiktoken.Encoding(
            name=f"titan_lite-{sha256}", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + len(special)
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]
        self.sha256 = sha256

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of any text; what looks like a special token in it is text as any other."""
        ids = [self.bos_id] if bos else []
        for piece in _cut(text):
            ids += self._encoding.encode_ordinary(piece)
        if eos:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids in [0, vocab_size); bytes that are no UTF-8 become U+FFFD, special tokens their names."""
        return self._encoding.decode(ids)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a file in tiktoken's format.

    Raises:
        ConfigError: the file cannot be read, or a line of it is not what this format asks for.
    """
    works = "name a file in tiktoken's format, such as assets/tokenizer/debug.model or Llama 3's original/tokenizer.model"
    wrong = f'model.tokenizer_path = "{os.fspath(path)}"'
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{wrong}: cannot be read ({error.strerror}); {works}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            text, rank_text = line.split()
            token, rank = base64.b64decode(text, validate=True), int(rank_text)
        except ValueError:
            shown = line[:40].decode(errors="replace")
            raise ConfigError(f"{wrong}, line {number}: {shown!r} is not a base64 token, a space and a rank; {works}") from None
        if rank != len(ranks):
            raise ConfigError(f"{wrong}, line {number}: rank {rank} where {len(ranks)} should follow; {works}")
        if token in ranks or not token:
            what = f"token {token!r} of rank {ranks[token]} again" if token else "an empty token"
            raise ConfigError(f"{wrong}, line {number}: {what}; {works}")
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:  # tiktoken would panic at the first text that has such a byte
        raise ConfigError(
            f"{wrong}, line {len(ranks)}: the file ends without a token for {len(missing)} of the 256 bytes, "
            f"such as {bytes(missing[:1])!r}; {works}"
        )
    return Tokenizer(ranks, hashlib.sha256(content).hexdigest())


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most 400,000 characters without a run of more than 25,000 of whitespace or of anything else."""
    for start in range(0, len(text), _MAX_CHARS):
        piece = text[start : start + _MAX_CHARS]
        begin = 0
        if any(_HALF_RUN.match(piece, at) for at in range(0, len(piece) - _HALF, _HALF)):
            for run in _LONG_RUN.finditer(piece):
                for end in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                    yield piece[begin:end]
                    begin = end
        yield piece[begin:]
