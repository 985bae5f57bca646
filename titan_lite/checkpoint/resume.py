"""Consequences for a run that goes on from a checkpoint, under a recipe that may have changed since.

    differences = compare(state, described)       # state.json of the step, and what this run says of itself (check.py)
    refuse(differences, "step-50", config.checkpoint)           # ConfigError for what cannot work
    for line in explain(differences, state, described): ...

    the learning rate changes: of step 51 it is 1.0e-03, where it would have been 2.0e-03
      optimizer.lr = 0.001, was 0.002
    numbers change by rounding
      ranks along dp_shard: 4, was 2

A step's state.json has the whole resolved recipe, and under "run" what a recipe does not say: the model's shape, hashes of the
tokenizer and of the documents, the ranks, versions. Two recipes are compared by these where they decide: another
`data.path` with the same documents is no other data. The consequence of a key stands in its row (config/row.py).
"""

import json
import subprocess
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from titan_lite.config import DROPPED, KEYS, SECTIONS, Checkpoint, ConfigError, LRScheduler, batch_ramp, without_need
from titan_lite.config.row import CANNOT, FRESH, LEARNING, NOTHING, PLACE, ROUNDING, WORST_FIRST
from titan_lite.data.dataset import EPOCH
from titan_lite.lr_scheduler import lr_factor

ACCEPTED_BY = {  # what is refused unless the recipe says so, and what it then does
    PLACE: ("restart_data", "begins the recipe's data at its first document"),
    FRESH: ("accept_model_only", "starts with moments of zero"),
}

NEEDED = {"recipe", "run", "tensors", "step", "tokens_seen", "validation_due", "loader"}  # of state.json
NEEDED |= {"skipped_steps", "skipped_in_a_row", "spikes"}

