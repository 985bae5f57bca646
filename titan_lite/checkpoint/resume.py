"""Compare a resumed run with the run that saved its step, and refuse what cannot go on.

    changes = compare(state, described)          # state.json of the step, and this run's description (check.py)
    changes.refuse_unless_accepted("step-50", config.checkpoint)                 # raises ConfigError
    for line in changes.lines(): ...

    the optimizer starts anew: optimizer.name = "Muon", was "AdamW"
    changed: training.steps = 200, was 100

A step's state.json has the resolved recipe, and under "run" the facts that a recipe does not have:
the model's shape, hashes of the tokenizer and of the documents, the ranks, versions. Where there is
a fact it decides, and not the key: another `data.path` with the same documents is no other data.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from titan_lite.config import Checkpoint, ConfigError


class Kind(Enum):
    """What a difference does to a resume."""

    REFUSED = "it cannot go on"
    DATA = "the data starts anew"
    OPTIMIZER = "the optimizer starts anew"
    NOTED = "changed"


KEYS_OF_DATA = (
    "data.dataset",
    "data.validation_fraction",
    "data.shuffle",
    "data.shuffle_buffer",
    "debug.seed",
)
KEYS_OF_OPTIMIZER = (
    "optimizer.name",
    "optimizer.max_preconditioner_dim",
    "optimizer.start_preconditioning_step",
)
KIND_OF_KEY = {
    **dict.fromkeys(KEYS_OF_DATA, Kind.DATA),
    **dict.fromkeys(KEYS_OF_OPTIMIZER, Kind.OPTIMIZER),
}
# key: (another key, the value of it without which a change of the first is only noted)
COUNTS_WITH = {
    "data.shuffle_buffer": ("data.shuffle", True),
    "debug.seed": ("data.shuffle", True),
    "optimizer.max_preconditioner_dim": ("optimizer.name", "Shampoo"),
    "optimizer.start_preconditioning_step": ("optimizer.name", "Shampoo"),
}

FACTS = {  # under "run" in state.json: (words, kind of a change)
    "model": ("the model's {} ([model])", Kind.REFUSED),
    "tokenizer": ("SHA-256 of model.tokenizer_path", Kind.REFUSED),
    "documents": ("SHA-256 of the documents' names and sizes ([data])", Kind.DATA),
    "rows": ("sequences a step (training.global_batch_size)", Kind.NOTED),
    "shares": ("share of each source's tokens (data.sources)", Kind.NOTED),
    "total_steps": ("steps of the schedule (lr_scheduler.total_steps)", Kind.NOTED),
    "world_size": ("ranks", Kind.NOTED),
    "mesh": ("ranks along {}", Kind.NOTED),
    "device": ("device", Kind.NOTED),
    "versions": ("version of {}", Kind.NOTED),
    "git": ("git revision", Kind.NOTED),
}

ACCEPTED_BY = {  # kinds that are an error without a key of [checkpoint]: (key, its effect)
    Kind.DATA: ("restart_data", "starts the recipe's data at its first document"),
    Kind.OPTIMIZER: ("accept_model_only", "starts with moments of zero"),
}
ONLY_MODEL = "the step has only the model"
ERRORS_DROPPED = (
    "gradients between copies: errors and factors begin anew, as the step has none of these ranks"
    " and this rank of the factors (parallelism.replicate_compression)"
)
NEEDED = (  # keys of state.json
    "recipe",
    "run",
    "tensors",
    "step",
    "tokens_seen",
    "validation_due",
    "loader",
    "skipped_steps",
    "skipped_in_a_row",
    "spikes",
)


@dataclass
class Changes:
    """The differences between a run and the one that saved its step, as a text each, by kind."""

    texts: dict[Kind, list[str]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    drops_errors: bool = False  # errors of gradients between copies are not loaded

    @property
    def restarts_data(self) -> bool:
        """Whether the recipe's data starts again.

        Steps saved later have the position in the new data.
        """
        return bool(self.texts[Kind.DATA])

    @property
    def restarts_optimizer(self) -> bool:
        return bool(self.texts[Kind.OPTIMIZER])

    def refuse_unless_accepted(
        self, where: Path | str, checkpoint: Checkpoint, *, done: bool = False
    ) -> None:
        """Raise ConfigError for what cannot go on, and for what starts anew if the recipe does not
        accept it.

        done: the step is the run's last, which needs no optimizer.
        """
        for kind in (Kind.REFUSED, Kind.DATA, Kind.OPTIMIZER):
            texts = self.texts[kind]
            key, effect = ACCEPTED_BY.get(kind, ("", ""))
            accepted = bool(key) and getattr(checkpoint, key)
            if not texts or accepted or (done and kind is Kind.OPTIMIZER):
                continue
            fix = (
                "a step that has the optimizer's state" if ONLY_MODEL in texts else "the old value"
            )
            other = f"checkpoint.{key} = true, which {effect}" if key else "another job.dump_folder"
            raise ConfigError(f"{where}: {kind.value}: {'; '.join(texts)}; use {fix}, or {other}")

    def lines(self) -> list[str]:
        """Return a line for each difference, those that matter most first."""
        lines = [f"{kind.value}: {text}" for kind in Kind for text in self.texts[kind]]
        if self.drops_errors:
            lines.append(ERRORS_DROPPED)
        return lines or ["nothing differs from the run that saved it"]

    def to_load(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a run's tensors, by name, that it loads from the step."""
        left_out = set()
        if self.restarts_optimizer:
            left_out.add("optimizer")
        if self.drops_errors:
            left_out.add("between")
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name.partition(".")[0] not in left_out
        }


