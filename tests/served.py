"""Files behind http as fsspec describes them, without its package for http, which tests do not need.

def test_a_file_behind_http(served):           # a fixture of tests/conftest.py
    served.files["http://host/a.jsonl"] = b'{"text": "a"}'
    served.headers["size"] = None               # it does not say it

def test_a_server_that_is_away(served, clock):             # so is `clock`
    served.fails(ConnectionError("away"), when=lambda: clock.now < 4)
"""

import io
from collections.abc import Callable
from fnmatch import fnmatch
from typing import ClassVar

from fsspec import AbstractFileSystem

CALLS = ("info", "list", "open", "read")


class File(io.BytesIO):
    def read(self, size=-1):
        self.failure("read")
        return super().read(size)


class Served(AbstractFileSystem):
    """A server: as HTTPFileSystem, it has headers in `info`."""

    protocol = ("http", "https")
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}  # by URL
    headers: ClassVar[dict[str, object]] = {}  # of every file
    serves_ranges: ClassVar[bool] = True
    failure: ClassVar[Callable[[str], None]] = staticmethod(lambda call: None)  # may raise

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def unstrip_protocol(self, name):
        return name

    @classmethod
    def fails(cls, error, *, calls=CALLS, when):
        """Raise an error from these calls while `when()` is true."""

        def fail(call):
            if call in calls and when():
                raise error

        cls.failure = staticmethod(fail)

    def info(self, path, **_):
        self.failure("info")
        if self.isdir(path):
            return {"name": path, "size": None, "type": "file", "mimetype": "text/html"}
        if path not in self.files:
            raise FileNotFoundError(path)
        info = {"name": path, "size": len(self.files[path]), "type": "file", "url": path}
        return info | self.headers

    def isdir(self, path):
        self.failure("list")
        return any(file.startswith(f"{path}/") for file in self.files)

    def find(self, path, **_):
        return {file: self.info(file) for file in self.files if file.startswith(f"{path}/")}

    def glob(self, path, **_):
        matches = (file for file in self.files if file == path or fnmatch(file, path))
        return {file: self.info(file) for file in matches}

    def _open(self, path, mode="rb", **_):
        self.failure("open")
        file = File(self.files[path])
        file.failure = self.failure
        if not self.serves_ranges:
            file.seek = self._refuse_seek
        return file

    def _refuse_seek(self, *_):
        raise ValueError("Cannot seek streaming HTTP file")
