"""Write and read the tensors of a step with torch.distributed.checkpoint (DCP).

    writer = StepWriter(folder, begin, commit)
    dcp.save(by_section(values), storage_writer=writer, planner=StepPlanner())
    load(folder, tensors)                    # in place, on any layout, without communication

A folder has the layout of torchtitan's checkpoints, with our FQNs:

    layers.0.attention.wq.weight                            a parameter
    optimizer.state.layers.0.attention.wq.weight.exp_avg    state of the optimizer
    optimizer.param_groups.layers.0.attention.wq.weight.lr  its settings; a resume has the recipe's
    between.layers.0.attention.wq.weight.error              state of gradient compression
    train_state.step, train_state.ntokens_seen

Values that are no tensors are pickles. They are written for other programs, and never read here.
DCP's `.metadata` is a pickle, too: it is read by an unpickler that knows only the classes that DCP
writes there.
"""

import hashlib
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import _get_layout, get_crc32_options, set_crc32_options

from titan_lite import progress
from titan_lite.checkpoint.names import section_of
from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError, is_of_machine
from titan_lite.config.weights_folder import METADATA
from titan_lite.manifest import (
    BLOCK_BYTES,
    CorruptFileError,
    FileDigest,
    fields_of,
    is_inside,
)
from titan_lite.text import error_line, first_lines


def by_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with those of each section in a dictionary of its own, as torchtitan has
    them.
    """
    state_dict: dict[str, Any] = {}
    for name, value in values.items():
        section = section_of(name)
        if section == "model":
            state_dict[name] = value
        else:
            state_dict.setdefault(section, {})[name.removeprefix(f"{section}.")] = value
    return state_dict


# Writing

COPY_AHEAD = 10_000_000  # bytes that DCP copies from a GPU while it writes others: its default


@dataclass(frozen=True)
class HashedResult(WriteResult):
    """The place of a part of a tensor on disk, and the digest of that file."""

    digest: FileDigest


class _HashedStream:
    """A file that is hashed while it is written, from its first byte to its last: it has no
    `seek`.
    """

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self.file.write(block)
            self.sha256.update(block)
            progress.beat()
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


class _HashedFiles(FileSystem):
    """A file system that keeps the digest of each file that is written, so that none is read again
    to be hashed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, FileDigest] = {}  # by the file's name

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            hashed = _HashedStream(cast(IO[bytes], file))
            yield hashed
        digest: FileDigest = {"sha256": hashed.sha256.hexdigest(), "size": hashed.size}
        self.digests[Path(path).name] = digest


class StepWriter(FileSystemWriter):
    """A writer of one file a rank, which that rank hashes; the first rank begins and commits the
    step.

    begin: called on the first rank with the bytes of all tensors, before anything is written; it
    makes the folder. commit: called on the first rank with the digest of each file, when all are on
    disk. An error of either is one of `dcp.save` on all ranks. on_host: the tensors are in host
    memory.
    """

    def __init__(
        self,
        folder: Path,
        begin: Callable[[int], None],
        commit: Callable[[dict[str, FileDigest]], None],
        *,
        on_host: bool,
    ):
        # With nothing to copy ahead, DCP asks for no stream: a thread's is one of the first GPU, on
        # which each rank of the node would make a context.
        super().__init__(folder, per_thread_copy_ahead=0 if on_host else COPY_AHEAD)
        self.fs = self.files = _HashedFiles()
        self.begin = begin
        self.commit = commit

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP would make the folder here, on every rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.begin(sum(_bytes_of(item) for plan in plans for item in plan.items))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        if not plan.items:  # for which DCP would write an empty file
            written.set_result([])
            return written
        try:
            with _without_crc32():
                results = super().write_data(plan, planner).wait()
        except Exception as error:
            raise _os_error_of(error) from None
        hashed: list[WriteResult] = []
        for result in results:
            digest = self.files.digests[result.storage_data.relative_path]
            hashed.append(
                HashedResult(result.index, result.size_in_bytes, result.storage_data, digest)
            )
        written.set_result(hashed)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        digests = {}
        for results_of_rank in results:
            for result in results_of_rank:
                assert isinstance(result, HashedResult)
                digests[result.storage_data.relative_path] = result.digest
        self.commit(digests)


