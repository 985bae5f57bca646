"""Documents in files, the [data] that names them, and what is read of them.

write_jsonl(folder / "a.jsonl", ["one", "two"])
assert documents(local(folder)) == ["one", "two"]
"""

import io
import json

import numpy as np
import pyarrow
from pyarrow import parquet

from titan_lite.config import Data
from titan_lite.data.files import read_piece, text_of
from titan_lite.data.listing import Listing


def local(path, **more):
    """[data] with all documents of a path, in their order."""
    return Data(
        dataset="local", path=str(path), **{"validation_fraction": 0.0, "shuffle": False, **more}
    )


def as_jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_jsonl(texts))


def as_parquet(column):
    """A file of rows with a column of texts, two in a row group."""
    out = io.BytesIO()
    rows = pyarrow.table({"id": list(range(len(column))), "text": column})
    parquet.write_table(rows, out, row_group_size=2)
    return out.getvalue()


def documents(data):
    """Texts and errors of all documents, in order."""
    pieces = Listing(data).pieces
    return [
        text_of(raw, piece, place, data)
        for piece in pieces
        for place, raw in read_piece(piece, data)
    ]


class Letters:
    """A tokenizer of one token a character."""

    bos_id, eos_id = 0, 1

    def encode_document(self, text):
        return np.array([self.bos_id, *map(ord, text), self.eos_id])
