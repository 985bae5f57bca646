"""Validation on documents of its own: all of them, and all of [data] for training."""

import json

import pytest
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.checkpoint.run_identity import (
    documents_of_run,
    list_documents,
    run_identity,
)
from titan_lite.config import ConfigError, load_config
from titan_lite.data.documents import build_source, check_data
from titan_lite.data.loader import build_loader
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.distributed.layout import Layout
from titan_lite.rules import check_all, check_keys
from titan_lite.tools import prepare

TOKENIZER = load_tokenizer(DEBUG_TOKENIZER)


@pytest.fixture
def corpus(tmp_path):
    """Forty documents to train on, twelve to validate on."""
    for name, numbers in (("train", range(40)), ("val", range(100, 112))):
        lines = (json.dumps({"text": f"document {i}."}) + "\n" for i in numbers)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def recipe(corpus, *options):
    paths = [
        "--data.dataset=local",
        f"--data.path={corpus}/train.jsonl",
        f"--validation.path={corpus}/val.jsonl",
        "--data.num_workers=0",
    ]
    return load_config(DEBUG, [*paths, *options])


def documents(data, split):
    """The documents of an epoch, sorted."""
    parts = [part for _, part in data.mixture()]
    sources = [build_source(part, split=split, seed=0) for part in parts]
    found = []
    for source in sources:
        for ordinal, document in source.documents(0, lambda _: True):
            if source.epoch(ordinal):
                break
            text = document if isinstance(document, str) else TOKENIZER.decode(document[1:-1])
            found.append(int(text.removeprefix("document ").removesuffix(".")))
    return sorted(found)


def test_all_documents_are_trained_on_and_all_of_its_own_validated_on(corpus):
    config = recipe(corpus)
    assert documents(config.data, "train") == list(range(40))
    assert documents(config.validation_data, "validation") == list(range(100, 112))


def test_several_of_its_own_are_mixed(corpus):
    (corpus / "other.jsonl").write_text(json.dumps({"text": "document 200."}) + "\n")
    sources = [
        f'{{dataset = "local", path = "{corpus}/{name}.jsonl"}}' for name in ("val", "other")
    ]
    config = recipe(corpus, "--validation.path=", f"--validation.sources=[{', '.join(sources)}]")
    assert documents(config.validation_data, "validation") == [*range(100, 112), 200]
    loader = loader_of(config.validation_data)
    assert {source for _ in range(8) for source in next(loader).sources} == {0, 1}
    assert loader.source_lines() == [
        "validation source val: 50% of the tokens; 1 file, 0.00 MiB",
        "validation source other: 50% of the tokens; 1 file, 0.00 MiB",
    ]


def loader_of(data):
    shape = dict(streams=2, batch_size=2, seq_len=8, dp_rank=0, dp_degree=1, seed=0)
    return build_loader(data, TOKENIZER, split="validation", **shape)


def identity(config):
    documents = documents_of_run(list_documents(config))
    return run_identity(config, Layout.from_config(config, 2), TOKENIZER, documents)


def test_a_run_is_identified_by_it(corpus):
    first = identity(recipe(corpus))
    assert first.validation_documents
    (corpus / "val.jsonl").rename(corpus / "moved.jsonl")
    moved = identity(recipe(corpus, f"--validation.path={corpus}/moved.jsonl"))
    assert moved.documents == first.documents
    with (corpus / "moved.jsonl").open("a") as file:
        file.write(json.dumps({"text": "document 112."}) + "\n")
    more = identity(recipe(corpus, f"--validation.path={corpus}/moved.jsonl"))
    assert more.documents == first.documents
    assert more.validation_documents != moved.validation_documents
    off = identity(recipe(corpus, "--validation.no-enable"))
    assert (off.documents, off.validation_documents) == (first.documents, "")


def test_both_are_prepared_by_one_command(corpus, capsys):
    options = [
        "--data.dataset=local",
        f"--data.path={corpus}/train.jsonl",
        f"--validation.path={corpus}/val.jsonl",
        "--workers=0",
    ]
    assert prepare.main([str(DEBUG), str(corpus / "p"), *options]) == 0
    out = capsys.readouterr().out
    assert "train: 40 documents" in out
    assert "validation: 12 documents" in out
    mine = corpus / "mine.toml"
    mine.write_text(f'extends = "{DEBUG}"\n' + out.partition("by this:")[2])
    config = load_config(mine, ["--data.num_workers=0"])
    check_keys(config)
    check_all(config, 2)
    with pytest.raises(ConfigError, match=r'was written by .*use validation.dataset = "prepared"'):
        check_data(recipe(corpus, f"--validation.path={corpus}/p/validation").validation_data)
    assert config.data.path == str(corpus / "p/train")
    assert config.validation.path == str(corpus / "p/validation")
    assert documents(config.data, "train") == list(range(40))
    assert documents(config.validation_data, "validation") == list(range(100, 112))
    text, tokens = loader_of(recipe(corpus).validation_data), loader_of(config.validation_data)
    for _ in range(6):
        assert next(text).input.equal(next(tokens).input)
