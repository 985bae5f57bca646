"""Speed of the data: tokenizing, and reading prepared data, beside other libraries.

    python scripts/benchmark_data.py                  # all, on the standard library's text; minutes
    python scripts/benchmark_data.py tokenize --tokenizer Meta-Llama-3/original/tokenizer.model
    python scripts/benchmark_data.py read --tokens 100000000 --rounds 7

tokenize   tokens/s of the Loader on text, one process, and of `datasets.map` with the same
           tokenizer, relative to tiktoken alone
read       tokens/s of the Loader on a prepared corpus, and of other readers of the same tokens

--cpu      tokenize in one process, by processor time: for a machine with other work

Variants run in turn, and what is compared is of one round; the tables, in Markdown, have medians
over rounds, and the best, in which other work on the machine is least. Tokens are those that come
out of packing: sequences x seq_len. See also benchmark_resume.py.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_lite.config import Data
from titan_lite.data.documents import build_source
from titan_lite.data.loader import Loader, build_loader
from titan_lite.data.prepared import BOTH_SPLITS
from titan_lite.data.tokenizer import TiktokenTokenizer, Tokenizer, load_tokenizer
from titan_lite.tools.prepare import prepare, write_info, write_table

ROOT = Path(__file__).parents[1]
DOCUMENTS_PER_PIECE = 300  # of a synthetic corpus: about 1 MiB of text
Variant = Callable[[], float]  # runs once; tokens a second, or seconds


def loader(data: Data, tokenizer: Tokenizer, options: argparse.Namespace) -> Loader:
    return build_loader(
        data,
        tokenizer,
        split="train",
        streams=options.batch,
        batch_size=options.batch,
        seq_len=options.seq_len,
        dp_rank=0,
        dp_degree=1,
        seed=0,
    )


def tokens_per_second(batches: Iterator[Any], options: argparse.Namespace, tokens: int) -> float:
    """Return the speed after the first batch, which opens processes and files."""
    next(batches)
    count = max(1, tokens // (options.batch * options.seq_len))
    started = options.clock()
    for _ in islice(batches, count):
        pass
    return count * options.batch * options.seq_len / (options.clock() - started)


def tokenize(options: argparse.Namespace, folder: Path) -> None:
    tokenizer = load_tokenizer(options.tokenizer)
    source = build_source(Data(), split="train", seed=0)
    texts, characters = [], 0
    for _, text in source.documents(0, lambda ordinal: True):
        texts += [text[at : at + 4000] for at in range(0, len(text), 4000)]  # as long as web pages
        characters += len(text)
        if characters > options.characters:
            break
    corpus = folder / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    total = sum(len(tokenizer.encode(text)) for text in texts)

    def own() -> float:
        """Return the speed of the library alone, a document at a time."""
        assert isinstance(tokenizer, TiktokenTokenizer)
        encode = tokenizer._encoding.encode_ordinary
        started = options.clock()
        tokens = sum(len(encode(text)) for text in texts)
        return tokens / (options.clock() - started)

    def ours(num_workers: int) -> Variant:
        data = Data(
            dataset="local",
            path=str(corpus),
            validation_fraction=0.0,
            shuffle=False,
            num_workers=num_workers,
        )
        return lambda: tokens_per_second(loader(data, tokenizer, options), options, total * 4 // 5)

    def mapped() -> float:
        """Return the speed of a table of ids in Arrow, as recipes for transformers make it."""
        import datasets

        datasets.disable_progress_bars()
        table = datasets.Dataset.from_dict({"text": texts})
        started = options.clock()
        ids = table.map(
            lambda batch: {
                "input_ids": [tokenizer.encode_document(text).tolist() for text in batch["text"]]
            },
            batched=True,
            remove_columns=["text"],
            load_from_cache_file=False,
            cache_file_name=str(folder / f"mapped-{time.monotonic_ns()}.arrow"),
        )
        assert len(ids) == len(texts)
        return total / (options.clock() - started)

    def prepared(workers: int) -> Variant:
        def run() -> float:
            data = Data(dataset="local", path=str(corpus), validation_fraction=0.0)
            started = options.clock()
            prepare(data, tokenizer, folder / f"prepared-{time.monotonic_ns()}", workers=workers)
            return total / (options.clock() - started)

        return run

    variants = {
        "tiktoken encode_ordinary, one document at a time": own,
        "Loader, local jsonl, num_workers = 0": ours(0),
        "Loader, local jsonl, num_workers = 1": ours(1),
        "prepare, this process": prepared(0),
        "datasets.map with our tokenizer and lists, one process": mapped,
    }
    if options.clock is time.process_time:
        del variants["Loader, local jsonl, num_workers = 1"]
    title = (
        f"Tokenizing {characters / 1e6:.1f} million characters, vocabulary of"
        f" {tokenizer.vocab_size:,}"
    )
    show(title, "tokens/s", measured(variants, options.rounds), options)


class NoTokenizer:
    """Stands for the tokenizer of random ids."""

    vocab_size = 128_256
    sha256 = "0" * 64


def synthetic(folder: Path, tokens: int, mean: int) -> Path:
    """Write a prepared corpus of random ids, and return its folder.

    mean: tokens of a document; their lengths are log-normal, as those of web pages are.
    """
    import datasets

    datasets.disable_progress_bars()
    rng = np.random.default_rng(0)
    lengths = np.maximum(
        2, rng.lognormal(np.log(mean) - 0.5, 1.0, size=tokens // mean).astype(np.int64)
    )
    path = folder / f"synthetic-{mean}"

    def rows() -> Iterator[dict[str, Any]]:
        for row, length in enumerate(lengths):
            ids = rng.integers(0, 128_000, size=length, dtype=np.uint32)
            ids[0], ids[-1] = 128_000, 128_001
            yield {"name": str(row), "size": 4 * length, "tokens": ids}

    features = datasets.Features(
        name=datasets.Value("string"),
        size=datasets.Value("int64"),
        tokens=datasets.LargeList(datasets.Value("uint32")),
    )
    table = datasets.Dataset.from_generator(
        rows, features=features, cache_dir=str(folder / "cache"), fingerprint=path.name
    )
    path.mkdir()
    per_piece = DOCUMENTS_PER_PIECE
    counts = [min(per_piece, len(lengths) - at) for at in range(0, len(lengths), per_piece)]
    sizes = [count * mean * 4 for count in counts]
    part = write_table(table, path / BOTH_SPLITS, piece_sizes=sizes, piece_documents=counts)
    source = {"dataset": "local", "path": "", "text_field": "text"}
    write_info(path, NoTokenizer(), {BOTH_SPLITS: part}, source)
    return path


def memory_mapped(path: Path) -> np.memmap:
    """Return the tokens of a prepared corpus without its documents, as other readers have them."""
    import datasets

    table = datasets.load_from_disk(str(path / BOTH_SPLITS)).data
    file = path.with_name(f"{path.name}.tokens")
    chunks = [chunk.flatten().to_numpy() for chunk in table["tokens"].chunks]
    np.concatenate(chunks).tofile(file)
    return np.memmap(file, dtype=np.uint32, mode="r")


def read(options: argparse.Namespace, folder: Path) -> None:
    for mean in options.mean_document:
        path = synthetic(folder, options.tokens, mean)
        variants = readers(path, options)
        title = (
            f"Reading {options.tokens:,} tokens in documents of {mean} on average, {options.batch}"
            f" x {options.seq_len} a batch"
        )
        millions = {
            name: [speed / 1e6 for speed in speeds]
            for name, speeds in measured(variants, options.rounds).items()
        }
        show(title, "million tokens/s", millions, options)


def readers(path: Path, options: argparse.Namespace) -> dict[str, Variant]:
    """Return the ways to read the prepared corpus at `path`."""
    tokens = memory_mapped(path)
    variants: dict[str, Variant] = {
        "random windows of one np.memmap, as nanoGPT reads": lambda: windows(tokens, options)
    }
    for num_workers in (0, 1):
        data = Data(
            dataset="prepared", path=str(path), num_workers=num_workers, validation_fraction=0.0
        )
        variants[f"Loader, prepared, num_workers = {num_workers}"] = partial(
            read_prepared, data, options
        )
    return variants


def read_prepared(data: Data, options: argparse.Namespace) -> float:
    tokenizer: Any = NoTokenizer()
    return tokens_per_second(loader(data, tokenizer, options), options, options.tokens)


def stacked(windows: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(window.astype(np.int64)) for window in windows])


def windows(tokens: np.ndarray, options: argparse.Namespace) -> float:
    """Do the least that any loader does: copy, widen and part windows, with replacement."""
    rng = np.random.default_rng(0)
    length = options.seq_len

    def batches() -> Iterator[Any]:
        while True:
            starts = rng.integers(len(tokens) - length - 1, size=options.batch)
            inputs = [tokens[start : start + length] for start in starts]
            labels = [tokens[start + 1 : start + 1 + length] for start in starts]
            yield stacked(inputs), stacked(labels)

    return tokens_per_second(batches(), options, options.tokens)


def measured(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Run the variants in turn, and return the values of each."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, run in variants.items():
            values[name].append(run())
            print(f"round {number + 1}, {name}: {values[name][-1]:,.3f}", file=sys.stderr)
    return values


def show(
    title: str, unit: str, measured: dict[str, list[float]], options: argparse.Namespace
) -> None:
    """Print medians and the best, relative to the first variant, which ran in the same round."""
    first = next(iter(measured.values()))
    print(f"\n{title}; {options.rounds} rounds\n")
    print(f"| | {unit}, median | relative | best | relative |")
    print("|---|--:|--:|--:|--:|")
    for name, values in measured.items():
        ratio = statistics.median(value / base for value, base in zip(values, first, strict=True))
        best_ratio = max(values) / max(first)
        median = number(statistics.median(values))
        print(f"| {name} | {median} | {ratio:.2f} | {number(max(values))} | {best_ratio:.2f} |")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=["tokenize", "read", []], default=[])
    parser.add_argument("--tokenizer", default=str(ROOT / "assets/tokenizer/debug.model"))
    parser.add_argument("--characters", type=int, default=12_000_000)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--mean-document", type=int, nargs="+", default=[800, 100])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="benchmark_data.") as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        for name in options.what or ["tokenize", "read"]:
            {"tokenize": tokenize, "read": read}[name](options, Path(folder))


if __name__ == "__main__":
    main()
