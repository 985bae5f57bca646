"""Convert weights, tensor by tensor: from Hugging Face to a step, or from a step or a run to
Hugging Face or torchtitan.

    python -m titan_lite convert outputs/debug_model exported                 # the run's newest step, for transformers
    python -m titan_lite convert Llama-3.1-8B initial                         # a step, for checkpoint.initial_load_path
    python -m titan_lite convert outputs/debug_model theirs --to torchtitan   # a checkpoint of torchtitan, model only

Nothing is overwritten. Until everything is on disk, the folder is called unfinished-TARGET-*; if
the program is killed, delete it by hand. Memory: two tensors of a step, or those of one safetensors
file.
"""

import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.identity import RunIdentity
from titan_lite.checkpoint.names import to_torchtitan
from titan_lite.checkpoint.state import RunState, write_state
from titan_lite.checkpoint.weights import (
    TOKENIZER_FILES,
    CheckpointFolder,
    Weights,
    check_tokenizer,
    open_weights,
    tokenizer_files,
)
from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import TiktokenTokenizer, Tokenizer, load_tokenizer
from titan_lite.data.tokenizer_json import to_json, tokenizer_config
from titan_lite.logging import init_logging, logger
from titan_lite.models.huggingface import config_to_hf, hf_names, to_hf


def write_step(folder: Path, weights: Weights, dtype: torch.dtype | None = None) -> None:
    """Write a step 0 with only the model, for checkpoint.initial_load_path. Raises ConfigError."""
    identity = RunIdentity(model=dataclasses.asdict(weights.config))
    parts = {
        "converted_from": {"folder": str(weights.folder.resolve())},
        "special_tokens": weights.special_tokens,
    }
    fqns = {fqn: fqn for fqn in weights.shapes}
    with _written_tensors(folder, weights, fqns, dtype) as unfinished:
        write_state(unfinished, 0, ["model"], RunState(identity, parts))
        files = {path.name: manifest.digest(path) for path in unfinished.iterdir()}
        manifest.write(unfinished, 0, files)


