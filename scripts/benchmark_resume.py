"""Measure the time to the first document of a resumed run, 90% into an epoch.

    python scripts/benchmark_resume.py --megabytes 200

Of local files, prepared data and the standard library. Beside it: reading all documents before that
one again, with this project's reader, and with `datasets` streaming and a shuffle buffer (where it
reads the format with no further package). One process, no tokenizer; the best of --rounds. Prepared
are as many documents as there are in the files, and half a million of 100 tokens.
"""

import argparse
import gzip
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark_data import synthetic

from titan_lite.config import Data
from titan_lite.data.documents import build_source

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt")
FILES = 8


def write_corpus(folder: Path, format: str, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    for number in range(FILES):
        some = texts[number::FILES]
        path = folder / f"{number}.{format}"
        if format == "txt":
            for index, text in enumerate(some):
                (folder / f"{number}-{index}.txt").write_text(text, encoding="utf-8")
        elif format == "parquet":
            parquet.write_table(pyarrow.table({"text": some}), path, row_group_size=1000)
        else:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in some).encode()
            compress = {
                "jsonl": bytes,
                "jsonl.gz": gzip.compress,
                "jsonl.zst": lambda b: pyarrow.compress(b, codec="zstd", asbytes=True),
            }
            path.write_bytes(compress[format](lines))


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def through_datasets(folder: Path, format: str, count: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, folder.iterdir()))
    read = (
        datasets.IterableDataset.from_parquet
        if format == "parquet"
        else datasets.IterableDataset.from_json
    )
    with tempfile.TemporaryDirectory() as cache:
        stream = read(files, cache_dir=cache).shuffle(seed=0, buffer_size=Data().shuffle_buffer)
        next(itertools.islice(stream, count, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = build_source(Data(validation_fraction=0.0), split="train", seed=0)
    texts = []
    size = 0
    for ordinal, text in source.documents(0, lambda ordinal: True):
        for start in range(0, len(text), 4000):
            texts.append(f"{ordinal} {text[start : start + 4000]}")
            size += len(texts[-1])
        if size > arguments.megabytes * 1e6:
            break
    print(
        f"{len(texts)} documents, {size / 1e6:.0f} MB of text in {FILES} files; seconds to the"
        " first document, 90% into an epoch"
    )
    print(
        f"{'format':26} {'going on':>9} {'from the beginning':>19}"
        f" {'datasets, from the beginning':>29}"
    )
    for format in FORMATS:
        with tempfile.TemporaryDirectory() as name:
            write_corpus(Path(name), format, texts)
            show(
                format,
                Data(dataset="local", path=name, validation_fraction=0.0),
                int(0.9 * len(texts)),
                arguments.rounds,
            )
    for count in (len(texts), 500_000):
        with tempfile.TemporaryDirectory() as name:
            path = synthetic(Path(name), count * 100, 100)
            show(
                f"prepared, {count:,}",
                Data(dataset="prepared", path=str(path)),
                int(0.9 * count),
                arguments.rounds,
            )
    show(
        f"stdlib, {len(source.names):,}",
        Data(validation_fraction=0.0),
        int(0.9 * len(source.names)),
        arguments.rounds,
    )


def show(name: str, data: Data, position: int, rounds: int) -> None:
    """Print a line with the best seconds until the document at a position of the first epoch."""
    documents = build_source(data, split="train", seed=0).documents(0, lambda ordinal: True)
    ordinal = next(itertools.islice(documents, position, None))[0]

    def begin(start: int) -> None:
        next(
            build_source(data, split="train", seed=0).documents(
                start, lambda wanted: wanted == ordinal
            )
        )

    ways = {"going on": lambda: begin(ordinal), "from the beginning": lambda: begin(0)}
    if data.dataset == "local" and name not in ("txt", "jsonl.zst"):
        ways["datasets"] = lambda: through_datasets(Path(data.path), name, position)
    took = {way: min(seconds(run) for _ in range(rounds)) for way, run in ways.items()}
    print(
        f"{name:26} {took['going on']:9.2f} {took['from the beginning']:19.2f}"
        f" {took.get('datasets', float('nan')):29.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
