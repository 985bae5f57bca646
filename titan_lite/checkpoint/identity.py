"""Identify a run: the recipe, and what a recipe does not have, such as hashes and versions.

    identity = run_identity(config, layout, tokenizer, git=git_revision())

Every step has the identity of the run that saved it (checkpoint/state.py). A run that resumes from
the step compares it with its own (checkpoint/resume.py).
"""

import dataclasses
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from titan_lite import __version__
from titan_lite.config import Config
from titan_lite.data.documents import fingerprint
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.layout import Layout


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, in JSON types and tuples.

    An empty value is unknown: `convert` writes steps that know only their model.
    """

    recipe: Mapping[str, Any] = field(default_factory=dict)  # resolved: {section: {key: value}}
    model: Mapping[str, Any] = field(default_factory=dict)  # shape, as dataclasses.asdict
    tokenizer: str = ""  # SHA-256
    documents: str = ""  # SHA-256 of names and sizes (data/documents.py)
    validation_documents: str = ""  # the same of those of [validation]; "": held out, or none
    sequences: int = 0  # of an optimizer step
    shares: tuple[float, ...] = ()  # of each source in the tokens
    total_steps: int = 0  # of the learning rate's schedule
    world_size: int = 0
    mesh: Mapping[str, int] = field(default_factory=dict)  # ranks along each axis
    # ranks along the axes and rank of the factors that PowerSGD's errors belong to; {}: not used
    compression: Mapping[str, int] = field(default_factory=dict)
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # by package
    git: str = ""  # commit of the checkout; only rank 0 looks it up

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunIdentity":
        """Return the identity in a state.json, which may lack fields or have unknown ones."""
        names = [each.name for each in dataclasses.fields(cls)]
        return cls(**{name: content[name] for name in names if name in content})


def run_identity(
    config: Config, layout: Layout, tokenizer: Tokenizer, git: str = ""
) -> RunIdentity:
    """Return the identity of this run."""
    shape = dataclasses.asdict(layout.model)
    del shape["max_seq_len"]  # training.seq_len of this run; parameters do not depend on it
    if config.model.max_seq_len:
        shape["max_seq_len"] = config.model.max_seq_len

    compression = {}
    if config.parallelism.replicate_compression != "none":
        compression = {axis: degree for axis, degree in layout.degrees.items() if axis != "pp"}
        compression["rank"] = config.parallelism.replicate_rank

    own_validation = config.validation.enable and config.validation.has_documents
    return RunIdentity(
        recipe=config.model_dump(),
        model=shape,
        tokenizer=tokenizer.sha256,
        documents=fingerprint(config.data),
        validation_documents=fingerprint(config.validation_data) if own_validation else "",
        sequences=layout.sequences_per_step,
        shares=tuple(share for share, _ in config.data.mixture()),
        total_steps=config.total_steps,
        world_size=layout.world_size,
        mesh=layout.degrees,
        compression=compression,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        versions={
            "titan_lite": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        git=git,
    )


@cache
def git_revision() -> str:
    """Return the commit of the checkout that has this package; "": no checkout.

    It ends with "+changes" if files were changed since.
    """
    path = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(path.parent), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", path.name)  # fails if installed inside another checkout
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""
