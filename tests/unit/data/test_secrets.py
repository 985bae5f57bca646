"""Passwords and tokens in URLs of documents: they are used, and written and shown nowhere."""

import dataclasses
import gzip
import json
import logging
import re

import pytest
from corpora import local
from identified import identify

from titan_lite.checkpoint.run_identity import (
    documents_of_run,
    list_documents,
    run_identity,
)
from titan_lite.config import ConfigError, load_config, to_toml
from titan_lite.config.errors import shown
from titan_lite.data.bad_documents import BadDocument
from titan_lite.data.documents import build_source
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.distributed.layout import Layout
from titan_lite.logging import events, logger
from titan_lite.text import without_secrets

URL = "http://me:SECRET@host/corpus"


@pytest.fixture
def corpus(served):
    """A corpus at a URL with a password, and with another one."""
    for url in (URL, URL.replace("SECRET", "OTHER")):
        served.files[f"{url}/0.jsonl"] = b'{"text": "a"}\n{"text": "b"}\n'
    return served


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://me:SECRET@host/0.jsonl", "http://***@host/0.jsonl"),
        ("https://SECRET@host:80/a/*.jsonl", "https://***@host:80/a/*.jsonl"),
        ("http://me:SE@C#R?ET@host/a", "http://***@host/a"),
        ("zip://*.txt::http://me:SECRET@host/a.zip", "zip://*.txt::http://***@host/a.zip"),
        ("http://h/a.jsonl?token=SECRET&part=3", "http://h/a.jsonl?token=***&part=3"),
        ("http://h/a?part=3&sig=SECRET", "http://h/a?part=3&sig=***"),
        (
            "https://h/a?X-Amz-Signature=SECRET&X-Amz-Credential=SECRET",
            "https://h/a?X-Amz-Signature=***&X-Amz-Credential=***",
        ),
        ("http://h/a?access_token=SECRET#x", "http://h/a?access_token=***#x"),
        ("http://h/a@b.jsonl", "http://h/a@b.jsonl"),
        ("github://owner:name@main/a.jsonl", "github://owner:name@main/a.jsonl"),
        ("hf://datasets/owner/name@main/a.jsonl", "hf://datasets/owner/name@main/a.jsonl"),
        ("corpus/part?/a=b.jsonl, me@host", "corpus/part?/a=b.jsonl, me@host"),
    ],
)
def test_what_gives_access_is_masked(url, expected):
    assert without_secrets(url) == expected
    assert without_secrets(f'data.path = "{url}": no') == f'data.path = "{expected}": no'


def test_a_secret_in_the_middle_of_a_long_value_is_masked_before_it_is_cut():
    url = f"https://me:{'SECRET' * 30}@host/{'a' * 90}.jsonl"
    assert not re.search("SECR|CRET", shown(url))


def test_a_recipe_is_written_without_secrets_and_read_with_them():
    options = [
        f"--data.sources=[{{dataset = 'local', path = '{URL}'}}]",
        f"--validation.path={URL}/x?token=SECRET",
    ]
    config = load_config("debug_model", options)
    for written in (to_toml(config), str(config.without_secrets())):
        assert "SECRET" not in written
        assert "http://***@host/corpus" in written
    assert config.data.sources[0].path == URL
    assert config.data.source_names() == ["corpus"]


def test_the_identity_of_a_run_has_no_secret_and_compares_the_rest(corpus):
    identities = []
    for path in (URL, URL.replace("SECRET", "OTHER"), f"{URL}/*.jsonl"):
        config = load_config("debug_model", ["--data.dataset=local", f"--data.path={path}"])
        tokenizer = load_tokenizer(config.model.tokenizer_path)
        documents = documents_of_run(list_documents(config))
        identity = run_identity(config, Layout.from_config(config, 1), tokenizer, documents)
        identities.append(json.dumps(dataclasses.asdict(identity)))
    assert "SECRET" not in identities[0]
    assert identities[0] == identities[1]
    assert identities[0] != identities[2]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_documents_of_a_signed_url_are_read_and_known_without_its_signature(suffix, served):
    content = b'{"text": "a"}\n'
    known = []
    for signature in ("SECRET", "OTHER"):
        url = f"http://host/a{suffix}?X-Amz-Signature={signature}"
        served.files[url] = gzip.compress(content, mtime=0) if suffix.endswith("gz") else content
        documents = build_source(local(url), split="train", seed=0).documents(0, lambda _: True)
        assert next(documents)[1] == "a"
        (source,) = identify(local(url))
        known.append(json.dumps(source.to_json()))
    assert "SECRET" not in known[0]
    assert known[0] == known[1]


def test_messages_log_and_events_have_no_secret(corpus, caplog, tmp_path, monkeypatch):
    corpus.files[f"{URL}/1.jsonl"] = b"no JSON\n"
    monkeypatch.setattr(events, "path", tmp_path / "events.jsonl")
    monkeypatch.setattr(events, "level", logging.INFO)
    with pytest.raises(ConfigError) as error, events.failures():
        next(build_source(local(f"{URL}/2*.jsonl"), split="train", seed=0).documents(0, bool))
    written = (tmp_path / "events.jsonl").read_text()
    for text in (str(error.value), written):
        assert "***@host" in text
        assert "SECRET" not in text
    source = build_source(local(URL), split="train", seed=0)
    documents = source.documents(0, lambda ordinal: True)
    bad = next(each for _, each in documents if isinstance(each, BadDocument))
    assert "SECRET" not in json.dumps(bad.to_dict())
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        logger.info(f"reads {URL}", extra={"event": "start"})
        logger.warning("reads %s", URL)
    assert "SECRET" not in caplog.text
    assert caplog.text.count("***@host") == 2
