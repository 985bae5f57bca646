"""No text has the id of a special token, whatever the kind of the tokenizer."""

import json
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_tokenizers import (
    PIECES,
    SPECIAL,
    added,
    bpe,
    byte_level,
    metaspace,
    save,
    unigram,
    word_level,
    word_piece,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import SPECIAL_TOKENS, TiktokenTokenizer, load_tokenizer

TEXTS = [
    "the cat </s> <s> sat",
    "</s>",
    "<s>the</s>cat<s></s></s>",
    "the  </s>  ",
    "x</s>y",
    "<unk> <|endoftext|> <pad>",
    "\uff1c/s\uff1e \uff1cs\uff1e",  # wide characters, which NFKC makes narrow
    "</S> <S>",
    "\u2581</s>\u2581",
    "<0x0A></s>",
]


def normalized(tokenizer):
    """Wide characters become narrow and capitals small, in names of special tokens, too."""
    steps = [normalizers.NFKC(), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(
        [*steps, *([tokenizer.normalizer] if tokenizer.normalizer else [])]
    )
    return tokenizer


def split_at_spaces(tokenizer):
    """Then `ignore_merges` finds a special token that stands alone."""
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def reordered():
    """An ordinary added token between special ones that the vocabulary lacks."""
    tokenizer = unigram()
    tokenizer.add_special_tokens(added(["<|pad|>"]))
    tokenizer.add_tokens(added(["the cat"], special=False))
    tokenizer.add_special_tokens(added(["<|eot|>"]))
    return tokenizer


def with_affixes():
    vocab = [*SPECIAL, *"</s>", "##/", "##s", "##>", "##s>", "</", "</s>end"]
    merges = [("##s", "##>"), ("<", "##/"), ("</", "##s>")]
    model = models.BPE(
        {piece: id for id, piece in enumerate(vocab)},
        merges,
        unk_token="<unk>",
        continuing_subword_prefix="##",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(added())
    return tokenizer


def two_names():
    """The id of a special token has a second name in the vocabulary."""
    vocab = {name: id for id, name in enumerate([*SPECIAL, "the", "cat"])} | {"x</s>y": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(added())
    return tokenizer


KINDS = {
    "Unigram": unigram(),
    "Unigram with bytes": unigram(byte_fallback=True),
    "Unigram, normalized": normalized(unigram()),
    "Unigram with more added tokens": reordered(),
    "WordLevel": word_level(),
    "WordLevel with two names for one": two_names(),
    "WordPiece": word_piece(),
    "BPE that ignores merges": split_at_spaces(bpe()),
    "BPE whose merges make them": bpe(ignore_merges=False, merged=True),
    "BPE with a prefix": with_affixes(),
    "BPE, not flagged as special": bpe(special=False),
    "BPE, added without normalizing": bpe(special=False, normalized=False),
    "BPE, stripping": bpe(special=False, lstrip=True, rstrip=True),
    "BPE, normalized": normalized(bpe(merged=True, ignore_merges=False)),
    "bytes": byte_level(("<s>", "</s>")),
    "one token for both": byte_level(),
}


def read(kind, folder):
    return load_tokenizer(save(KINDS[kind], folder))


def special_ids(tokenizer):
    """Ids that no text has: all special ones but that of what is unknown."""
    return {id for name, id in tokenizer.special_tokens.items() if name != "<unk>"}


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_are_text(kind, tmp_path):
    tokenizer = read(kind, tmp_path)
    assert {tokenizer.bos_id, tokenizer.eos_id} <= special_ids(tokenizer)
    for text in TEXTS:
        document = tokenizer.encode_document(text).tolist()
        assert (document[0], document[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert special_ids(tokenizer).isdisjoint(document[1:-1]), text
        assert document[1:-1] == tokenizer.encode(text)
        assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.lists(st.sampled_from([*SPECIAL, *"</s> >the", "<|endoftext|>", "\u2581", "\n"])))
def test_no_join_of_names_is_a_special_token(kind, tmp_path, parts):
    tokenizer = cached(kind, tmp_path)
    assert special_ids(tokenizer).isdisjoint(tokenizer.encode("".join(parts)))


def cached(kind, folder, cache={}):  # noqa: B006 - once for all examples
    if kind not in cache:
        cache[kind] = read(kind, folder)
    return cache[kind]


@pytest.mark.parametrize("kind", ["Unigram with bytes", "bytes", "one token for both"])
def test_they_come_back(kind, tmp_path):
    tokenizer = read(kind, tmp_path)
    for text in TEXTS[:6]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_id]) in tokenizer.special_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_other_texts_have_the_ids_of_the_file(kind, tmp_path):
    """Also those with added tokens that are not special, and unknown characters."""
    theirs, tokenizer = KINDS[kind], read(kind, tmp_path)
    for text in ("the cat sat", "the cat", "s > / <", " the  cat ", "hate \u20ac", "the catthe"):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_a_word_that_cannot_be_encoded_is_named(tmp_path):
    path = save(word_level(unk=None), tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("the cat") == [2, 3]
    for text in ("the cat </s>", "the dog"):
        with pytest.raises(ConfigError) as error:
            tokenizer.encode(text)
        assert str(error.value).startswith(
            f'model.tokenizer_path = "{path}" cannot encode the text "{text}" (WordLevel error:'
        )
        assert str(error.value).count("\n") == 0


def bpe_without(unk=None):
    """Characters of the special tokens' names are not in the vocabulary."""
    vocab = {piece: id for id, piece in enumerate([*SPECIAL, "\u2581", "t", "h", "e"])}
    return metaspace(Tokenizer(models.BPE(vocab, [], unk_token=unk)))


LOSES = "has tokens neither for all characters nor for unknown text, so that texts would lose"
ENDS = "gives unknown text the token that begins or ends a document"


@pytest.mark.parametrize(("unk", "words"), [(None, LOSES), ("</s>", ENDS)])
def test_one_that_would_lose_text_or_end_documents_in_it_is_refused(unk, words, tmp_path):
    assert words in refusal(bpe_without(unk), tmp_path)
    assert load_tokenizer(save(bpe_without("<unk>"), tmp_path)).encode("the") == [3, 4, 5, 6]


def refusal(tokenizer, folder, **config):
    """Return the error of a tokenizer with this tokenizer_config.json beside it."""
    path = save(tokenizer, folder)
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        load_tokenizer(path)
    assert str(error.value).startswith(f'model.tokenizer_path = "{path}" ')
    assert str(error.value).endswith("; use another tokenizer")
    return str(error.value)


@pytest.mark.parametrize("kind", ["Unigram with bytes", "BPE whose merges make them"])
@pytest.mark.parametrize("end", ["bos_token", "eos_token"])
def test_a_byte_of_text_ends_no_document(kind, end, tmp_path):
    words = "begins or ends documents with <0x0A>, which is a byte of texts, too"
    assert words in refusal(KINDS[kind], tmp_path, **{end: "<0x0A>"})


def without_unusual(tokenizer):
    """Unknown characters are normalized away, or are spaces."""
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    return tokenizer


def with_private_use(unk):
    """A word of the character that no vocabulary should have."""
    words = {word: id for id, word in enumerate(["<s>", "</s>", "\U0010fffd", *"<s>/"])}
    return Tokenizer(models.WordPiece(words, unk_token=unk))


@pytest.mark.parametrize("unk", ["<s>", "</s>"])
def test_unknown_text_ends_no_document(unk, tmp_path):
    pieces = [("<s>", 0.0), ("</s>", 0.0), *((piece, -3.0) for piece in PIECES)]
    for tokenizer in (
        without_unusual(Tokenizer(models.Unigram(pieces, ["<s>", "</s>"].index(unk)))),
        without_unusual(word_level(unk)),
        with_private_use(unk),
    ):
        assert ENDS in refusal(tokenizer, tmp_path)


def affixed(unk, *, missing=()):
    """CLIP's kind: the last character of a word has a piece of its own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<s>", "</s>"]
    vocab = {piece: id for id, piece in enumerate(pieces) if piece not in missing}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=unk, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(added(["<s>", "</s>"]))
    return tokenizer


def test_one_that_knows_every_byte_has_no_unknown_text(tmp_path):
    tokenizer = load_tokenizer(save(affixed("</s>"), tmp_path))
    assert tokenizer.eos_id not in tokenizer.encode("the \u20ac </s>")
    assert ENDS in refusal(affixed("</s>", missing=["\u0120</w>"]), tmp_path)
    assert LOSES in refusal(affixed(None, missing=["\u0120</w>"]), tmp_path)


@pytest.mark.parametrize("name", ["\u0120", "\u010a", "\u00c3", "\u00e9", "!"])
def test_a_special_token_is_no_byte_of_text(name, tmp_path):
    """A space, a newline, the first byte of \u00e9, that of \u9b3c, and themselves."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(added([name]))
    assert f"has the special token {name}, which is a byte of texts, too" in refusal(
        tokenizer, tmp_path
    )
    config = {"bos_token": name, "eos_token": name}
    assert f"has the special token {name}" in refusal(byte_level(), tmp_path, **config)


def test_merges_are_not_left_out_at_random(tmp_path):
    theirs = byte_level()
    theirs.model.dropout = 0.5
    tokenizer = load_tokenizer(save(theirs, tmp_path))
    again = pickle.loads(pickle.dumps(tokenizer))
    text = "the cat" * 50
    ids = byte_level().encode(text).ids
    assert tokenizer.encode(text) == again.encode(text) == tokenizer.encode(text) == ids


def test_a_text_with_the_end_of_a_document_is_an_error(tmp_path, monkeypatch):
    """Whatever way it took: here that of the file, without other names for special tokens."""
    tokenizer = read("Unigram", tmp_path)
    monkeypatch.setattr(tokenizer, "_encoder", KINDS["Unigram"])
    with pytest.raises(ConfigError) as error:
        tokenizer.encode_document("the cat </s> sat")
    assert str(error.value) == (
        f'model.tokenizer_path = "{tmp_path}/tokenizer.json" gives a part of the text'
        ' "the cat </s> sat" the token that begins or ends a document; use another tokenizer'
    )


def test_a_tiktoken_file_has_no_way_to_them():
    """Its special tokens are no ranks; one that a rank spells is another token."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for name in SPECIAL_TOKENS[:2]:
        for length in range(2, len(name) + 1):
            ranks.setdefault(name[:length].encode(), len(ranks))
    tokenizer = TiktokenTokenizer(ranks, "0" * 64)
    text = "a<|begin_of_text|><|end_of_text|>b"
    assert max(tokenizer.encode(text)) < len(ranks) == tokenizer.bos_id
    assert tokenizer.decode(tokenizer.encode(text)) == text
