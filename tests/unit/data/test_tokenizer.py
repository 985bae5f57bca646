import base64
import os
import pickle
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import _cut, load_tokenizer
from titan_lite.models.llama3 import FLAVORS

DEBUG = Path(__file__).parents[3] / "assets/tokenizer/debug.model"
BYTES = [b"%s %d" % (base64.b64encode(bytes([i])), i) for i in range(256)]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEBUG)


def test_the_debug_tokenizer_fits_the_debug_flavor(tokenizer):
    assert tokenizer.vocab_size == FLAVORS["debug"].vocab_size == 2048


def test_256_special_tokens_follow_the_ranks(tokenizer):
    names = [tokenizer.decode([i]) for i in range(1792, 2048)]
    assert len(set(names)) == 256
    assert all(name.startswith("<|") and name.endswith("|>") for name in names)
    at = {name: i for i, name in enumerate(names)}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1792, 1793)
    assert at["<|begin_of_text|>"] == 0
    assert at["<|end_of_text|>"] == 1
    assert at["<|start_header_id|>"] == 6
    assert at["<|eot_id|>"] == 9
    assert at["<|reserved_special_token_245|>"] == 255


def test_bos_and_eos_stand_where_asked(tokenizer):
    plain = tokenizer.encode("import os")
    assert plain == [759, 665]  # merged: the ranks are used, not only the bytes
    assert tokenizer.encode_document("import os").tolist() == [1792, *plain, 1793]
    assert tokenizer.encode("", bos=True) == [1792]


def test_special_tokens_in_a_document_are_text(tokenizer):
    text = "a <|end_of_text|><|begin_of_text|> b"
    ids = tokenizer.encode(text)
    assert max(ids) < 1792
    assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=50)
@given(st.text() | st.sampled_from(["<|end_of_text|>", "a" * 30_000, "\ud800 half a pair"]))
def test_any_text_round_trips_and_is_the_same_as_a_document(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("\ud800", "\ufffd")
    document = tokenizer.encode_document(text)
    assert document.dtype == "uint32"
    assert (
        document.tolist()
        == [1792, *tokenizer._encoding.encode_ordinary(text), 1793]
        == [1792, *ids, 1793]
    )


def test_pattern_splits_as_llama_3_does(tmp_path):
    # A file whose merges would join across the pattern's borders: three digits at most, no letter with a digit.
    extra = [
        b"%s %d" % (base64.b64encode(t), 256 + i)
        for i, t in enumerate([b"12", b"34", b"1234", b"a1", b"'s", b" a"])
    ]
    (tmp_path / "some.model").write_bytes(b"\n".join(BYTES + extra))
    tokenizer = load_tokenizer(tmp_path / "some.model")
    assert tokenizer.encode("1234") == [256, ord("3"), ord("4")]
    assert tokenizer.encode("a1") == [ord("a"), ord("1")]
    assert tokenizer.encode("b's a") == [ord("b"), 260, 261]


def slow_cut(text):
    """Llama 3's rule, one character at a time."""
    pieces = []
    for start in range(0, len(text), 400_000):
        piece = ""
        for _, run in groupby(text[start : start + 400_000], str.isspace):
            for i, char in enumerate(run):
                if i and i % 25_000 == 0:
                    pieces.append(piece)
                    piece = ""
                piece += char
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [7],
        [25_000],
        [25_001],
        [24_999, 25_000, 25_000, 3],
        [1, 25_001, 1, 75_003, 12_500, 12_501],
        [12_499, 25_001],
        [399_990, 25_001, 5],
        [3, 5, 400_000, 50_000],
    ],
)
@pytest.mark.parametrize("chars", ["a ", "\u3000\u6f22", "\n."])
def test_long_texts_are_cut_where_llama_3_cuts(runs, chars):
    text = "".join(chars[i % 2] * length for i, length in enumerate(runs))
    assert list(_cut(text)) == slow_cut(text)


def test_very_long_runs_are_encoded(tokenizer):
    text = "a" * 300_000 + " " * 300_000 + "\u6f22" * 100_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pickles_and_is_told_by_its_hash(tokenizer, tmp_path):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("def f(x): return x", bos=True) == tokenizer.encode(
        "def f(x): return x", bos=True
    )
    assert (copy.vocab_size, copy.sha256) == (2048, tokenizer.sha256)
    (tmp_path / "other.model").write_bytes(b"\n".join(BYTES))
    assert load_tokenizer(tmp_path / "other.model").sha256 != tokenizer.sha256


