"""A server that is away for a while is asked again; what it refuses, and a mistake, is not."""

import errno
import gzip
import itertools
import socket

import datasets
import pyarrow
import pytest
from corpora import local
from pyarrow import parquet

from titan_lite.config import ConfigError, Data
from titan_lite.config.errors import MachineError
from titan_lite.data.documents import build_source, check_data
from titan_lite.data.files import local_files, size_of
from titan_lite.data.listing import hash_of
from titan_lite.data.readers import open_file
from titan_lite.data.servers import RETRY_LIMIT, may_pass, retried

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(300))
URL = "http://host/corpus/a.jsonl"
AWAY = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def texts(source, count):
    documents = source.documents(0, lambda ordinal: True)
    return [text for _, text in itertools.islice(documents, count)]


@pytest.fixture
def corpus(served, monkeypatch):
    served.files[URL] = LINES
    return served


@pytest.mark.parametrize("call", ["info", "list", "open", "read"])
def test_a_server_that_is_away_for_four_seconds_costs_waits_and_a_line(call, corpus, clock, caplog):
    corpus.fails(AWAY, calls=[call], when=lambda: clock.now < 4)
    data = local("http://host/corpus")
    check_data(data)
    assert texts(build_source(data, split="train", seed=0), 300)[-1] == "line 299"
    assert clock.waits == [0.5, 1, 2, 4]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("http://host/corpus")
    assert "Connection reset by peer" in line
    assert line.endswith("it is tried again for 60 s")


@pytest.mark.parametrize("call", ["info", "list", "open", "read"])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_server_that_stays_away_is_no_mistake_of_the_recipe(call, policy, corpus, clock):
    corpus.fails(AWAY, calls=[call], when=lambda: True)
    with pytest.raises(MachineError) as error:
        check_data(local("http://host/corpus", on_bad_document=policy))
    (line,) = str(error.value).splitlines()
    assert "Connection reset by peer" in line
    assert "was tried for 60 s: start again when its server answers" in line
    assert clock.now == RETRY_LIMIT
    assert clock.waits == sorted(clock.waits[:-1]) + clock.waits[-1:]


@pytest.mark.parametrize("serves_ranges", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_read_on_from_the_byte_that_was_reached(
    name, serves_ranges, corpus, clock, monkeypatch
):
    """In the middle of training: no document is lost, and none is there twice."""
    url = f"http://host/{name}"
    text = b"".join(b'{"text": "%064x"}\n' % (number * 7919**9) for number in range(20_000))
    corpus.files[url] = gzip.compress(text) if name.endswith("gz") else text
    monkeypatch.setattr(corpus, "serves_ranges", serves_ranges)
    reads = itertools.count()
    corpus.fails(AWAY, calls=["read"], when=lambda: next(reads) % 7 == 6)
    with open_file(url) as file:
        assert file.read() == text
    assert clock.waits


def test_a_row_group_is_read_on(corpus, clock):
    table = pyarrow.table({"text": [f"row {number}" for number in range(1000)]})
    out = pyarrow.BufferOutputStream()
    parquet.write_table(table, out)
    corpus.files["http://host/a.parquet"] = out.getvalue().to_pybytes()
    data = local("http://host/a.parquet")
    source = build_source(data, split="train", seed=0)
    reads = itertools.count()
    corpus.fails(AWAY, calls=["read"], when=lambda: next(reads) % 3 == 1)
    assert texts(source, 1000)[-1] == "row 999"
    assert clock.waits
    corpus.fails(AWAY, calls=["read"], when=lambda: True)
    with pytest.raises(MachineError, match=r"a\.parquet.*was tried for 60 s"):
        texts(source, 1000)


def test_what_a_server_refuses_is_not_asked_for_again(corpus, clock):
    corpus.fails(PermissionError(errno.EACCES, "Permission denied"), when=lambda: True)
    for ask in (size_of, hash_of, lambda url: local_files(local(url))):
        with pytest.raises(ConfigError, match=r"a\.jsonl.*cannot be read.*Permission denied"):
            ask(URL)
    corpus.fails(None, when=lambda: False)
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        size_of("http://host/absent.jsonl")
    assert clock.waits == []


class OfLibrary(Exception):
    """An error of a library, with attributes that say what a server has answered."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def botocore(status):
    answer = OfLibrary(response={"ResponseMetadata": {"HTTPStatusCode": status}})
    error = OSError(errno.EIO, "what s3fs does not know")
    error.__cause__ = answer
    return error


def named(name, bases=(Exception,), *arguments):
    return type(name, bases, {})(*arguments)


def of_http(cause):
    """As fsspec says that it cannot tell the size of a file."""
    error = FileNotFoundError("http://host/a.jsonl")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((OfLibrary(status=status), True) for status in (408, 429, 500, 502, 503, 504)),
        *((OfLibrary(status=status), False) for status in (400, 401, 403, 404, 410, 416)),
        (OfLibrary(status_code=503), True),
        (OfLibrary(code=503), True),
        (OfLibrary(response=OfLibrary(status_code=404)), False),
        (of_http(OfLibrary(status=503)), True),
        (of_http(OfLibrary(status=404)), False),
        (of_http(AWAY), True),
        (FileNotFoundError("a.jsonl"), False),
        (botocore(503), True),
        (botocore(301), False),
        (TimeoutError(), True),
        (BrokenPipeError(), True),
        *((OSError(getattr(errno, n), n), True) for n in ("EIO", "ESTALE", "EMFILE", "ENOMEM")),
        *((OSError(getattr(errno, n), n), False) for n in ("ENOENT", "EACCES", "EISDIR", "ELOOP")),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (named("ServerDisconnectedError", (named("ClientConnectionError").__class__,)), True),
        (named("ReadTimeoutError"), True),
        (named("ServiceRequestError"), True),
        (named("ClientConnectorCertificateError"), False),
        (named("OfflineModeIsEnabled", (ConnectionError,)), False),
        (ValueError("no URL"), False),
        (ImportError("no s3fs"), False),
        (OSError("Forbidden: gs://bucket"), False),
        (MachineError("it was tried"), False),
    ],
)
def test_which_errors_may_pass(error, passes):
    assert may_pass(error) is passes


def test_an_error_that_does_not_pass_ends_the_tries(clock):
    errors = iter([AWAY, AWAY, KeyError("a mistake")])

    def ask():
        raise next(errors)

    with pytest.raises(KeyError):
        retried(ask, URL)
    assert clock.waits == [0.5, 1]


# The hub


def test_a_hub_that_is_away_is_asked_again(clock, monkeypatch):
    stream = datasets.IterableDataset.from_generator(lambda: ({"text": f"{i}"} for i in range(5)))

    def load_dataset(*_, **__):
        if clock.now < 4:
            raise ConnectionError("Couldn't reach the hub")
        return stream

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = build_source(Data(dataset="c4", shuffle=False), split="train", seed=0)
    assert texts(source, 5) == list("01234")
    assert clock.waits == [0.5, 1, 2, 4]
