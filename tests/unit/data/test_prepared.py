"""Prepared data: a corpus tokenized once, from which training reads what it would read from the
text.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path

import datasets
import pytest
import torch
from descendants import runs

from titan_lite.config import ConfigError, Data, load_config
from titan_lite.config.errors import MachineError
from titan_lite.data.documents import build_source
from titan_lite.data.loader import build_loader
from titan_lite.data.prepared import PreparedCorpus, read_prepared
from titan_lite.data.streams import merge_states
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.distributed.layout import Layout
from titan_lite.rules.machine import check_machine
from titan_lite.tools import prepare as command
from titan_lite.tools.prepare import prepare

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[3]
TOKENIZER = load_tokenizer(ROOT / "assets/tokenizer/debug.model")
RECIPE = str(ROOT / "train_configs/debug_model.toml")
DATA = ["--data.dataset=local", "--data.path=corpus.jsonl"]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The folder in which `datasets` would leave copies."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield folder


def text(i):
    return f"document {i} " + "".join(
        chr(33 + (i * 7 + j * (i + 1)) % 90) for j in range(i * 13 % 97)
    )


def lines(numbers):
    return "".join(json.dumps({"text": text(i)}) + "\n" for i in numbers)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """160 documents in files of several formats, and two bad ones."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text(lines(range(50)) + "bad\n" + lines(range(50, 70)))
    (folder / "b.json").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(40)))
    (folder / "c.txt").write_text("one text\n")
    table = pyarrow.table(
        {"text": [*map(text, range(100, 140)), None, *map(text, range(150, 159))]}
    )
    parquet.write_table(table, folder / "d.parquet", row_group_size=15)
    return folder


def local(corpus, **more):
    path = str(corpus)
    return Data(dataset="local", path=path, on_bad_document="skip", num_workers=0, **more)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared") / "corpus"
    prepare(local(corpus), TOKENIZER, path, workers=2)
    return path


def prepared(folder, **more):
    return Data(dataset="prepared", path=str(folder), num_workers=0, **more)


# What is written


def test_a_row_is_a_document_with_its_name(folder):
    corpus = PreparedCorpus(prepared(folder), read_prepared(folder), "train")
    rows = {
        corpus.name(piece, row): corpus.document(piece, row, raw)
        for piece in corpus.pieces
        for row, raw in corpus.read(piece)
    }
    assert len(rows) == 162
    assert [name for name, tokens in rows.items() if tokens is None] == [
        f"a.jsonl:{len(lines(range(50)))}",
        "d.parquet:40",
    ]
    for name, expected in (("b.json:1", "document 0"), ("c.txt", "one text\n")):
        assert rows[name].tolist() == TOKENIZER.encode_document(expected).tolist()
        assert rows[name].dtype == "uint16"


def test_nothing_is_left_but_the_folder(folder, cache):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*read_prepared(folder).files, "prepared.json"}
    assert not any(path.suffix == ".arrow" for path in cache.rglob("*"))
    assert os.listdir(folder.parent) == ["corpus"]


def test_a_large_vocabulary_has_larger_tokens(corpus, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "vocab_size", 1 << 16 | 1)
    prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0)
    one, other = (
        PreparedCorpus(prepared(path), read_prepared(path), "train").document(None, 7, None)
        for path in (folder, tmp_path / "p")
    )
    assert other.dtype == "uint32"
    assert one.tolist() == other.tolist()


class Dies:
    vocab_size = 2048
    sha256 = "0" * 64

    def encode_document(self, text):
        signal.raise_signal(signal.SIGKILL)


