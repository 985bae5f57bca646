"""Read a corpus that `titan_lite.data.prepare` has tokenized: shards of tokens on disk, with random access to documents.

    manifest.json            the format's version, tokenizer, counts, skipped documents, and size and SHA-256 of every file
    train-00000.tokens       token ids, one document after the other, each with BOS and EOS; uint16 or uint32, little-endian
    train-00000.documents    first token of each document, then the number of tokens; uint64, little-endian
    validation-00000.tokens, ...

    source = PreparedSource(Data(dataset="prepared", path="prepared/c4"), split="train", seed=0)
    for ordinal, tokens in source.documents(start=0, wanted=lambda ordinal: True): ...

Memory does not grow with the corpus: files are mapped, and the order of an epoch is computed, not stored. numpy's permutation
would take 8 bytes per document on every rank and seconds of a resume, and would change with the version of numpy.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_lite import manifest
from titan_lite.config import ConfigError, Data
from titan_lite.outside import (
    ANY,
    BYTES,
    FILE,
    HASH,
    NO_OTHER,
    NUMBER,
    SIZE,
    WORD,
    Damaged,
    check_form,
    one_of,
)

FORMAT = 1
Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
_AT_ONCE = 1024  # documents whose place in the order is computed at once
DTYPE = one_of("uint16", "uint32")
WRITTEN = {  # the form of the description of shards, in a manifest and in progress.json
    "splits": {split: [{"name": FILE, "documents": BYTES, "tokens": BYTES}] for split in SPLITS}
    | {NO_OTHER: ANY},
    "files": manifest.FILES,
    "bad": [{"file": WORD, "place": WORD, "reason": WORD}],
}
_DESCRIBED: dict[Any, Any] = {
    **WRITTEN,
    "tokenizer": HASH,
    "vocab_size": SIZE,
    "dtype": DTYPE,
    "data": {"validation_fraction": NUMBER, WORD: ANY},
    WORD: ANY,
}


class PreparedSource:
    """The documents of one split, as arrays of token ids with BOS and EOS."""

    def __init__(self, data: Data, split: Split, seed: int):
        self.folder, self.shuffle, self.seed, self.key = (
            Path(data.path),
            data.shuffle,
            seed,
            data.key("path"),
        )
        described = read_manifest(self.folder, key=data.key("path"))
        self.dtype, self.vocab_size = (
            np.dtype(described["dtype"]).newbyteorder("<"),
            described["vocab_size"],
        )
        shards = described["splits"][split]
        self.names, self.tokens = (
            [shard["name"] for shard in shards],
            sum(shard["tokens"] for shard in shards),
        )
        # firsts[i]: index of the first document of shard i; firsts[-1]: number of documents
        self.firsts = np.cumsum([0, *(shard["documents"] for shard in shards)])
        if not self.firsts[-1]:
            raise ConfigError(
                f'{data.key("path")} = "{self.folder}" has no {split} document; prepare it again with another '
                f"data.validation_fraction (it was {described['data']['validation_fraction']})"
            )

    def epoch(self, ordinal: int) -> int:
        return ordinal // int(self.firsts[-1])

    def documents(
        self, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (ordinal, tokens) of the documents from `start` on whose ordinal is wanted; only these are read."""
        count = int(self.firsts[-1])
        shards: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for epoch in itertools.count(start // count):
            end = (epoch + 1) * count
            for begin in range(max(start, epoch * count), end, _AT_ONCE):
                ordinals = [
                    ordinal
                    for ordinal in range(begin, min(begin + _AT_ONCE, end))
                    if wanted(ordinal)
                ]
                documents = np.array(
                    [ordinal - epoch * count for ordinal in ordinals], dtype=np.int64
                )
                if self.shuffle:
                    documents = shuffled(documents, count, f"{self.seed} {epoch}")
                numbers = np.searchsorted(self.firsts, documents, side="right") - 1
                within = documents - self.firsts[numbers]
                for ordinal, number, at in zip(
                    ordinals, numbers.tolist(), within.tolist(), strict=True
                ):
                    if number not in shards:
                        shards[number] = self._open(number)
                    tokens, begins = shards[number]
                    begin, end = begins[
                        at : at + 2
                    ].tolist()  # numpy's own integers make slower slices
                    if not begin < end <= len(tokens) or tokens[begin:end].max() >= self.vocab_size:
                        raise ConfigError(
                            f'{self.key} = "{self.folder}": {self.names[number]}, document {at}: not of this tokenizer; '
                            "use `python -m titan_lite.data.prepare` to prepare it again"
                        )
                    yield ordinal, tokens[begin:end]

    def _open(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a shard's tokens and the first token of each document, mapped; as plain arrays, which numpy slices faster."""
        name = self.names[number]
        tokens = np.memmap(self.folder / f"{name}.tokens", dtype=self.dtype, mode="r")
        begins = np.memmap(self.folder / f"{name}.documents", dtype="<u8", mode="r")
        return tokens.view(np.ndarray), begins.view(np.ndarray)


def shuffled(places: np.ndarray, count: int, key: str) -> np.ndarray:
    """Return the documents at these places of a pseudo-random order of range(count) that the key decides.

    A Feistel network permutes the numbers of an even number of bits. A number outside range(count) is permuted again until it is
    inside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype="<u8")
    found = places.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right + round_key) & mask)
        found[outside] = (left << half) | right
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64 with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def read_manifest(folder: Path, every_byte: bool = False, key: str = "data.path") -> dict[str, Any]:
    """Return the manifest after a check of the size of each file, or of every byte. Raises ConfigError. key: names the folder."""
    try:
        described = manifest.read_sealed(folder, {WORD: ANY})
        if described.get("format") != FORMAT:
            found = (
                f"format {described['format']!r:.60}"
                if "format" in described
                else "no format of prepared data"
            )
            raise Damaged(f"{manifest.NAME} is in {found}, and this version reads format {FORMAT}")
        check_shards(check_form(described, _DESCRIBED, manifest.NAME))
        manifest.check_sizes(folder, described["files"])
        if every_byte:
            manifest.check_bytes(folder, described["files"])
    except Damaged as why:
        raise ConfigError(
            f'{key} = "{folder}": {why}; use `python -m titan_lite.data.prepare` to prepare it again'
        ) from None
    return described


def check_shards(described: Mapping[str, Any]) -> None:
    """Raise Damaged if a shard is listed twice, or if its files do not have the sizes of its documents and tokens."""
    names = set[str]()
    for shard in itertools.chain.from_iterable(described["splits"].values()):
        if shard["name"] in names:
            raise Damaged(
                f"{manifest.NAME}: {shard['name']} is listed twice, whose documents would be read twice"
            )
        names.add(shard["name"])
        name, documents, tokens = shard["name"], shard["documents"], shard["tokens"]
        sizes = {
            "tokens": np.dtype(described["dtype"]).itemsize * tokens,
            "documents": 8 * (documents + 1),
        }
        listed = {
            suffix: described["files"].get(f"{name}.{suffix}", {}).get("size") for suffix in sizes
        }
        if listed != sizes or tokens < documents:
            raise Damaged(
                f"{manifest.NAME}: {name} has {documents:,} documents and {tokens:,} tokens, and no files of such sizes"
            )


def check_prepared(data: Data, tokenizer_sha256: str, vocab_size: int) -> None:
    """Raise ConfigError if the folder is damaged, or if another tokenizer made it."""
    described = read_manifest(Path(data.path), key=data.key("path"))
    if (described["tokenizer"], described["vocab_size"]) != (tokenizer_sha256, vocab_size):
        raise ConfigError(
            f'{data.key("path")} = "{data.path}" was made by another tokenizer (SHA-256 {described["tokenizer"][:12]}, '
            f"{described['vocab_size']} tokens) than model.tokenizer_path ({tokenizer_sha256[:12]}, {vocab_size} tokens); "
            "use that tokenizer, or prepare it again"
        )


def prepared_fingerprint(data: Data) -> str:
    """Return the SHA-256 of the manifest, which covers every byte."""
    read_manifest(Path(data.path), key=data.key("path"))
    return manifest.digest(Path(data.path, manifest.NAME))["sha256"]
