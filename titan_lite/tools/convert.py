"""Convert weights between a run's checkpoints, Hugging Face's format and torchtitan's.

    titan-lite convert outputs/debug_model exported       # the newest checkpoint, for transformers
    titan-lite convert Llama-3.1-8B initial               # ours, for checkpoint.initial_load_path
    titan-lite convert outputs/debug_model theirs --to torchtitan     # the model only

Nothing is overwritten. Until everything is on disk, the folder is called unfinished-TARGET-*; if
the program is killed, delete it by hand. Tensors are converted one by one: memory is needed for two
tensors of a checkpoint, or those of one safetensors file.
"""

import dataclasses
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.names import TorchtitanNames
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState, write_state
from titan_lite.checkpoint.weights import (
    CheckpointFolder,
    Weights,
    check_tokenizer,
    open_weights,
)
from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.config.weights_folder import TOKENIZER_FILES, tokenizer_files
from titan_lite.data.tokenizer import (
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
)
from titan_lite.data.tokenizer_json import (
    config_with_bos,
    to_json,
    tokenizer_config,
    with_bos,
)
from titan_lite.logging import init_logging, logger
from titan_lite.models.huggingface import config_to_hf, hf_names, to_halves, to_hf
from titan_lite.models.shapes import buffer_shapes
from titan_lite.tools.new_folder import new_folder

DEFAULT_SHARD_GB = 5.0  # of a safetensors file


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer that is copied beside weights."""

    paths: Sequence[Path] = ()  # the tokenizer itself, then others
    is_required: bool = False  # the user named it, so that it must be readable


def write_step(
    folder: Path,
    weights: Weights,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerFiles = TokenizerFiles(),
    *,
    sources: Sequence[Path] = (),
) -> None:
    """Write a step 0 with only the model, for checkpoint.initial_load_path.

    sources: folders that the weights were made of. Raises ConfigError.
    """
    _load_tokenizer(weights, tokenizer)
    identity = RunIdentity(model=dataclasses.asdict(weights.config))
    parts = {
        "converted_from": {"folders": [str(folder.resolve()) for folder in sources]},
        "special_tokens": weights.special_tokens,
    }
    fqns = {fqn: fqn for fqn in (*weights.shapes, *weights.buffers)}
    with _written_tensors(folder, weights, fqns, dtype, weights.read) as unfinished:
        _copy_tokenizer(unfinished, tokenizer.paths)
        write_state(unfinished, 0, ["model"], RunState(identity, parts))
        files = {path.name: manifest.digest(path) for path in unfinished.iterdir()}
        manifest.write(unfinished, 0, files)


def write_torchtitan(
    folder: Path,
    weights: Weights,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerFiles = TokenizerFiles(),
) -> None:
    """Write a checkpoint with only the model, which torchtitan loads as initial_load_path.

    Raises ConfigError.
    """
    theirs = TorchtitanNames(weights.config.family)
    _load_tokenizer(weights, tokenizer)
    fqns = {theirs.of(fqn): fqn for fqn in weights.shapes}
    if weights.config.tied_embeddings:
        fqns[theirs.of("output.weight")] = "tok_embeddings.weight"
    # torchtitan asks for biases of routers, also if none was ever set
    shapes = buffer_shapes(weights.config)
    buffers = {fqn: shape for fqn, shape in shapes.items() if theirs.has(fqn)}
    fqns |= {theirs.of(fqn): fqn for fqn in buffers}

    def converted(fqn: str) -> Tensor:
        if fqn in buffers and fqn not in weights.buffers:
            return torch.zeros(buffers[fqn])
        weight = weights.read(fqn)
        return to_halves(weight, weights.config.head_dim) if theirs.is_rotary(fqn) else weight

    with _written_tensors(folder, weights, fqns, dtype, converted) as unfinished:
        _copy_tokenizer(unfinished, tokenizer.paths)


def _rounded(fqn: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype`. Raises ConfigError if that does not have its numbers."""
    finite = tensor.isfinite()
    others = tensor.numel() - int(finite.sum())
    if others:
        logger.warning(f"{fqn}: {others:,} of {tensor.numel():,} numbers are NaN or infinite")
    rounded = tensor.to(dtype)
    overflows = int((finite & ~rounded.isfinite()).sum())
    if overflows:
        largest = torch.finfo(dtype).max
        instead = "bfloat16" if dtype == torch.float16 else _name(tensor.dtype)
        raise ConfigError(
            f"--dtype {_name(dtype)}: {fqn}: {overflows:,} of {tensor.numel():,} numbers are above"
            f" its largest, {largest:g}; use --dtype {instead}"
        )
    return rounded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _written_tensors(
    folder: Path,
    weights: Weights,
    fqns: Mapping[str, str],
    dtype: torch.dtype | None,
    converted: Callable[[str], Tensor],
) -> Iterator[Path]:
    """Return a context with a folder, as in `new_folder`, that has the tensors as DCP writes them.

    fqns: {name in the checkpoint: our name}. converted: returns a tensor by our name, as the
    checkpoint has it.
    """
    planned = {}
    buffers = buffer_shapes(weights.config)
    for name, fqn in fqns.items():
        shape: Sequence[int]
        if fqn in buffers:  # what routers keep stays as it is
            shape, stored_as = buffers[fqn], weights.dtypes.get(fqn, torch.float32)
        else:
            shape, stored_as = weights.shapes[fqn], dtype or weights.dtypes[fqn]
        planned[name] = torch.empty(shape, dtype=stored_as, device="meta")

    def read(name: str) -> Tensor:
        return _rounded(fqns[name], converted(fqns[name]), planned[name].dtype)

    with new_folder(folder) as unfinished:
        tensor_files.write_one_by_one(unfinished, planned, read)
        yield unfinished


