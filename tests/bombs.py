"""Small files that ask for much memory or time, and what reading them took.

for name, (content, good) in contents(limit=2**22).items(): ...
for path, took in measure(paths, mib=4).items(): ...    # {"mib": peak above a process that reads nothing, "seconds", ...}
"""

import gzip
import io
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _gz(begin, middle, times, end=b""):
    begin, middle, end = (gzip.compress(part, 1) for part in (begin, middle, end))
    return begin + middle * times + end


def _zst(begin, middle, times, end=b""):
    import pyarrow

    begin, middle, end = (
        pyarrow.compress(part, codec="zstd", asbytes=True) for part in (begin, middle, end)
    )
    return begin + middle * times + end


def _parquet(texts, **how):
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), out, **how)
    return out.getvalue()


def _arrow(column, opened="new_stream", **how):
    import pyarrow

    out = io.BytesIO()
    with getattr(pyarrow.ipc, opened)(
        out, pyarrow.schema([("text", column.type)]), options=pyarrow.ipc.IpcWriteOptions(**how)
    ) as w:
        w.write_batch(pyarrow.record_batch([column], names=["text"]))
    return out.getvalue()


def contents(limit):
    """{name: (bytes, good documents in it)}. limit: bytes of a document."""
    import pyarrow

    good, times = b'{"text": "good"}\n', 30
    a, size = b"a" * limit, limit * times
    once = "a" * (limit - 1)
    shared = pyarrow.DictionaryArray.from_arrays([0] * 1000, [once])
    pages = {"use_dictionary": False, "compression": "zstd", "write_statistics": False}
    some = {f"k{number:x}": 0 for number in range(limit // 14)}
    return {
        "line.jsonl.gz": (_gz(good, a, times, b"\n" + good), 2),
        "line.jsonl.zst": (_zst(good, a, times, b"\n" + good), 2),
        "blank.jsonl.gz": (_gz(good, b"\n" * limit, times), 1),
        "spaces.jsonl.gz": (_gz(good, b" " * limit, times, b"\n" + good), 2),
        "objects.jsonl": (b'{"a": [' + b"{}," * (limit // 3 - 9) + b"{}]}\n" + good, 1),
        "lists.jsonl": (b'{"a": [' + b"[]," * (limit // 3 - 9) + b"[]]}\n" + good, 1),
        "keys.jsonl": (json.dumps(some).encode() + b"\n" + good, 1),
        "floats.jsonl": (b'{"a": [' + b"1e9," * (limit // 4 - 9) + b"1]}\n" + good, 1),
        "wide.jsonl": (
            json.dumps(
                {"text": "\U0001f600" + "\xe9" * (limit // 2 - 99)}, ensure_ascii=False
            ).encode()
            + b"\n",
            1,
        ),
        "escapes.jsonl": (b'{"text": "' + b"\\n" * (limit // 2 - 99) + b'"}\n', 1),
        "digits.jsonl": (b'{"text": ' + b"9" * (limit - 99) + b"}\n" + good, 1),
        "string.json.zst": (_zst(b'[{"text": "', a, times, b'"}, {"text": "good"}]'), 1),
        "string.json.gz": (_gz(b'[{"text": "', a, times, b'"}, {"text": "good"}]'), 1),
        "lists.json.gz": (_gz(b"[[", b"[]," * (limit // 3), times, b'1], {"text": "good"}]'), 0),
        "escapes.json.gz": (
            _gz(b'[{"text": "', b'\\"' * (limit // 2), times // 2, b'"}, {"text": "good"}]'),
            0,
        ),
        "spaces.json.gz": (
            _gz(b'[{"text": "good"}', b" " * limit, times, b', {"text": "good"}]'),
            1,
        ),
        "line.csv.gz": (_gz(b"id,text\n1,good\n2,", a, times, b"\n3,good\n"), 2),
        "header.csv.gz": (_gz(b"text", a, times), 0),
        "quoted.csv.gz": (
            _gz(b'text\ngood\n"', b"a,\n" * (limit // 2), 1, b'""' * (limit // 2) + b'"\ngood\n'),
            2,
        ),
        "open.csv.gz": (_gz(b'text\ngood\n"', (b"a" * 999 + b"\n") * (limit // 1000), times), 1),
        "fields.csv": (b"id,text\n1,good\n" + b"ab," * (limit // 3 - 9) + b"\n3,good\n", 3),
        "wide.csv": ("text\ngood\n\U0001f600".encode() + b"a" * (limit - 99) + b"\ngood\n", 3),
        "blank.csv.gz": (_gz(b"text\ngood\n", b"\n" * limit, times), 1),
        "a.txt.gz": (_gz(a, a, times), 0),
        "a.txt.zst": (_zst(a, a, times), 0),
        "shared.parquet": (_parquet(shared, compression="zstd"), 1000),
        "larger.parquet": (
            _parquet(
                pyarrow.DictionaryArray.from_arrays([0] * 1000, [once * 7]), compression="zstd"
            ),
            0,
        ),
        "page.parquet": (_parquet([once * 9], **pages), 0),
        "rows.parquet": (_parquet([once] * 64, **pages), 0),
        "pages.parquet": (_parquet([once] * 64, write_batch_size=1, data_page_size=1, **pages), 64),
        "delta.parquet": (
            _parquet([once] * 64, column_encoding={"text": "DELTA_BYTE_ARRAY"}, **pages),
            64,
        ),
        "lengths.parquet": (
            _parquet([once] * 64, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"}, **pages),
            0,
        ),
        "shared.arrow": (_arrow(shared, compression="zstd"), 1000),
        "shared_file.arrow": (_arrow(shared, "new_file"), 1000),
        "runs.arrow": (_arrow(pyarrow.RunEndEncodedArray.from_arrays([1000], [once])), 1000),
        "views.arrow": (_arrow(_views(once, 1000)), 1000),
        "batch.arrow": (_arrow(pyarrow.array([once] * 64), compression="zstd"), 0),
        "batch_file.arrow": (_arrow(pyarrow.array([once] * 64), "new_file", compression="lz4"), 0),
        "dictionary.arrow": (
            _arrow(pyarrow.DictionaryArray.from_arrays([0], ["a" * size]), compression="zstd"),
            0,
        ),
    }


def _views(text, rows):
    import pyarrow

    one = pyarrow.array([text], pyarrow.string_view())
    header, *data = one.buffers()[1:]
    return pyarrow.Array.from_buffers(
        pyarrow.string_view(), rows, [None, pyarrow.py_buffer(header.to_pybytes() * rows), *data]
    )


def write_and_measure(bombs, folder, mib):
    """{name: figures of `measure`} of bombs as `contents` makes them."""
    for name, (content, _) in bombs.items():
        (folder / name).write_bytes(content)
    return {
        path.name: figures
        for path, figures in measure([folder / name for name in bombs], mib).items()
    }


def measure(paths, mib):
    """{path: {"mib", "seconds", "good", "bad"}} of reading each, in a process of its own with data.max_document_mib = mib."""
    command = [sys.executable, __file__, str(mib), *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return {
        path: json.loads(line) for path, line in zip(paths, done.stdout.splitlines(), strict=True)
    }


def _read(path, mib):
    from titan_lite.config import Data
    from titan_lite.data.bad_documents import BadDocument
    from titan_lite.data.files import local_pieces, read_piece, text_of

    data = Data("local", path=path, max_document_mib=mib)
    good, bad = 0, []
    for piece in local_pieces(data):
        for place, raw in read_piece(piece, data):
            text = text_of(raw, piece, place, data)
            good += isinstance(text, str)
            bad += [str(text)] if isinstance(text, BadDocument) else []
            del raw, text
    return good, bad


def main(mib, *paths):
    import pyarrow.ipc
    import pyarrow.parquet

    import titan_lite.data.columns

    titan_lite.data.columns, pyarrow.parquet
    before = 0
    for path in ("", *paths):
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
            begun = time.perf_counter()
            good, bad = _read(path, int(mib)) if path else (0, [])
            os.write(
                send,
                json.dumps(
                    {"seconds": time.perf_counter() - begun, "good": good, "bad": bad[:5]}
                ).encode(),
            )
            os._exit(0)
        os.close(send)
        _, status, usage = os.wait4(child, 0)
        with open(receive) as file:
            told = file.read()
        assert status == 0, (path, status)
        if path:
            print(
                json.dumps({**json.loads(told), "mib": (usage.ru_maxrss - before) / 2**10}),
                flush=True,
            )
        before = before or usage.ru_maxrss  # of a process that reads nothing


if __name__ == "__main__":
    main(*sys.argv[1:])