def _bytes_of(item: WriteItem) -> int:
    """Return the bytes of the part of a tensor that an item writes; 0 for other values."""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Return a context in which `torch.save` computes no CRC-32 of a tensor: the manifest has the
    SHA-256 of the file, and torch does not read the other.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _os_error_of(error: Exception) -> BaseException:
    """Return the OSError that led to an error, or the error itself.

    On a full disk, torch raises another one, about its archive, after it.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


class StepPlanner(DefaultSavePlanner):
    """A planner whose parts of tensors are progress.

    copies: of this rank's parts of all tensors by name, which are written in place of the tensors
    themselves; None to write the tensors. failure: an error of this rank before the save, which
    becomes one of `dcp.save` on all ranks.
    """

    def __init__(
        self,
        copies: Mapping[str, Tensor] | None = None,
        failure: Exception | None = None,
    ):
        super().__init__()
        self.copies = copies
        self.failure = failure
        self.pickles: dict[bytes, Any] = {}  # a value, pickled: the file that torch.save makes

    def create_local_plan(self) -> SavePlan:
        if self.failure is not None:
            raise self.failure
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> Any:
        progress.beat()
        if write_item.type == WriteItemType.BYTE_IO:
            return self._pickle_of(write_item)
        if self.copies is None:
            return super().resolve_data(write_item)
        return self.copies[write_item.index.fqn]

    def _pickle_of(self, write_item: WriteItem) -> Any:
        """Return a value as `torch.save` writes it. Parameters have a few settings of the optimizer
        each, most of them equal, and each value is written once.
        """
        key = pickle.dumps(self.lookup_object(write_item.index))
        if key not in self.pickles:
            self.pickles[key] = super().resolve_data(write_item)
        return self.pickles[key]


class _LazySavePlanner(DefaultSavePlanner):
    """A planner for tensors that are read only when they are written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.read(index.fqn)


def write_one_by_one(
    folder: Path, planned: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> None:
    """Write each tensor to a file of its own, in one process. Raises OSError.

    planned: {name: a tensor on the meta device}. read: returns the tensor of a name, which is freed
    once it is written; a ConfigError that it raises is raised.
    """
    # With a GPU, too, a tensor is read only when the one before it is written.
    writer = FileSystemWriter(folder, single_file_per_rank=False, per_thread_copy_ahead=0)
    try:
        with _single_process():
            dcp.save(
                dict(planned), storage_writer=writer, planner=_LazySavePlanner(read), no_dist=True
            )
    except CheckpointException as failed:
        for cause, _ in failed.failures.values():
            if isinstance(cause, ConfigError):
                raise cause from None
        raise OSError(_describe_failure(failed)) from None


# Reading

DCP_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")


def _memory_format_of_name(_: object, name: str) -> _MEM_FORMAT_ENCODING:
    """Return a member of the one enumeration, as `getattr` would: Python up to 3.11.3 pickles it
    so.
    """
    return _MEM_FORMAT_ENCODING.__members__[name]


# What the pickle of a `.metadata` may ask for
_CLASSES = (
    *(_StorageInfo, BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex),
    *(StorageMeta, TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, _get_layout),
)
_KNOWN_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): getattr(torch, name) for name in ("Size", *DCP_DTYPES)},
    **{(each.__module__, each.__name__): each for each in _CLASSES},
    ("builtins", "getattr"): _memory_format_of_name,
}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows what DCP writes to `.metadata`, and nothing else that a pickle could
    call.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return PurePosixPath  # the folder that it was written to
        if (module, name) not in _KNOWN_NAMES:
            raise CorruptFileError(
                f"{METADATA} asks for {module}.{name}, which DCP does not write there"
            )
        return _KNOWN_NAMES[module, name]


