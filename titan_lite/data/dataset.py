"""Documents: an endless, numbered stream of texts from the running Python, from local files or from the hub.

    source = build_source(Data(dataset="stdlib"), split="train", seed=0)
    for ordinal, text in source.documents(start=0, wanted=lambda ordinal: ordinal % 8 == 3):
        ...                                 # documents 3, 11, 19, ... of the infinite concatenation of epochs

An ordinal is a document's place in that concatenation; it is the same on every rank, so that the loader's whole state is
numbers. Each epoch has a new order, which follows from the seed. A document belongs to training or to validation by a
hash of its name: the split stays when documents are added, and no rank needs to be told of it.
"""

import glob
import hashlib
import itertools
import logging
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from titan_lite.config import ConfigError, Data

logger = logging.getLogger(__name__)

Split = Literal["train", "validation"]
# Extension of a local file -> its reader among `datasets.IterableDataset`'s; a txt file is read whole, it is one document.
FORMATS = {".txt": "", ".jsonl": "from_json", ".json": "from_json", ".parquet": "from_parquet"}
_WORKS = "name a file, a folder or a glob of " + ", ".join(FORMATS) + ' files, such as path = "corpus/*.jsonl"'
_STDLIB = Path(sysconfig.get_path("stdlib"))
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class StdlibSource:
    """`pydoc_data.topics` and the sources of the standard library; any document can be read at once."""

    def __init__(self, data: Data, split: Split, seed: int):
        self.names = [name for name in _stdlib_names() if _belongs(name, split, data.validation_fraction)]
        self.shuffle, self.seed = data.shuffle, seed
        if not self.names:
            raise _empty(data, split)

    def documents(self, start: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str]]:
        """(ordinal, text) of the documents from `start` on whose ordinal is wanted; only these are read."""
        count = len(self.names)
        for epoch in itertools.count(start // count):
            order = list(range(count))
            if self.shuffle:
                random.Random(f"{self.seed} {epoch}").shuffle(order)
            for ordinal in range(max(start, epoch * count), (epoch + 1) * count):
                if wanted(ordinal):
                    yield ordinal, _stdlib_text(self.names[order[ordinal % count]])


class StreamSource:
    """A streamed `datasets.IterableDataset`, whose documents can only be reached by going through those before.

    With `data.shuffle`, the order of files is shuffled, then documents within a buffer of `data.shuffle_buffer`.
    """

    def __init__(self, data: Data, split: Split, seed: int):
        stream = _c4(split) if data.dataset == "c4" else _local(data, split)
        self.stream = stream.shuffle(seed=seed, buffer_size=data.shuffle_buffer) if data.shuffle else stream
        self.shuffle, self.empty = data.shuffle, _empty(data, split)

    def documents(self, start: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str]]:
        """(ordinal, text) of the documents from `start` on whose ordinal is wanted; those before are skipped, untokenized."""
        epoch = 0
        first = 0  # ordinal of the epoch's first document
        while True:
            if self.shuffle:  # set_epoch alone would shuffle the files
                self.stream.set_epoch(epoch)
            count = 0
            # Plain iteration draws other random numbers in a loader process than outside of one.
            for count, batch in enumerate(self.stream.iter(batch_size=1), start=1):
                ordinal = first + count - 1
                if ordinal >= start and wanted(ordinal):
                    yield ordinal, batch["text"][0]
            if count == 0:
                raise self.empty
            # Every epoch has as many documents: those that end before `start` need not be gone through.
            epoch = max(epoch + 1, start // count)
            first = epoch * count


Source = StdlibSource | StreamSource


def build_source(data: Data, *, split: Split, seed: int) -> Source:
    """The documents of one split of `data.dataset`.

    Raises:
        ConfigError: nothing to read, or not readable. A stream that has no document for this split raises it only when
            a whole epoch has been read.
    """
    return (StdlibSource if data.dataset == "stdlib" else StreamSource)(data, split, seed)


def check_data(data: Data) -> None:
    """Find what is wrong with [data] before any process starts: reads one document of each format, nothing of the hub.

    Raises:
        ConfigError: as `build_source` and reading would.
    """
    if data.dataset == "stdlib":
        _stdlib_text(StdlibSource(data, "train", seed=0).names[0])
    elif data.dataset == "local":
        files, root = _local_files(data)
        for suffix in {Path(file).suffix for file in files}:
            file = next(file for file in files if file.endswith(suffix))
            next(_read_files([file], root, data.text_field), None)


def fingerprint(data: Data) -> str:
    """SHA-256 of the names and sizes of all documents or their files, by which a run tells its data from other; c4: empty."""
    if data.dataset == "c4":
        return ""
    if data.dataset == "stdlib":
        topics = _topics()
        sizes = [
            (name, os.path.getsize(_STDLIB / name) if name.endswith(".py") else len(topics[name.removeprefix("topics/")]))
            for name in _stdlib_names()
        ]
    else:
        files, root = _local_files(data)
        sizes = [(Path(file).relative_to(root).as_posix(), os.path.getsize(file)) for file in files]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()


def _belongs(name: str, split: Split, validation_fraction: float) -> bool:
    """Whether the document of this name is in the split; over all names, validation has its fraction of them."""
    hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return (hashed < validation_fraction) == (split == "validation")


def _empty(data: Data, split: Split) -> ConfigError:
    where = f' at data.path = "{data.path}"' if data.path else ""
    return ConfigError(
        f'data.dataset = "{data.dataset}"{where} has no {split} document with data.validation_fraction = '
        f"{data.validation_fraction}; more documents or validation_fraction = {0.5 if split == 'validation' else 0.05} would work"
    )


# The standard library of the running Python


def _stdlib_names() -> list[str]:
    """Sorted names: "topics/NAME" of pydoc's help texts, paths relative to the standard library of its sources."""
    names = [f"topics/{topic}" for topic in _topics()]
    for folder, subfolders, files in os.walk(_STDLIB):
        subfolders[:] = [name for name in subfolders if name not in _NOT_OURS]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(_STDLIB).as_posix()
            # _sysconfigdata differs between builds of one Python, and the topics are in already.
            left_out = file.startswith("_sysconfigdata") or name == "pydoc_data/topics.py"
            if path.suffix == ".py" and not left_out and path.is_file() and path.stat().st_size:
                names.append(name)
    if len(names) < 100:
        raise ConfigError(
            f'data.dataset = "stdlib": this Python comes without the sources of its standard library ({len(names)} documents, '
            f'looked in {_STDLIB}); a full Python, or data.dataset = "local" with data.path, would work'
        )
    return sorted(names)


def _stdlib_text(name: str) -> str:
    kind, _, topic = name.partition("/")
    if kind == "topics":
        return _topics()[topic]
    return (_STDLIB / name).read_text(encoding="utf-8", errors="replace")


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship it in another package; the sources are most of the text
        return {}
    return topics


# Streams. `datasets` takes a second to import, so only where it is used.


def _c4(split: Split) -> Any:
    """C4 in English, about 156 billion tokens of Llama 3, with a validation split of its own."""
    import datasets

    logger.info("c4 has its own validation split: data.validation_fraction has no effect")
    try:
        return datasets.load_dataset("allenai/c4", "en", split=split, streaming=True)
    except Exception as error:
        raise ConfigError(
            f'data.dataset = "c4": allenai/c4 cannot be opened on the Hugging Face hub ({type(error).__name__}: {error}); '
            'without a way there, data.dataset = "local" with data.path, or "stdlib", would work'
        ) from error


def _local(data: Data, split: Split) -> Any:
    """A stream of {"text": ...}, one shard a file."""
    import datasets

    files, root = _local_files(data)
    arguments = dict(files=files, root=root, field=data.text_field, split=split, fraction=data.validation_fraction)
    return datasets.IterableDataset.from_generator(_local_documents, gen_kwargs=arguments)


def _local_documents(files: list[str], root: str, field: str, split: Split, fraction: float) -> Iterator[dict[str, str]]:
    for name, text in _read_files(files, root, field):
        if _belongs(name, split, fraction):
            yield {"text": text}


def _local_files(data: Data) -> tuple[list[str], str]:
    """Sorted files at `data.path`, and the folder that their names are relative to."""
    wrong, path = f'data.path = "{data.path}"', Path(data.path)
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.is_file())
        files = [file for file in found if Path(file).suffix in FORMATS]
        if len(files) < len(found):
            logger.info("%s: %d files of other formats are left out", wrong, len(found) - len(files))
        if not files:
            raise ConfigError(f"{wrong}: none of the {len(found)} files in this folder can be read; {_WORKS}")
        return files, str(path)
    files = [data.path] if path.is_file() else sorted(filter(os.path.isfile, glob.glob(data.path, recursive=True)))
    if not files:
        raise ConfigError(f"{wrong}: no such file, and no file matches; {_WORKS}")
    for file in files:
        if Path(file).suffix not in FORMATS:
            raise ConfigError(f'{wrong}: {file}: unknown format "{Path(file).suffix}"; {_WORKS}')
    return files, os.path.commonpath([Path(file).parent for file in files])


