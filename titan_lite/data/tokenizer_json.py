"""Hugging Face's tokenizer.json: ours written so, that AutoTokenizer opens it, and theirs read.

    to_json(load_tokenizer("assets/tokenizer/debug.model"))      # the content of tokenizer.json
    tokenizer_config()                                           # and of the tokenizer_config.json beside it
    JsonTokenizer("exported/tokenizer.json").encode("import os", bos=True)

A file in tiktoken's format has the ranks of tokens; tokenizer.json has pairs to merge. The pair that makes a token is what is
left when its bytes are merged by all smaller ranks. Bytes are written as printable characters: themselves, or from U+0100 on.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import PATTERN, Tokenizer

_PRINTABLE = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Encodes as ours does with bos=True, but for texts that look like special tokens, which become these."""
    pairs = (_pair(token, tokenizer.ranks) for token in tokenizer.ranks if len(token) > 1)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    bos = next(name for name, id in tokenizer.special_tokens.items() if id == tokenizer.bos_id)
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": name, **plain} for name, id in tokenizer.special_tokens.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is this token, as in tiktoken
            "vocab": {_text(token): rank for token, rank in tokenizer.ranks.items()},
            "merges": [[_text(part) for part in pair] for pair in pairs if len(pair) == 2],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


class JsonTokenizer:
    """Encodes and decodes as a `Tokenizer` does, through the package tokenizers. Raises ConfigError."""

    def __init__(self, path: str | os.PathLike):
        try:
            from tokenizers import Tokenizer as Theirs
        except ImportError:
            raise ConfigError(f"{os.fspath(path)}: reading it needs the package tokenizers, which is not installed") from None
        try:
            self._theirs = Theirs.from_file(os.fspath(path))
        except Exception as error:  # they raise this very class
            raise ConfigError(f"{os.fspath(path)}: cannot be read as a tokenizer.json: {error}") from None
        self.vocab_size = 1 + max(self._theirs.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """bos: with the special tokens that the file wants around a text."""
        return self._theirs.encode(text, add_special_tokens=bos).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._theirs.decode(list(ids), skip_special_tokens=False)


def _pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts that the token's bytes have become before the last merge: two, or more of a token that no merge makes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
        lowest = min(merged)
        if lowest >= ranks[token]:
            break
        at = merged.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _text(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
