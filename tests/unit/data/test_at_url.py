"""Files behind a real server of http, with fsspec's own package for it: what can be read, and in one
line what cannot.
"""

import gzip
import io
import json
import re
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from corpora import documents, local
from fsspec import AbstractFileSystem
from fsspec.registry import _registry

from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.data import servers
from titan_lite.data.documents import check_data
from titan_lite.data.files import local_files, read_piece
from titan_lite.data.listing import Listing, hash_of, list_sources

LINES = [{"text": f"line {number} " + "x" * 1000} for number in range(300)]
JSONL = "".join(json.dumps(line) + "\n" for line in LINES).encode()


FILES = {
    "/corpus/a.jsonl": JSONL,
    "/corpus/b.jsonl.gz": gzip.compress(JSONL),
    "/labelled/b.jsonl.gz": gzip.compress(JSONL),
    "/labelled/b.jsonl": gzip.compress(JSONL),
    "/whole/labelled/b.jsonl.gz": gzip.compress(JSONL),
    "/secret/a.jsonl": JSONL,
    "/cut.jsonl": JSONL,
    "/short.jsonl": JSONL,
    "/sizeless.jsonl": JSONL,
    "/corpus/a.xml": JSONL,
}
READ: list[str] = []  # paths whose content was asked for
PAGE = b'<html><a href="a.jsonl">a</a> <a href="b.jsonl.gz">b</a> <a href="../">up</a></html>'
ACCOUNT = "Basic " + b64encode(b"me:SECRET").decode()


class Handler(BaseHTTPRequestHandler):
    """A server that serves FILES in ranges, and some of them badly."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.respond()

    def do_GET(self):
        self.server.read.append(self.path)
        self.respond()

    def respond(self):
        stalled = self.server.stalled
        if self.path == "/stalled.jsonl":
            stalled.wait()
        elif self.path.startswith("/secret/") and self.headers["Authorization"] != ACCOUNT:
            self.answer(401)
        elif self.path == "/loop.jsonl":
            self.answer(302, Location="/loop.jsonl")
        elif self.path == "/moved.jsonl":
            self.answer(302, Location="/corpus/a.jsonl")
        elif self.path in ("/corpus", "/corpus/"):
            self.answer(200, PAGE, **{"Content-Type": "text/html"})
        elif self.path == "/labelled/":
            self.answer(200, b'<a href="b.jsonl.gz">b</a>', **{"Content-Type": "text/html"})
        elif self.path in FILES:
            self.serve(FILES[self.path])
        else:
            self.answer(404)

    def serve(self, content):
        if self.path == "/sizeless.jsonl":
            self.answer(200, content, sized=False)
            return
        encoding = {"Content-Encoding": "gzip"} if "/labelled/" in self.path else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or self.path.startswith("/whole/"):
            self.answer(200, content, **encoding)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        part = content[first : last + 1]
        if self.path == "/short.jsonl":  # it has become shorter
            part = part[:-1000]
            last -= 1000
        ranges = {"Content-Range": f"bytes {first}-{last}/{len(content)}"} | encoding
        self.answer(206, part, cut=self.path == "/cut.jsonl", **ranges)

    def answer(self, status, content=b"", *, sized=True, cut=False, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if sized:
            self.send_header("Content-Length", str(len(content)))
        self.close_connection = cut or not sized
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if cut else content)

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def address():
    """The host and the port of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.stalled = threading.Event()
        server.read = READ
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.stalled.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    """Nothing is asked for again: test_servers.py has that."""
    monkeypatch.setattr(servers, "RETRY_LIMIT", 0)


@pytest.mark.parametrize(
    ("path", "times"),
    [
        ("corpus/a.jsonl", 1),
        ("corpus/b.jsonl.gz", 1),
        ("corpus/", 2),
        ("corpus", 2),
        ("corpus/*.jsonl", 1),
        ("moved.jsonl", 1),
        # whose server says Content-Encoding: gzip
        ("labelled/b.jsonl.gz", 1),
        ("labelled/", 1),
        ("labelled/*.gz", 1),
        ("whole/labelled/b.jsonl.gz", 1),  # and has no ranges
    ],
)
def test_files_behind_http_are_read(path, times, address):
    data = local(f"http://{address}/{path}")
    check_data(data)
    assert documents(data) == [line["text"] for line in LINES] * times


