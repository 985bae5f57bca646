"""Llama 3's own tokenizer, as the package llama-models has it: ours and the tokenizer.json that we
make of it agree with theirs.

The package is part of the extra `test`; its file of ranks stays in the package.
"""

import json
import pydoc_data.topics
import random
import re
from pathlib import Path

import pytest

from titan_lite.config.families import LLAMA3
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.data.tokenizer_json import to_json, tokenizer_config

reference = pytest.importorskip(
    "llama_models.llama3.tokenizer", reason="needs the package llama-models (extra test)"
)
FILE = Path(reference.__file__).with_name("tokenizer.model")


@pytest.fixture(scope="module")
def theirs():
    return reference.Tokenizer(FILE)


@pytest.fixture(scope="module")
def ours():
    return load_tokenizer(FILE)


@pytest.fixture(scope="module")
def as_json(ours, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "tokenizer.json"
    path.write_text(json.dumps(to_json(ours)), encoding="utf-8")
    path.with_name("tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(ours)), encoding="utf-8"
    )
    return load_tokenizer(path)


# Letters with and without case, digits, marks, scripts without spaces, right to left, emoji with
# joiners, private use, controls.
BLOCKS = """
    20-7E 0-1F 30-39 A0-24F 300-36F 370-3FF 400-4FF 590-5FF 600-6FF 900-97F E00-E7F 1100-11FF
    2000-206F 2070-209F 2150-218F 2190-22FF 3040-30FF 4E00-9FFF AC00-D7A3 E000-E0FF FE00-FE0F
    FF00-FFEF 10330-1034A 1D400-1D7FF 1F300-1F6FF 1F900-1F9FF 20000-2A6DF E0100-E01EF
"""
RANGES = [tuple(int(end, 16) for end in block.split("-")) for block in BLOCKS.split()]
WORDS = """
    's 'LL 'Re \u2019t 123 4567890 0.5 e-9 return {} :// ... --- __init__ naïve Straße \u0130 한국어
    漢字 👩‍👩‍👧 🇩🇪 \ufeff \ufffd
"""
PIECES = [" ", "  ", "\n", "\r\n", "\n\n ", "\t", "\u00a0", "\u3000", "\u200d", "def "]
PIECES += WORDS.split()


def diverse(count):
    """From documents, of one range of characters, of all of them, and of pieces that meet at
    borders of the pattern.
    """
    draw = random.Random(0)
    text = "\n".join(pydoc_data.topics.topics.values())
    for i in range(count):
        if i % 4 == 0:
            start = draw.randrange(len(text))
            yield text[start : start + draw.randint(0, 200)]
        elif i % 4 == 1:
            low, high = draw.choice(RANGES)
            yield "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(0, 30)))
        elif i % 4 == 2:
            yield "".join(
                chr(draw.randint(*draw.choice(RANGES))) for _ in range(draw.randint(0, 40))
            )
        else:
            yield "".join(draw.choice(PIECES) for _ in range(draw.randint(0, 20)))


STRINGS = list(diverse(12_000))


def test_vocabulary_and_special_tokens_are_theirs(theirs, ours, as_json):
    for tokenizer in (ours, as_json):
        assert tokenizer.vocab_size == theirs.n_words == LLAMA3.flavors["8B"].vocab_size == 128_256
        assert tokenizer.special_tokens == theirs.special_tokens
        assert (
            (tokenizer.bos_id, tokenizer.eos_id)
            == (theirs.bos_id, theirs.eos_id)
            == (128_000, 128_001)
        )


def test_every_string_has_the_ids_that_theirs_gives_it_and_comes_back(theirs, ours, as_json):
    of_tokens = [
        theirs.decode(range(at, at + 16)) for at in range(0, 128_000, 16)
    ]  # all that are text, in unlikely company
    used = set()
    for string in STRINGS + of_tokens:
        ids = theirs.encode(string, bos=True, eos=True)
        assert ours.encode_document(string).tolist() == ids, repr(string)
        assert as_json.encode_document(string).tolist() == ids, repr(string)
        assert ours.decode(ids) == as_json.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids[1:-1]) == string
        used.update(ids)
    assert len(used) > 60_000


def test_text_with_special_tokens_has_the_ids_that_theirs_gives_it(theirs, ours, as_json):
    """With allowed_special, theirs gives the ids that ours has with special ids between texts;
    without, both read text.
    """
    draw, names = random.Random(1), list(theirs.special_tokens)
    for i, string in enumerate(STRINGS[:1000]):
        cut = draw.randint(0, len(string))
        some = [names[i % len(names)], *draw.choices(names, k=draw.randint(0, 2))]
        string = string[:cut] + "".join(some) + string[cut:]
        ids = theirs.encode(string, bos=False, eos=False, allowed_special="all")
        for tokenizer in (ours, as_json):
            parts = re.split(f"({'|'.join(map(re.escape, names))})", string)
            mine = [
                id
                for p in parts
                for id in ([tokenizer.special_tokens[p]] if p in names else tokenizer.encode(p))
            ]
            assert mine == ids, repr(string)
            assert tokenizer.decode(ids) == string
            assert tokenizer.encode(string) == theirs.encode(string, bos=False, eos=False), repr(
                string
            )


def test_bytes_that_are_no_text_decode_as_theirs(theirs, ours, as_json):
    draw = random.Random(2)
    for _ in range(2000):
        ids = [draw.randrange(128_256) for _ in range(draw.randint(0, 12))]
        assert ours.decode(ids) == as_json.decode(ids) == theirs.decode(ids), ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["a", " ", "漢", "\n", "ab ", "x" * 24_999 + " ", "words and words. "]
)
def test_long_texts_are_cut_as_theirs(theirs, ours, as_json, unit):
    text = (unit * (430_000 // len(unit) + 1))[:430_000] + "end"
    ids = theirs.encode(text, bos=False, eos=False)
    assert ours.encode(text) == ids
    assert as_json.encode(text) == ids


def test_half_a_surrogate_pair_is_read_as_theirs_does(theirs, ours, as_json):
    for text in ("a\ud83d b", "\udc00", "x\ud800\ud800"):
        ids = theirs.encode(text, bos=False, eos=False)
        assert ours.encode(text) == as_json.encode(text) == ids
