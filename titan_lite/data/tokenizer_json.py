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
from tokenizers import decoders, models, pre_tokenizers, processors

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
    vocab = {_text(token): rank for token, rank in tokenizer.ranks.items()}
    merges = [
        (_text(first), _text(second))
        for token in tokenizer.ranks
        for first, second in _pairs(token, tokenizer.ranks)
    ]
    # a piece that is a token is not split, as in tiktoken
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    made.decoder = decoders.ByteLevel()
    made.post_processor = _begin_with_bos(tokenizer)
    made.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False) for name in tokenizer.special_tokens]
    )
    return json.loads(made.to_str())


def with_bos(tokenizer: JsonTokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json that puts BOS before a text, as training does: the
    tokenizer's own, if that puts it there.

    Raises ValueError if that puts other tokens there.
    """
    content = json.loads(tokenizer.content)
    made = tokenizers.Tokenizer.from_str(tokenizer.content)
    before = tokens_around_text(made)["bos_token"]
    if before not in ([], [tokenizer.bos_id]):
        raise ValueError(
            f"puts {tokenizer.decode(before)} before a text, and training put"
            f" {_name_of(tokenizer, tokenizer.bos_id)}"
        )
    if not before:
        own = made.post_processor
        begin = _begin_with_bos(tokenizer)
        made.post_processor = begin if own is None else processors.Sequence([own, begin])
        content["post_processor"] = json.loads(made.to_str())["post_processor"]
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


def _begin_with_bos(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """Return the processor that puts BOS before a text."""
    bos = _name_of(tokenizer, tokenizer.bos_id)
    return processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, tokenizer.bos_id)]
    )


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
