"""Hugging Face's tokenizer.json: of our tokenizer, the same ids of any text; of theirs, read for
training.
"""

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
from tiny import DEBUG

from titan_lite.config import ConfigError, load_config
from titan_lite.data import tokenizer
from titan_lite.data.tokenizer import TiktokenTokenizer, load_tokenizer
from titan_lite.data.tokenizer_json import to_json, tokenizer_config
from titan_lite.rules import check_all

OURS = load_tokenizer(Path(__file__).parents[3] / "assets/tokenizer/debug.model")


def test_a_token_that_no_merges_make_is_found_all_the_same():
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"abc": 256, b"bcd": 257, b"abcd": 258}
    ours = TiktokenTokenizer(ranks, "0" * 64)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(to_json(ours)))
    assert ours.encode("abcd") == [258]
    for text in ("abc", "abcd", "abd"):
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)


def test_transformers_opens_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_json(OURS)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(OURS)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def main():\n    return 'ü'"
    assert theirs(text)["input_ids"] == OURS.encode(text, bos=True)
    assert theirs.decode(OURS.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (OURS.bos_id, OURS.eos_id)


# Read for training


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_json(OURS)))
    return tmp_path / "tokenizer.json"


def change(path, **parts):
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))


def test_a_limit_of_length_and_padding_in_the_file_are_left_out(path):
    change(
        path,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    assert load_tokenizer(path).encode("one two three four five six") == OURS.encode(
        "one two three four five six"
    )
    assert load_tokenizer(path).encode("a") == OURS.encode("a")


@pytest.mark.parametrize(
    "error", [TypeError("another type"), UnicodeEncodeError("x", "", 0, 1, "y")]
)
def test_a_text_that_the_library_refuses_twice_is_named(error, path, monkeypatch):
    refused = []

    class Refusing:
        def __init__(self, encoder):
            self.encoder = encoder

        def __getattr__(self, name):
            return getattr(self.encoder, name)

        def encode_batch_fast(self, texts, add_special_tokens):
            if "some" not in texts[0]:
                return self.encoder.encode_batch_fast(texts, add_special_tokens=False)
            refused.append(texts[0])
            raise error

    text_encoder = tokenizer.text_encoder
    monkeypatch.setattr(tokenizer, "text_encoder", lambda *given: Refusing(text_encoder(*given)))
    with pytest.raises(ConfigError, match=r"cannot encode the text .*some.* words"):
        load_tokenizer(path).encode("some \ud800 words")
    assert refused == ["some \ud800 words", "some \ufffd words"]


@pytest.mark.parametrize("unit", ["a", " ", "ab "])
def test_long_texts_are_cut_where_ours_are(path, unit):
    text = (unit * 500_000)[:450_000]
    assert load_tokenizer(path).encode(text) == OURS.encode(text)


def byte_level(normalizer=None, pattern=r"\s?\S+|\s+"):
    """Return a BPE of bytes with some merges, which is not Llama 3's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("c", "d"), ("\u0120", "ab")]
    names = ["<s>", "</s>", *alphabet, *(first + second for first, second in merges)]
    vocab = {name: id for id, name in enumerate(names)}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    p = tokenizers.pre_tokenizers
    split = p.Split(tokenizers.Regex(pattern), "isolated")
    theirs.pre_tokenizer = p.Sequence([split, p.ByteLevel(False, use_regex=False)])
    theirs.decoder = tokenizers.decoders.ByteLevel()
    if normalizer is not None:
        theirs.normalizer = normalizer
    return theirs


@pytest.mark.parametrize(
    ("normalizer", "unit"),
    [
        (tokenizers.normalizers.Strip(), "a "),
        (tokenizers.normalizers.Strip(), "ab  cd. "),
        (tokenizers.normalizers.NFC(), "e\u0301"),
        (tokenizers.normalizers.NFC(), "e\u0301 ab"),
        (None, "abcd"),
        (None, "abc"),
        (None, "\u6f22\u5b57\uff0c"),
        (None, "ab cd, "),
        (None, " "),
    ],
)
@pytest.mark.parametrize("shift", range(4))
def test_a_text_that_is_cut_has_the_ids_of_the_complete_text(
    normalizer, unit, shift, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenizer, "_MAX_CHARACTERS", 1000)
    monkeypatch.setattr(tokenizer, "_MAX_RUN", 100)
    byte_level(normalizer).save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path / "tokenizer.json")
    text = "ab cd"[:shift] + unit * 2000
    assert read.encode(text) == read._ids(text)


def test_a_long_text_is_cut_where_its_ids_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "_MAX_CHARACTERS", 1000)
    byte_level(tokenizers.normalizers.Strip(), r"\w+|\W").save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path / "tokenizer.json")
    encoded = []
    ids = read._ids
    monkeypatch.setattr(read, "_ids", lambda text: encoded.append(text) or ids(text))
    read.encode("ab cd(ab) " * 1000)
    assert max(map(len, encoded)) < 1100


def test_a_tokenizer_that_gives_every_text_a_beginning_is_not_cut(tmp_path):
    """As Llama 2's does: a second piece would begin with a space of its own."""
    vocab = {"<s>": 0, "</s>": 1, "\u2581": 2, "a": 3, "b": 4, "?": 5}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="?", fuse_unk=True))
    n, d = tokenizers.normalizers, tokenizers.decoders
    theirs.normalizer = n.Sequence([n.Prepend("\u2581"), n.Replace(" ", "\u2581")])
    theirs.decoder = d.Sequence([d.Replace("\u2581", " "), d.Fuse(), d.Strip(" ", 1, 0)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path / "tokenizer.json")
    assert (read.bos_id, read.eos_id) == (0, 1)
    text = "ab " * 140_000
    ids = read.encode(text)
    assert len(ids) == len(text) + 1
    assert read.decode(ids) == text


def test_what_begins_and_ends_a_document_is_said_beside_it_or_in_it_or_by_llamas_names(path):
    def ids():
        return load_tokenizer(path).bos_id, load_tokenizer(path).eos_id

    before = load_tokenizer(path).sha256
    assert ids() == (1792, 1793)
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "x", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "y", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "x": {"id": "x", "ids": [1800], "tokens": ["x"]},
            "y": {"id": "y", "ids": [1801], "tokens": ["y"]},
        },
    }
    change(path, post_processor=template)
    assert ids() == (1800, 1801)
    change(path, post_processor=None)
    assert ids() == (1792, 1793)  # by their names
    config = path.with_name("tokenizer_config.json")
    config.write_text(
        json.dumps({"bos_token": None, "eos_token": {"content": "<|eot_id|>", "special": True}})
    )
    assert ids() == (1792, 1801)
    content = path.read_text()
    assert (
        load_tokenizer(path).sha256
        == hashlib.sha256(f"{content}\n1792 1801".encode()).hexdigest()
        != before
    )
    config.write_text(json.dumps({"bos_token": "<|nowhere|>"}))
    with pytest.raises(
        ConfigError,
        match=(
            r"has no token '<\|nowhere\|>', which tokenizer_config.json beside it calls bos_token"
        ),
    ):
        load_tokenizer(path)


