"""List the documents of a source once: its files, the pieces of these, and what identifies them.

    (listing,) = list_sources(Data(dataset="local", path="corpus/*.jsonl"))   # nothing is read yet
    listing.files, listing.pieces        # LocalFile, Piece
    listing.identity                     # a SourceIdentity: names, sizes and hashes

What was asked for once stays as it was found: all parts of a run see the same documents. The first
rank of a node completes its listings, and the others get them (Trainer.share_listings).
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from titan_lite.config import Data
from titan_lite.config.errors import error_because_of
from titan_lite.data.files import LocalFile, Piece, cut_into_pieces, local_files
from titan_lite.data.outputs import PREPARED
from titan_lite.data.prepared import PreparedInfo, read_prepared
from titan_lite.data.readers import DAMAGED_AT_URL, is_url, open_at_url
from titan_lite.data.servers import serves_no_ranges
from titan_lite.data.source_identity import FileContent, SourceIdentity
from titan_lite.data.stdlib import FOLDER, TOPIC, Stdlib
from titan_lite.logging import telling_if_slow
from titan_lite.manifest import SAMPLE_BYTES, digest, sampled_sha256

HASH_DIGITS = 16  # of a SHA-256 that are kept: steps have those of all files
THREADS = 16  # since a shared file system, and a server, have a latency


class Listing:
    """The documents of one source, as they are when they are first asked for."""

    def __init__(self, data: Data):
        """data: a source, as of `Data.mixture`."""
        self.data = data

    @cached_property
    def files(self) -> list[LocalFile]:
        """The files of dataset = "local". Raises ConfigError."""
        return local_files(self.data)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces of these files. Raises ConfigError."""
        return cut_into_pieces(self.files)

    @cached_property
    def prepared(self) -> PreparedInfo:
        """The content of prepared.json of dataset = "prepared". Raises ConfigError."""
        return read_prepared(Path(self.data.path), self.data.key("path"))

    @cached_property
    def stdlib(self) -> Stdlib:
        """The texts of dataset = "stdlib". Raises ConfigError."""
        return Stdlib()

    @cached_property
    def identity(self) -> SourceIdentity:
        """The names, sizes and hashes of the documents. Raises ConfigError and MachineError."""
        return replace(self._documents(), name=self.data.name)

    def _documents(self) -> SourceIdentity:
        data = self.data
        match data.dataset:
            case "local":
                settings = {"dataset": "local", "text_field": data.text_field}
                with telling_if_slow(f'hashing samples of {data.key("path")} = "{data.path}"'):
                    return SourceIdentity(settings, _contents_of(self.files))
            case "prepared":
                return SourceIdentity({"dataset": "prepared"}, self._prepared_contents())
            case "stdlib":
                return SourceIdentity({"dataset": "stdlib"}, self._stdlib_contents())
        names = ("dataset", "subset", "split", "text_field")
        return SourceIdentity({name: getattr(data, name) for name in names})

    def _prepared_contents(self) -> dict[str, FileContent]:
        """Return the contents of prepared.json, which has a SHA-256 of each other file, and of
        those files as they are.
        """
        folder = Path(self.data.path)
        listed = digest(folder / PREPARED)
        files = [
            LocalFile(str(folder / name), name, file["size"])
            for name, file in sorted(self.prepared.files.items())
        ]
        return {PREPARED: FileContent(listed["size"], listed["sha256"]), **_contents_of(files)}

    def _stdlib_contents(self) -> dict[str, FileContent]:
        names = self.stdlib.names
        contents = _contents_of(
            [
                LocalFile(str(FOLDER / name), name, (FOLDER / name).stat().st_size)
                for name in names
                if not name.startswith(TOPIC)
            ]
        )
        for name in names:
            if name.startswith(TOPIC):
                text = self.stdlib.document(name)
                sha256 = hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
                contents[name] = FileContent(len(text), sha256)
        return {name: contents[name] for name in names}

    def complete(self) -> None:
        """Find everything of the source that is not known yet. Raises ConfigError."""
        _ = self.identity
        if self.data.dataset == "local":
            _ = self.pieces


def list_sources(data: Data) -> list[Listing]:
    """Return a listing for each source of [data] or [validation]; nothing is read yet."""
    return [Listing(part) for _, part in data.mixture()]


def _contents_of(files: Sequence[LocalFile]) -> dict[str, FileContent]:
    """Return the content of each file, by name."""
    with ThreadPoolExecutor(THREADS) as threads:
        hashes = threads.map(hash_of, [file.path for file in files])
        return {
            file.name: FileContent(file.size, sha256)
            for file, sha256 in zip(files, hashes, strict=True)
        }


def hash_of(file: str) -> str:
    """Return the hash of a file's content, or of its samples (manifest.sampled_sha256).

    Raises ConfigError and MachineError.
    """
    try:
        if not is_url(file):
            with open(file, "rb", buffering=0) as opened:
                return sampled_sha256(cast(BinaryIO, opened))[:HASH_DIGITS]
        with open_at_url(file, SAMPLE_BYTES) as opened:
            return sampled_sha256(cast(BinaryIO, opened))[:HASH_DIGITS]
    except (OSError, *DAMAGED_AT_URL) as error:
        fix = (
            "; use a server that serves ranges, or a copy on disk"
            if serves_no_ranges(error)
            else ""
        )
        raise error_because_of(error, f"{file} cannot be read: {error}{fix}") from error
