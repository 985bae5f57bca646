"""Our tokenizer in Hugging Face's format: the same ids of any text, through their libraries."""

import json
import pydoc_data.topics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_lite.data.tokenizer import SPECIAL_TOKENS, Tokenizer, load_tokenizer
from titan_lite.data.tokenizer_json import CHARACTERS, to_json, tokenizer_config

OURS = load_tokenizer(Path(__file__).parents[3] / "assets/tokenizer/debug.model")


@pytest.fixture(scope="module")
def theirs():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_str(json.dumps(to_json(OURS)))


def test_real_text_has_the_same_ids(theirs):
    texts = list(pydoc_data.topics.topics.values())
    assert len(texts) > 50
    for text in texts:
        assert theirs.encode(text).ids == OURS.encode(text, bos=True)


@given(text=st.text() | st.text(alphabet=" \t\n\rab1'.é€😀"))
def test_any_text_has_the_same_ids_and_comes_back(theirs, text):
    ids = OURS.encode(text, bos=True)
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids, skip_special_tokens=True) == text


def test_a_token_that_no_merges_make_is_found_all_the_same():
    tokenizers = pytest.importorskip("tokenizers")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"abc": 256, b"bcd": 257, b"abcd": 258}
    ours = Tokenizer(ranks, "0" * 64)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(to_json(ours)))
    assert ours.encode("abcd") == [258]
    for text in ("abc", "abcd", "abd"):
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)


def test_special_tokens_keep_their_ids(theirs):
    assert [theirs.token_to_id(name) for name in SPECIAL_TOKENS] == list(range(1792, 2048))
    assert theirs.get_vocab_size() == OURS.vocab_size


def test_every_byte_has_a_character_of_its_own():
    tokenizers = pytest.importorskip("tokenizers")
    assert sorted(CHARACTERS) == list(range(256))
    assert set(CHARACTERS.values()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_transformers_opens_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_json(OURS)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def main():\n    return 'ü'"
    assert theirs(text)["input_ids"] == OURS.encode(text, bos=True)
    assert theirs.decode(OURS.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (OURS.bos_id, OURS.eos_id)
