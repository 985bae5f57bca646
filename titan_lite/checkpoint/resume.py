"""Compare a resumed run with the run that saved its checkpoint, and say what each difference means.

    differences = compare(state, described)                     # state.json of the step, and this run's description (check.py)
    refuse(differences, "step-50", config.checkpoint)           # raises ConfigError for what cannot work
    for line in explain(differences, state, described): ...

    the learning rate changes: of step 51 it is 1.0e-03, where it would have been 2.0e-03
      optimizer.lr = 0.001, was 0.002
    numbers change by rounding
      ranks along dp_shard: 4, was 2

A step's state.json has the resolved recipe, and under "run" the facts that a recipe does not have: the model's shape, hashes of
the tokenizer and of the documents, the ranks, versions. A fact decides where there is one: another `data.path` with the same
documents is no other data. The consequence of a key is in its row (config/row.py).
"""

import json
import subprocess
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from titan_lite.config import (
    KEYS,
    SECTIONS,
    Checkpoint,
    ConfigError,
    LRScheduler,
    batch_ramp,
    without_need,
)
from titan_lite.config.row import CANNOT, FRESH, LEARNING, NOTHING, PLACE, ROUNDING, WORST_FIRST
from titan_lite.data.dataset import EPOCH
from titan_lite.lr_scheduler import lr_factor

ONLY_MODEL = "the step has only the model"
ERRORS_DROPPED = (
    "gradients between copies: errors and factors begin anew, as the step has none of these ranks and this rank of the factors "
    "(parallelism.replicate_compression)"
)
ACCEPTED_BY = {  # consequences that are errors without a key of [checkpoint]: (key, its effect)
    PLACE: ("restart_data", "starts the recipe's data at its first document"),
    FRESH: ("accept_model_only", "starts with moments of zero"),
}

NEEDED = {
    "recipe",
    "run",
    "tensors",
    "step",
    "tokens_seen",
    "validation_due",
    "loader",
}  # keys of state.json
NEEDED |= {"skipped_steps", "skipped_in_a_row", "spikes"}

FACTS = {  # compared beside the recipe: (words, consequence of a change)
    "model": ("the model's {}", CANNOT),
    "tokenizer": ("SHA-256 of model.tokenizer_path", CANNOT),
    "rows": ("sequences a step (training.global_batch_size)", LEARNING),
    "documents": ("SHA-256 of the documents' names and sizes ([data])", PLACE),
    "shares": ("share of each source's tokens (data.sources)", LEARNING),
    "total_steps": ("steps of the schedule (lr_scheduler.total_steps)", LEARNING),
    "world_size": ("ranks", ROUNDING),
    "mesh": ("ranks along {}", ROUNDING),
    "device": ("device", ROUNDING),
    "versions": ("version of {}", ROUNDING),
    "git": ("git revision", ROUNDING),
}


@dataclass(frozen=True)
class Difference:
    """One difference between this run and the one that saved the step, and its consequence."""

    consequence: str
    text: str