@pytest.mark.parametrize(
    ("lines", "place", "what"),
    [
        ([], "line 0", "256 of the 256 bytes"),
        ([b'["version", "1.0",'], "line 1", '["version", "1.0",'),
        ([*BYTES[:5], b"!!!! 5"], "line 6", "'!!!! 5'"),
        ([*BYTES[:5], b"BQ==5"], "line 6", "'BQ==5'"),
        ([*BYTES[:5], b"", BYTES[5]], "line 6", "''"),
        ([*BYTES[:5], b"BQ== five"], "line 6", "'BQ== five'"),
        ([*BYTES[:5], BYTES[6]], "line 6", "rank 6 where 5 should follow"),
        ([*BYTES[:5], b"AA== 5"], "line 6", "of rank 0 again"),
        (BYTES[:255], "line 255", "1 of the 256 bytes, such as b'\\xff'"),
        ([b"\xff\xfe\x00 0"], "line 1", "base64"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, lines, place, what):
    path = tmp_path / "bad.model"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as error:
        load_tokenizer(path)
    for part in (f'model.tokenizer_path = "{path}"', place, what, "assets/tokenizer/debug.model"):
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["absent.model", ".", "absent.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path / name)
    for part in (
        "model.tokenizer_path",
        str(tmp_path / name),
        "cannot be read",
        "assets/tokenizer/debug.model",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\n\n\x03<s>", "a SentencePiece model"),
        (
            b"@\x00\x00\x00\x00\x00\x00\x00"
            + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            "a safetensors file",
        ),
        (b' {"version": "1.0", "model": {}}', "its name does not end in .json"),
    ],
)
def test_another_kind_of_file_is_called_by_its_name(tmp_path, content, words):
    (tmp_path / "some.model").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path / "some.model")
    assert str(error.value).startswith(f'model.tokenizer_path = "{tmp_path}/some.model" is ')
    assert words in str(error.value)


def test_what_is_no_file_or_too_large_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.model")
    os.mkfifo(tmp_path / "pipe.json")
    for name, size in (("large.model", 2**24 + 1), ("large.json", 10 * 2**30)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)  # which takes no room on the disk
    for path, words in (
        ("pipe.model", "is a pipe, not a file"),
        ("pipe.json", "is a pipe, not a file"),
        ("/dev/zero", "is a device, not a file"),
        ("large.model", "is larger than 16 MiB"),
        ("large.json", "is larger than 64 MiB"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            load_tokenizer(tmp_path / path)
        assert "\n" not in str(error.value)


PIECES = st.sampled_from(
    [b"\n", b" ", b"AA==", b"!", b"0", b"1", b"999999999999999999999", b"\xff", b"{", b"=", b"\0"]
)


def told(path, content):
    """A tokenizer of any bytes, or what is wrong in one line."""
    path.write_bytes(content)
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        assert str(error).isprintable(), str(error)  # noqa: PT017
        assert len(str(error)) < 2000  # noqa: PT017
    else:
        assert max(tokenizer.encode("some text")) < tokenizer.vocab_size


@settings(max_examples=60)
@given(data=st.data())
def test_any_bytes_are_a_tokenizer_or_told(tmp_path_factory, data):
    real = b"\n".join(BYTES)
    at = data.draw(st.integers(0, len(real)))
    put = data.draw(st.lists(PIECES, max_size=5).map(b"".join) | st.binary(max_size=20))
    content = real[:at] + put + real[at + data.draw(st.integers(0, 9)) :]
    told(
        tmp_path_factory.getbasetemp() / "fuzz.model",
        data.draw(st.sampled_from([content, content[:at], put])),
    )


def test_of_a_folder_its_tokenizer_is_named(tmp_path):
    (tmp_path / "original").mkdir()
    (tmp_path / "original/tokenizer.model").write_bytes(DEBUG.read_bytes())
    with pytest.raises(ConfigError, match=r"is a folder.*use its original/tokenizer\.model"):
        load_tokenizer(tmp_path)
