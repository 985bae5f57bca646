import errno
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from descendants import runs

from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import MachineError
from titan_lite.data.documents import EPOCH_STRIDE
from titan_lite.data.loader import build_loader
from titan_lite.data.packing import WindowPacker
from titan_lite.data.processes import LoaderError
from titan_lite.data.streams import LoaderState, RankStreams, StreamPosition, merge_states
from titan_lite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
STREAMS = 8
SEQ_LEN = 16
# characters of 19 documents
LENGTHS = [5, 2, 300, 17, 41, 1, 90, 33, 12, 64, 7, 150, 28, 3, 55, 20, 9, 110, 38]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "assets/tokenizer/debug.model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """19 different documents in two files, some shorter than a window, some many windows long."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [
        "".join(chr(33 + (i * 7 + j * (i + 1)) % 90) for j in range(length))
        for i, length in enumerate(LENGTHS)
    ]
    for name, some in (("a.jsonl", texts[:8]), ("b.jsonl", texts[8:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    return folder


@pytest.fixture(scope="module", params=["local in order", "local shuffled", "stdlib"])
def data(request, corpus):
    if request.param == "stdlib":
        return Data(num_workers=0)
    shuffle = request.param == "local shuffled"
    return Data(
        dataset="local",
        path=str(corpus),
        validation_fraction=0.0,
        shuffle=shuffle,
        shuffle_buffer=5,
        num_workers=0,
    )


def loaders(data, tokenizer, dp_degree=1, batch_size=STREAMS, state=None, seed=0, streams=STREAMS):
    result = []
    for rank in range(dp_degree):
        shape = dict(streams=streams, batch_size=batch_size, seq_len=SEQ_LEN)
        loader = build_loader(
            data, tokenizer, split="train", dp_rank=rank, dp_degree=dp_degree, seed=seed, **shape
        )
        if state is not None:
            loader.load_state_dict(state)
        result.append(loader)
    return result


def same(one, other):
    return torch.equal(one.input, other.input) and torch.equal(one.label, other.label)


def global_batch(ranks, batch_size, size=STREAMS):
    """One optimizer step's windows, (size, SEQ_LEN + 1), in the order of their numbers, from all
    ranks and microbatches.
    """
    shares = []
    first = ranks[0].state_dict()["windows_taken"]
    for loader in ranks:
        windows = []
        for _ in range(size // len(ranks) // batch_size):
            batch = next(loader)
            input, label = batch.input, batch.label
            assert input.shape == label.shape == (batch_size, SEQ_LEN)
            assert input.dtype == label.dtype == torch.int64
            assert input.is_contiguous()
            assert label.is_contiguous()
            assert torch.equal(input[:, 1:], label[:, :-1])
            windows.append(torch.cat([input, label[:, -1:]], dim=1))
        shares.append(torch.cat(windows))
    # window n is that of rank n modulo their number
    return torch.stack(shares[first % len(ranks) :] + shares[: first % len(ranks)], dim=1).flatten(
        0, 1
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_groups_that_deal_batches_have_each_once_and_the_same_state(corpus, tokenizer, num_workers):
    """Local batches 0 and 2 are of one replica group, 1 and 3 of another."""
    data = Data(dataset="local", path=str(corpus), validation_fraction=0.0, num_workers=num_workers)
    (alone,) = loaders(data, tokenizer, batch_size=4)
    copies = [loaders(data, tokenizer, batch_size=4)[0] for _ in range(2)]
    for number in range(4):
        expected = next(alone)
        copies[1 - number % 2].skip()
        assert same(next(copies[number % 2]), expected)
    assert copies[0].state_dict() == copies[1].state_dict() == alone.state_dict()


@pytest.mark.parametrize("num_workers", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted(corpus, tokenizer, num_workers):
    others = set(multiprocessing.active_children())
    data = Data(
        dataset="local",
        path=str(corpus),
        validation_fraction=0.0,
        shuffle_buffer=5,
        num_workers=num_workers,
    )
    [loader] = loaders(data, tokenizer, batch_size=2)
    states, batches = [loader.state_dict()], []
    for _ in range(161):
        batches.append(next(loader))
        states.append(json.loads(json.dumps(loader.state_dict())))
    # the run crossed several epochs, and its states lie inside documents, inside steps and on both
    # sides of an epoch's edge
    assert all(document > 2 * EPOCH_STRIDE for [[document, _]] in states[-1]["positions"].values())
    for at in (0, 1, 3, 4, 10, 17, 33, 90, 153):
        [resumed] = loaders(data, tokenizer, batch_size=2, state=states[at])
        assert resumed.state_dict() == states[at]
        for i in range(at, at + 8):
            assert same(resumed.peek(), batches[i])
            assert resumed.state_dict() == states[i]
            assert same(next(resumed), batches[i])
            assert resumed.state_dict() == states[i + 1]
    loader.load_state_dict(states[5])  # and the very loader can go back
    assert same(next(loader), batches[5])
    del resumed
    # without leaving its old process behind, which it does not wait for on a busy machine
    await_that(lambda: len(set(multiprocessing.active_children()) - others) == num_workers)


def await_that(condition):
    """Wait until a condition holds, for at most two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("batch_size", "workers", "used"), [(8, 2, 2), (2, 4, 4), (1, 3, 2)])
def test_any_number_of_processes_gives_the_same_batches_and_reads_each_document_once(
    corpus, tokenizer, batch_size, workers, used, caplog
):
    others = set(multiprocessing.active_children())
    data = Data(
        dataset="local", path=str(corpus), validation_fraction=0.0, shuffle_buffer=5, num_workers=0
    )
    [plain] = loaders(data, tokenizer, batch_size=batch_size)
    with caplog.at_level("INFO", logger="titan_lite"):
        [many] = loaders(data.replace(num_workers=workers), tokenizer, batch_size=batch_size)
        many.peek()
    for _ in range(20):
        assert same(next(many), next(plain))
        assert many.state_dict() == plain.state_dict()
    assert len(set(multiprocessing.active_children()) - others) == used
    assert (f"divided among {used}" in caplog.text) == (used < workers)
    # from the middle of a step, where some streams are ahead of others, nobody piles up what nobody
    # takes
    many.load_state_dict(plain.state_dict())
    for _ in range(40):
        assert same(next(many), next(plain))
        assert max(Counter(number % STREAMS for number in many.received).values(), default=0) <= 2


def hashes(batch):
    """One for each sequence, in order."""
    return [hashlib.sha256(sequence.numpy().tobytes()).hexdigest() for sequence in batch]


def state_of(ranks):
    """As a checkpoint holds it."""
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in ranks])))


@pytest.fixture(scope="module")
def uninterrupted(data, tokenizer):
    """Return (state before it, samples) of each of 24 steps, which are several epochs of the
    corpus.
    """
    ranks, steps = loaders(data, tokenizer), []
    for _ in range(24):
        state = state_of(ranks)
        steps.append((state, hashes(global_batch(ranks, STREAMS))))
    assert len({tuple(samples) for _, samples in steps}) == 24
    return steps


def test_dp_4_to_2_to_8_sees_the_samples_of_an_uninterrupted_run(data, tokenizer, uninterrupted):
    state, seen = None, []
    for dp_degree, batch_size, steps in ((4, 2, 9), (2, 4, 7), (8, 1, 8)):
        ranks = loaders(data, tokenizer, dp_degree, batch_size, state=state)
        seen += [hashes(global_batch(ranks, batch_size)) for _ in range(steps)]
        state = state_of(ranks)
    assert seen == [samples for _, samples in uninterrupted]


def test_a_resume_at_any_step_goes_on_with_its_samples(data, tokenizer, uninterrupted):
    """So also at an epoch's edge, and at the steps before and after it."""
    epochs = [
        {document // EPOCH_STRIDE for [[document, _]] in state["positions"].values()}
        for state, _ in uninterrupted
    ]
    assert data.dataset == "stdlib" or (
        max(epochs[-1]) >= 2 and any(len(some) > 1 for some in epochs)
    )
    for at in range(22):
        dp_degree, batch_size = ((1, 8), (2, 1), (8, 1), (4, 1))[
            at % 4
        ]  # accumulating 1, 4, 1 and 2 microbatches
        ranks = loaders(data, tokenizer, dp_degree, batch_size, state=uninterrupted[at][0])
        for _, samples in uninterrupted[at : at + 2]:
            assert hashes(global_batch(ranks, batch_size)) == samples


class Listening:
    """A tokenizer that remembers what it was given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, []

    def encode_document(self, text):
        self.texts.append(text)
        return self.tokenizer.encode_document(text)


def test_ranks_tokenize_only_documents_of_their_streams_and_each_once(data, tokenizer):
    ears = [Listening(tokenizer) for _ in range(3)]
    ranks = [
        loaders(data, ears[0], 2, 4)[0],
        loaders(data, ears[1], 2, 4)[1],
        *loaders(data, ears[2]),
    ]
    for _ in range(6):
        for loader in ranks:
            next(loader)
    assert sorted(ears[0].texts + ears[1].texts) == sorted(ears[2].texts)
    tokens = sum(len(tokenizer.encode_document(text)) for text in ears[2].texts)
    taken = 6 * STREAMS * (SEQ_LEN + 1)
    assert taken <= tokens <= taken + STREAMS * 10_000
    assert min(len(ears[0].texts), len(ears[1].texts)) >= 4


def test_resuming_does_not_tokenize_what_is_behind(data, tokenizer):
    ears = [Listening(tokenizer), Listening(tokenizer)]
    [loader] = loaders(data, ears[0])
    for _ in range(40):
        next(loader)
    before, state = len(ears[0].texts), loader.state_dict()
    next(loader)
    [resumed] = loaders(data, ears[1], state=state)
    next(resumed)
    in_use = sum(used > 0 for [[_, used]] in state["positions"].values())
    assert len(ears[1].texts) == in_use + len(ears[0].texts) - before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mistake_in_the_data_arrives_as_itself(tmp_path, tokenizer, num_workers):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": null}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n')
    for shuffle in (False, True):
        data = Data(
            dataset="local",
            path=str(tmp_path),
            validation_fraction=0.0,
            num_workers=num_workers,
            shuffle=shuffle,
        )
        [loader] = loaders(data, tokenizer)
        with pytest.raises(ConfigError) as error:
            next(loader)
        assert 'a.jsonl, line 2: data.text_field = "text" is null in it' in str(error.value)
        assert 'data.on_bad_document = "skip"' in str(error.value)
        assert "Traceback" not in str(error.value)


class Broken:
    def encode_document(self, text):
        raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bug_arrives_as_its_own_kind(num_workers):
    [loader] = loaders(Data(num_workers=num_workers), Broken())
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        next(loader)


def test_a_state_goes_on_with_its_own_streams_whatever_the_run_would_have(data, tokenizer):
    ranks = loaders(data, tokenizer, dp_degree=2, batch_size=4)
    expected = [global_batch(ranks, 4) for _ in range(4)]
    ranks = loaders(data, tokenizer, dp_degree=2, batch_size=4)
    found = [global_batch(ranks, 4)]
    [other] = loaders(data, tokenizer, batch_size=24, state=state_of(ranks), streams=16)
    found.append(global_batch([other], 24, size=24))
    assert torch.equal(torch.cat(found), torch.cat(expected))
    with pytest.raises(KeyError, match="1"):
        loaders(
            data, tokenizer, state=ranks[0].state_dict()
        )  # which is not merged with the other's


def test_processes_follow_batches_that_change_without_piling_up(corpus, tokenizer):
    """The windows of one process that reads them one by one.

    On 2 ranks with 2 processes each, and on 3 that share streams.
    """
    data = Data(
        dataset="local", path=str(corpus), validation_fraction=0.0, shuffle_buffer=5, num_workers=0
    )
    [plain] = loaders(data, tokenizer, batch_size=1)
    state = None
    for dp_degree, batch_size, sizes in ((2, 2, (4, 8, 12, 4)), (3, 1, (3, 9, 6, 3))):
        ranks = loaders(data.replace(num_workers=2), tokenizer, dp_degree, batch_size, state=state)
        for size in sizes:
            assert torch.equal(
                global_batch(ranks, batch_size, size=size), global_batch([plain], 1, size=size)
            )
            for loader in ranks:
                assert len(loader.received) <= 2 * len(loader.streams.indices)
        state = state_of(ranks)
        assert state == state_of([plain])


def test_ranks_that_share_streams_count_short_documents_once(corpus, tokenizer):
    data = Data(
        dataset="local",
        path=str(corpus),
        validation_fraction=0.0,
        shuffle=False,
        num_workers=0,
        min_document_tokens=20,
    )
    [one], three = loaders(data, tokenizer, batch_size=6), loaders(data, tokenizer, 3, 2)
    for loader in (one, *three):
        next(loader)
    [alone], shared = [one.pop_skipped()], [loader.pop_skipped() for loader in three]
    assert alone.short == sum(skipped.short for skipped in shared) > 0


def test_a_state_of_other_documents_is_refused(data, tokenizer):
    [loader] = loaders(data, tokenizer)
    state = loader.state_dict()
    state["positions"]["3"] = [[3, 10**9]]
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="1000000000 tokens into document 3"):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_server_that_is_lost_ends_the_batches_in_a_line(
    num_workers, corpus, tokenizer, served, clock
):
    """Also where a loader process has read it."""
    served.files["http://host/a.jsonl"] = (corpus / "a.jsonl").read_bytes()
    data = Data(
        dataset="local",
        path="http://host/a.jsonl",
        validation_fraction=0.0,
        num_workers=num_workers,
    )
    [loader] = loaders(data, tokenizer)
    next(loader)
    served.fails(ConnectionResetError("it is away"), when=lambda: True)
    loader.load_state_dict(loader.state_dict())  # ends what is packed ahead
    with pytest.raises(
        MachineError, match=r"a\.jsonl cannot be read \(.*it is away\), and was"
    ) as e:
        next(loader)
    assert "\n" not in str(e.value)


def test_processes_that_cannot_be_started_are_told_in_a_line_with_what_is_full(
    corpus, tokenizer, monkeypatch, capfd
):
    def no_semaphore(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", no_semaphore)
    [loader] = loaders(
        Data(dataset="local", path=str(corpus), validation_fraction=0.0, num_workers=2),
        tokenizer,
        batch_size=4,
    )
    with pytest.raises(
        LoaderError, match=r"^data.num_workers = 2: .* No space left on device; free .*/dev/shm, "
    ) as error:
        next(loader)
    assert "or use data.num_workers = 0" in str(error.value)
    assert "\n" not in str(error.value)
    del loader, error
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_loader_process_that_was_killed_is_told_in_a_line(corpus, tokenizer):
    others = set(multiprocessing.active_children())
    data = Data(
        dataset="local", path=str(corpus), validation_fraction=0.0, num_workers=1, prefetch=1
    )
    [loader] = loaders(data, tokenizer, batch_size=1)
    next(loader)
    (process,) = set(multiprocessing.active_children()) - others
    process.kill()
    process.join()
    time.sleep(0.2)  # in which a handler of SIGCHLD would raise
    with pytest.raises(
        LoaderError,
        match=rf"^loader process {process.pid} was killed by SIGKILL, .*num_workers = 0",
    ) as error:
        list(itertools.islice(loader, 200))
    assert "\n" not in str(error.value)


class Threads:
    """A tokenizer whose tokens are torch's threads where it runs."""

    def encode_document(self, text):
        return np.array([torch.get_num_threads()] * 5)


def test_the_loader_process_runs_torch_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert set(next(loaders(Data(num_workers=1), Threads())[0]).input.flatten().tolist()) == {1}
        assert set(next(loaders(Data(num_workers=0), Threads())[0]).input.flatten().tolist()) == {3}
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(
    not hasattr(signal, "sigwaitinfo"), reason="needs Linux: who sent a signal is not told here"
)
def test_a_signal_to_all_processes_leaves_the_loader_process_to_the_training_process(
    corpus, tokenizer
):
    """Which still wants batches; of its own SIGTERM it ends."""
    data = Data(dataset="local", path=str(corpus), validation_fraction=0.0, num_workers=0)
    [expected] = loaders(data, tokenizer, batch_size=1)
    [loader] = loaders(data.replace(num_workers=1, prefetch=1), tokenizer, batch_size=1)
    others = set(
        multiprocessing.active_children()
    )  # of loaders that no garbage collection has met yet
    assert same(next(loader), next(expected))
    (process,) = set(multiprocessing.active_children()) - others
    for name in ("TERM", "USR1", "INT", "HUP"):
        subprocess.run(["sh", "-c", f"kill -{name} {process.pid}"], check=True)
    for _ in range(20):
        assert same(next(loader), next(expected))
    # Its thread takes one after another: of two that are pending, SIGTERM would be one.
    status = Path(f"/proc/{process.pid}/status")
    await_that(lambda: re.search(r"^ShdPnd:\s0+$", status.read_text(), re.MULTILINE))
    process.terminate()
    process.join(120)
    assert process.exitcode == 0


def test_what_the_loader_process_gets_can_be_pickled(data, tokenizer):
    """As where processes are spawned, not forked."""
    [loader] = loaders(data, tokenizer)
    positions = {stream: [StreamPosition(stream)] for stream in range(STREAMS)}
    state = LoaderState(0, STREAMS, positions)
    packer = WindowPacker(loader.packing, RankStreams(STREAMS, 0, 1), state, STREAMS)
    copy = iter(pickle.loads(pickle.dumps(packer)))
    for _ in range(3):
        windows = [np.frombuffer(window.tokens, dtype=np.int32) for window in next(copy).windows]
        assert [window[1:].tolist() for window in windows] == next(loader).label.tolist()


SCRIPT = """
import multiprocessing
from titan_lite.config import Data
from titan_lite.data.loader import build_loader
from titan_lite.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer("assets/tokenizer/debug.model")
shape = dict(streams=2, batch_size=2, seq_len=8, dp_rank=0, dp_degree=1)
loader = build_loader(Data(), tokenizer, split="train", seed=0, **shape)
next(loader)
print(*[child.pid for child in multiprocessing.active_children()])
"""


@pytest.mark.slow
def test_a_program_ends_with_its_loader_open_and_takes_it_along():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stderr) == (0, "")
    [worker] = map(int, run.stdout.split())
    await_that(lambda: not runs(worker))


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_program_that_is_killed_takes_its_loader_along(is_stopped, tmp_path):
    """Also where that is in the middle of handing over a batch, which is more than a pipe holds;
    and where the loader process was stopped, so that none of its threads can notice.
    """
    stop = "[os.kill(child.pid, signal.SIGSTOP) for child in multiprocessing.active_children()]"
    die = (
        "; import os, signal, sys, time; sys.stdout.flush(); time.sleep(1);"
        f" {stop if is_stopped else ''}; os.kill(os.getpid(), signal.SIGKILL)"
    ).replace("; ;", ";")
    script = SCRIPT.strip().replace("seq_len=8", "seq_len=20_000") + die
    with (tmp_path / "out").open("w") as out:  # no pipe, which the loader process would hold open
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
    assert run.returncode == -signal.SIGKILL
    worker = int((tmp_path / "out").read_text())
    await_that(lambda: not runs(worker))
