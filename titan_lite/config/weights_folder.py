"""Say what a folder of weights is by the names of its files, without torch.

    folder_kind(Path("Llama-3.1-8B"))       # HUGGING_FACE
    steps_in(Path("outputs/debug_model"))   # [.../checkpoint/step-100, .../checkpoint/step-50]
    tokenizer_files("Llama-3.1-8B")         # [.../tokenizer.json, .../tokenizer_config.json]

config/from_weights.py reads the model's shape there, and checkpoint/weights.py its weights.
"""

import re
from pathlib import Path

from titan_lite import manifest

# Kinds of folders.
STEP = "a checkpoint of titan_lite"
TORCHTITAN = "a checkpoint of torchtitan"
HUGGING_FACE = "a Hugging Face folder"

STATE = "state.json"  # in a step: everything beside its tensors
METADATA = ".metadata"  # of DCP, in both: names, shapes and places of tensors
CONFIG = "config.json"  # in a Hugging Face folder
TOKENIZER_FILES = (  # in a Hugging Face folder; the first two are tokenizers
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def folder_kind(folder: Path) -> str:
    """Return the kind of a folder that has weights itself, or ""."""
    kinds = {manifest.NAME: STEP, STATE: STEP, METADATA: TORCHTITAN, CONFIG: HUGGING_FACE}
    return next((kind for name, kind in kinds.items() if (folder / name).is_file()), "")


def why_not_weights(path: Path) -> str:
    """Return what is wrong with a path that is neither a checkpoint nor a Hugging Face folder."""
    if not path.is_dir():
        return "is not a folder"
    if any(path.glob("*.safetensors")):
        return f"has *.safetensors, but not {CONFIG}, which says of which model they are"
    return "has no weights"


def steps_in(folder: Path) -> list[Path]:
    """Return the steps in a run's folder, or in a folder of steps, newest first."""
    paths = (*folder.glob("step-*"), *folder.glob("*/step-*"))
    steps = [path for path in paths if re.fullmatch(r"step-\d+", path.name)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def tokenizer_files(path: str | Path) -> list[Path]:
    """Return a tokenizer's file, or the first one that transformers finds in a folder, then the
    files beside it; [] if there is none. Of a step, those that its manifest lists.

    Raises CorruptFileError for a step without one.
    """
    path = Path(path)
    if path.is_file():
        beside = path.with_name("tokenizer_config.json")
        if path.suffix == ".json" and beside.is_file() and beside != path:
            return [path, beside]
        return [path]
    names = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    if names and folder_kind(path) == STEP:
        listed = manifest.read(path, None)
        names = [name for name in names if name in listed]
    files = [path / name for name in names]
    has_tokenizer = bool(files) and files[0].name in TOKENIZER_FILES[:2]
    return files if has_tokenizer else []


def tokenizer_in(folder: Path) -> str:
    """Return the file of the tokenizer that transformers finds in a folder, or ""."""
    files = tokenizer_files(folder) if folder.is_dir() else []
    return str(files[0]) if files else ""