FACTS = {  # what is compared beside the recipe: how it is called, and what its change does
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
    """One thing that is not as it was when the step was saved."""

    consequence: str
    text: str


def compare(state: Mapping[str, Any], described: Mapping[str, Any]) -> list[Difference]:
    """The differences between a step's state.json and this run: keys of the recipe, then FACTS. Raises ConfigError."""
    lacking = sorted(NEEDED - state.keys()) or sorted({"data", "optimizer", "lr_scheduler", "training"} - state["recipe"].keys())
    if lacking or "total_steps" not in state["run"]:
        raise ConfigError(
            f"checkpoint.folder: state.json of the step does not say how it goes on ({', '.join(lacking) or 'run.total_steps'}); "
            "a step that a run of titan_lite saved, or another job.dump_folder, would work"
        )
    now = json.loads(json.dumps(described))  # tuples become lists, as in the file
    known = [fact for fact in FACTS if state["run"].get(fact) and now["run"].get(fact)]  # of others one of both says nothing
    facts = [(fact, *change) for fact in known for change in _changes(state["run"][fact], now["run"][fact])]
    facts = [change for change in facts if change[:2] != ("model", "max_seq_len")]  # a limit, and of no parameter
    changed = {fact for fact, *_ in facts}
    idle = without_need(state["recipe"], resuming=True).keys() & without_need(now["recipe"], resuming=True).keys()
    differences = []
    for key, was, new in _changes(state["recipe"], now["recipe"]):
        if key in KEYS:
            was = json.loads(json.dumps(KEYS[key].default)) if was is None else was
            if was != new:
                consequence = NOTHING if key in idle else consequence_of(key, changed)
                differences.append(Difference(consequence, f"{key} = {json.dumps(new)}, was {json.dumps(was):.500}"))
        elif key not in DROPPED or was != DROPPED[key][0]:
            consequence = SECTIONS[key.partition(".")[0]].resume if key in DROPPED else NOTHING
            differences.append(Difference(consequence, f"{key} was {json.dumps(was):.500}, and is no key of this version"))
    for fact, path, was, new in facts:
        words, consequence = FACTS[fact]
        differences.append(Difference(consequence, f"{words.format(path)}: {_short(new)}, was {_short(was)}"))
    if "optimizer" not in state["tensors"]:
        differences.append(Difference(FRESH, "the step has the model alone"))
    return differences


def consequence_of(key: str, changed_facts: Set[str] = frozenset()) -> str:
    """The consequence of a change of this key where these facts have changed as well."""
    row = KEYS[key].metadata
    return FACTS[row["fact"]][1] if row["fact"] in changed_facts else row["resume"] or SECTIONS[key.partition(".")[0]].resume


def refuse(differences: Sequence[Difference], where: Path | str, config: Checkpoint, *, done: bool = False) -> None:
    """Raises ConfigError for the differences that cannot work, or that the recipe does not accept.

    done: the step is the run's last, after which no optimizer is asked for.
    """
    for consequence in (CANNOT, *ACCEPTED_BY):
        texts = [difference.text for difference in differences if difference.consequence == consequence]
        key, effect = ACCEPTED_BY.get(consequence, ("", ""))
        if not texts or (key and getattr(config, key)) or (done and consequence == FRESH):
            continue
        if len(texts) > 3:
            texts[3:] = [f"and {len(texts) - 3} more, which --checkpoint.explain lists"]
        works = "what it was" if consequence != FRESH else "a step that has the optimizer's state"
        other = f"checkpoint.{key} = true, which {effect}," if key else "another job.dump_folder"
        raise ConfigError(f"{where}: {consequence}: {'; '.join(texts)}; {works}, or {other} would work")


def restarts_data(differences: Sequence[Difference]) -> bool:
    """True: the recipe's data begins anew, where checkpoint.restart_data accepts that.

    Only at the first resume with other data: the steps saved since then have its position, from which later resumes go on.
    """
    return any(difference.consequence == PLACE for difference in differences)


def explain(differences: Sequence[Difference], state: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """The differences in lines, those with the worst consequence first."""
    lines = []
    for consequence in WORST_FIRST:
        texts = [difference.text for difference in differences if difference.consequence == consequence]
        more = _next_step(state, described) if texts and consequence == LEARNING else ""
        if texts and consequence in ACCEPTED_BY:
            key, effect = ACCEPTED_BY[consequence]
            more = f"; checkpoint.{key} = true {effect}"
        lines += [f"{consequence}{more}", *(f"  {text}" for text in texts)] if texts else []
    return lines or ["nothing differs from the run that saved it"]


def position(state: Mapping[str, Any]) -> str:
    """The place of a step in its data, in words."""
    rows = list(state["loader"]["rows"].values())
    places = []
    for source in range(1, len(rows[0])):
        ordinals = [row[source][0] for row in rows]
        name, one = ("documents", 1) if max(ordinals) < EPOCH else ("epochs", EPOCH)
        of = f" of source {source}" if len(rows[0]) > 2 else ""
        places.append(f"{name} {min(ordinals) // one} to {max(ordinals) // one}{of}")
    return (
        f"step {state['step']}, {state['tokens_seen']:,} tokens seen: {sum(row[0] for row in rows):,} sequences of {len(rows)} "
        f"streams, which stand in {', '.join(places)}"
    )


@cache
def git_revision() -> str:
    """Commit of the checkout that this package runs from, "+changes" where files were changed since; empty: no checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # or it is installed within somebody else's checkout
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""


def _changes(was: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted path within, value before, value now) of all leaves that differ; None: not there."""
    if isinstance(was, dict | None) and isinstance(new, dict | None):
        was, new = was or {}, new or {}
        inside = [(f"{path}.{name}" if path else name, was.get(name), new.get(name)) for name in dict.fromkeys((*new, *was))]
        return [change for name, before, after in inside for change in _changes(before, after, name)]
    return [] if was == new else [(path, was, new)]


def _next_step(state: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """The next step's learning rate and sequences, and those that it would have had; empty where they are the same."""
    step, rates, sizes = state["step"] + 1, [], []
    for which in (state, described):
        ramp = batch_ramp(which["recipe"]["training"].get("global_batch_ramp", ()))
        sizes.append(next((size for size, last in ramp if step <= last), which["run"].get("rows")))
        recipe = which["recipe"]["lr_scheduler"]
        scheduler = LRScheduler(**{field.name: recipe[field.name] for field in fields(LRScheduler) if field.name in recipe})
        peak = which["recipe"]["optimizer"].get("lr", KEYS["optimizer.lr"].default)
        rates.append(peak * lr_factor(step, scheduler, which["run"]["total_steps"]))
    told = []
    if rates[0] != rates[1]:
        told.append(f"the learning rate of step {step} is {rates[1]:.2e}, where it would have been {rates[0]:.2e}")
    if sizes[0] != sizes[1] and None not in sizes:
        told.append(f"step {step} has {sizes[1]:,} sequences, where it would have had {sizes[0]:,}, from the next one on")
    return f": {'; '.join(told)}" if told else ""


def _short(value: Any) -> str:
    """A hash's beginning is enough to tell it by."""
    return value[:12] if isinstance(value, str) and len(value) >= 64 else f"{json.dumps(value):.500}"
