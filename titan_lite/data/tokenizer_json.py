"""Convert a tokenizer in tiktoken's format to Hugging Face's tokenizer.json, for AutoTokenizer, and
have another tokenizer.json begin texts as training does.

    to_json(load_tiktoken("assets/tokenizer/debug.model"))       # the content of tokenizer.json
    tokenizer_config(load_tokenizer("tokenizer.json"))           # that of tokenizer_config.json
    with_bos(load_tokenizer("tokenizer.json"))                   # of a tokenizer.json that puts BOS

A file in tiktoken's format has the ranks of tokens. tokenizer.json has pairs to merge, in the order
of the rank of the merged token. Bytes are written as printable characters.
"""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from titan_lite.data.special_tokens import CHARACTERS
from titan_lite.data.tokenizer import (
    PATTERN,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    tokens_around_text,
)


def to_json(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json that encodes like `encode(text, bos=True)`.

    Except that names of special tokens become these.
    """
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(id, name) for name, id in tokenizer.special_tokens.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": _begin_with_bos(tokenizer),
        "decoder": byte_level,
        "model": _merges(tokenizer),
    }


def _added_token(id: int, name: str) -> dict[str, Any]:
    return {
        "id": id,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def with_bos(tokenizer: JsonTokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json that puts BOS before a text, as training does: the
    tokenizer's own, if that puts it there.

    Raises ValueError if that puts other tokens there.
    """
    content = json.loads(tokenizer.content)
    before = tokens_around_text(tokenizers.Tokenizer.from_str(tokenizer.content))["bos_token"]
    if before not in ([], [tokenizer.bos_id]):
        raise ValueError(
            f"puts {tokenizer.decode(before)} before a text, and training put"
            f" {_name_of(tokenizer, tokenizer.bos_id)}"
        )
    if not before:
        own = content.get("post_processor")
        begin = _begin_with_bos(tokenizer)
        both = {"type": "Sequence", "processors": [own, begin]}
        content["post_processor"] = begin if own is None else both
    return content


def config_with_bos(tokenizer: JsonTokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json with which transformers puts BOS, as the tokenizer.json says.

    It would not where `add_bos_token` is false, or missing beside `add_eos_token`.
    """
    changed = dict(config)
    if not changed.get("bos_token"):
        changed["bos_token"] = _name_of(tokenizer, tokenizer.bos_id)
    if "add_bos_token" in changed or "add_eos_token" in changed:
        changed["add_bos_token"] = True
    return changed


def _begin_with_bos(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the processor that puts BOS before a text."""
    bos = _name_of(tokenizer, tokenizer.bos_id)
    before = {"SpecialToken": {"id": bos, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second_text = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [before, text],
        "pair": [before, text, second_text],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
    }


def _merges(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """Return the model: the vocabulary, and the pairs to merge."""
    merges = []
    for token in tokenizer.ranks:
        for first, second in _pairs(token, tokenizer.ranks):
            merges.append([_text(first), _text(second)])
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,  # a piece that is a token is not split, as in tiktoken
        "vocab": {_text(token): rank for token, rank in tokenizer.ranks.items()},
        "merges": merges,
    }


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer_config.json, which AutoTokenizer needs to know BOS and EOS."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _name_of(tokenizer, tokenizer.bos_id),
        "eos_token": _name_of(tokenizer, tokenizer.eos_id),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _name_of(tokenizer: Tokenizer, special_id: int) -> str:
    return next(name for name, id in tokenizer.special_tokens.items() if id == special_id)


def _pairs(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens whose concatenation is this token: tiktoken merges any of them."""
    pairs = []
    for length in range(1, len(token)):
        first = token[:length]
        second = token[length:]
        if first in ranks and second in ranks:
            pairs.append((first, second))
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _text(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