def test_a_worker_that_dies_is_an_error_and_no_hang(corpus, tmp_path):
    with pytest.raises(ConfigError, match="--workers 2: a process that tokenizes ended"):
        prepare(local(corpus), Dies(), tmp_path / "p", workers=2)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_and_leaves_nothing(corpus, tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", full)
    with pytest.raises(MachineError, match=r"p cannot be written: .*No space left on device"):
        prepare(local(corpus), TOKENIZER, tmp_path / "p", workers=0)
    assert os.listdir(tmp_path) == []


def test_bad_documents_are_an_error_or_skipped_and_listed(corpus, folder, tmp_path):
    data = local(corpus)
    with pytest.raises(ConfigError, match=r"a.jsonl, line 51: not JSON.*on_bad_document"):
        prepare(data.replace(on_bad_document="error"), TOKENIZER, tmp_path / "p", workers=0)
    with pytest.raises(
        ConfigError, match=r"data.max_bad_documents = 1: there are 2, over all epochs, the"
    ):
        prepare(data.replace(max_bad_documents=1), TOKENIZER, tmp_path / "p", workers=0)
    assert os.listdir(tmp_path) == []
    bad = read_prepared(folder).bad
    assert [(Path(one["file"]).name, one["location"]) for one in bad] == [
        ("a.jsonl", "line 51"),
        ("d.parquet", "row 40"),
    ]


def test_a_corpus_with_nothing_to_train_on_is_an_error(tmp_path):
    (tmp_path / "bad.jsonl").write_text("bad\n")
    with pytest.raises(ConfigError, match="has no document that can be read"):
        prepare(local(tmp_path), TOKENIZER, tmp_path / "p", workers=0)


# The command


def options(folder, corpus):
    data = ["--data.dataset=local", f"--data.path={corpus}", "--data.on_bad_document=skip"]
    return [RECIPE, str(folder), "--workers", "0", *data]


def test_the_command_prepares_says_what_and_verifies(corpus, tmp_path, capsys):
    assert command.main(options(tmp_path / "p", corpus)) == 0
    out = capsys.readouterr().out
    assert f"--data.dataset prepared --data.path {tmp_path}/p trains on it" in out
    assert re.search(": 162 documents, [0-9,]+ tokens; 2 bad documents among them", out)
    assert command.main(["--verify", str(tmp_path / "p")]) == 0
    assert "every byte is as written" in capsys.readouterr().out
    [file] = (tmp_path / "p/documents").glob("*.arrow")
    content = bytearray(file.read_bytes())
    content[-2000] ^= 1
    file.write_bytes(content)
    assert command.main(["--verify", str(tmp_path / "p")]) == 2
    assert f"documents/{file.name} was altered" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_when_the_command_ends_its_processes_do(tmp_path, number):
    """Killed; and by a closed terminal, whose signal all processes get as that of Ctrl-C."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text(i) * 100}) + "\n" for i in range(5000)))
    words = [sys.executable, "-m", "titan_lite", "prepare", *options(tmp_path / "p", corpus)]
    words[words.index("--workers") + 1] = "2"
    command = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(children(command.pid)) < 3:  # two that tokenize, and the one of their queue
        assert command.poll() is None
        time.sleep(0.05)
    started = children(command.pid)
    if number == signal.SIGKILL:
        command.kill()
    else:
        os.killpg(command.pid, number)
    assert command.wait(60) == (-number if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 120
    while any(map(runs, started)):
        assert time.monotonic() < deadline, "processes outlived the command"
        time.sleep(0.01)
    if number != signal.SIGKILL:
        assert "Traceback" not in command.stderr.read()
        assert os.listdir(tmp_path) == ["corpus.jsonl"]
    assert not (tmp_path / "p").exists()


def children(pid):
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["FOLDER"], "expected RECIPE FOLDER first"),
        ([RECIPE, "HERE", *DATA], "exists, and nothing is overwritten"),
        ([RECIPE, "new", "--workers", "-1"], "--workers -1: expected 0 or more"),
        (["--verify", "HERE", RECIPE], "expected nothing else"),
        ([RECIPE, "new", "--data.dataset=prepared", "--data.path=HERE"], "is prepared already"),
        ([RECIPE, "new"], 'data.dataset = "stdlib" is small, and not prepared; use "local"'),
    ],
)
def test_what_is_wrong_is_one_line(folder, tmp_path, options, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([option.replace("HERE", str(folder)) for option in options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert os.listdir(tmp_path) == []


def test_each_source_of_a_mixture_becomes_a_folder(corpus, folder, tmp_path, capsys):
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.jsonl").write_text(lines(range(200, 240)))
    sources = (
        f'[{{dataset = "local", path = "{corpus}", weight = 2}},'
        f' {{dataset = "local", path = "{tmp_path}/books/*.jsonl"}},'
        f' {{dataset = "prepared", path = "{folder}"}}]'
    )
    more = [f"--data.sources={sources}", "--data.on_bad_document=skip", "--workers=0"]
    assert command.main([RECIPE, str(tmp_path / "mix"), *more]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: was prepared before" in out
    assert sorted(os.listdir(tmp_path / "mix")) == [f"1-{corpus.name}", "2-books"]
    recipe = tmp_path / "mixed.toml"
    recipe.write_text(f'extends = "{RECIPE}"\n' + out.partition("by this:")[2])
    config = load_config(recipe, [f"--job.dump_folder={tmp_path}"])
    assert [share for share, _ in config.data.mixture()] == [0.5, 0.25, 0.25]
    checked(config)


# What is read


def checked(config):
    return check_machine(config, Layout.from_config(config, 1))


def test_what_is_wrong_is_found_before_anything_starts(folder, tmp_path):
    more = ["--data.dataset=prepared", f"--data.path={folder}", f"--job.dump_folder={tmp_path}"]
    checked(load_config(RECIPE, more))
    (tmp_path / "other.model").write_text(
        "".join(f"{b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"was made by another tokenizer \(SHA-256 865699d1d602, 2048 tokens\) than"
            r" model.tokenizer_path"
        ),
    ):
        checked(load_config(RECIPE, [*more, f"--model.tokenizer_path={tmp_path}/other.model"]))
    with pytest.raises(ConfigError, match=r"prepared.json cannot be read"):
        checked(load_config(RECIPE, [*more, f"--data.path={tmp_path}"]))


def changed(name, value):
    """Change a value of prepared.json."""

    def change(folder):
        content = json.loads((folder / "prepared.json").read_text())
        (folder / "prepared.json").write_text(json.dumps({**content, name: value}))

    return change


def of_part(name, value):
    def change(folder):
        parts = json.loads((folder / "prepared.json").read_text())["parts"]
        changed("parts", {"documents": {**parts["documents"], name: value}})(folder)

    return change


def cut(path):
    os.truncate(path, path.stat().st_size - 8)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "prepared.json").write_text("{}"), "prepared.json is damaged"),
        (
            lambda f: (f / "prepared.json").write_text('{"format": 1}'),
            "its format is 1, not 3; use `titan-lite prepare` to prepare it again",
        ),
        (
            changed("vocab_size", -1),
            r"prepared.json is damaged \(vocab_size = -1: input should be greater than 0\)",
        ),
        (changed("files", {"../a": {"size": 1, "sha256": ""}}), "outside of the folder"),
        (
            of_part("documents", -5),
            r"\(parts\.documents\.documents = -5: input should be greater than or equal to 0\)",
        ),
        (lambda f: (f / "documents/state.json").unlink(), "state.json is missing"),
        (lambda f: cut(next((f / "documents").glob("*.arrow"))), r"\.arrow has [0-9,]+ bytes of"),
    ],
)
def test_what_is_not_whole_is_named(folder, tmp_path, damage, words):
    copy = shutil.copytree(folder, tmp_path / "copy")
    read_prepared(copy)
    damage(copy)
    with pytest.raises(ConfigError, match=words) as error:
        read_prepared(copy)
    assert str(error.value).startswith(f'data.path = "{copy}"')


def test_a_deep_place_is_reached_at_once(folder, monkeypatch):
    """Only the tokens of wanted documents are read."""
    source = build_source(prepared(folder), split="train", seed=0)
    epoch = 10**6
    start = next(source.documents(epoch * (2**61 - 1), lambda ordinal: True))[0]
    read = []
    monkeypatch.setattr(
        source.corpus, "document", lambda piece, index, raw: read.append(index) or index
    )
    wanted = [ordinal for ordinal, _ in zip_some(source, start, lambda at: at % 8 == 3)]
    assert len(wanted) == len(read) == 3


def zip_some(source, start, wanted, count=3):
    documents = source.documents(start, wanted)
    return [next(documents) for _ in range(count)]


# Against the text


def windows(data, split="train", degrees=(2, 3), steps=30):
    """(tokens, states) of 8 streams on the given numbers of ranks, each resuming the one before."""
    tokens, states = [], []
    for degree in degrees:
        shape = dict(streams=8, batch_size=1, seq_len=40, dp_degree=degree, split=split, seed=5)
        ranks = [build_loader(data, TOKENIZER, dp_rank=rank, **shape) for rank in range(degree)]
        for rank in ranks:
            if states:
                rank.load_state_dict(states[-1])
        batches = [next(rank) for _ in range(steps) for rank in ranks]
        tokens += [torch.stack((batch.input, batch.label)) for batch in batches]
        merged = merge_states([rank.state_dict() for rank in ranks])
        states.append(json.loads(json.dumps(merged)))
    return torch.stack(tokens), states


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    "order", [{"shuffle": False}, {"shuffle": True}, {"shuffle": True, "shuffle_buffer": 20}]
)
def test_it_gives_the_batches_of_the_text_over_epochs_and_resumes(corpus, folder, split, order):
    data = local(corpus, validation_fraction=0.2, **order)
    from_text, states = windows(data, split)
    from_tokens, same_states = windows(prepared(folder, validation_fraction=0.2, **order), split)
    assert torch.equal(from_tokens, from_text)
    assert same_states == states
    documents = [document for [[document, _]] in states[-1]["positions"].values()]
    assert min(documents) > 2**61 - 1 or split == "train"  # in the second epoch at least


def test_c4_keeps_its_own_split(tmp_path, monkeypatch):
    def load_dataset(*arguments, split, streaming):
        texts = [{"text": f"{split} {i}"} for i in range(5)]
        return datasets.IterableDataset.from_generator(lambda: iter(texts))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare(Data(dataset="c4"), TOKENIZER, tmp_path / "p", workers=0)
    for split in ("train", "validation"):
        from_text, _ = windows(Data(dataset="c4", num_workers=0), split, steps=3)
        assert torch.equal(windows(prepared(tmp_path / "p"), split, steps=3)[0], from_text)
