"""Weights of a model wherever they lie: a step of ours, a Hugging Face folder, or Meta's consolidated files.

    weights = open_weights("outputs/debug_model")            # the newest step of a run; or any folder of the three kinds
    weights.config                                           # the model's shape
    weights.read("layers.3.attention.wq.weight")             # one tensor, whole, under our name and in our layout
    load(weights, dict(model.named_parameters()), shard_of)  # into a model on any layout

Opening reads names and shapes alone, and tells everything that does not fit at once. Nothing is read through a pickle that
could run code.
"""

import dataclasses
import json
import math
import pickle
import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.config import ConfigError
from titan_lite.logging import logger
from titan_lite.manifest import Damaged
from titan_lite.models.hf import config_from_hf, from_hf, hf_names, is_number, is_size
from titan_lite.models.llama3 import FLAVORS, ModelConfig, RopeScaling, Transformer
from titan_lite.ranks import gather_objects

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TOKENIZER_FILES = (  # of a Hugging Face folder
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class Step:
    """A step as a run saves it or `convert` writes it; of its tensors the model's."""

    kind = "a step of titan_lite"

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = manifest.check_step(folder, None)
        self.metadata = tensor_files.read_metadata(folder, self.files)
        self.state: dict[str, Any] = _read_json(folder / "state.json")
        self.config = self._config()
        stored = {
            name.removeprefix("model."): tensor
            for name, tensor in self.metadata.state_dict_metadata.items()
            if name.startswith("model.") and isinstance(tensor, TensorStorageMetadata)  # as all are, says tensor_files
        }
        self.shapes = shapes(self.config)
        _must_fit(self.shapes, {fqn: tensor.size for fqn, tensor in stored.items()})
        self.dtypes = {fqn: tensor.properties.dtype for fqn, tensor in stored.items()}
        # Of what was imported; of a run its tokenizer knows them.
        self.special_tokens = self.state.get("special_tokens") or {"bos_token_id": None, "eos_token_id": None}

    def _config(self) -> ModelConfig:
        try:
            shape = self.state["run"]["model"]
            scaling = shape["rope_scaling"]
            return ModelConfig(**{**shape, "rope_scaling": scaling and RopeScaling(**scaling)})
        except (TypeError, KeyError):
            raise Damaged("state.json does not say which model this is (run.model)") from None

    def check_bytes(self, part: int = 0, of: int = 1) -> None:
        """Compares every part-th file with its SHA-256. Raises Damaged."""
        manifest.check_bytes(self.folder, {name: self.files[name] for name in sorted(self.files)[part::of]})

    def read(self, fqn: str) -> Tensor:
        tensor = torch.empty(self.shapes[fqn], dtype=self.dtypes[fqn])
        self.read_into({fqn: tensor})
        return tensor

    def read_into(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill tensors or DTensors, each rank for itself. Raises ConfigError."""
        tensors: dict[str, Any] = {f"model.{fqn}": parameter.detach() for fqn, parameter in parameters.items()}
        try:
            with warnings.catch_warnings():  # that it is for one process
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=tensor_files.Reader(self.folder, self.metadata), no_dist=True)
        except CheckpointException as failed:
            reasons = "; ".join(str(cause) for cause, _ in failed.failures.values())
            raise ConfigError(f"{self.folder} cannot be read: {reasons}") from None

    def tokenizer_files(self) -> list[Path]:
        """That of the run's recipe, where it still lies there, and what stands beside a tokenizer.json."""
        path = self.state.get("recipe", {}).get("model", {}).get("tokenizer_path")
        return tokenizer_files(path) if path and Path(path).is_file() else []


class HuggingFace:
    """A folder with config.json and safetensors files, of transformers or of `convert`."""

    kind = "a Hugging Face folder"

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.config = config_from_hf(_read_json(folder / "config.json"))
        except ValueError as error:
            raise error if isinstance(error, Damaged) else Damaged(f"config.json: {error}") from None
        self.names = hf_names(self.config)
        self.file_of: dict[str, Path] = {}
        stored: dict[str, tuple[torch.Size, str]] = {}
        for path in self._files():
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - it is no dictionary
                        part = file.get_slice(name)
                        stored[name], self.file_of[name] = (torch.Size(part.get_shape()), part.get_dtype()), path
            except (SafetensorError, OSError) as error:
                raise Damaged(f"{path.name} cannot be read: {error}") from None
        self._drop_copies(stored)
        self.shapes = shapes(self.config)
        expected = {self.names[fqn]: shape for fqn, shape in self.shapes.items()}
        _must_fit(expected, {name: shape for name, (shape, _) in stored.items()})
        unknown = [f"{name} is of dtype {dtype}" for name, (_, dtype) in stored.items() if dtype not in DTYPES]
        if unknown:
            raise Damaged(_list(unknown))
        self.dtypes = {fqn: DTYPES[stored[name][1]] for fqn, name in self.names.items()}
        self.special_tokens = self._special_tokens()

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            found = sorted(self.folder.glob("*.safetensors"))
            if not found:
                raise Damaged("there is no .safetensors file; transformers writes one with save_pretrained")
            return found
        named = _read_json(index).get("weight_map")
        if not isinstance(named, dict) or any(Path(str(name)).name != name for name in named.values()):
            raise Damaged(f"{index.name} lists no files of this folder")
        files = [self.folder / name for name in sorted(set(named.values()))]
        missing = [f"{path.name} is missing, which {index.name} lists" for path in files if not path.is_file()]
        if missing:
            raise Damaged(_list(missing))
        return files

    def _drop_copies(self, stored: dict[str, tuple[torch.Size, str]]) -> None:
        """What some folders hold beside the parameters: frequencies that are computed, and tied weights a second time."""
        for name in [name for name in stored if name.endswith("rotary_emb.inv_freq")]:
            del stored[name]
        embedding, output = "model.embed_tokens.weight", "lm_head.weight"
        if self.config.tied_embeddings and {embedding, output} <= stored.keys():
            if not torch.equal(self._open(embedding), self._open(output)):
                raise Damaged(f"config.json says tie_word_embeddings, but {output} is not {embedding}")
            del stored[output]

    def _special_tokens(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json"):  # the latter knows more that end a text
            if (self.folder / name).is_file():
                found |= {key: id for key, id in _read_json(self.folder / name).items() if id is not None}
        return {key: found.get(key) for key in ("bos_token_id", "eos_token_id")}

    def _open(self, name: str) -> Tensor:
        """Mapped from the file, so that bytes are read as they are used, and let go with the tensor."""
        with safe_open(self.file_of[name], "pt") as file:
            return file.get_tensor(name)

    def read(self, fqn: str) -> Tensor:
        return from_hf(fqn, self._open(self.names[fqn]), self.config)

    def tokenizer_files(self) -> list[Path]:
        return tokenizer_files(self.folder)


class Meta:
    """Llama 3 as Meta releases it: params.json and one consolidated.*.pth for each rank of tensor parallelism."""

    kind = "Meta's consolidated files"

    def __init__(self, folder: Path):
        self.folder = folder
        self.parts: list[dict[str, Tensor]] = []
        paths = sorted(folder.glob("consolidated.*.pth"))
        for number, path in enumerate(paths):
            if path.name != f"consolidated.{number:02d}.pth":
                raise Damaged(f"consolidated.{number:02d}.pth is missing, and {path.name} is there")
        for path in paths:
            try:
                part = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except pickle.UnpicklingError:  # torch's advice is to admit anything
                raise Damaged(f"{path.name} holds something else than tensors, which may run code") from None
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                raise Damaged(f"{path.name} cannot be read: {' '.join(str(error).split())}") from None
            if not isinstance(part, dict) or not all(isinstance(tensor, Tensor) for tensor in part.values()):
                raise Damaged(f"{path.name} has no tensors by name")
            part.pop("rope.freqs", None)
            unknown = [
                f"{name} is of dtype {tensor.dtype}" for name, tensor in part.items() if tensor.dtype not in DTYPES.values()
            ]
            if unknown:
                raise Damaged(f"{path.name}: {_list(unknown)}")
            self.parts.append(part)
        first = self.parts[0]
        tied = all(
            "output.weight" not in part or torch.equal(part["output.weight"], part["tok_embeddings.weight"])
            for part in self.parts
            if "tok_embeddings.weight" in part
        )
        self.config = config_from_meta(_read_json(folder / "params.json"), tied)
        for part in self.parts if tied else ():
            part.pop("output.weight", None)
        self.shapes = expected = shapes(self.config)
        self._check_count()
        faults = []
        for number, part in enumerate(self.parts):
            found = {
                fqn: expected[fqn] if fqn in expected and self._axis(tensor, expected[fqn]) is not None else tensor.shape
                for fqn, tensor in part.items()
            }
            faults += [f"consolidated.{number:02d}.pth: {fault}" for fault in misfits(expected, found)]
        if faults:
            raise Damaged(_list(faults))
        self.dtypes = {fqn: first[fqn].dtype for fqn in expected}
        bos = self.config.vocab_size - 256  # special tokens end Llama 3's vocabulary
        self.special_tokens = {"bos_token_id": bos, "eos_token_id": bos + 1}

    def _check_count(self) -> None:
        """Raises Damaged where a part is the part of a whole, and there are not as many: a line, and not one for every tensor."""
        name = "layers.0.attention.wq.weight"
        (rows, *rest), part = self.shapes[name], self.parts[0].get(name, torch.empty(0)).shape
        if list(part[1:]) == rest and 0 < part[0] < rows != part[0] * len(self.parts) and rows % part[0] == 0:
            raise Damaged(
                f"consolidated.*.pth: {len(self.parts)} found, and {rows // part[0]} would make a whole, as {name} is "
                f"{list(part)} in the first, and {[rows, *rest]} by params.json; a file may be missing"
            )

    def _axis(self, part: Tensor, whole: torch.Size) -> int | None:
        """The dimension along which the parts make the whole; -1: each is the whole; None: they do not."""
        if part.shape == whole:
            return -1
        for dim in range(part.dim()):
            if torch.Size((*part.shape[:dim], part.shape[dim] * len(self.parts), *part.shape[dim + 1 :])) == whole:
                return dim
        return None

    def read(self, fqn: str) -> Tensor:
        axis = self._axis(self.parts[0][fqn], self.shapes[fqn])
        parts = [part[fqn] for part in self.parts]
        return parts[0] if axis == -1 else torch.cat(parts, axis or 0)

    def tokenizer_files(self) -> list[Path]:
        return tokenizer_files(self.folder / "tokenizer.model")


Weights = Step | HuggingFace | Meta
ShardOf = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]


def open_weights(path: str | Path, key: str = "", *, every_byte: bool = False) -> Weights:
    """The weights in a folder of any kind; of a run, or of a folder of steps, the newest step that is whole.

    key: the recipe's, which an error then names. every_byte: compare all of a step with its manifest, and not sizes alone.
    Raises ConfigError with all names and shapes that do not fit.
    """

    def open_step(folder: Path) -> Step:
        step = Step(folder)
        if every_byte:
            step.check_bytes()
        return step

    folder, wrong = Path(path), f'{key} = "{path}"' if key else f"{path}"
    try:
        if (folder / manifest.NAME).is_file():
            return open_step(folder)
        if (folder / "config.json").is_file():
            return HuggingFace(folder)
        if any(folder.glob("consolidated.*.pth")):
            return Meta(folder)
        steps = _steps(folder)
        for step in steps:
            try:
                return open_step(step)
            except Damaged as damage:
                logger.warning(f"{step} is passed over: {damage}")
    except (Damaged, ConfigError) as error:
        raise ConfigError(f"{wrong}: {error}") from None
    if steps:
        raise ConfigError(f"{wrong}: none of its {len(steps)} steps is whole")
    what = "has none of them" if folder.is_dir() else "is no folder"
    raise ConfigError(
        f"{wrong} {what}: a step (such as outputs/NAME/checkpoint/step-100), a run's folder, a Hugging Face folder (config.json "
        "and *.safetensors) or Meta's (params.json and consolidated.*.pth) would work"
    )


def _steps(folder: Path) -> list[Path]:
    """Folders of steps in it or one level deeper, the newest first."""
    found = [path for path in (*folder.glob("step-*"), *folder.glob("*/step-*")) if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))


def load_initial(path: str, parameters: Mapping[str, Tensor], shard_of: ShardOf) -> None:
    """Fill a run's parameters from checkpoint.initial_load_path, where it has one. For all ranks; raises ConfigError on all."""
    if not path:
        return
    wrong, started, fault = f'checkpoint.initial_load_path = "{path}"', time.perf_counter(), ""
    weights = open_weights(path, "checkpoint.initial_load_path")
    if isinstance(weights, Step):
        try:
            weights.check_bytes(dist.get_rank(), dist.get_world_size())
        except Damaged as damage:
            fault = str(damage)
    seen = gather_objects((str(weights.folder), fault))
    for folder, fault in seen:
        if fault:
            raise ConfigError(f"{wrong}: {folder}: {fault}")
        if folder != seen[0][0]:  # a run that is still going saves another one
            raise ConfigError(f"{wrong}: ranks see different newest steps in it, {seen[0][0]} and {folder}; name one of them")
    load(weights, parameters, shard_of)
    dtypes = {str(dtype).removeprefix("torch.") for dtype in weights.dtypes.values()}
    logger.info(
        f"weights from {weights.folder}, {weights.kind} in {' and '.join(sorted(dtypes))}, "
        f"read in {time.perf_counter() - started:.1f} s"
    )


@torch.no_grad()
def load(weights: Weights, parameters: Mapping[str, Tensor], shard_of: ShardOf | None = None) -> None:
    """Fill the parameters in place, by name. Without a word between ranks: each reads its part.

    shard_of: parameter -> (the tensor this rank holds of it, its offset in the whole); default: the whole. Raises ConfigError.
    """
    if isinstance(weights, Step):
        weights.read_into(parameters)
        return
    for fqn, parameter in parameters.items():
        local, offset = (parameter, (0,) * parameter.dim()) if shard_of is None else shard_of(parameter)
        part = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
        local.copy_(weights.read(fqn)[part])


def check_fit(weights: Weights, flavor: ModelConfig, key: str) -> None:
    """Raises ConfigError where these are weights of another model than the flavor; what only computes otherwise is told."""
    theirs, ours = dataclasses.asdict(weights.config), dataclasses.asdict(flavor)
    differing = [f"{name} is {theirs[name]} there, {ours[name]} here" for name in ours if theirs[name] != ours[name]]
    told = [line for line in differing if line.startswith(("rope_", "norm_eps"))]
    refused = [line for line in differing if line not in told and not line.startswith("max_seq_len")]
    if refused:
        fitting = [name for name, other in FLAVORS.items() if shapes(other) == weights.shapes]
        works = f'model.flavor = "{fitting[0]}"' if fitting else "a flavor of that shape (FLAVORS in models/llama3.py)"
        raise ConfigError(f'{key} = "{weights.folder}" has another model: {"; ".join(refused)}; {works} would work')
    if told:
        logger.info(f"{key}: these weights were trained for another computation: {'; '.join(told)}")


def tokenizer_files(path: str | Path) -> list[Path]:
    """The tokenizer, of any name, or of a folder those that transformers looks for, and after it what stands beside; or none."""
    path = Path(path)
    if path.is_file():
        beside = path.with_name("tokenizer_config.json")
        return [path, beside] if path.suffix == ".json" and beside.is_file() and beside != path else [path]
    found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    return found if found and found[0].name in TOKENIZER_FILES[:2] else []


def check_tokenizer(weights: Weights, path: str | Path, vocab_size: int, sha256: str) -> None:
    """Raises ConfigError where it is not the run's, as far as a step knows that, or has more tokens than the model."""
    trained_with = weights.state["run"].get("tokenizer") if isinstance(weights, Step) else None
    if trained_with not in (None, sha256):
        raise ConfigError(
            f"tokenizer {path} has SHA-256 {sha256[:12]}, and {weights.folder} was trained with {str(trained_with)[:12]}; "
            "--tokenizer with that one would work"
        )
    if vocab_size > weights.config.vocab_size:
        raise ConfigError(
            f"tokenizer {path} has {vocab_size} tokens, and the model {weights.config.vocab_size}; --tokenizer with the one it "
            "was trained with would work"
        )


def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Our name of every parameter -> its shape, in the model's order."""
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config, max_seq_len=1))
    return {fqn: parameter.shape for fqn, parameter in model.named_parameters()}


