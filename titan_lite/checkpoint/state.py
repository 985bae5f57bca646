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

from titan_lite import manifest
from titan_lite.checkpoint.run_identity import DocumentsOfRun, RunIdentity
from titan_lite.data.source_identity import SourceIdentity
from titan_lite.manifest import CorruptFileError, fields_of, read_json

NAME = "state.json"
DOCUMENTS = "documents.json"


class Stateful(Protocol):
    """A part of a run whose state is in a checkpoint, in JSON types."""

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

    def read_documents(self) -> DocumentsOfRun:
        """Return the documents of the run that saved the step; {} if the step does not have them,
        as until November 2026. Raises CorruptFileError.
        """
        path = self.folder / DOCUMENTS
        if not path.exists():
            return {}
        content = read_json(path)
        with fields_of(f"{path}"):
            return {
                name: [SourceIdentity.from_json(source) for source in sources]
                for name, sources in content.items()
            }

    def load_into(self, stateful: Mapping[str, Stateful]) -> None:
        """Load each part of a run from the state under its name. Raises CorruptFileError."""
        for name, part in stateful.items():
            with fields_of(f"{self.folder / NAME}: {name}"):
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
    manifest.write_text(folder / NAME, json.dumps(content, indent=1) + "\n")
    if state.documents:
        by_field = {
            name: [source.to_json() for source in sources]
            for name, sources in state.documents.items()
        }
        text = json.dumps(by_field, separators=(",", ":"))  # about 60 bytes a file
        manifest.write_text(folder / DOCUMENTS, text)


def read_state(folder: Path) -> SavedState:
    """Return the state of the step in this folder. Raises CorruptFileError."""
    content = read_json(folder / NAME)
    if not isinstance(content.get("step"), int):
        raise CorruptFileError(f"{NAME} has no step")
    with fields_of(NAME):
        if "parts" not in content:
            content = _from_flat(content)
        return SavedState(
            identity=RunIdentity.from_json(content["identity"]),
            parts=content["parts"],
            folder=folder,
            step=content["step"],
            tensors=tuple(content["tensors"]),
        )


def _from_flat(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a state.json that has the keys of all parts in one dictionary.

    Steps were saved so until November 2026. This can go once no such step is resumed or converted
    any more: at the earliest with version 1.0.
    """
    identity = {"recipe": flat.get("recipe", {}), **flat.get("run", {})}
    identity["sequences"] = identity.pop("rows", 0)
    identity["compression"] = identity.pop("between", {})
    content = {
        "step": flat["step"],
        "tensors": flat.get("tensors", ["model"]),
        "identity": identity,
        "parts": {"special_tokens": flat.get("special_tokens")},
    }
    if "recipe" in flat:  # saved by a run, and not written by `convert`
        content["parts"] = {
            "progress": {key: flat[key] for key in ("step", "tokens_seen", "validation_due")},
            "skipped_steps": {
                "count": flat["skipped_steps"],
                "in_a_row": flat["skipped_in_a_row"],
                **flat["spikes"],
            },
            "per_source": {"tokens": flat.get("tokens_by_source", {})},
            "loader": flat["loader"],
        }
    return content