def write_torchtitan(folder: Path, weights: Weights, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint with only the model, which torchtitan loads as initial_load_path.

    Raises ConfigError.
    """
    fqns = {to_torchtitan(fqn): fqn for fqn in weights.shapes}
    if weights.config.tied_embeddings:
        fqns[to_torchtitan("output.weight")] = "tok_embeddings.weight"
    with _written_tensors(folder, weights, fqns, dtype):
        pass


@contextmanager
def _written_tensors(
    folder: Path, weights: Weights, fqns: Mapping[str, str], dtype: torch.dtype | None
) -> Iterator[Path]:
    """Return a context with a folder that has the tensors as a checkpoint of DCP, as in `_whole`.

    fqns: by name there.
    """
    planned = {
        name: torch.empty(weights.shapes[fqn], dtype=dtype or weights.dtypes[fqn], device="meta")
        for name, fqn in fqns.items()
    }

    def read(name: str) -> Tensor:
        return weights.read(fqns[name]).to(planned[name].dtype)

    with _whole(folder, sum(tensor.nbytes for tensor in planned.values())) as unfinished:
        tensor_files.write_one_by_one(unfinished, planned, read)
        yield unfinished


def write_hf(
    folder: Path,
    weights: Weights,
    dtype: torch.dtype | None = None,
    *,
    tokenizer: Sequence[Path] = (),
    asked_for: bool = False,
    shard_bytes: float = 5e9,
) -> None:
    """Write a folder that transformers' from_pretrained opens. Raises ConfigError.

    tokenizer: its file, and others to copy. asked_for: the user named it, so that it must be
    readable.
    """
    understood = _understand(weights, tokenizer[0], asked_for) if tokenizer else None
    names = hf_names(weights.config)
    dtypes = {fqn: dtype or weights.dtypes[fqn] for fqn in names}
    sizes = {fqn: shape.numel() * dtypes[fqn].itemsize for fqn, shape in weights.shapes.items()}
    shards: list[list[str]] = [[]]
    for fqn in names:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[fqn] > shard_bytes:
            shards.append([])
        shards[-1].append(fqn)
    with _whole(folder, sum(sizes.values())) as unfinished:
        known = (
            {}
            if understood is None
            else {"bos_token_id": understood.bos_id, "eos_token_id": understood.eos_id}
        )
        special = {
            key: id if id is not None else known.get(key)
            for key, id in weights.special_tokens.items()
        }
        _write_json(
            unfinished / "config.json",
            config_to_hf(weights.config, dtypes["tok_embeddings.weight"]) | special,
        )
        _write_json(unfinished / "generation_config.json", special)
        file_of: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = (
                "model.safetensors"
                if len(shards) == 1
                else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            )
            tensors = {
                names[fqn]: to_hf(fqn, weights.read(fqn), weights.config).to(dtypes[fqn])
                for fqn in shard
            }
            save_file(tensors, unfinished / file, metadata={"format": "pt"})
            shutil.copymode(
                unfinished / "config.json", unfinished / file
            )  # save_file lets the owner alone read it
            del tensors  # before those of the next shard are read
            file_of |= {names[fqn]: file for fqn in shard}
            logger.info(
                f"{file}: {len(shard)} tensors, {sum(sizes[fqn] for fqn in shard) / 1e9:.2f} GB"
            )
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
            _write_json(unfinished / "model.safetensors.index.json", index)
        _copy_tokenizer(unfinished, tokenizer, understood)


def _understand(weights: Weights, path: Path, asked_for: bool) -> Tokenizer | None:
    """Load a tokenizer, or warn and return None if it cannot be read.

    Raises ConfigError if it is not the model's.
    """
    try:
        tokenizer = load_tokenizer(path, "--tokenizer" if asked_for else "tokenizer")
    except ConfigError as error:
        if asked_for:
            raise
        logger.warning(
            f"the tokenizer is copied unchanged, since it cannot be read: {error}"
        )  # such as SentencePiece's
        return None
    check_tokenizer(weights, path, tokenizer.vocab_size, tokenizer.sha256)
    return tokenizer


def _copy_tokenizer(folder: Path, files: Sequence[Path], tokenizer: Tokenizer | None) -> None:
    """Copy the files; for a file in tiktoken's format also write tokenizer.json, which transformers
    reads.
    """
    for number, path in enumerate(files):
        # The recipe's file may have any name; here it gets the one that transformers looks for.
        name = path.name if number else f"tokenizer.{'json' if path.suffix == '.json' else 'model'}"
        shutil.copyfile(path, folder / name)
    if isinstance(tokenizer, TiktokenTokenizer):
        _write_json(folder / "tokenizer.json", to_json(tokenizer))
        _write_json(folder / "tokenizer_config.json", tokenizer_config())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _whole(folder: Path, needed: int) -> Iterator[Path]:
    """Return a context with a folder to fill with `needed` bytes, which is renamed when they are on
    disk, or removed on failure.

    Until then it has a unique name, so that only what was made here is deleted.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is overwritten; use a new folder")
    unfinished = folder.with_name(f"unfinished-{folder.name}-{secrets.token_hex(8)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise ConfigError(
                f"{folder} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free; use"
                " another disk"
            )
        unfinished.mkdir()
        yield unfinished
        for path in unfinished.iterdir():
            manifest.sync(path)
        manifest.publish(unfinished, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be written: {error}; use another folder") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@command()
def main(arguments: Sequence[str]) -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", help="a step, a run's folder, or a Hugging Face folder")
    add("target", type=Path, help="a new folder")
    add(
        "--to",
        choices=("hf", "step", "torchtitan"),
        help="the format to write (default: hf from a step, and a step from anything else)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the dtype to write (default: as stored)",
    )
    where = (
        "the model's tokenizer, a file or a folder that has one, to copy beside the weights"
        " (default: that of SOURCE)"
    )
    add("--tokenizer", metavar="PATH", help=where)
    add("--max-shard-size", type=float, metavar="GB", help="largest safetensors file (default 5)")
    options = parser.parse_args(arguments)
    init_logging()
    if options.max_shard_size is not None and not options.max_shard_size > 0:  # nan is neither
        raise ConfigError(f"--max-shard-size {options.max_shard_size}: use GB above 0, such as 5")
    weights = open_weights(options.source, every_byte=True)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    logger.info(
        f"{weights.folder}: {weights.kind}, {sum(s.numel() for s in weights.shapes.values()):,}"
        " parameters"
    )
    to = options.to or ("hf" if isinstance(weights, CheckpointFolder) else "step")
    if to in ("step", "torchtitan"):
        what = "a step" if to == "step" else "a checkpoint of torchtitan"
        if options.tokenizer:
            raise ConfigError(f"--tokenizer: {what} has none, the recipe names it; leave it out")
        if options.max_shard_size is not None:
            raise ConfigError(
                f"--max-shard-size {options.max_shard_size}: {what} has a file for each tensor;"
                " leave it out, or use --to hf"
            )
        write = write_step if to == "step" else write_torchtitan
        write(options.target, weights, dtype)
    else:
        asked_for = bool(options.tokenizer)
        files = tokenizer_files(options.tokenizer) if asked_for else weights.tokenizer_files()
        if asked_for and not files:
            fix = " or ".join(TOKENIZER_FILES[:2])
            raise ConfigError(
                f"--tokenizer {options.tokenizer}: no such file; use a file, or a folder with {fix}"
            )
        shard_bytes = (options.max_shard_size or 5.0) * 1e9
        write_hf(
            options.target,
            weights,
            dtype,
            tokenizer=files,
            asked_for=asked_for,
            shard_bytes=shard_bytes,
        )
        if not files:
            logger.warning("no tokenizer was copied; use --tokenizer PATH to copy one")
    logger.info(f"written to {options.target}")
