"""Where documents begin in packed windows, if one token is both BOS and EOS and if two are."""

import itertools
import json

import pytest
import torch
from json_tokenizers import bpe, save, save_gpt2

from titan_lite.config import Data
from titan_lite.data.loader import build_loader
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.models.attention import doc_starts
from titan_lite.tools.prepare import prepare

TEXTS = ["the cat", "c", "the the the", "cat the", "cc", "the cat the cat the cat", "a"]
SEQ_LEN = 10
WINDOWS = 200  # many epochs, so that windows begin at every token


@pytest.fixture(params=["one token", "two tokens"])
def tokenizer(request, tmp_path):
    one = request.param == "one token"
    read = load_tokenizer(save_gpt2(tmp_path / "t") if one else save(bpe(), tmp_path / "t"))
    assert (read.bos_id == read.eos_id) == one
    return read


@pytest.fixture(params=["text", "prepared"])
def data(request, tokenizer, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = dict(validation_fraction=0.0, shuffle=False, num_workers=0)
    found = Data(dataset="local", path=str(texts), **options)
    if request.param == "prepared":
        prepare(found, tokenizer, tmp_path / "prepared", workers=0)
        found = Data(dataset="prepared", path=str(tmp_path / "prepared"), **options)
    return found


def test_documents_begin_where_they_were_packed(data, tokenizer):
    documents = [tokenizer.encode_document(text).tolist() for text in TEXTS]
    stream = [  # (token, whether it begins a document), epoch after epoch
        (token, position == 0)
        for document in itertools.islice(itertools.cycle(documents), 1000)
        for position, token in enumerate(document)
    ]
    loader = build_loader(
        data,
        tokenizer,
        split="train",
        streams=1,
        batch_size=1,
        seq_len=SEQ_LEN,
        dp_rank=0,
        dp_degree=1,
        seed=0,
    )
    first_tokens = set()
    for number in range(WINDOWS):
        window = stream[number * (SEQ_LEN + 1) :][:SEQ_LEN]
        tokens = next(loader).input
        assert tokens.tolist() == [[token for token, _ in window]]
        begins = [position if is_first else 0 for position, (_, is_first) in enumerate(window)]
        expected = torch.tensor([begins]).cummax(dim=1).values
        assert torch.equal(doc_starts(tokens, tokenizer.bos_id, tokenizer.eos_id), expected)
        first_tokens.add(window[0])
    # windows began with BOS, with EOS and within a document
    assert len({is_first for _, is_first in first_tokens}) == 2
    assert (tokenizer.eos_id, False) in first_tokens
