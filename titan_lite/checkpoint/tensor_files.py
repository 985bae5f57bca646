"""Read and write DCP's files: `.metadata` with an unpickler that admits only what DCP writes there, and tensors only.

    metadata = read_metadata(folder, files)            # raises Damaged
    dcp.load(tensors, storage_reader=Reader(folder, metadata))
    entries = write(folder, tensors, copies.__getitem__)       # this rank's part, without communication
    write_metadata(folder, [entries of each rank])             # on the first rank

`.metadata` is a pickle, and a pickle can call any function and set attributes of any object, also of classes. The unpickler of
torch 2.11 to 2.13 would allow that. So would the one for entries that are not tensors, which are refused here.

`dcp.save` and `dcp.load` gather a plan from every rank on the first one, and `dcp.save` sends all of `.metadata` to every rank.
Here each rank knows from the placements what it writes, and the first rank receives what `.metadata` needs. A reader is alone.
"""

import dataclasses
import io
import math
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _ReaderView
from torch.distributed.tensor import DTensor, Replicate
from torch.serialization import _get_layout

from titan_lite.config import ConfigError
from titan_lite.outside import Damaged, in_short, open_regular

NAME = ".metadata"
# of one part of a tensor: (name, properties, size of the tensor, part, place in a file)
Entry = tuple[str, dcp.TensorProperties, torch.Size, dcp.ChunkStorageMetadata, _StorageInfo]
_CLASSES = (
    _StorageInfo,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
)
_LENGTHS = {ord(opcode.code): opcode.arg.n if opcode.arg else 0 for opcode in pickletools.opcodes}
_PREFIXES = {  # bytes of the length of an argument
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_DTYPES = {
    ("torch", name): getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int32", "int64")
}


def _admitted() -> dict[tuple[str, str], Any]:
    """Return {name that a file may ask for: a new subclass or function, which nothing else uses}."""

    def memory_format(value: int) -> Any:
        return dcp._MEM_FORMAT_ENCODING(value)

    def member(
        kind: Any, name: str
    ) -> Any:  # Python up to 3.11.3 pickles a member of an enumeration with getattr
        if kind is not memory_format:
            raise Damaged(
                f"{NAME} asks for builtins.getattr of {kind}, which DCP does not write for tensors"
            )
        return dcp._MEM_FORMAT_ENCODING[name]

    return {
        **_DTYPES,
        **{
            (kind.__module__, kind.__qualname__): type(kind.__name__, (kind,), {})
            for kind in _CLASSES
        },
        (dcp.__name__, "_MEM_FORMAT_ENCODING"): memory_format,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): lambda name: _get_layout(
            name
        ),  # looks up torch.strided in a table
        ("pathlib", "PosixPath"): lambda *parts: None,  # the folder it was written to
        ("pathlib._local", "PosixPath"): lambda *parts: None,  # from Python 3.13 on
        ("builtins", "getattr"): member,
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]):
        super().__init__(file)
        self.admitted = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.admitted:
            raise Damaged(
                f"{NAME} asks for {module}.{name}, which may run code and which DCP does not write for tensors"
            )
        return self.admitted[module, name]


def _check_opcodes(content: bytes) -> None:
    """Raise Damaged for an explicit index into the unpickler's memo: with index 2**31, seven bytes would take 32 GiB."""
    at = 0
    while at < len(content) and (length := _LENGTHS.get(content[at])) is not None:
        if content[at] in b"pr":
            raise Damaged(
                f"{NAME} has an index into the unpickler's memo, which DCP does not write"
            )
        if length == pickletools.UP_TO_NEWLINE:
            lines = 2 if content[at] in b"ci" else 1
            for _ in range(lines):
                at = content.find(b"\n", at + 1)
                if at < 0:
                    return
            length = 0
        elif length < 0:
            prefix = _PREFIXES[length]
            length = prefix + int.from_bytes(content[at + 1 : at + 1 + prefix], "little")
        at += 1 + length


def _is_covered(tensor: dcp.TensorStorageMetadata) -> bool:
    """Return True if the chunks are inside the tensor, begin at different places and have its number of elements."""
    filled = [chunk for chunk in tensor.chunks if chunk.sizes.numel()]
    within = all(
        len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
        and all(
            start >= 0 and start + size <= most
            for start, size, most in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        )
        for chunk in filled
    )
    numbers = sum(chunk.sizes.numel() for chunk in filled)
    return (
        within
        and numbers == tensor.size.numel()
        and len({chunk.offsets for chunk in filled}) == len(filled)
    )