def compare(state: Mapping[str, Any], described: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between a step's state.json and this run: keys of the recipe, then FACTS. Raises ConfigError."""
    lacking = sorted(NEEDED - state.keys()) or sorted(
        {"data", "optimizer", "lr_scheduler", "training"} - state["recipe"].keys()
    )
    if lacking or "total_steps" not in state["run"]:
        raise ConfigError(
            f"checkpoint.folder: state.json of the step is incomplete (no {', '.join(lacking) or 'run.total_steps'}); "
            "use a step that a run of titan_lite saved, or another job.dump_folder"
        )
    now = json.loads(json.dumps(described))  # tuples become lists, as in the file
    known = [
        fact for fact in FACTS if state["run"].get(fact) and now["run"].get(fact)
    ]  # those that both have
    facts = [
        (fact, *change)
        for fact in known
        for change in _changes(state["run"][fact], now["run"][fact])
    ]
    facts = [
        change for change in facts if change[:2] != ("model", "max_seq_len")
    ]  # a limit, without parameters
    changed = {fact for fact, *_ in facts}
    idle = (
        without_need(state["recipe"], resuming=True).keys()
        & without_need(now["recipe"], resuming=True).keys()
    )
    differences = []
    for key, was, new in _changes(state["recipe"], now["recipe"]):
        if key in KEYS:
            was = _before_it_was_a_key(key, state["recipe"]) if was is None else was
            if was != new:
                consequence = NOTHING if key in idle else consequence_of(key, changed)
                if key == "debug.seed" and consequence == NOTHING and _rounds(now["recipe"]):
                    consequence = ROUNDING
                differences.append(
                    Difference(
                        consequence, f"{key} = {json.dumps(new)}, was {json.dumps(was):.500}"
                    )
                )
        else:
            differences.append(
                Difference(
                    NOTHING,
                    f"{key} was {json.dumps(was):.500}, and is not a key of this version",
                )
            )
    for fact, path, was, new in facts:
        words, consequence = FACTS[fact]
        differences.append(
            Difference(consequence, f"{words.format(path)}: {_short(new)}, was {_short(was)}")
        )
    if "optimizer" not in state["tensors"]:
        differences.append(Difference(FRESH, ONLY_MODEL))
    return differences


def _before_it_was_a_key(key: str, recipe: Mapping[str, Any]) -> Any:
    """Return the value that a key had in effect in versions without it."""
    if key == "optimizer.state_dtype":  # moments had the dtype of parameters
        return recipe["training"].get("dtype", KEYS[key].default)
    return json.loads(json.dumps(KEYS[key].default))


def _rounds(recipe: Mapping[str, Any]) -> bool:
    """Return True if updates are rounded stochastically, with bits that depend on debug.seed."""
    return "bfloat16" in (recipe["training"]["dtype"], recipe["optimizer"]["state_dtype"])


def consequence_of(key: str, changed_facts: Set[str] = frozenset()) -> str:
    """Return the consequence of a change of this key if these facts have changed, too."""
    row = KEYS[key].metadata
    return (
        FACTS[row["fact"]][1]
        if row["fact"] in changed_facts
        else row["resume"] or SECTIONS[key.partition(".")[0]].resume
    )


def refuse(
    differences: Sequence[Difference], where: Path | str, config: Checkpoint, *, done: bool = False
) -> None:
    """Raise ConfigError for differences that cannot work, or that the recipe does not accept.

    done: the step is the run's last, which needs no optimizer.
    """
    for consequence in (CANNOT, *ACCEPTED_BY):
        texts = [
            difference.text for difference in differences if difference.consequence == consequence
        ]
        key, effect = ACCEPTED_BY.get(consequence, ("", ""))
        if not texts or (key and getattr(config, key)) or (done and consequence == FRESH):
            continue
        if len(texts) > 3:
            texts[3:] = [f"and {len(texts) - 3} more, which --checkpoint.explain lists"]
        fix = "a step that has the optimizer's state" if ONLY_MODEL in texts else "the old value"
        other = f"checkpoint.{key} = true, which {effect}" if key else "another job.dump_folder"
        raise ConfigError(f"{where}: {consequence}: {'; '.join(texts)}; use {fix}, or {other}")


def restarts_data(differences: Sequence[Difference]) -> bool:
    """Return True if the recipe's data starts again, which checkpoint.restart_data accepts.

    This happens only at the first resume with other data: steps saved later have the position in the new data.
    """
    return any(difference.consequence == PLACE for difference in differences)


def to_load(
    tensors: Mapping[str, Any],
    differences: Sequence[Difference],
    state: Mapping[str, Any],
    described: Mapping[str, Any],
) -> dict[str, Any]:
    """Return those of a run's tensors, by name, that it loads: without the optimizer's if that starts anew, and without
    errors of compression between copies if those of the step are of other shards."""
    anew = any(difference.consequence == FRESH for difference in differences)
    kinds = {"model": True, "optimizer": not anew, "between": not _drops_errors(state, described)}
    return {name: tensor for name, tensor in tensors.items() if kinds[name.partition(".")[0]]}


def _drops_errors(state: Mapping[str, Any], described: Mapping[str, Any]) -> bool:
    """Return True if this run compresses gradients between copies, and the step has no errors of the same shards and rank."""
    now = described.get("run", {}).get("between")
    return bool(now) and ("between" not in state["tensors"] or state["run"].get("between") != now)


def explain(
    differences: Sequence[Difference], state: Mapping[str, Any], described: Mapping[str, Any]
) -> list[str]:
    """Return the differences as lines, those with the worst consequence first."""
    lines = []
    for consequence in WORST_FIRST:
        texts = [
            difference.text for difference in differences if difference.consequence == consequence
        ]
        more = _next_step(state, described) if texts and consequence == LEARNING else ""
        if texts and consequence in ACCEPTED_BY:
            key, effect = ACCEPTED_BY[consequence]
            more = f"; checkpoint.{key} = true {effect}"
        lines += [f"{consequence}{more}", *(f"  {text}" for text in texts)] if texts else []
    if _drops_errors(state, described):
        lines.append(ERRORS_DROPPED)
    return lines or ["nothing differs from the run that saved it"]


def position(state: Mapping[str, Any]) -> str:
    """Describe the position of a step in its data."""
    rows = list(state["loader"]["rows"].values())
    places = []
    for source in range(1, len(rows[0])):
        ordinals = [row[source][0] for row in rows]
        name, one = ("documents", 1) if max(ordinals) < EPOCH else ("epochs", EPOCH)
        of = f" of source {source}" if len(rows[0]) > 2 else ""
        places.append(f"{name} {min(ordinals) // one} to {max(ordinals) // one}{of}")
    return (
        f"step {state['step']}, {state['tokens_seen']:,} tokens seen: {sum(row[0] for row in rows):,} sequences of {len(rows)} "
        f"streams, which are at {', '.join(places)}"
    )


@cache
def git_revision() -> str:
    """Return the commit of the checkout that has this package, with "+changes" if files were changed since; "": no checkout."""
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


def _changes(was: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted path, value before, value now) of all leaves that differ; None: not present."""
    if isinstance(was, dict | None) and isinstance(new, dict | None):
        was, new = was or {}, new or {}
        inside = [
            (f"{path}.{name}" if path else name, was.get(name), new.get(name))
            for name in dict.fromkeys((*new, *was))
        ]
        return [
            change for name, before, after in inside for change in _changes(before, after, name)
        ]
    return [] if was == new else [(path, was, new)]


def _next_step(state: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """Return a phrase about the next step's learning rate and sequences if they differ from those before, else ""."""
    step, rates, sizes = state["step"] + 1, [], []
    for which in (state, described):
        ramp = batch_ramp(which["recipe"]["training"].get("global_batch_ramp", ()))
        sizes.append(next((size for size, last in ramp if step <= last), which["run"].get("rows")))
        recipe = which["recipe"]["lr_scheduler"]
        scheduler = LRScheduler(
            **{
                field.name: recipe[field.name]
                for field in fields(LRScheduler)
                if field.name in recipe
            }
        )
        peak = which["recipe"]["optimizer"].get("lr", KEYS["optimizer.lr"].default)
        rates.append(peak * lr_factor(step, scheduler, which["run"]["total_steps"]))
    words = []
    if rates[0] != rates[1]:
        words.append(
            f"the learning rate of step {step} is {rates[1]:.2e} instead of {rates[0]:.2e}"
        )
    if sizes[0] != sizes[1] and None not in sizes:
        words.append(f"step {step} has {sizes[1]:,} sequences instead of {sizes[0]:,}")
    return f": {'; '.join(words)}" if words else ""


def _short(value: Any) -> str:
    """Return a value for a message; of a hash only its first 12 digits."""
    return (
        value[:12] if isinstance(value, str) and len(value) >= 64 else f"{json.dumps(value):.500}"
    )
