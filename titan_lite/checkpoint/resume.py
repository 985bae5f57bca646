"""Compare a resumed run with the run that saved its step, and refuse what cannot resume.

    changes = compare(checkpointer.read_state(50), identity, documents)
    changes.refuse_unless_accepted(config.checkpoint)                 # raises ConfigError
    for line in changes.describe(): ...

    the optimizer restarts: optimizer.name = "Muon", was "AdamW"
    changed: training.steps = 200, was 100

The effect of a key is a mark at its field (config/effects.py). Where the identity of a run
(checkpoint/run_identity.py) has more than the recipe, it decides, and not the key: another
`data.path` with the same documents is the same data.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_lite.checkpoint.names import OF_FEATURES, section_of
from titan_lite.checkpoint.run_identity import DocumentsOfRun, RunIdentity
from titan_lite.checkpoint.state import SavedState
from titan_lite.config import KEYS, Checkpoint, ConfigError, LRScheduler, Optimizer, is_unset
from titan_lite.config.effects import ACCEPTED_BY, Effect, effect_of
from titan_lite.config.weights_folder import STATE
from titan_lite.data.source_identity import (
    SourceIdentity,
    SourceKey,
    differences_in_words,
    source_keys,
)
from titan_lite.manifest import fields_of
from titan_lite.optim.lr_scheduler import Decay, lr_factor

# field of RunIdentity: what it is called ({}: of its dictionary, the key that differs), its effect
FIELDS = {
    "model": ("the model's {} ([model])", Effect.REFUSED),
    "tokenizer": ("SHA-256 of model.tokenizer_path", Effect.REFUSED),
    "documents": ("the documents of [data]", Effect.RESTARTS_DATA),
    "validation_documents": ("the documents of [validation]", Effect.NOTED),
    "sequences": ("sequences a step (training.global_batch_size)", Effect.NOTED),
    "shares": ("share of each source's tokens (data.sources)", Effect.NOTED),
    "decay": ("{} of the learning rate's decay (lr_scheduler)", Effect.NOTED),
    "world_size": ("ranks", Effect.ROUNDING),
    "mesh": ("ranks along {}", Effect.ROUNDING),
    "device": ("device", Effect.ROUNDING),
    "numerics": ("{}", Effect.ROUNDING),
    "versions": ("version of {}", Effect.NOTED),
    "family_file": ("SHA-256 of the Python file of model.name", Effect.NOTED),
    "sources": ("SHA-256 of titan_lite's source files", Effect.NOTED),
    "git": ("git revision", Effect.NOTED),
}
DOCUMENTS = ("documents", "validation_documents")  # fields whose files a step has
# field and key of its dictionary whose effect is not the field's
EFFECT_OF_ENTRY = {
    ("model", "max_seq_len"): Effect.NOTED,  # a limit, which no parameter depends on
    ("versions", "torch"): Effect.ROUNDING,
    ("versions", "cuDNN"): Effect.ROUNDING,
}
# Field and key of its dictionary that older steps do not have
NEW_ENTRIES = {
    ("model", "max_seq_len"),
    ("mesh", "ep"),
    ("numerics", "gradients are summed once a"),
}

ONLY_MODEL = "the checkpoint has only the model"


@dataclass(frozen=True)
class Change:
    """A difference between a run and the one that saved its step."""

    effect: Effect
    text: str  # such as "training.steps = 200, was 100"


@dataclass(frozen=True)
class Changes:
    """All differences between a run and the one that saved its step."""

    folder: Path  # of the step
    changes: tuple[Change, ...]
    is_last_step: bool  # of this run, so that the optimizer's state is not needed
    restarted: tuple[str, ...] = ()  # tensors of features that begin anew, by their first words

    @property
    def restarts_data(self) -> bool:
        """True if the recipe's data starts again.

        Steps saved later have the position in the new data.
        """
        return bool(self._texts(Effect.RESTARTS_DATA))

    @property
    def restarts_optimizer(self) -> bool:
        return bool(self._texts(Effect.RESTARTS_OPTIMIZER))

    def _texts(self, effect: Effect) -> list[str]:
        return [change.text for change in self.changes if change.effect is effect]

    def refuse_unless_accepted(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigError if the run cannot resume, or restarts more than the recipe accepts."""
        if texts := self._texts(Effect.REFUSED):
            self._refuse(Effect.REFUSED, texts, "another job.dump_folder")
        for effect, (key, does) in ACCEPTED_BY.items():
            texts = self._texts(effect)
            accepted = getattr(checkpoint, key)
            waived = effect is Effect.RESTARTS_OPTIMIZER and self.is_last_step
            if texts and not (accepted or waived):
                self._refuse(effect, texts, f"checkpoint.{key} = true, which {does}")

    def _refuse(self, effect: Effect, texts: list[str], instead: str) -> None:
        fix = "the old value"
        if ONLY_MODEL in texts:
            fix = "a checkpoint that has the optimizer's state"
        raise ConfigError(
            f"{self.folder}: {effect.value}: {'; '.join(texts)}; use {fix}, or {instead}"
        )

    def describe(self) -> list[str]:
        """Return a line for each difference, those that matter most first."""
        lines = [f"{effect.value}: {text}" for effect in Effect for text in self._texts(effect)]
        return lines or ["nothing differs from the run that saved it"]

    def tensors_to_load(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a run's tensors, by name, that it loads from the step."""
        left_out = set(self.restarted)
        if self.restarts_optimizer:
            left_out.add("optimizer")
        return {
            name: tensor for name, tensor in tensors.items() if section_of(name) not in left_out
        }


def compare(saved: SavedState, identity: RunIdentity, documents: DocumentsOfRun) -> Changes:
    """Return the differences between the run that saved a step and this run.

    documents: of this run, to name the files that differ.

    Raises ConfigError if the step does not say which run saved it.
    """
    if not saved.identity.recipe:
        raise ConfigError(
            f"{saved.folder}/{STATE} does not have the recipe of a run; use a checkpoint that a"
            " run of titan_lite saved, or another job.dump_folder"
        )
    with fields_of(f"{saved.folder}/{STATE}"):
        was = _as_json(saved.identity)
        now = _as_json(identity)
        restarted = _restarted(saved, now["added_tensors"])
        changes = [
            *_changes_of_recipe(was["recipe"], now["recipe"]),
            *_changes_of_fields(was, now),
            *_changes_of_learning_rate(was, now, saved.step),
            *_changes_of_documents(saved, identity, documents),
            *_lost_optimizer(saved),
            *(
                Change(Effect.RESTARTS_TENSORS, f"{OF_FEATURES[first]}: {why}")
                for first, why in restarted
            ),
        ]
        is_last_step = saved.step >= now["recipe"]["training"]["steps"]
    return Changes(
        saved.folder, tuple(changes), is_last_step, tuple(first for first, _ in restarted)
    )


def _as_json(identity: RunIdentity) -> dict[str, Any]:
    """Return the fields as they are read from a file: tuples become lists.

    A family in a user's own file has the file's name, wherever it is.
    """
    fields = json.loads(json.dumps(dataclasses.asdict(identity)))
    if model := fields["model"]:
        model["family"] = Path(model["family"]).name
    return fields


def _changes_of_recipe(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for key, before, after in leaves_that_differ(was, now):
        if before is None and key in KEYS and after == _as_in_json(KEYS[key].default):
            continue  # the step is older than the key
        if is_unset(key, before) and is_unset(key, after):
            continue  # the step is from before the key was removed
        effect = effect_of(KEYS[key], was, now) if key in KEYS else Effect.NOTED
        now_words = f"{key} is not set" if is_unset(key, after) else f"{key} = {short(after)}"
        was_words = "not set" if is_unset(key, before) else short(before)
        yield Change(effect, f"{now_words}, was {was_words}")


def _as_in_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _changes_of_fields(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for name, (words, effect) in FIELDS.items():
        if not was[name] or not now[name]:  # one of them is unknown
            continue
        if name in DOCUMENTS:
            continue
        for path, before, after in leaves_that_differ(was[name], now[name]):
            is_new = (name, path) in NEW_ENTRIES or (name == "model" and after == 0)
            if before is None and is_new:
                continue  # the step is older than the entry
            text = f"{words.format(path)}: {short(after)}, was {short(before)}"
            yield Change(EFFECT_OF_ENTRY.get((name, path), effect), text)


def _changes_of_learning_rate(
    was: Mapping[str, Any], now: Mapping[str, Any], step: int
) -> Iterator[Change]:
    """Yield the jump of the learning rate at the step where another schedule takes over."""
    before = _learning_rate(was, step)
    after = _learning_rate(now, step)
    if before and after and before != after:
        yield Change(Effect.NOTED, f"learning rate at step {step}: {after}, was {before}")


def _learning_rate(identity: Mapping[str, Any], step: int) -> str:
    """Return the learning rate of a run at a step, in three digits; "": its keys do not say it."""
    try:
        peak = Optimizer(lr=identity["recipe"]["optimizer"]["lr"]).lr
        schedule = LRScheduler(**identity["recipe"]["lr_scheduler"])
    except (KeyError, ValidationError):  # the step is of another version
        return ""
    if step == 0 or not identity["decay"]:
        return ""
    return f"{peak * lr_factor(step, schedule, Decay(**identity['decay'])):.3g}"


def _changes_of_documents(
    saved: SavedState, identity: RunIdentity, documents: DocumentsOfRun
) -> Iterator[Change]:
    digests = {name: (getattr(saved.identity, name), getattr(identity, name)) for name in DOCUMENTS}
    different = [name for name, (was, now) in digests.items() if was and now and was != now]
    for name in different:
        words, effect = FIELDS[name]
        before = saved.read_documents(name)
        if name == "documents" and (known := saved.source_keys()):
            yield from changes_of_sources(known, before, documents[name])
            continue
        differences = differences_in_words(before, documents[name])
        yield Change(effect, f"{words}: {'; '.join(differences)}")


def changes_of_sources(
    known: Sequence[SourceKey], before: Sequence[SourceIdentity], now: Sequence[SourceIdentity]
) -> Iterator[Change]:
    """Yield what becomes of each source of training that is another one, gone or here again.

    known: all sources that have a position in the step, of which those in `before` come first.
    """
    keys = source_keys(now)
    hashes = {key.sha256 for key in known}
    hashes_now = {key.sha256 for key in keys}
    last = dict(zip(known, before, strict=False))
    for key, source in zip(keys, now, strict=True):
        same_name = [
            other for other in known if other.name == key.name and other.sha256 not in hashes_now
        ]
        if key.sha256 in hashes:
            if key.sha256 not in {other.sha256 for other in last}:
                yield Change(Effect.NOTED, f"source {key.name} is here again, at its position")
        elif same_name:
            was = last.get(same_name[0])
            differences = differences_in_words([was], [source]) if was else ["other documents"]
            words, effect = FIELDS["documents"]
            of_source = f"source {key.name}: " if len(now) > 1 else ""
            yield Change(effect, f"{words}: {of_source}{'; '.join(differences)}")
        else:
            yield Change(Effect.NOTED, f"source {key.name} is new, from its first document on")
    for key in last:
        if key.sha256 not in hashes_now and key.name not in {other.name for other in keys}:
            yield Change(
                Effect.NOTED, f"source {key.name} is gone; the checkpoint has its position"
            )


def _lost_optimizer(saved: SavedState) -> Iterator[Change]:
    if "optimizer" not in saved.tensors:
        yield Change(Effect.RESTARTS_OPTIMIZER, ONLY_MODEL)


def _restarted(saved: SavedState, added: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Return the first words of tensors of features that the step does not have as this run needs
    them, and why. added: as in RunIdentity.
    """
    found = []
    for first, now in added.items():
        was = saved.identity.added_tensors.get(first, {})
        if first not in saved.tensors:
            found.append((first, "the checkpoint has none"))
        elif was != now:
            differences = leaves_that_differ(was, now)
            text = ", ".join(
                f"{name} {short(after)}, was {short(before)}" for name, before, after in differences
            )
            found.append((first, text))
    return found


def leaves_that_differ(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, value before, value now) of all leaves that differ; None: not present."""
    if isinstance(was, dict | None) and isinstance(now, dict | None):
        was = was or {}
        now = now or {}
        for name in dict.fromkeys((*now, *was)):
            inner_path = f"{path}.{name}" if path else name
            yield from leaves_that_differ(was.get(name), now.get(name), inner_path)
    elif was != now:
        yield path, was, now


def short(value: Any) -> str:
    """Return a value for a message; of a hash only its first 12 digits."""
    if value is None:
        return "not set"
    is_hash = isinstance(value, str) and len(value) >= 64
    return value[:12] if is_hash else f"{json.dumps(value):.500}"
