"""Convert a tokenizer in tiktoken's format to Hugging Face's tokenizer.json, so that AutoTokenizer
can open it.

    to_json(load_tiktoken("assets/tokenizer/debug.model"))       # the content of tokenizer.json
    tokenizer_config()                                           # the content of the tokenizer_config.json beside it

A file in tiktoken's format has the ranks of tokens. tokenizer.json has pairs to merge, in the order
of the rank of the merged token. Bytes are written as printable characters: themselves, or from
U+0100 on.
"""

from typing import Any

from titan_lite.data.tokenizer import PATTERN, TiktokenTokenizer

_PRINTABLE = [
    byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)
]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(_OTHERS)
}


def to_json(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json that encodes like `encode(text, bos=True)`, except that names of
    special tokens become these.
    """
    pairs = (pair for token in tokenizer.ranks for pair in _pairs(token, tokenizer.ranks))
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    bos = next(name for name, id in tokenizer.special_tokens.items() if id == tokenizer.bos_id)
    first, text = (
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": name, **plain} for name, id in tokenizer.special_tokens.items()
        ],
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
            "ignore_merges": True,  # a piece that is a token is not split, as in tiktoken
            "vocab": {_text(token): rank for token, rank in tokenizer.ranks.items()},
            "merges": [[_text(part) for part in pair] for pair in pairs],
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


def _pairs(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens whose concatenation is this token: tiktoken merges any of them."""
    halves = ((token[:at], token[at:]) for at in range(1, len(token)))
    return sorted(
        (pair for pair in halves if pair[0] in ranks and pair[1] in ranks),
        key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
    )


def _text(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