def read_metadata(folder: Path, files: Collection[str]) -> dcp.Metadata:
    """Return names, shapes and places of all tensors, each place in one of `files`. Raises Damaged."""
    try:
        with open_regular(folder / NAME) as file:
            _check_opcodes(content := file.read())
        metadata = _Unpickler(io.BytesIO(content)).load()
        if not all(
            isinstance(tensor, dcp.TensorStorageMetadata)
            for tensor in metadata.state_dict_metadata.values()
        ):
            raise Damaged(f"{NAME} has an entry that is not a tensor")
        for name, tensor in metadata.state_dict_metadata.items():
            sizes = (
                tensor.size,
                *(part for chunk in tensor.chunks for part in (chunk.offsets, chunk.sizes)),
            )
            if (
                type(name) is not str
                or {*map(type, sizes)} != {torch.Size}
                or type(tensor.properties.dtype) is not torch.dtype
            ):
                raise Damaged(f"{NAME} has a tensor without a size or dtype")
            if not _is_covered(tensor):
                raise Damaged(f"{NAME}: the parts of {name[:200]} do not cover it")
        for place in metadata.storage_data.values():
            # Our steps have no path out of the folder, and no transformation.
            if place.relative_path not in files or place.transform_descriptors:
                raise Damaged(
                    f"{NAME} has a tensor in {place.relative_path}, which is not of this step"
                )
        metadata.storage_meta = dcp.StorageMeta()
        # Use the class itself, since its instances are not equal to those of a subclass.
        places = metadata.storage_data.items()
        metadata.storage_data = {
            dcp.MetadataIndex(index.fqn, index.offset, index.index): place
            for index, place in places
        }
    except Damaged:
        raise
    except Exception as error:  # arbitrary bytes may raise anything
        raise Damaged(f"{NAME} cannot be read: {type(error).__name__}: {in_short(error)}") from None
    return metadata


class _Files(FileSystem):
    """A file system whose errors name the file and the cause."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = Path(path).name
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except (
            pickle.UnpicklingError
        ) as error:  # torch admits only tensors; its message advises to admit anything
            wanted = re.search(r"GLOBAL (\S+)", str(error))
            reason = (
                f"asks for {wanted[1]}, which may run code"
                if wanted
                else f"has something other than tensors: {in_short(error)}"
            )
            raise Damaged(f"{name} {reason}") from None
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = (
                    cause.__context__
                )  # on a full disk, torch then raises an error about its archive
            if mode == "rb":
                raise Damaged(f"{name} cannot be read: {in_short(error)}") from None
            raise (cause or error) from None


class _Part(_ReaderView):
    """A part of a file; torch's own (2.13) has the wrong sign for a position from the end."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return (
            super().seek(self.len + offset)
            if whence == os.SEEK_END
            else super().seek(offset, whence)
        )


class Reader(FileSystemReader):
    """A reader of the tensors of a step whose metadata are known; torch reads them with weights_only=True."""

    def __init__(self, folder: Path, metadata: dcp.Metadata):
        super().__init__(folder)
        self.fs, self.metadata = _Files(), metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self.metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        part = cast(IO[bytes], _Part(file, sinfo.offset, sinfo.length))
        check_uncompressed(part)
        return part


def check_uncompressed(file: IO[bytes]) -> None:
    """Raise ValueError for an archive with a compressed entry, which may have any size in memory; torch saves none."""
    if file.read(4) == b"PK\x03\x04":
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, and torch saves tensors uncompressed")
    file.seek(0)


class Writer(FileSystemWriter):
    """A writer of one file per rank, synced to disk."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=True)
        self.fs = _Files()


class FromHost(DefaultSavePlanner):
    """A planner that plans with the tensors, and writes `copy_of(name)` for each: this rank's part, on the host."""

    def __init__(self, copy_of: Callable[[str], Tensor]):
        super().__init__()
        self.copy_of = copy_of

    def lookup_object(self, index: dcp.MetadataIndex) -> Any:
        return self.copy_of(index.fqn)