def write_hf(
    folder: Path,
    weights: Weights,
    dtype: torch.dtype | None = None,
    tokenizer: TokenizerFiles = TokenizerFiles(),
    *,
    shard_bytes: float = DEFAULT_SHARD_GB * 1e9,
) -> None:
    """Write a folder that transformers' from_pretrained opens. Raises ConfigError.

    shard_bytes: of a safetensors file, at most, but for a tensor that is larger.
    """
    loaded = _load_tokenizer(weights, tokenizer)
    dtypes = {fqn: dtype or weights.dtypes[fqn] for fqn in hf_names(weights.config)}
    warn_of_biases(weights)
    sizes = {fqn: weights.shapes[fqn].numel() * dtypes[fqn].itemsize for fqn in dtypes}
    with new_folder(folder) as unfinished:
        _write_configs(unfinished, weights, dtypes["tok_embeddings.weight"], loaded)
        shards = split_into_shards(sizes, shard_bytes)
        _write_shards(unfinished, weights, dtypes, shards)
        _copy_tokenizer(unfinished, tokenizer.paths)
        if isinstance(loaded, TiktokenTokenizer):  # transformers reads a tokenizer.json alone
            _write_json(unfinished / "tokenizer.json", to_json(loaded))
            _write_json(unfinished / "tokenizer_config.json", tokenizer_config(loaded))
        elif loaded is not None:
            config = unfinished / "tokenizer_config.json"
            if not config.is_file():
                _write_json(config, tokenizer_config(loaded))
            if isinstance(weights, CheckpointFolder) and weights.state.identity.tokenizer:
                _put_bos(unfinished, loaded)


def warn_of_biases(weights: Weights) -> None:
    """Warn of biases of routers, which transformers' files have no place for."""
    names = [fqn for fqn in weights.buffers if fqn.endswith(".expert_bias")]
    biased = [fqn for fqn in names if weights.read(fqn).any()]
    if biased:
        logger.warning(
            f"left out: the biases by which {len(biased)} routers choose experts (experts.balance ="
            f' "bias"), such as {biased[0]}: the format has no place for them, and without them'
            " other experts are chosen; a checkpoint has them"
        )


