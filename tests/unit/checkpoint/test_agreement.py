"""Ranks that were started for different runs are told so, before a process group starts."""

import dataclasses
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from titan_lite.checkpoint import agreement
from titan_lite.checkpoint.agreement import (
    COMPARED,
    HARDWARE,
    PYTHON,
    VARIABLES,
    agree,
    parts_of,
)
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.config import ConfigError, load_config

DEBUG = Path(__file__).parents[3] / "train_configs/debug_model.toml"
FACTS = {
    "model": {"dim": 256, "n_layers": 6},
    "tokenizer": "a" * 64,
    "documents": "b" * 64,
    "validation_documents": "c" * 64,
    "device": "CPU",
    "numerics": {"threads": 1, "processor": "a processor", "MKL_CBWR": "COMPATIBLE"},
    "versions": {"torch": "2.13.0", "titan_lite": "0.1.0", "python": "3.11.2"},
    "sources": "d" * 64,
    "git": "e" * 40,
}


def identity(*overrides, **facts):
    return RunIdentity(recipe=load_config(DEBUG, overrides).model_dump(), **{**FACTS, **facts})


def agreed(monkeypatch, *identities):
    """What `agree` raises on each rank: the error's lines, or () for none."""
    monkeypatch.setattr(agreement, "git_revision", lambda: "e" * 40)
    store = dist.HashStore()
    raised: dict[int, tuple] = {}

    def run(rank):
        try:
            agree(store, rank, len(identities), identities[rank])
            raised[rank] = ()
        except ConfigError as error:
            raised[rank] = error.args

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(identities))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not [thread for thread in threads if thread.is_alive()]
    return [raised[rank] for rank in range(len(identities))]


HERE = socket.gethostname()
CASES = [
    (
        ["--optimizer.lr=2e-2"],
        {},
        f"optimizer.lr differs: 0.002 on {HERE} (rank 0), 0.02 on {HERE} (rank 1); start all",
    ),
    ([], {"tokenizer": "f" * 64}, "SHA-256 of model.tokenizer_path differs: aaaaaaaaaaaa on"),
    ([], {"documents": "f" * 64}, "differs: bbbbbbbbbbbb on"),
    ([], {"model": {"dim": 256, "n_layers": 5}}, "the model's n_layers ([model]) differs: 6 on"),
    (
        [],
        {"versions": {**FACTS["versions"], "cuDNN": "91900"}},
        "version of cuDNN differs: not set on",
    ),
    (
        [],
        {"sources": "f" * 64},
        "SHA-256 of titan_lite's source files differs: dddddddddddd (git eeeeee",
    ),
    (
        [],
        {"numerics": {"threads": 1, "processor": "a processor"}},
        'the environment variable MKL_CBWR differs: "COMPATIBLE" on',
    ),
]


@pytest.mark.parametrize(("overrides", "facts", "line"), CASES)
def test_all_ranks_raise_the_same_line_for_a_key_that_differs(overrides, facts, line, monkeypatch):
    other = identity(*overrides, **facts)
    lines = agreed(monkeypatch, identity(), other, identity())
    assert lines[0] == lines[1] == lines[2]
    assert len(lines[0]) == 1
    assert line in lines[0][0]


def test_every_key_that_differs_has_a_line(monkeypatch):
    other = identity("--optimizer.lr=1", "--debug.seed=1", "--data.no-shuffle")
    lines, same = agreed(monkeypatch, identity(), other)
    assert [line.split()[0] for line in lines] == ["optimizer.lr", "data.shuffle", "debug.seed"]
    assert lines == same


def test_copies_of_a_corpus_and_a_tokenizer_may_have_another_name(monkeypatch):
    local = ["--data.dataset=local", "--validation.enable"]
    one = identity(*local, "--data.path=/a", "--validation.path=/v")
    other = identity(
        *local, "--data.path=/b", "--validation.path=/w", "--model.tokenizer_path=/t.model"
    )
    assert agreed(monkeypatch, one, other) == [(), ()]
    sources = '[{{dataset = "local", path = "{}"}}]'
    one = identity(f"--data.sources={sources.format('/a')}")
    other = identity(f"--data.sources={sources.format('/b')}")
    assert agreed(monkeypatch, one, other) == [(), ()]


@pytest.fixture
def warnings(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(agreement.logger, "warning", lambda line, **_: lines.append(line))
    return lines


def test_other_hardware_is_a_warning(monkeypatch, warnings):
    other = identity(device="H100", numerics={**FACTS["numerics"], "threads": 2})
    assert agreed(monkeypatch, identity(), other) == [(), ()]
    assert {line.partition(":")[0] for line in warnings} == {
        "ranks differ in device",
        "ranks differ in threads",
    }


def test_another_python_is_a_warning(monkeypatch, warnings):
    other = identity(versions={**FACTS["versions"], "python": "3.11.9"})
    assert agreed(monkeypatch, identity(), other) == [(), ()]
    line = (
        f'ranks differ in version of Python: "3.11.2" on {HERE} (rank 0), "3.11.9" on {HERE}'
        " (rank 1)"
    )
    assert warnings == [line]  # of all ranks that differ, the first one has it


def test_other_hardware_hides_no_recipe(monkeypatch, warnings):
    other = identity("--optimizer.lr=2e-2", numerics={**FACTS["numerics"], "threads": 2})
    lines, same = agreed(monkeypatch, identity(), other)
    assert [line.split()[0] for line in lines] == ["optimizer.lr"]
    assert lines == same
    assert [line.partition(":")[0] for line in warnings] == ["ranks differ in threads"]


def test_ranks_that_differ_are_counted_and_the_first_one_is_shown(monkeypatch):
    others = [identity(f"--debug.seed={seed}") for seed in range(1, 5)]
    ranks = agreed(monkeypatch, identity(), identity(), *others)
    assert len(set(ranks)) == 1
    (line,) = ranks[0]
    assert f"0 on {HERE} (rank 0), 1 on {HERE} (rank 2); 4 ranks differ from rank 0; start" in line


def test_every_field_of_an_identity_is_compared_or_follows_from_one_that_is():
    fields = {field.name for field in dataclasses.fields(RunIdentity)}
    follow = {
        "sequences",
        "shares",
        "total_steps",
        "decay",
        "world_size",
        "mesh",
        "added_tensors",
        "git",
    }
    assert fields - follow == {*COMPARED, "device", "numerics"}
    assert parts_of(identity()).keys() == {*COMPARED, VARIABLES, HARDWARE, PYTHON}