def write(
    folder: Path, tensors: Mapping[str, Tensor], copy_of: Callable[[str], Tensor]
) -> list[Entry]:
    """Write this rank's parts of the tensors to one file, and return its entries for `write_metadata`. No collective."""
    planner, writer = FromHost(copy_of), Writer(folder)
    planner.set_up_planner({name: tensors[name] for name in own_names(tensors)})
    plan = dataclasses.replace(
        planner.create_local_plan(), storage_data=_StoragePrefix(f"__{dist.get_rank()}_")
    )
    places = {
        result.index: result.storage_data for result in writer.write_data(plan, planner).value()
    }
    alike: dict[
        str, dcp.TensorProperties
    ] = {}  # one object for equal properties, which a pickle then has once
    entries = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        properties = alike.setdefault(str(data.properties), data.properties)
        entries.append((item.index.fqn, properties, data.size, data.chunk, places[item.index]))
    return entries


def write_metadata(folder: Path, parts: Iterable[Iterable[Entry]]) -> None:
    """Write `.metadata` from the entries of all ranks. Raises Damaged if they do not cover the tensors."""
    metadata, places = dcp.Metadata({}, planner_data={}), []
    for name, properties, size, chunk, place in (entry for part in parts for entry in part):
        tensor = metadata.state_dict_metadata.setdefault(
            name, dcp.TensorStorageMetadata(properties, size, [])
        )
        metadata.planner_data[name] = (name,)
        index = dcp.MetadataIndex(name, chunk.offsets, len(tensor.chunks))  # type: ignore[union-attr]
        places.append(WriteResult(index, 0, place))
        tensor.chunks.append(chunk)  # type: ignore[union-attr]
    for name, tensor in metadata.state_dict_metadata.items():
        if not _is_covered(tensor):  # type: ignore[arg-type]
            raise Damaged(f"{NAME}: the parts of {name} do not cover it")
    Writer(folder).finish(metadata, [places])


def own_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of which this rank writes its part.

    Ranks that have the same part all know it, and divide such parts so that they write about as many bytes. A plain tensor is the
    same on all ranks that have these tensors.
    """
    meshes = (tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor))
    mesh = next(meshes, None)
    shape, at = (
        ((dist.get_world_size(),), (dist.get_rank(),))
        if mesh is None
        else (mesh.shape, mesh.get_coordinate() or ())
    )
    written: dict[tuple[int, ...], list[int]] = defaultdict(
        list
    )  # by mesh axes with copies: bytes that each copy writes
    names = []
    for name, tensor in tensors.items():
        placements = (
            tensor.placements if isinstance(tensor, DTensor) else [Replicate()] * len(shape)
        )
        axes = tuple(axis for axis, placement in enumerate(placements) if placement.is_replicate())
        mine = 0
        for axis in axes:
            mine = mine * shape[axis] + at[axis]
        loads = written[axes] = written[axes] or [0] * math.prod(shape[axis] for axis in axes)
        least = loads.index(min(loads))
        loads[least] += max(1, local_part(tensor).nbytes)
        names += [name] if least == mine else []
    return names


class Filling(DefaultLoadPlanner):
    """A planner that fills tensors in place. beat: called for each part."""

    def __init__(self, beat: Callable[[], None]):
        super().__init__()
        self.beat = beat

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self.beat()
        return super().resolve_tensor(read_item)


@contextmanager
def alone(fault: str) -> Iterator[None]:
    """Return a context for DCP in one process (no_dist), without its warning. Raises ConfigError that begins with `fault`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        raise ConfigError(
            f"{fault}: {'; '.join(in_short(cause) for cause, _ in failed.failures.values())}"
        ) from None


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part, without a copy."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def share(tensor: Tensor) -> int:
    """Return this rank's share of the bytes of a tensor; bytes that are replicated on k ranks count 1/k on each."""
    if not isinstance(tensor, DTensor):
        return math.ceil(tensor.numel() * tensor.itemsize / dist.get_world_size())
    copies = math.prod(
        size
        for size, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        if p.is_replicate()
    )
    return math.ceil(local_part(tensor).numel() * tensor.itemsize / copies)


def misfit(metadata: dcp.Metadata, tensors: Mapping[str, Tensor]) -> str:
    """Return why these tensors cannot be filled from a checkpoint with these metadata, or "" if they can."""
    stored = metadata.state_dict_metadata
    missing = [name for name in tensors if name not in stored]
    if missing and not any(name.startswith("optimizer.") for name in stored):
        return (
            "it has only the model (checkpoint.last_save_model_only = true), and no optimizer state"
        )
    if missing:
        return f"it has no {missing[0]}" + (
            f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        )
    for name, tensor in tensors.items():
        size = stored[name].size  # type: ignore[union-attr] # all are tensors, see read_metadata
        if size != tensor.shape:
            return f"{name} is {list(size)} in it, and {list(tensor.shape)} in this run"
    return ""