def split_into_shards(sizes: Mapping[str, int], shard_bytes: float) -> list[list[str]]:
    """Return the names of each file's tensors, in order, as many as fit into `shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_configs(
    folder: Path, weights: Weights, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> None:
    """Write config.json and generation_config.json.

    Special tokens that the weights do not name are the tokenizer's.
    """
    special_tokens = dict(weights.special_tokens)
    if tokenizer is not None:
        from_tokenizer = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        for key, token in special_tokens.items():
            if token is None:
                special_tokens[key] = from_tokenizer.get(key)
    _write_json(folder / "config.json", config_to_hf(weights.config, dtype) | special_tokens)
    _write_json(folder / "generation_config.json", special_tokens)


def _write_shards(
    folder: Path,
    weights: Weights,
    dtypes: Mapping[str, torch.dtype],
    shards: Sequence[Sequence[str]],
) -> None:
    """Write the safetensors files, and the index of several."""
    file_of: dict[str, str] = {}  # by name in transformers
    total_bytes = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for fqn in shard:
            weight = _rounded(fqn, weights.read(fqn), dtypes[fqn])
            tensors.update(to_hf(fqn, weight, weights.config))
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        file_of |= dict.fromkeys(tensors, file)
        count = len(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # save_file's is the owner's alone
        del tensors  # before those of the next file are read
        total_bytes += nbytes
        logger.info(f"{file}: {count} tensors, {nbytes / 1e9:.2f} GB")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
        _write_json(folder / "model.safetensors.index.json", index)


def _load_tokenizer(weights: Weights, files: TokenizerFiles) -> Tokenizer | None:
    """Load a tokenizer, or warn and return None if it cannot be read and need not be.

    Raises ConfigError if it is not the model's.
    """
    if not files.paths:
        return None
    path = files.paths[0]
    try:
        tokenizer = load_tokenizer(path, "--tokenizer" if files.is_required else "tokenizer")
    except ConfigError as error:  # such as SentencePiece's
        if files.is_required:
            raise
        logger.warning(f"the tokenizer is copied unchanged, since it cannot be read: {error}")
        return None
    check_tokenizer(weights, path, tokenizer.vocab_size, tokenizer.sha256)
    return tokenizer


def _copy_tokenizer(folder: Path, paths: Sequence[Path]) -> None:
    """Copy the files, the first under the name of a tokenizer in a Hugging Face folder."""
    for number, path in enumerate(paths):
        name = path.name
        if number == 0:  # it may have any name; transformers looks for these
            name = "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"
        shutil.copyfile(path, folder / name)


def _put_bos(folder: Path, tokenizer: JsonTokenizer) -> None:
    """Have the tokenizer in a folder put BOS before a text, as the run did that trained with it.

    Whoever uses the folder would begin texts otherwise.
    """
    try:
        content = with_bos(tokenizer)
    except ValueError as error:
        logger.warning(f"tokenizer.json is copied unchanged: it {error}")
        return
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config_before = json.loads(config.read_text(encoding="utf-8"))
    config_after = config_with_bos(tokenizer, config_before)
    if content == json.loads(tokenizer.content) and config_after == config_before:
        return
    _write_json(path, content)
    _write_json(config, config_after)
    bos = next(name for name, id in tokenizer.special_tokens.items() if id == tokenizer.bos_id)
    logger.info(
        f"{path.name} and {config.name} put {bos} before a text, as training did; the tokenizer of"
        " the run does not"
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@command()
def main(arguments: Sequence[str]) -> None:
    options = build_parser().parse_args(arguments)
    init_logging()
    weights = open_weights(options.source, every_byte=True)
    write(options, weights, [weights.folder])


def write(options: Namespace, weights: Weights, sources: Sequence[Path]) -> None:
    """Write weights as the options of `add_options_of_target` say, and a target, a new folder.

    sources: what they were made of, which a step keeps. Raises ConfigError.
    """
    if options.max_shard_size is not None and not options.max_shard_size > 0:  # nan is neither
        raise ConfigError(f"--max-shard-size {options.max_shard_size}: use GB above 0, such as 5")
    parameters = sum(shape.numel() for shape in weights.shapes.values())
    logger.info(f"{weights.folder}: {weights.kind}, {parameters:,} parameters")
    target = options.to or ("hf" if isinstance(weights, CheckpointFolder) else "step")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    tokenizer = find_tokenizer(options, weights)
    if target == "hf":
        shard_bytes = (options.max_shard_size or DEFAULT_SHARD_GB) * 1e9
        write_hf(options.target, weights, dtype, tokenizer, shard_bytes=shard_bytes)
    elif options.max_shard_size is not None:
        raise ConfigError(
            f"--max-shard-size {options.max_shard_size}: a checkpoint has a file for each tensor;"
            " leave it out, or use --to hf"
        )
    elif target == "step":
        write_step(options.target, weights, dtype, tokenizer, sources=sources)
    else:
        write_torchtitan(options.target, weights, dtype, tokenizer)
    if not tokenizer.paths:
        logger.warning("no tokenizer was copied; use --tokenizer PATH to copy one")
    logger.info(f"written to {options.target}")


def build_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("source", help="a checkpoint, a run's folder, or a Hugging Face folder")
    parser.add_argument("target", type=Path, help="a new folder")
    add_options_of_target(parser)
    return parser


def add_options_of_target(parser: Parser) -> None:
    """Add the options that say what `write` writes."""
    parser.add_argument(
        "--to",
        choices=("hf", "step", "torchtitan"),
        help="the format to write (default: hf from our checkpoints, and step from others)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the dtype to write (default: as stored)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help=(
            "the model's tokenizer, a file or a folder that has one, to copy beside the weights"
            " (default: that of the source)"
        ),
    )
    parser.add_argument(
        "--max-shard-size", type=float, metavar="GB", help="largest safetensors file (default 5)"
    )


def find_tokenizer(options: Namespace, weights: Weights) -> TokenizerFiles:
    """Return the tokenizer that the user names, or that of the weights. Raises ConfigError."""
    if not options.tokenizer:
        return TokenizerFiles(weights.tokenizer_files())
    paths = tokenizer_files(options.tokenizer)
    if not paths:
        names = " or ".join(TOKENIZER_FILES[:2])
        raise ConfigError(
            f"--tokenizer {options.tokenizer}: no such file; use a file, or a folder with {names}"
        )
    return TokenizerFiles(paths, is_required=True)