def compare(state: Mapping[str, Any], described: Mapping[str, Any]) -> Changes:
    """Return the differences between a step's state.json and this run.

    Raises ConfigError if the file is incomplete.
    """
    if lacking := [key for key in NEEDED if key not in state]:
        raise ConfigError(
            f"checkpoint.folder: state.json of the step is incomplete (no {', '.join(lacking)}); "
            "use a step that a run of titan_lite saved, or another job.dump_folder"
        )
    now = json.loads(json.dumps(described))  # tuples become lists, as in the file
    changes = Changes()
    for key, was, new in _differences(state["recipe"], now["recipe"]):
        kind = KIND_OF_KEY.get(key, Kind.NOTED)
        if not (_counts(key, state["recipe"]) or _counts(key, now["recipe"])):
            kind = Kind.NOTED
        changes.texts[kind].append(f"{key} = {_short(new)}, was {_short(was)}")
    for fact, (words, kind) in FACTS.items():
        was, new = state["run"].get(fact), now["run"].get(fact)
        if not was or not new:  # one of them does not know
            continue
        for path, before, after in _differences(was, new):
            # max_seq_len is a limit, without parameters
            of_kind = Kind.NOTED if path == "max_seq_len" else kind
            text = f"{words.format(path)}: {_short(after)}, was {_short(before)}"
            changes.texts[of_kind].append(text)
    if "optimizer" not in state["tensors"]:
        changes.texts[Kind.OPTIMIZER].append(ONLY_MODEL)
    errors = now["run"].get("between")
    saved = "between" in state["tensors"] and state["run"].get("between")
    changes.drops_errors = bool(errors) and saved != errors
    return changes


def _counts(key: str, recipe: Mapping[str, Any]) -> bool:
    """Return False if a recipe has a key in COUNTS_WITH without the other key's value."""
    if key not in COUNTS_WITH:
        return True
    other, value = COUNTS_WITH[key]
    section, _, name = other.partition(".")
    return recipe.get(section, {}).get(name) == value


@cache
def git_revision() -> str:
    """Return the commit of the checkout that has this package, with "+changes" if files were
    changed since; "": no checkout.
    """
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # fails if installed inside another checkout
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""


def _differences(was: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, value before, value now) of all leaves that differ; None: not present."""
    if isinstance(was, dict | None) and isinstance(new, dict | None):
        was, new = was or {}, new or {}
        for name in dict.fromkeys((*new, *was)):
            inside = f"{path}.{name}" if path else name
            yield from _differences(was.get(name), new.get(name), inside)
    elif was != new:
        yield path, was, new


def _short(value: Any) -> str:
    """Return a value for a message; of a hash only its first 12 digits."""
    is_hash = isinstance(value, str) and len(value) >= 64
    return value[:12] if is_hash else f"{json.dumps(value):.500}"
