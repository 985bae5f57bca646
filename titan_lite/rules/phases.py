"""Rules of [[phases]]: what a phase cannot change, since a resume with it is refused."""

from collections.abc import Iterator

from titan_lite.config import KEYS, Config, changes_of
from titan_lite.config.effects import ACCEPTED_BY, effect_of
from titan_lite.config.errors import shown
from titan_lite.rules.mistakes import Mistake, rule_of_keys

# of the whole run
OF_RUN = (
    "job.",
    "model.",
    "training.steps",
    "checkpoint.enable",
    "checkpoint.folder",
    "checkpoint.load_step",
    "checkpoint.branch_from",
    "checkpoint.initial_load_path",
    "fault_tolerance.",
)


@rule_of_keys
def a_phase_changes_what_a_resume_may_change(config: Config) -> Iterator[Mistake]:
    number = config.phase.number
    if number == 1:
        return
    before = config.phases[number - 2]
    for key, value in changes_of(config.phases, number - 1).items():
        written = f"{config.origin(key)}: {key} = {shown(value)}"
        if key.startswith(OF_RUN):
            line = f"{written}: is the same in all phases of a run; set it before [[phases]]"
            yield Mistake(key, line=line)
            continue
        effect = effect_of(KEYS[key], before.model_dump(), config.model_dump())
        accepted, _ = ACCEPTED_BY.get(effect, ("", ""))
        if accepted and not getattr(config.checkpoint, accepted):
            yield Mistake(
                key,
                line=f"{written}: {effect.value} in a phase that changes it; leave it out, or use"
                f" checkpoint.{accepted} = true there",
            )


@rule_of_keys
def phases_have_a_checkpoint_between_them(config: Config) -> Iterator[Mistake]:
    if len(config.phases) == 1 or config.phase.number > 1:
        return
    if not config.checkpoint.enable:
        why = "has no checkpoint at the boundary of two phases"
        yield Mistake("checkpoint.enable", False, why, "true, or no [[phases]]")
    if config.fault_tolerance.replica_groups > 1:
        why = "cannot be with [[phases]]"
        groups = config.fault_tolerance.replica_groups
        instead = "1, or a start by hand for each phase"
        yield Mistake("fault_tolerance.replica_groups", groups, why, instead)


@rule_of_keys
def a_decay_in_tokens_has_the_same_tokens_a_step_in_all_phases(config: Config) -> Iterator[Mistake]:
    if len(config.phases) == 1:
        return
    trained = [phase.training for phase in config.phases]
    batches = {(training.seq_len, training.global_batch_size) for training in trained}
    # -1: as many sequences as the ranks of a phase have
    if len(batches) == 1 and config.training.global_batch_size != -1:
        return
    for name in ("decay_begin", "decay_length"):
        value = getattr(config.lr_scheduler, name)
        if str(value).endswith("tokens"):
            key = f"lr_scheduler.{name}"
            why = "is counted with one number of tokens a step, and phases may have several"
            yield Mistake(key, value, why, 'a number of steps, or a share such as "20%"')