def read_metadata(folder: Path) -> Metadata:
    """Return names and shapes of all tensors in a folder, and where in its files they are.

    Raises CorruptFileError.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except CorruptFileError:
        raise
    except FileNotFoundError:
        raise CorruptFileError(f"{METADATA} is missing") from None
    except Exception as error:  # arbitrary bytes may raise anything
        if is_of_machine(error):
            raise MachineError(f"{folder / METADATA} cannot be read: {error}") from None
        raise CorruptFileError(f"{METADATA} cannot be read: {_describe_error(error)}") from None
    if not isinstance(metadata, Metadata):
        raise CorruptFileError(f"{METADATA} cannot be read: it is a {type(metadata).__name__}")
    with fields_of(METADATA):
        for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
            if not is_inside(name):
                raise CorruptFileError(f"{METADATA} names the file {name}, outside of the folder")
        for name, tensor in parameters(metadata).items():
            if not isinstance(tensor.properties.dtype, torch.dtype):
                raise CorruptFileError(f"{METADATA} has no dtype of {name}")
    return metadata


def incomplete(tensors: Mapping[str, TensorStorageMetadata]) -> list[str]:
    """Return a line for each tensor whose chunks do not have each of its numbers exactly once.

    Raises CorruptFileError if they are no chunks.
    """
    with fields_of(METADATA):
        lines = {name: _fault_of_chunks(tensor) for name, tensor in tensors.items()}
    return [f"{name} {line}" for name, line in lines.items() if line]


def _fault_of_chunks(tensor: TensorStorageMetadata) -> str:
    chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.sizes]
    if len({tuple(chunk.offsets) for chunk in chunks}) < len(chunks):
        return "has numbers twice, in two parts that begin with the same one"
    stored = sum(math.prod(chunk.sizes) for chunk in chunks)
    whole = math.prod(tensor.size)
    if stored != whole:
        return f"has {stored:,} of its {whole:,} numbers: parts of it are missing, or overlap"
    return ""


def parameters(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors that are the model's, by their names in the folder."""
    return {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and section_of(name) == "model"
    }


class _NamedFiles(FileSystem):
    """A file system whose errors of reading begin with the file's name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            if is_of_machine(error):
                raise MachineError(f"{path} cannot be read: {error}") from None
            raise CorruptFileError(
                f"{Path(path).name} cannot be read: {_describe_error(error)}"
            ) from None


class _Reader(FileSystemReader):
    """A reader of a folder whose metadata are known."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.fs = _NamedFiles()
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _ProgressLoadPlanner(DefaultLoadPlanner):
    """A planner that fills tensors in place, whose parts are progress."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        progress.beat()
        return super().resolve_tensor(read_item)


def load(folder: Path, tensors: Mapping[str, Tensor], metadata: Metadata | None = None) -> None:
    """Fill tensors and DTensors in place, without communication.

    metadata: those of the folder, if they were read before. Raises CorruptFileError if the tensors
    are not in the folder, and MachineError.
    """
    metadata = metadata or read_metadata(folder)
    stored = {name: metadata.state_dict_metadata.get(name) for name in tensors}
    # DCP names one that is missing, or of another shape
    found = {name: each for name, each in stored.items() if isinstance(each, TensorStorageMetadata)}
    if lines := incomplete(found):
        raise CorruptFileError("; ".join(first_lines(lines, 3)))
    try:
        with _single_process():
            dcp.load(
                dict(tensors),
                storage_reader=_Reader(folder, metadata),
                planner=_ProgressLoadPlanner(),
                no_dist=True,
            )
    except CheckpointException as failed:
        for cause, _ in failed.failures.values():
            if isinstance(cause, MachineError):
                raise cause from None
        raise CorruptFileError(_describe_failure(failed)) from None


@contextmanager
def _single_process() -> Iterator[None]:
    """Return a context for DCP in one process (no_dist), without its warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _describe_failure(failed: CheckpointException) -> str:
    """Return what failed in one process."""
    return "; ".join(error_line(cause) for cause, _ in failed.failures.values())


def _describe_error(error: Exception) -> str:
    """Return an error that may have no text."""
    return f"{type(error).__name__}: {error_line(error)}".removesuffix(": ")
