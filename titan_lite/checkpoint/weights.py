"""Read a model's weights: of titan_lite or torchtitan, or from a Hugging Face folder.

    weights = open_weights("outputs/debug_model")     # a run's newest checkpoint, or any folder
    weights.config                                    # the model's shape
    weights.read("layers.3.attention.wq.weight")      # an unsharded tensor, our name and layout
    load(weights, dict(model.named_parameters()))     # into a model on any layout

Opening reads only names and shapes, and reports everything that does not fit at once.
"""

import dataclasses
import functools
import hashlib
import json
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.names import TorchtitanNames
from titan_lite.checkpoint.state import read_state
from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError, error_because_of, is_of_machine, shown
from titan_lite.config.families import ModelConfig, file_digest, where_it_is
from titan_lite.config.weights_folder import (
    CONFIG,
    HUGGING_FACE,
    STATE,
    STEP,
    TORCHTITAN,
    folder_kind,
    steps_in,
    tokenizer_files,
    why_not_weights,
)
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer
from titan_lite.distributed.process_group import all_equal, all_gather_objects, first_nonempty
from titan_lite.dtensor import shard_of
from titan_lite.logging import logger
from titan_lite.manifest import CorruptFileError, fields_of, is_inside, read_json
from titan_lite.models.huggingface import config_from_hf, sources_of, to_pairs
from titan_lite.models.shapes import buffer_shapes, config_from_fields, parameter_shapes
from titan_lite.text import error_line, first_lines

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of safetensors
NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
INITIAL_STEP = "initial_step.json"  # in a run's folder: the step that it began from
ROWS = 4096  # of two matrices that are compared at once
MAX_FAULTS = 40  # shown of a folder that does not fit
QUERIES = "layers.0.attention.wq.weight"
SINGLE_FILE = "model.safetensors"  # in a Hugging Face folder, as INDEX
INDEX = f"{SINGLE_FILE}.index.json"
ADAPTER = "adapter_config.json"


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    shape: torch.Size
    dtype: str  # a key of DTYPES, if it can be read