def test_a_user_and_a_password_are_those_of_the_url(address):
    assert documents(local(f"http://me:SECRET@{address}/secret/a.jsonl"))[0] == LINES[0]["text"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://me:WRONG@HOST/secret/a.jsonl", "the server answers 401"),
        ("http://HOST/secret/a.jsonl", "401 Unauthorized: it may want a user"),
        ("http://HOST/secret/", "the server answers 401"),
        ("http://HOST/secret/*.jsonl", "the server answers 401"),
        ("http://HOST/loop.jsonl", "redirects again and again"),
        ("http://HOST/absent.jsonl", "404"),
        ("http://HOST/absent/", "the server answers 404"),
        ("http://HOST/sizeless.jsonl", "does not say its size"),
        ("http://HOST/labelled/b.jsonl", "does not say its size"),
        ("http://HOST/cut.jsonl", "not completed"),
        ("http://HOST/short.jsonl", "the server ends at byte"),
        ("http://127.0.0.1:1/a.jsonl", "Cannot connect"),
        ("http://:x/a.jsonl", "cannot be read"),
        ("zip://*.txt::http://me:WRONG@HOST/secret/a.zip", "401"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_url(url, words, address):
    may_pass = words in ("not completed", "the server ends at byte", "Cannot connect")
    (listing,) = list_sources(local(url.replace("HOST", address)))
    with pytest.raises(MachineError if may_pass else ConfigError) as error:
        listing.complete()
    (line,) = str(error.value).splitlines()
    assert words in line
    assert url.rpartition("@")[2].partition("*")[0].replace("HOST", address) in line
    assert "WRONG" not in line


def test_a_file_of_an_unknown_format_is_not_read_to_be_refused(address):
    with pytest.raises(ConfigError, match=r'corpus/a\.xml: unknown format "\.xml"; use'):
        local_files(local(f"http://{address}/corpus/a.xml"))
    assert "/corpus/a.xml" not in READ


def test_a_server_that_stalls_ends_in_one_line(address, monkeypatch):
    monkeypatch.setattr(servers, "ANSWER_LIMIT", 0.5)
    with pytest.raises(MachineError, match=r"stalled\.jsonl.*no answer within 0\.5 s"):
        local_files(local(f"http://{address}/stalled.jsonl"))
    with pytest.raises(MachineError, match=r"stalled\.jsonl.*no answer within 0\.5 s"):
        hash_of(f"http://{address}/stalled.jsonl")


def test_a_body_that_is_cut_is_no_bad_document(address):
    """It is not the file that is damaged: nothing of it is skipped."""
    data = local(f"http://{address}/cut.jsonl").replace(on_bad_document="skip")
    pieces = Listing(data).pieces
    with pytest.raises(MachineError, match=r"cut\.jsonl cannot be read "):
        list(read_piece(pieces[0], data))


@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://bucket/*.jsonl", "s3fs"), ("gs://bucket/*.jsonl", "gcsfs"), ("az://b/a.txt", "adlfs")],
)
def test_a_package_that_is_missing_is_named_with_its_extra(url, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*install it .*`titan_lite\[remote\]`"):
        local_files(local(url))


class OddError(Exception):
    """An error of a library, which is none of Python's."""


class Odd(AbstractFileSystem):
    """A file system that lists a file, and fails at what `fails` names."""

    protocol = "odd"
    cachable = False
    fails = ""

    def _do(self, what, result):
        if self.fails == what:
            raise OddError(f"no {what} at odd://me:SECRET@host")
        return result

    def isdir(self, path):
        return self._do("listing", False)

    def info(self, path, **_):
        return self._do("size", {"name": path, "size": 14, "type": "file"})

    def glob(self, path, **_):
        return {path: {"name": path, "size": 14, "type": "file"}}

    def ukey(self, path):
        return "1"

    def _open(self, path, mode="rb", **_):
        file = io.BytesIO(b'{"text": "a"}\n')
        file.read = lambda size=-1: self._do("reading", io.BytesIO.read(file, size))
        return self._do("opening", file)


@pytest.mark.parametrize("fails", ["listing", "size", "opening", "reading"])
def test_an_error_of_any_library_is_one_line(fails, monkeypatch):
    monkeypatch.setitem(_registry, "odd", Odd)
    data = local("odd://host/a.jsonl").replace(validation_fraction=0.01)
    check_data(data)
    monkeypatch.setattr(Odd, "fails", fails)
    with pytest.raises(ConfigError) as error:
        check_data(data)
    (line,) = str(error.value).splitlines()
    assert "odd://host/a.jsonl" in line
    assert f"OddError: no {fails} at odd://***@host" in line
