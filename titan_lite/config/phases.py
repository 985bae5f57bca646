"""Phases of a run: where each begins, and what its recipe changes there.

    [[phases]]
    begin = 8000                       # steps before it, or "2B tokens"
    training.seq_len = 32768

    config = load_config("recipe.toml")
    [phase.begin for phase in phases_of(config)]      # [0, 8000]
    phase_at(config, 8000)                             # the recipe of steps 8001 on

A phase is a recipe of its own, with what the ones before it have changed, that resumes from the
checkpoint at its first step's beginning. Nothing else in a run knows of others.
"""

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from titan_lite.config.batch_sizes import number_of_tokens
from titan_lite.config.errors import ConfigError, in_toml, shown
from titan_lite.config.sections import Config, Phase, changes_of

KEY = "phases"


def phases_of(config: Config) -> list[Phase]:
    """Return the phases of a recipe; one for a recipe without."""
    return [each.phase for each in config.phases]


def phase_at(config: Config, step: int) -> Config:
    """Return the recipe that trains the step after this one, or the last one that there is."""
    begins = [phase.begin for phase in phases_of(config)]
    return config.phases[bisect.bisect_right(begins, step) - 1]


def describe_phase(config: Config) -> str:
    """Return "phase 2 of 3, steps 8,001 to 9,000: training.seq_len = 32768"."""
    phase = config.phase
    changes = ", ".join(
        f"{key} = {in_toml(value)}"
        for key, value in changes_of(config.phases, phase.number - 1).items()
    )
    return (
        f"phase {phase.number} of {len(config.phases)}, steps {phase.begin + 1:,} to"
        f" {phase.end:,}: {changes or 'as in the recipe'}"
    )


def tables_of_phases(phases: object, place: str) -> Sequence[Mapping[str, object]]:
    """Return the tables of `phases` in a recipe. Raises ConfigError. place: the recipe's path."""
    tables: list[Any] = phases if isinstance(phases, list) else [phases]
    for number, phase in enumerate(tables, 1):
        where = f"{place}: phases[{number}]"
        if not isinstance(phase, dict):
            raise ConfigError(
                f"{where} = {shown(phase)}: expected a table [[phases]] for each phase after the"
                " first"
            )
        if "begin" not in phase:
            raise ConfigError(f"{where} has no begin; use one such as begin = 8000")
        for name, value in phase.items():
            if name != "begin" and not isinstance(value, dict):
                raise ConfigError(
                    f"{where}.{name} = {shown(value)}: expected a key with its section, such as"
                    " training.seq_len = 8192"
                )
    return tables


def with_phases(first: Config, later: Sequence[Config], begins: Sequence[object]) -> Config:
    """Return the recipe of a run's first phase, which knows the others.

    later: the other phases. begins: where they begin, as in the recipe. Raises ConfigError.
    """
    ends: list[int] = []
    for number, (begin, config) in enumerate(zip(begins, (first, *later), strict=False), 1):
        steps_before = ends[-1] if ends else 0
        step = _step_of(begin, [first, *later][:number], ends, f"phases[{number}]")
        written = f"phases[{number}].begin = {shown(begin)}"
        if step <= steps_before:
            where = f"step {steps_before}, where the phase before it begins" if ends else "step 0"
            raise ConfigError(f"{written}: does not come after {where}; use a later one")
        if step >= config.training.steps:
            raise ConfigError(
                f"{written}: no step reaches it{_as_step(begin, step)}, since training.steps ="
                f" {config.training.steps}; use an earlier one, or more steps"
            )
        ends.append(step)
    ends.append(first.training.steps)
    configs = []
    for number, config in enumerate((first, *later), 1):
        begin = 0 if number == 1 else ends[number - 2]
        configs.append(config.in_phase(Phase(number, begin, ends[number - 1])))
    return configs[0].with_all_phases(configs)


def _as_step(begin: object, step: int) -> str:
    return "" if isinstance(begin, int) else f" (step {step})"


def _step_of(begin: object, before: Sequence[Config], ends: Sequence[int], place: str) -> int:
    """Return the number of steps before a phase.

    before: the phases before it, which end at `ends`, but for the last of them. Raises ConfigError.
    """
    if isinstance(begin, int) and not isinstance(begin, bool) and begin >= 0:
        return begin
    if not re.fullmatch(r"\d{1,15}(\.\d+)? ?[MBT]? ?tokens", str(begin)):
        raise ConfigError(
            f'{place}.begin = {shown(begin)}: expected a number of steps, or tokens such as "2B'
            ' tokens"'
        )
    tokens = number_of_tokens(str(begin))
    step = 0
    *earlier, phase = before
    for config, end in zip(earlier, ends, strict=True):
        tokens_of_phase = (end - step) * _tokens_of_step(config, place)
        if tokens <= tokens_of_phase:
            phase = config
            break
        tokens -= tokens_of_phase
        step = end
    return step + -(-tokens // _tokens_of_step(phase, place))  # rounded up


def _tokens_of_step(config: Config, place: str) -> int:
    sequences = config.training.global_batch_size
    if sequences == -1:
        raise ConfigError(
            f"{place}.begin in tokens needs training.global_batch_size, since the tokens of a step"
            " depend on the number of ranks; use one, or a number of steps"
        )
    return sequences * config.training.seq_len
