"""Small tokenizers of every kind that a tokenizer.json may have.

path = save(unigram(), folder)              # folder/tokenizer.json
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", *"<>/|stheca", "\u2581the", "\u2581cat", "\u2581sat", "<s", "</", "s>"]
SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = ["the", "cat", "sat", "<", ">", "/", "s"]


def save(tokenizer, folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, "tokenizer.json")
    tokenizer.save(str(path))
    return path


def added(names=SPECIAL, *, special=True, **more):
    return [AddedToken(name, special=special, **more) for name in names]


def metaspace(tokenizer):
    """Spaces are U+2581, and a text begins with one: as Llama 2's and Mistral's."""
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def unigram(*, byte_fallback=False):
    """As T5's, whose vocabulary has the special tokens with a score of 0."""
    pieces = [(name, 0.0) for name in SPECIAL]
    pieces += [(piece, -3.0) for piece in BYTES * byte_fallback]
    pieces += [(piece, -3.0 + len(piece) / 10) for piece in PIECES]
    tokenizer = metaspace(Tokenizer(models.Unigram(pieces, 0, byte_fallback)))
    if byte_fallback:
        others = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        tokenizer.decoder = decoders.Sequence(others)
    tokenizer.add_special_tokens(added())
    return tokenizer


def word_level(unk="<unk>"):
    names = SPECIAL if unk else SPECIAL[1:]
    vocab = {name: id for id, name in enumerate([*names, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk) if unk else models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(added(names))
    return tokenizer


def word_piece():
    pieces = [*WORDS, *(f"##{piece}" for piece in WORDS)]
    vocab = {name: id for id, name in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(added())
    return tokenizer


def bpe(*, ignore_merges=True, merged=False, special=True, **more):
    """Llama 2's, with bytes for characters that it lacks.

    merged: the pieces of a special token's name merge to it. special: as the file flags it.
    """
    pairs = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    pairs += [("s", ">"), ("<", "/"), ("<", "s")]
    if merged:
        pairs += [("</", "s>"), ("<s", ">")]
    names = [*SPECIAL, *BYTES, "\u2581", *"<>/|stheca", *("".join(pair) for pair in pairs)]
    vocab = {name: id for id, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(vocab, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    model.ignore_merges = ignore_merges
    tokenizer = Tokenizer(model)
    prepare = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(prepare)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_tokens(added(special=special, **more))
    return tokenizer


def byte_level(names=("<|endoftext|>",)):
    """GPT-2's: `names` are in the vocabulary, after bytes and merges."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    pairs = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("c", "a")]
    pieces = [*sorted(letters), *("".join(pair) for pair in pairs), *names]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(added(names))
    return tokenizer


def save_gpt2(folder):
    """One token begins and ends a document."""
    path = save(byte_level(), folder)
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return path
