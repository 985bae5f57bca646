"""Warnings about the first batch and the first loss: for each fault, and none without one."""

import logging
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_lite.config import ConfigError, Data
from titan_lite.data import preflight
from titan_lite.data.loader import Batch, build_loader
from titan_lite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]


def check(batches):
    """batches: (data-parallel rank, hash, largest token) by rank."""
    preflight.check_batches([preflight.BatchSummary(*batch) for batch in batches], vocab_size=7)


def test_ranks_that_read_as_they_should():
    check([(0, 10, 5), (1, 11, 6)])
    # tensor parallel ones share theirs
    check([(0, 10, 5), (0, 10, 5), (1, 11, 6), (1, 11, 6)])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            [(0, 10, 1), (1, 11, 1), (2, 10, 1)],
            r"ranks 0, 2 have read the same first batch: .* a .txt file is one",
        ),
        (
            [(0, 10, 1), (0, 11, 1), (1, 12, 1)],
            r"ranks 0, 1 need the same sequences, but have read different ones",
        ),
        (
            [(0, 10, 1), (1, 11, 7)],
            r"rank 1 has read token 7, and the model has room for 7: model.tokenizer_path",
        ),
    ],
)
def test_ranks_that_do_not_are_named(batches, message):
    with pytest.raises(ConfigError, match=message):
        check(batches)


@pytest.fixture
def other_rank(monkeypatch):
    """A function: what another rank will have gathered."""
    told = []

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(preflight, "all_gather_ints", lambda *own: [own, *told])
    return told.append


def test_a_sample_is_shown_in_one_line_and_shortened(other_rank, caplog):
    tokenizer = load_tokenizer(ROOT / "assets/tokenizer/debug.model")
    ids = tokenizer.encode("def f():\n\treturn 1\n" * 100, bos=True)
    batch = torch.tensor([ids, ids])
    other_rank((1, 13, 5))
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        preflight.check_first_batch(
            Batch(batch[:, :-1], batch[:, 1:], [0, 0]), tokenizer, tokenizer.vocab_size, dp_rank=0
        )
    [record] = caplog.records
    assert "first sequence of" in record.message
    assert r"<|begin_of_text|>def f():\n\treturn 1\n" in record.message
    assert record.message.endswith("...")
    assert "\n" not in record.message
    assert len(record.message) < 400


@pytest.mark.parametrize("same", [True, False])
def test_hashes_tell_batches_apart(other_rank, monkeypatch, same):
    tokenizer = load_tokenizer(ROOT / "assets/tokenizer/debug.model")
    tokens = [torch.arange(34).view(2, 17) + (0 if same else number) for number in range(2)]
    batches = [Batch(some[:, :-1], some[:, 1:], [0, 0]) for some in tokens]
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(
            preflight, "check_batches", lambda batches, vocab_size: seen.append(batches[0])
        )
        preflight.check_first_batch(batches[0], tokenizer, 2048, dp_rank=0)
    other_rank((1, *seen[0][1:]))
    arguments = batches[1], tokenizer, 2048, 0
    if same:
        with pytest.raises(ConfigError, match="ranks 0, 1 have read the same first batch"):
            preflight.check_first_batch(*arguments)
    else:
        preflight.check_first_batch(*arguments)


@pytest.mark.parametrize(
    ("loss", "far"),
    [
        (math.log(2048), False),
        (math.log(2048) + 0.5, False),
        (9.0, True),
        (6.0, True),
        (0.1, True),
        (math.inf, True),
        (math.nan, True),
    ],
)
def test_a_first_loss_far_from_that_of_guessing_is_told(loss, far, caplog):
    preflight.check_first_loss(loss, 2048, is_trained=False)
    assert bool(caplog.records) == far
    assert not far or f"the first loss is {loss:.2f}, far from ln(2048) = 7.62" in caplog.text


@pytest.mark.parametrize(
    ("loss", "far"), [(7.7, False), (12.5, False), (6.0, True), (math.inf, True), (math.nan, True)]
)
def test_tied_weights_first_predict_the_token_that_was_read(loss, far, caplog):
    with caplog.at_level(logging.INFO, logger="titan_lite"):
        preflight.check_first_loss(loss, 2048, is_trained=False, is_tied=True)
    assert any(record.levelno == logging.WARNING for record in caplog.records) == far
    assert ("with tied embeddings a token first predicts itself" in caplog.text) == (loss == 12.5)


@pytest.mark.parametrize(
    ("loss", "far"), [(2.0, False), (6.0, False), (7.6, True), (11.0, True), (math.nan, True)]
)
def test_a_first_loss_of_initial_weights_that_is_no_better_than_guessing_is_told(loss, far, caplog):
    preflight.check_first_loss(loss, 2048, is_trained=True)
    words = f"the first loss is {loss:.2f}, not far below ln(2048) = 7.62, that of an untrained"
    assert (words in caplog.text) == bool(caplog.records) == far


def test_a_validation_that_repeats_its_documents_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(preflight, "max_over_ranks", lambda *numbers: list(numbers))
    (tmp_path / "a.jsonl").write_text('{"text": "five documents of some tokens"}\n' * 5)
    data = Data(dataset="local", path=str(tmp_path), validation_fraction=0.0, num_workers=0)
    tokenizer = load_tokenizer(str(ROOT / "assets/tokenizer/debug.model"))

    def after(batches):
        loader = build_loader(
            data,
            tokenizer,
            split="train",
            streams=2,
            batch_size=2,
            seq_len=8,
            dp_rank=0,
            dp_degree=1,
            seed=0,
        )
        for _ in range(batches):
            next(loader)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            preflight.warn_of_repeated_documents(loader, 2 * batches)
        return caplog.text

    assert after(1) == ""
    words = r"up to \d+ times, for its 40 sequences; use smaller validation\.steps"
    assert re.search(words, after(20))
