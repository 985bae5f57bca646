import base64
import os
import pickle
from itertools import groupby
from pathlib import Path

import pytest

from titan_lite.config import ConfigError
from titan_lite.config.families import LLAMA3
from titan_lite.data.tokenizer import cut_text, load_tokenizer

DEBUG = Path(__file__).parents[3] / "assets/tokenizer/debug.model"
BYTES = [b"%s %d" % (base64.b64encode(bytes([i])), i) for i in range(256)]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEBUG)


def test_the_debug_tokenizer_fits_the_debug_flavor(tokenizer):
    assert tokenizer.vocab_size == LLAMA3.flavors["debug"].vocab_size == 2048


def test_bos_and_eos_stand_where_asked(tokenizer):
    plain = tokenizer.encode("import os")
    assert plain == [759, 665]  # merged: the ranks are used, not only the bytes
    document = tokenizer.encode_document("import os")
    assert (document.dtype, document.tolist()) == ("uint32", [1792, *plain, 1793])
    assert tokenizer.encode("", bos=True) == [1792]


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
    assert list(cut_text(text)) == slow_cut(text)


def test_pickles_and_is_told_by_its_hash(tokenizer, tmp_path):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("def f(x): return x", bos=True) == tokenizer.encode(
        "def f(x): return x", bos=True
    )
    assert (copy.vocab_size, copy.sha256) == (2048, tokenizer.sha256)
    (tmp_path / "other.model").write_bytes(b"\n".join(BYTES))
    assert load_tokenizer(tmp_path / "other.model").sha256 != tokenizer.sha256


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([], "no token for 256 of the 256 bytes"),
        ([b'["version", "1.0",'], "is not in tiktoken's format (Error parsing line"),
        ([*BYTES[:5], b"BQ== five"], "Error parsing line b'BQ== five'"),
        ([*BYTES, b"AAA= 257"], "its ranks are not 0 to 256"),
        (BYTES[:255], "no token for 1 of the 256 bytes"),
        ([b"\n\x0e\n\x05<unk>\x15\x00\x00", b"<s>"], "is not in tiktoken's format"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, lines, what):
    path = tmp_path / "bad.model"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)
    for part in (f'model.tokenizer_path = "{path}"', what, "assets/tokenizer/debug.model"):
        assert part in str(error.value)


def test_a_file_that_changes_is_read_again(tmp_path):
    """Though tiktoken keeps what it has read in a folder for temporary files, by the path."""
    path = tmp_path / "some.model"
    path.write_bytes(b"\n".join(BYTES))
    assert load_tokenizer(path).vocab_size == 512
    path.write_bytes(b"\n".join([*BYTES, b"AAA= 256"]))
    assert load_tokenizer(path).vocab_size == 513


@pytest.mark.parametrize("name", ["absent.model", ".", "absent.json", "pipe.model", "pipe.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    if name.startswith("pipe"):  # is not waited for
        os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path / name)
    for part in (
        "model.tokenizer_path",
        str(tmp_path / name),
        "cannot be read",
        "assets/tokenizer/debug.model",
    ):
        assert part in str(error.value)


def test_of_a_folder_its_tokenizer_is_named(tmp_path):
    (tmp_path / "original").mkdir()
    (tmp_path / "original/tokenizer.model").write_bytes(DEBUG.read_bytes())
    with pytest.raises(ConfigError, match=r"is a folder.*use its original/tokenizer\.model"):
        load_tokenizer(tmp_path)