def misfits(expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> list[str]:
    """A line for every name that is missing, that is not expected, or whose shape is not."""
    return [
        *(f"{name} is missing" for name in expected if name not in found),
        *(f"{name} is unexpected" for name in found if name not in expected),
        *(
            f"{name} is {list(found[name])}, where {list(shape)} is expected"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ),
    ]


def _must_fit(expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> None:
    if faults := misfits(expected, found):
        raise Damaged(_list(faults))


def _list(faults: list[str]) -> str:
    return faults[0] if len(faults) == 1 else "\n  ".join((f"{len(faults)} things do not fit:", *faults))


def config_from_meta(params: Mapping[str, Any], tied: bool) -> ModelConfig:
    """The shape of the model that a params.json describes. Raises Damaged."""
    given = {name: value for name, value in params.items() if value is not None}
    sizes = ("dim", "n_layers", "n_heads", "multiple_of", "vocab_size", *({"n_kv_heads"} & given.keys()))
    numbers = ("norm_eps", *(name for name in ("ffn_dim_multiplier", "rope_theta", "rope_scaling_factor") if name in given))
    wrong = [
        f"{name} = {given.get(name)!r}, where a {'whole ' * (name in sizes)}number above 0 is what works"
        for name, fits in (*((name, is_size) for name in sizes), *((name, is_number) for name in numbers))
        if not fits(given.get(name))
    ]
    if wrong:  # Llama 2's vocab_size is -1: its program asked the tokenizer
        raise Damaged(f"params.json does not describe a Llama 3: {'; '.join(wrong)}")
    dim, heads, unit = given["dim"], given["n_heads"], given["multiple_of"]
    hidden = math.ceil(int(given.get("ffn_dim_multiplier", 1.0) * (8 * dim // 3)) / unit) * unit
    if not is_size(hidden):
        raise Damaged(f"params.json: ffn_dim_multiplier = {given.get('ffn_dim_multiplier')} makes feed_forward of {hidden} rows")
    config = ModelConfig(
        dim=dim,
        n_layers=given["n_layers"],
        n_heads=heads,
        n_kv_heads=given.get("n_kv_heads", heads),
        hidden_dim=hidden,
        vocab_size=given["vocab_size"],
        tied_embeddings=tied,
        rope_theta=float(given.get("rope_theta", 10_000.0)),
        norm_eps=given["norm_eps"],
        max_seq_len=8192,
    )
    if not params.get("use_scaled_rope"):
        return config
    # By how much frequencies are stretched is not always in the file: 8 in Llama 3.1, 32 in 3.2, by the size of the model.
    same = [flavor.rope_scaling.factor for flavor in FLAVORS.values() if flavor.rope_scaling and shapes(flavor) == shapes(config)]
    factor = given.get("rope_scaling_factor", (same or [8.0])[0])
    return dataclasses.replace(config, rope_scaling=RopeScaling(factor=float(factor)), max_seq_len=131_072)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path.name} is no JSON object")
    return found