def test_a_file_without_an_end_of_document_is_an_error(path):
    tokens = [
        token
        for token in json.loads(path.read_text())["added_tokens"]
        if token["content"] != "<|end_of_text|>"
    ]
    change(path, added_tokens=tokens)
    with pytest.raises(
        ConfigError, match=r'does not say what ends a document.*with "eos_token", or a token called'
    ):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"model_type": "llama"}', "aaa 1\n", "\ud800"]
)
def test_a_file_of_another_kind_is_an_error(tmp_path, content):
    (tmp_path / "some.json").write_text(content, errors="surrogatepass")
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path / "some.json")
    assert str(error.value).startswith(
        f'model.tokenizer_path = "{tmp_path}/some.json": cannot be read as a tokenizer.json'
    )


@pytest.mark.parametrize(
    ("piece", "id", "words"),
    [
        ("dup", 5, "has several tokens with one id"),
        ("far", 2**31, "begins or ends documents with the id 1792, which no token has"),
    ],
)
def test_ids_that_are_no_numbering_are_refused(path, piece, id, words):
    model = json.loads(path.read_text())["model"]
    change(path, model={**model, "vocab": {**model["vocab"], piece: id}})
    with pytest.raises(ConfigError, match=f"tokenizer.json. {words}; use another tokenizer"):
        load_tokenizer(path)


LINES_REMOVED = {
    "type": "Split",
    "pattern": {"Regex": "\\n"},
    "behavior": "Removed",
    "invert": False,
}
STRIPPED_LINE = {
    "id": 2048,
    "content": "\n",
    "single_word": False,
    "lstrip": True,
    "rstrip": True,
    "normalized": False,
    "special": False,
}


def lost(path, caplog):
    """The warnings of a run that reads this tokenizer."""
    options = [f"--model.tokenizer_path={path}", "--model.vocab_size=2049"]
    config = load_config(DEBUG, [*options, f"--job.dump_folder={path.parent}"])
    caplog.clear()
    check_all(config, 1)
    return [record.getMessage() for record in caplog.records if "encoded" in record.getMessage()]


def test_a_tokenizer_that_loses_characters_is_reported_with_the_first(path, caplog):
    assert not lost(path, caplog)
    whole = json.loads(path.read_text())
    first = whole["pre_tokenizer"]["pretokenizers"]
    words = {"type": "WhitespaceSplit"}
    where = f'model.tokenizer_path = "{path}": a text is not the same after it was encoded'
    for parts, differences in (
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, *first]}}, "Somewords"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LINES_REMOVED, *first]}},
            r"rds, 3.14:\tdef f(x):    return",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "some words"),
        ({"added_tokens": [*whole["added_tokens"], STRIPPED_LINE]}, r"3.14:\ndef f(x)"),
    ):
        change(path, **{**whole, **parts})
        (line,) = lost(path, caplog)
        assert line.startswith(where)
        assert differences in line
        assert line.endswith("; use another tokenizer to keep it")


@pytest.mark.parametrize("content", ["{", "5", "[]"])
def test_a_tokenizer_config_that_is_none_is_an_error(path, content):
    path.with_name("tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json cannot be read \(.*repair or"):
        load_tokenizer(path)
