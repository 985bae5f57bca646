"""Encode text with a tokenizer.json so that no text has the id of a special token.

    encoder = text_encoder(tokenizer, content, special={"<s>": 1, "</s>": 2})
    encoder.encode_batch_fast(["</s>"], add_special_tokens=False)[0].ids      # of "</", "s", ">"

`encode_special_tokens` of the package `tokenizers` only ends the search for added tokens. The model
may still have their names: the vocabulary of a Unigram, WordLevel or WordPiece model often does,
and so may that of byte-pair encoding, whose merges may make them. The encoder is a copy in which
these entries have other names, that no text has. Ids are the same.

`text_fault` says what such an encoder would lose of texts, or take for the end of a document.
"""

import json
import re
import uuid
from collections.abc import Mapping, Set
from typing import Any

import tokenizers
from tokenizers import models

Names = Mapping[str, str]  # of special tokens: the name that an entry has instead

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece for a byte of text, which a file may flag as special
BYTES_OF_TEXT = [*range(0xC0), *range(0xC2, 0xF5)]  # that UTF-8 has

# Byte-level tokenizers write bytes as printable characters: themselves, or from U+0100 on.
_PRINTABLE = [
    byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)
]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE}
CHARACTERS |= {byte: chr(code) for code, byte in enumerate(_OTHERS, start=0x100)}


def text_encoder(
    tokenizer: tokenizers.Tokenizer, content: str, special: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """Return a tokenizer whose ids of a text are never special ones, and always the same.

    It is `tokenizer` itself if its model has none of them. content: of the file that `tokenizer`
    was read from; special: ids by name. An unknown word or character still has the id of the
    model's unknown token, and a byte that of its piece. Raises ValueError if the file is not
    understood.
    """
    ids = set(special.values())
    in_model = tokenizer.get_vocab(with_added_tokens=False)
    hidden = {piece for piece, id in in_model.items() if id in ids or piece in special}
    added = tokenizer.get_added_tokens_decoder().values()
    skipped = {token.content for token in added if token.special}
    encoder = tokenizer
    if hidden or not special.keys() <= skipped:
        hidden = {name for name in hidden | special.keys() if not BYTE.fullmatch(name)}
        # random, so that not even a text that was made for it has one
        names = {name: uuid.uuid4().hex for name in hidden}
        encoder = tokenizers.Tokenizer.from_str(json.dumps(_renamed(json.loads(content), names)))
        for name, other in names.items():
            if encoder.token_to_id(other) != tokenizer.token_to_id(name):
                raise ValueError(f"has a special token {name} that cannot be kept apart from text")
    encoder.encode_special_tokens = True
    encoder.no_truncation()  # some files enable it
    encoder.no_padding()
    if isinstance(encoder.model, models.BPE):
        encoder.model.dropout = None  # which merges at random
    return encoder


def text_fault(
    encoder: tokenizers.Tokenizer, content: str, special: Mapping[str, int], ends: Set[int]
) -> str:
    """Return the damage that an encoder would do to texts, in words; "" if there is none.

    It would end documents within texts, or lose characters without a word. content: of the
    tokenizer.json; special: ids by name; ends: the ids that begin and end a document.
    """
    model = encoder.model
    for name, id in special.items():
        if id in ends and BYTE.fullmatch(name):
            return f"begins or ends documents with {name}, which is a byte of texts, too"
    unknown, byte_fallback = _unknown(model, content)
    pieces = _byte_pieces(encoder, byte_fallback)
    missing = {piece for piece in pieces if model.token_to_id(piece) is None}
    if pieces and not missing:
        return ""  # no text is unknown
    if unknown in ends:
        return "gives unknown text the token that begins or ends a document"
    hidden = sorted(special.keys() & missing)
    if hidden:
        return f"has the special token {hidden[0]}, which is a byte of texts, too"
    if isinstance(model, models.BPE) and model.unk_token is None:
        return (
            "has tokens neither for all characters nor for unknown text, so that texts would lose"
            " characters"
        )
    return ""


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return True if a piece has a character for each byte, as GPT-2's and Llama 3's."""
    steps = [step for step in (tokenizer.normalizer, tokenizer.pre_tokenizer) if step is not None]
    # JSON, in which the quotes of a pattern have backslashes
    return any(b'"type":"ByteLevel"' in step.__getstate__() for step in steps)


def _unknown(model: models.Model, content: str) -> tuple[int | None, bool]:
    """Return the id of unknown text, and whether an unknown character has those of its bytes."""
    if isinstance(model, models.Unigram):  # the library's class has neither
        settings = json.loads(content)["model"]
        return settings.get("unk_id"), settings.get("byte_fallback", False)
    name = getattr(model, "unk_token", None)  # None: BPE leaves out what is unknown
    id = None if name is None else model.token_to_id(name)
    return id, isinstance(model, models.BPE) and model.byte_fallback


def _byte_pieces(encoder: tokenizers.Tokenizer, byte_fallback: bool) -> list[str]:
    """Return the pieces that a model needs so that it knows any text; [] if there are none."""
    model = encoder.model
    if byte_fallback:
        return [f"<0x{byte:02X}>" for byte in BYTES_OF_TEXT]
    if not is_byte_level(encoder) or not isinstance(model, models.BPE | models.Unigram):
        return []
    prefixes = {"", getattr(model, "continuing_subword_prefix", None) or ""}
    suffixes = {"", getattr(model, "end_of_word_suffix", None) or ""}
    return [
        prefix + CHARACTERS[byte] + suffix
        for byte in BYTES_OF_TEXT
        for prefix in prefixes
        for suffix in suffixes
    ]


def _renamed(content: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return the content of a tokenizer.json in which special tokens have other names."""
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in content.get("added_tokens") or []
    ]
    # the post-processor, which puts special tokens around a text, names them, too
    return {
        **content,
        "added_tokens": added,
        "post_processor": None,
        "model": _renamed_model(content["model"], names),
    }


def _renamed_model(model: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return a model whose vocabulary has other names for special tokens, and no merges to them."""
    renamed = dict(model)
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    else:  # Unigram's: a piece and its score
        renamed["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "unk_token" in model:
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        renamed["merges"] = [
            merge for merge in model["merges"] if names.keys().isdisjoint(_pieces(merge, prefix))
        ]
    return renamed


def _pieces(merge: str | list[str], prefix: str) -> tuple[str, str, str]:
    """Return the two pieces of a merge, and what they make."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second.removeprefix(prefix)
