"""Read and write a step's state.json: everything that is saved beside its tensors.

    parts = {"progress": progress.state_dict(), "loader": loader.state_dict()}
    write_state(folder, 50, ["model", "optimizer"], RunState(identity, parts))

    saved = read_state(folder)                      # raises CorruptFileError
    saved.identity.model, saved.tensors             # {"dim": 256, ...}, ("model", "optimizer")
    saved.load_into({"progress": progress, "loader": loader})

The file has, with the state of each part under its own name:

    {
     "step": 50,
     "tensors": ["model", "optimizer"],
     "identity": {"recipe": {...}, "model": {...}, "tokenizer": "82e9...", "world_size": 8, ...},
     "parts": {"progress": {...}, "skipped_steps": {...}, "per_source": {...}, "loader": {...}}
    }

Beside it, documents.json has the names, sizes and hashes of the files that the run reads.

A step that `convert` wrote has only the model, and no part of a run.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import NonNegativeInt

from titan_lite import manifest
from titan_lite.checkpoint.run_identity import DocumentsOfRun, RunIdentity
from titan_lite.config.weights_folder import STATE
from titan_lite.data.source_identity import SourceIdentity, SourceKey
from titan_lite.manifest import CorruptFileError, fields_of, read_json, validated

DOCUMENTS = "documents.json"


class Stateful(Protocol):
    """A part of a run whose state is in a checkpoint, in JSON types.

    Both methods are local. Counts of all ranks are gathered before a save, and Checkpointer.save
    merges the loaders' states.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunState:
    """The state of a step beside its tensors."""

    identity: RunIdentity = field(default_factory=RunIdentity)
    parts: Mapping[str, Any] = field(default_factory=dict)  # state_dict() of each part, by its name
    documents: DocumentsOfRun = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SavedState(RunState):
    """The state of a step on disk, without its documents."""

    folder: Path  # of the step
    step: int
    tensors: tuple[str, ...]  # sections of tensors that it has, such as "model", "optimizer"

    def read_documents(self, field: str) -> list[SourceIdentity]:
        """Return documents of the run that saved the step. Raises CorruptFileError.

        field: of RunIdentity, which has their hash, such as "documents".
        """
        try:
            content = read_json(self.folder / DOCUMENTS)
        except CorruptFileError as error:
            raise CorruptFileError(f"{self.folder}: {error}") from None
        with fields_of(f"{self.folder}: {DOCUMENTS}"):
            return [SourceIdentity.from_json(source) for source in content[field]]

    def source_keys(self) -> list[SourceKey]:
        """Return the sources of training that have a position, those of the run that saved the step
        first; [] for a step from before 0.2. Raises CorruptFileError.
        """
        loader = self.parts.get("loader", {})
        if "sources" not in loader:
            return []
        with fields_of(f"{self.folder / STATE}: loader"):
            return validated(list[SourceKey], loader, "sources")

    def load_into(self, stateful: Mapping[str, Stateful]) -> None:
        """Load each part of a run from the state under its name. Raises CorruptFileError."""
        for name, part in stateful.items():
            with fields_of(f"{self.folder / STATE}: {name}"):
                part.load_state_dict(self.parts[name])


def write_state(folder: Path, step: int, tensors: Iterable[str], state: RunState) -> None:
    """Write state.json and, if there are any, documents.json.

    tensors: the sections of tensors that the step has. Raises OSError.
    """
    content = {
        "step": step,
        "tensors": sorted(tensors),
        "identity": dataclasses.asdict(state.identity),
        "parts": state.parts,
    }
    manifest.write_text(folder / STATE, json.dumps(content, indent=1) + "\n")
    if state.documents:
        by_field = {
            name: [source.to_json() for source in sources]
            for name, sources in state.documents.items()
        }
        text = json.dumps(by_field, separators=(",", ":"))  # about 60 bytes a file
        manifest.write_text(folder / DOCUMENTS, text)


def read_state(folder: Path) -> SavedState:
    """Return the state of the step in this folder. Raises CorruptFileError."""
    content = read_json(folder / STATE)
    if not isinstance(content.get("step"), int):
        raise CorruptFileError(f"{STATE} has no step")
    with fields_of(STATE):
        return SavedState(
            identity=RunIdentity.from_json(content["identity"]),
            parts=validated(dict[str, Any], content, "parts"),
            folder=folder,
            step=validated(NonNegativeInt, content, "step"),
            tensors=tuple(validated(list[str], content, "tensors")),
        )