class _DcpFolder:
    """The model's weights in a checkpoint of torch.distributed.checkpoint."""

    folder: Path
    config: ModelConfig
    metadata: Metadata
    names: dict[str, str]  # of parameters and buffers in the folder, by FQN
    shapes: dict[str, torch.Size]  # by FQN
    dtypes: dict[str, torch.dtype]  # by FQN
    buffers: dict[str, torch.Size]  # that it has beside parameters, by FQN

    def _set_shapes(self, stored: Mapping[str, TensorStorageMetadata]) -> None:
        """Set shapes and dtypes.

        stored: the tensors in the folder, by their names there. Raises CorruptFileError if they are
        not the model's.
        """
        self.shapes = shapes(self.config)
        expected = {self.names[fqn]: shape for fqn, shape in self.shapes.items()}
        expected |= {self.names[fqn]: shape for fqn, shape in self.buffers.items()}
        _raise_faults(misfits(expected, {name: tensor.size for name, tensor in stored.items()}))
        of_model = {name: stored[name] for name in expected}
        _raise_faults(
            f"{name} has dtype {str(tensor.properties.dtype).removeprefix('torch.')}: expected"
            " numbers with a fraction, such as bfloat16 or float32"
            for name, tensor in of_model.items()
            if not tensor.properties.dtype.is_floating_point
        )
        _raise_faults(tensor_files.incomplete(of_model))
        self.dtypes = {fqn: stored[name].properties.dtype for fqn, name in self.names.items()}

    def digest(self) -> str:
        """Return a hash of the content: of samples of all files."""
        return manifest.sampled_digest(self.folder.glob("*.distcp"))

    def read(self, fqn: str) -> Tensor:
        shape = self.shapes.get(fqn) or self.buffers[fqn]
        tensor = torch.empty(shape, dtype=self.dtypes[fqn])
        self.read_into({fqn: tensor})
        return tensor

    def read_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill tensors or DTensors, without communication. Raises ConfigError."""
        tensors = {self.names[fqn]: parameter.detach() for fqn, parameter in parameters.items()}
        try:
            tensor_files.load(self.folder, tensors, metadata=self.metadata)
        except CorruptFileError as damage:
            raise ConfigError(f"{self.folder} cannot be read: {damage}") from None


class CheckpointFolder(_DcpFolder):
    """The model's weights in a step that a run or `convert` has written.

    every_byte: check all bytes on opening. family: model.name of a recipe, where a user's own file
    may be now.
    """

    kind = STEP

    def __init__(self, folder: Path, *, every_byte: bool = False, family: str = ""):
        self.folder = folder
        self.files = manifest.check_step(folder, None)
        if every_byte:
            self.check_bytes()
        self.metadata = tensor_files.read_metadata(folder)
        self.state = read_state(folder)
        shape = self.state.identity.model
        if not shape:
            raise CorruptFileError(f"{STATE} does not say which model this is (identity.model)")
        config = config_from_fields(shape, f"{STATE}: identity.model")
        self.config = dataclasses.replace(config, family=where_it_is(config.family, family))
        saved_with = self.state.identity.family_file
        if saved_with and saved_with != file_digest(self.config.family):
            logger.warning(f"{self.config.family} has changed since {folder} was saved")
        stored = tensor_files.parameters(self.metadata)
        # a step that `convert` wrote may have none
        self.buffers = {
            fqn: torch.Size(shape)
            for fqn, shape in buffer_shapes(self.config).items()
            if fqn in stored
        }
        self.names = {fqn: fqn for fqn in (*shapes(self.config), *self.buffers)}
        self._set_shapes(stored)
        # Only a converted step has them; those of a run are in its tokenizer.
        self.special_tokens = self.state.parts.get("special_tokens") or dict(NO_SPECIAL_TOKENS)

    def check_bytes(self, share: int = 0, shares: int = 1) -> None:
        """Compare every `shares`-th file, from number `share` on, with its SHA-256.

        Raises CorruptFileError.
        """
        names = sorted(self.files)[share::shares]
        manifest.check_bytes(self.folder, {name: self.files[name] for name in names})

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()

    def tokenizer_files(self) -> list[Path]:
        """Return the tokenizer that `convert` has put into the step, or that of the run's recipe if
        it still exists, with the files beside it.
        """
        copied = tokenizer_files(self.folder)
        if copied:
            return copied
        path = self.state.identity.recipe.get("model", {}).get("tokenizer_path")
        return tokenizer_files(path) if path and Path(path).is_file() else []


class TorchtitanFolder(_DcpFolder):
    """The model's weights in a checkpoint of torchtitan, or of a plain `dcp.save` with its names.

    Of Llama 3 also with ours; with these, the order of other families' rows is not certain.

    config: the model's shape, which the folder does not have.
    """

    kind = TORCHTITAN

    def __init__(self, folder: Path, config: ModelConfig):
        self.theirs = TorchtitanNames(config.family)
        self.folder = folder
        self.config = config
        self.metadata = tensor_files.read_metadata(folder)
        stored = tensor_files.parameters(self.metadata)
        ours = {self.theirs.ours(name): name for name in stored}
        if self.theirs.rotary and QUERIES in stored:
            raise ConfigError(
                f"{folder} has {QUERIES}, a name of titan_lite and of torchtitan 0.2, whose rows"
                f" of model.name = {shown(config.family)} are in different orders; use a checkpoint"
                " that titan_lite or torchtitan 0.3 has saved, or a Hugging Face folder"
            )
        if config.tied_embeddings and "output.weight" in ours:  # torchtitan stores them twice
            del stored[ours["output.weight"]]
        self.buffers = {
            fqn: torch.Size(shape) for fqn, shape in buffer_shapes(config).items() if fqn in ours
        }
        fqns = (*shapes(config), *self.buffers)
        self.names = {fqn: ours.get(fqn, self.theirs.of(fqn)) for fqn in fqns}
        self._set_shapes(stored)
        self.special_tokens = dict(NO_SPECIAL_TOKENS)

    def read_into(self, parameters: Mapping[str, Tensor]) -> None:
        rotary = {fqn for fqn in parameters if self.theirs.is_rotary(fqn)}
        super().read_into({fqn: each for fqn, each in parameters.items() if fqn not in rotary})
        for fqn in rotary:
            weight = torch.empty(self.shapes[fqn], dtype=self.dtypes[fqn])
            super().read_into({fqn: weight})
            _fill(parameters[fqn], to_pairs(weight, self.config.head_dim).__getitem__)

    def tokenizer_files(self) -> list[Path]:
        return tokenizer_files(self.folder)


class HuggingFaceFolder:
    """The weights in a folder with config.json and safetensors files, from transformers or
    `convert`.

    family: a user's own, which may be that of the folder.
    """

    kind = HUGGING_FACE

    def __init__(self, folder: Path, family: str = ""):
        self.folder = folder
        if (folder / ADAPTER).is_file():  # transformers adds it to the weights, with peft
            raise CorruptFileError(
                f"{ADAPTER} is there: weights with an adapter, such as LoRA's, are not read; merge"
                " it into the weights, or remove this file to read them without it"
            )
        try:
            self.config = config_from_hf(read_json(folder / CONFIG), family)
        except CorruptFileError:
            raise
        except ValueError as error:
            raise CorruptFileError(f"config.json: {error}") from None
        self.stored = self._find_tensors()
        _raise_faults(
            f"{name} has dtype {tensor.dtype}"
            for name, tensor in self.stored.items()
            if tensor.dtype not in DTYPES
        )
        self._drop_frequencies()
        try:
            self.sources = sources_of(self.config, self.stored)  # by FQN
        except ConfigError:
            raise
        except ValueError as error:
            raise CorruptFileError(str(error)) from None
        self._drop_copy_of_table()
        self.shapes = shapes(self.config)
        self.buffers: dict[str, torch.Size] = {}
        expected = {
            name: torch.Size(source.shape)
            for source in self.sources.values()
            for name in source.names
        }
        _raise_faults(misfits(expected, {name: one.shape for name, one in self.stored.items()}))
        self.dtypes = {
            fqn: DTYPES[self.stored[source.names[0]].dtype] for fqn, source in self.sources.items()
        }
        self.special_tokens = self._special_tokens()

    def _find_tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors by their names there, each from the file that transformers reads:
        model.safetensors, else for each tensor the one in the index. Raises CorruptFileError.
        """
        if (self.folder / SINGLE_FILE).is_file():
            return _only(self.folder / SINGLE_FILE)
        if (self.folder / INDEX).is_file():
            return self._tensors_of_index(self.folder / INDEX)
        raise CorruptFileError(
            f"there is neither {SINGLE_FILE} nor {INDEX}; use save_pretrained of transformers to"
            " write one"
        )

    def _tensors_of_index(self, index: Path) -> dict[str, StoredTensor]:
        with fields_of(index.name):
            file_of = dict(read_json(index)["weight_map"])
            _raise_faults(
                f"{index.name} has {name} in {file!r:.200}: expected a file in the folder"
                for name, file in file_of.items()
                if not is_inside(file)
            )
            files = sorted(set(file_of.values()))
        _raise_faults(
            f"{name} is missing, which {index.name} lists"
            for name in files
            if not (self.folder / name).is_file()
        )
        return {
            name: tensor
            for file in files
            for name, tensor in _read_header(self.folder / file).items()
            if file_of.get(name, file) == file
        }

    def _drop_frequencies(self) -> None:
        """Forget the computed frequencies that some folders have beside parameters."""
        for name in list(self.stored):
            if name.endswith("rotary_emb.inv_freq"):
                del self.stored[name]

    def _drop_copy_of_table(self) -> None:
        """Forget a second copy of tied weights. A folder may have these under the output's name
        alone.
        """
        embedding = "model.embed_tokens.weight"
        output = "lm_head.weight"
        if not self.config.tied_embeddings or output not in self.stored:
            return
        if embedding not in self.stored:
            table = self.sources["tok_embeddings.weight"]
            self.sources["tok_embeddings.weight"] = dataclasses.replace(table, names=(output,))
        else:
            if not _equal(self._open(embedding), self._open(output)):
                raise CorruptFileError(
                    f"config.json has tie_word_embeddings = true, but {output} is not {embedding}"
                )
            del self.stored[output]

    def _special_tokens(self) -> dict[str, Any]:
        tokens = dict(NO_SPECIAL_TOKENS)
        # The second file may have more tokens that end a text.
        for name in ("config.json", "generation_config.json"):
            if (self.folder / name).is_file():
                content = read_json(self.folder / name)
                for key in tokens:
                    if content.get(key) is not None:
                        tokens[key] = content[key]
        return tokens

    def digest(self) -> str:
        """Return a hash of the content: of samples of the files that are read."""
        return manifest.sampled_digest({tensor.file for tensor in self.stored.values()})

    def _open(self, name: str) -> Tensor:
        """Return a tensor mapped from its file: bytes are read on use, freed with the tensor."""
        with safe_open(self.stored[name].file, "pt") as file:
            return file.get_tensor(name)

    def read(self, fqn: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of a parameter, all by default."""
        return self.sources[fqn].join(self._open, self.config, rows)

    def read_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill tensors or DTensors, without communication: this rank's rows of each."""
        for fqn, parameter in parameters.items():
            _fill(parameter, functools.partial(self.read, fqn))

    def tokenizer_files(self) -> list[Path]:
        return tokenizer_files(self.folder)


def _only(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, and log the files beside it that are not read."""
    files = {other.name for other in path.parent.glob("*.safetensors*") if other != path}
    if files:
        logger.info(f"{path} is read, as in transformers, and not {', '.join(sorted(files))}")
    return _read_header(path)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by their names there. Raises CorruptFileError."""
    stored: dict[str, StoredTensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                header = file.get_slice(name)
                shape = torch.Size(header.get_shape())
                stored[name] = StoredTensor(path, shape, header.get_dtype())
    except (SafetensorError, OSError) as error:
        if is_of_machine(error):
            raise MachineError(f"{path} cannot be read: {error}") from None
        raise CorruptFileError(f"{path.name} cannot be read: {error_line(error)}") from None
    return stored


Weights = CheckpointFolder | TorchtitanFolder | HuggingFaceFolder


def open_weights(
    path: str | Path,
    key: str = "",
    *,
    every_byte: bool = False,
    model: ModelConfig | None = None,
) -> Weights:
    """Open the weights in a folder of any kind; of a run or a folder of steps, the newest undamaged
    step.

    key: the recipe's key, which errors name. every_byte: compare all bytes of a step with its
    manifest, not only sizes. model: the shape to read a checkpoint of torchtitan with, and the
    family that a Hugging Face folder may be of, or where a user's own file is. Raises ConfigError
    with all names and shapes that do not fit.
    """
    folder = Path(path)
    subject = f'{key} = "{path}"' if key else f"{path}"
    try:
        kind = folder_kind(folder)
        if kind == HUGGING_FACE:
            return HuggingFaceFolder(folder, "" if model is None else model.family)
        if kind:
            return _open_checkpoint(folder, every_byte, model)
        steps = steps_in(folder)
        for step in steps:
            try:
                return _open_checkpoint(step, every_byte, model)
            except CorruptFileError as damage:
                logger.warning(f"{step} is skipped: {damage}")
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from None
    except OSError as error:
        raise error_because_of(error, f"{subject}: {error.filename}: {error.strerror}") from None
    if steps:
        raise ConfigError(
            f"{subject}: all of its {len(steps)} checkpoints are damaged; use another folder"
        )
    raise ConfigError(
        f"{subject} {why_not_weights(folder)}; use a checkpoint (such as"
        " outputs/NAME/checkpoint/step-100), a run's folder, a checkpoint of torchtitan, or a"
        " Hugging Face folder (config.json and *.safetensors)"
    )


def _open_checkpoint(folder: Path, every_byte: bool, model: ModelConfig | None) -> Weights:
    """Open a checkpoint of titan_lite or of torchtitan.

    Raises ConfigError, and CorruptFileError for a broken one.
    """
    if folder_kind(folder) != TORCHTITAN:
        family = "" if model is None else model.family
        return CheckpointFolder(folder, every_byte=every_byte, family=family)
    if model is None:
        raise ConfigError(
            f"{folder} is a checkpoint of torchtitan, which does not have the shape of its model;"
            " use it as checkpoint.initial_load_path of a recipe that has the shape"
        )
    return TorchtitanFolder(folder, model)


def load_initial(
    path: str,
    model: ModelConfig,
    parameters: Mapping[str, Tensor],
    run_folder: Path,
) -> None:
    """Fill a run's parameters from checkpoint.initial_load_path, if set. A collective.

    run_folder: job.dump_folder, which keeps the step that was the newest at the first start: a run
    that starts again before it has saved begins from the same weights. Raises ConfigError on all
    ranks.
    """
    if not path:
        return
    key = "checkpoint.initial_load_path"
    started = time.perf_counter()
    kept = _kept_step(path, run_folder)
    weights = open_weights(kept or path, key, model=model)
    fault = ""
    if isinstance(weights, CheckpointFolder):
        try:
            weights.check_bytes(dist.get_rank(), dist.get_world_size())
        except CorruptFileError as damage:
            fault = f"{weights.folder}: {damage}"
    shared_fault = first_nonempty(fault)
    if shared_fault:
        raise ConfigError(f'{key} = "{path}": {shared_fault}')
    found = (str(weights.folder), weights.digest())
    if not all_equal(str(found)):  # each rank reads its part of every file
        by_rank = all_gather_objects(found)
        rank = next(rank for rank, each in enumerate(by_rank) if each != by_rank[0])
        raise ConfigError(
            f'{key} = "{path}": rank {rank} finds other weights in {by_rank[rank][0]} than rank 0'
            f" in {by_rank[0][0]}; use the same files on all nodes, and one checkpoint of a run"
        )
    if not kept and weights.folder != Path(path):
        _keep_step(path, weights.folder, run_folder)
    load(weights, parameters)
    dtypes = {str(dtype).removeprefix("torch.") for dtype in weights.dtypes.values()}
    logger.info(
        f"weights from {weights.folder}, {weights.kind} in {' and '.join(sorted(dtypes))}, "
        f"read in {time.perf_counter() - started:.1f} s"
    )


def _kept_step(path: str, run_folder: Path) -> str:
    """Return the step of the folder `path` that the first start of a run took, or "" if this is the
    first one. A collective. Raises ConfigError.
    """
    file = run_folder / INITIAL_STEP
    step = error = ""
    if _is_first_rank() and file.is_file():
        try:
            content = read_json(file)
            with fields_of(file.name):
                if content["initial_load_path"] == os.path.abspath(path):
                    step = str(content["step"])
        except CorruptFileError as damage:
            error = f"{run_folder}: {damage}; remove that file to begin from the newest checkpoint"
        if step and not Path(step).is_dir():
            error = (
                f'checkpoint.initial_load_path = "{path}": this run has begun from {step}, which is'
                f" not there any more; remove {file} to begin from the newest checkpoint"
            )
    if shared_error := first_nonempty(error):
        raise ConfigError(shared_error)
    step = first_nonempty(step)
    if step:
        logger.info(f"{step} is read again, as at the first start of this run ({file})")
    return step


def _keep_step(path: str, step: Path, run_folder: Path) -> None:
    """Keep the step that a run begins from, for its next start. A collective.

    Raises ConfigError.
    """
    error = ""
    if _is_first_rank():
        file = run_folder / INITIAL_STEP
        content = {"initial_load_path": os.path.abspath(path), "step": os.path.abspath(step)}
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            manifest.replace_text(file, json.dumps(content, indent=1) + "\n", durable=True)
        except OSError as wrong:
            error = f"{file} cannot be written: {wrong.strerror}; use another job.dump_folder"
            if is_of_machine(wrong):
                raise MachineError(error) from None  # which the other ranks are told
    if shared_error := first_nonempty(error):
        raise ConfigError(shared_error)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def load(weights: Weights, parameters: Mapping[str, Tensor]) -> None:
    """Fill tensors or DTensors in place, by name, and the buffers among them that the folder has.
    Each rank reads its part, without communication. Raises ConfigError.
    """
    has = {*weights.shapes, *weights.buffers}
    weights.read_into({fqn: tensor for fqn, tensor in parameters.items() if fqn in has})


def _fill(parameter: Tensor, read: Callable[[slice], Tensor]) -> None:
    """Fill a tensor, or this rank's part of a DTensor. read: returns rows of it."""
    shard, offset = parameter, (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shard, offset = shard_of(parameter)
    rows, *others = map(slice, offset, map(operator.add, offset, shard.shape))
    shard.copy_(read(rows)[(slice(None), *others)])


def check_tokenizer(weights: Weights, path: str | Path, vocab_size: int, sha256: str) -> None:
    """Raise ConfigError if a tokenizer is not that of the step, if known, or has more tokens than
    the model.
    """
    trained_with = ""
    if isinstance(weights, CheckpointFolder):
        trained_with = weights.state.identity.tokenizer
    if trained_with not in ("", sha256):
        raise ConfigError(
            f"tokenizer {path} has SHA-256 {sha256[:12]}, and {weights.folder} was trained with"
            f" {trained_with[:12]}; use --tokenizer with that one"
        )
    if vocab_size > weights.config.vocab_size:
        raise ConfigError(
            f"tokenizer {path} has {vocab_size} tokens, and the model {weights.config.vocab_size};"
            " use --tokenizer with the one it was trained with"
        )


def find_tokenizer(weights: Weights, path: str) -> Tokenizer:
    """Return the tokenizer at `path`, or else the model's.

    Raises ConfigError if it is not the one of the model.
    """
    if not path:
        files = weights.tokenizer_files()
        if not files:
            raise ConfigError(
                f"{weights.folder} has no tokenizer that can be read; use --tokenizer FILE"
            )
        path = str(files[0])
    tokenizer = load_tokenizer(path, "--tokenizer")
    check_tokenizer(weights, path, tokenizer.vocab_size, tokenizer.sha256)
    return tokenizer


def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shape of every parameter by FQN, in the model's order."""
    return {fqn: torch.Size(shape) for fqn, shape in parameter_shapes(config).items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two matrices have the same numbers, in whatever dtypes."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    blocks = zip(one.split(ROWS), other.split(ROWS), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in blocks)


def misfits(expected: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> list[str]:
    """Return a line for every name that is missing or unexpected, or has another shape."""
    missing = [f"{name} is missing" for name in expected if name not in stored]
    unexpected = [f"{name} is unexpected" for name in stored if name not in expected]
    other_shape = [
        f"{name} is {list(stored[name])}, where {list(shape)} is expected"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    return [*missing, *unexpected, *other_shape]


def _raise_faults(faults: Iterable[str]) -> None:
    """Raise CorruptFileError with the faults, if there are any."""
    faults = list(faults)
    if not faults:
        return
    if len(faults) == 1:
        raise CorruptFileError(faults[0])
    lines = [f"{len(faults)} things do not fit:", *first_lines(faults, MAX_FAULTS)]
    raise CorruptFileError("\n  ".join(lines))
