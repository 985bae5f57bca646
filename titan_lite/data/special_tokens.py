"""Encode text with a tokenizer.json so that no text has the id of a special token.

    encoder = text_encoder(tokenizer, content, special={"<s>": 1, "</s>": 2})
    encoder.encode_batch_fast(["</s>"], add_special_tokens=False)[0].ids      # of "</", "s", ">"

`encode_special_tokens` of the package `tokenizers` only ends the search for added tokens. The model
may still have their names: the vocabulary of a Unigram, WordLevel or WordPiece model often does,
and so may that of byte-pair encoding, whose merges may make them. The encoder is a copy in which
these entries have other names, that no text has. Ids are the same.
"""

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

import tokenizers

Names = Mapping[str, str]  # of special tokens: the name that an entry has instead

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece for a byte of text, which a file may flag as special


def text_encoder(
    tokenizer: tokenizers.Tokenizer, content: str, special: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """Return a tokenizer whose ids of a text are never special ones.

    It is `tokenizer` itself if its model has none of them. content: of the file that `tokenizer`
    was read from; special: ids by name. An unknown word or character still has the id of the
    model's unknown token. Raises ValueError if the file is not understood.
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
                raise ValueError(f"has a special token {name} that cannot be told from text")
    encoder.encode_special_tokens = True
    encoder.no_truncation()  # some files enable it
    encoder.no_padding()
    return encoder


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
