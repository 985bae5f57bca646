"""Files behind http as fsspec describes them, without its package for http, which tests do not need.

def test_a_file_behind_http(served):           # a fixture of tests/conftest.py
    served.files["http://host/a.jsonl"] = b'{"text": "a"}'
    served.headers["ETag"] = "1"
"""

import io
from fnmatch import fnmatch
from typing import ClassVar

from fsspec import AbstractFileSystem


class Served(AbstractFileSystem):
    """A server: as HTTPFileSystem, it has headers in `info`, and a constant `ukey`."""

    protocol = ("http", "https")
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}  # by URL
    headers: ClassVar[dict[str, object]] = {}  # of every file
    serves_ranges: ClassVar[bool] = True

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def unstrip_protocol(self, name):
        return name

    def ukey(self, path):
        return "static"

    def info(self, path, **_):
        if path not in self.files:
            raise FileNotFoundError(path)
        info = {"name": path, "size": len(self.files[path]), "type": "file", "url": path}
        return info | self.headers

    def isdir(self, path):
        return any(file.startswith(f"{path}/") for file in self.files)

    def find(self, path, **_):
        return {file: self.info(file) for file in self.files if file.startswith(f"{path}/")}

    def glob(self, path, **_):
        matches = (file for file in self.files if file == path or fnmatch(file, path))
        return {file: self.info(file) for file in matches}

    def _open(self, path, mode="rb", **_):
        file = io.BytesIO(self.files[path])
        if not self.serves_ranges:
            file.seek = self._refuse_seek
        return file

    def _refuse_seek(self, *_):
        raise ValueError("Cannot seek streaming HTTP file")