def _read_files(files: list[str], root: str, field: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every document; the name is the file's path relative to root, and :index where it holds several."""
    import datasets

    datasets.utils.tqdm.get_lock()  # else each progress bar of its threads deletes the lock that the others use
    for file in files:
        name = Path(file).relative_to(root).as_posix()
        index = 0
        try:
            if not os.path.getsize(file):
                continue  # it holds no document; the JSON reader would stumble
            if file.endswith(".txt"):
                yield name, Path(file).read_text(encoding="utf-8")
                continue
            # not load_dataset("json", ...), which calls the hub once a file to count its use
            stream = getattr(datasets.IterableDataset, FORMATS[Path(file).suffix])(glob.escape(file))
            for index, example in enumerate(stream):
                text = example.get(field)
                if not isinstance(text, str):
                    raise ConfigError(
                        f'data.text_field = "{field}": {file}, document {index}, has no text there; '
                        f"its fields with text: {', '.join(k for k, v in example.items() if isinstance(v, str)) or 'none'}"
                    )
                yield f"{name}:{index}", text
        except ConfigError:
            raise
        except Exception as error:  # pyarrow's and datasets' errors have no common class
            raise ConfigError(
                f"data.path: {file}, document {index}, cannot be read ({type(error).__name__}: {error}); "
                "repair the file or take it out"
            ) from error
