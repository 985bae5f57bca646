"""Train a recipe: check the environment, load the config, run Trainer(config).train().

    torchrun --nproc-per-node 8 -m titan_lite.train llama3_8b --training.steps 100
    python -m titan_lite.train debug_model             # one process, without torchrun

resilience/exit_code.py lists the exit codes. torchrun turns all but 0 into 1, and starts the ranks
again, so a run that is stopped by a signal exits with 0 under torchrun. ./run_train.sh exits with
the codes themselves.
"""

import gc
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_lite import progress, recipe, rules
from titan_lite.checkpoint.steps import SavedSteps
from titan_lite.config import Config, ConfigError, read_config
from titan_lite.config.errors import MachineError
from titan_lite.config.phases import phase_at
from titan_lite.distributed.endpoint import EndpointError
from titan_lite.environment import (
    check_environment,
    folder_of_group,
    group_number,
    number,
)
from titan_lite.logging import events, init_logging, logger, print_line
from titan_lite.metrics.start_times import StartTimes
from titan_lite.processes import large_imports
from titan_lite.resilience import TrainingError, exit_code, signals
from titan_lite.resilience.restarts import RepeatedFault, Restarts

if TYPE_CHECKING:
    import torch.distributed as dist


def main(arguments: list[str], hooks: Sequence[Any] = ()) -> int:
    """Run the command line, and return the exit code. hooks: as in Trainer."""
    if exit_code.has_ended():
        return exit_code.TRAINED  # torchrun started the ranks again, where no start can help
    try:
        if not arguments or {"--help", "-h", "--print-config"} & set(arguments):
            return recipe.main(arguments) if number("RANK", 0) == 0 else 0
        config, wrong = read_config(arguments[0], arguments[1:])
        code = train(config, hooks, wrong)
    except ConfigError as error:
        code = print_error(error, exit_code.WRONG_INPUT)
    except MachineError as error:
        code = print_error(error, exit_code.FAILED)
    return exit_code.record_and_translate(code)


def train(config: Config, hooks: Sequence[Any] = (), wrong: Sequence[str] = ()) -> int:
    """Train a recipe on this rank, and return the exit code.

    wrong: messages of `read_config`. Raises ConfigError.
    """
    start_times = StartTimes()
    start_times.begin("recipe")
    signals.listen()
    rank, world_size = check_environment()
    rules.check_recipe(config, world_size, wrong)  # before torch is imported
    group = group_number(config.fault_tolerance)
    has_groups = config.fault_tolerance.replica_groups > 1
    init_logging(
        rank,
        world_size,
        group=group if has_groups else None,
        all_warnings=config.metrics.show_all_warnings,
    )
    events.keep(Path(config.job.dump_folder), all_events=rank == 0 and not has_groups)
    try:
        Restarts(folder_of_group(Path(config.job.dump_folder), group)).check()
    except RepeatedFault as error:
        return print_error(error, exit_code.REPEATED)
    logger.info("starting on 1 rank" if world_size == 1 else f"starting on {world_size} ranks")
    start_times.begin("imports")
    with large_imports():
        import titan_lite.trainer  # noqa: F401  # most of a start's imports

    try:
        with events.failures():
            trained = train_phases(config, rank, hooks, start_times)
    except (TrainingError, EndpointError) as error:
        return print_error(error, exit_code.FAILED)
    return exit_code.TRAINED if trained else exit_code.STOPPED


def train_phases(config: Config, rank: int, hooks: Sequence[Any], start_times: StartTimes) -> bool:
    """Train all phases from the newest checkpoint on; return False if a signal has asked to stop.

    Raises TrainingError, EndpointError and ConfigError.
    """
    import torch.distributed as dist

    from titan_lite.distributed.process_group import connect_store

    if len(config.phases) == 1:
        step = train_phase(config, hooks, start_times)
        close_process_group()
        return step is not None
    store = connect_store(config.comm.init_timeout_seconds + progress.PATIENCE)
    phase = phase_to_resume(config, rank, store)
    for start in itertools.count(1):
        own_store = dist.PrefixStore(f"start-{start}", store)
        step = train_phase(phase, hooks, start_times, own_store)
        close_process_group()
        if step is None or step >= config.training.steps:
            break
        signals.end_start()  # which would keep the trainer, and its memory
        free_memory()
        start_times = StartTimes()
        phase = phase_at(config, step)
    return step is not None


def train_phase(
    config: Config, hooks: Sequence[Any], start_times: StartTimes, store: "dist.Store | None" = None
) -> int | None:
    """Train a phase; return the step that the run resumes from, None if a signal has asked to stop.

    That is the last step of the phase; or one of an earlier phase, where newer checkpoints are
    damaged. store: as in Trainer. Raises TrainingError, EndpointError and ConfigError.
    """
    from titan_lite.trainer import EarlierPhaseError, Trainer

    try:
        trainer = Trainer(config, hooks=hooks, start_times=start_times, store=store)
        trained = trainer.train()
    except EarlierPhaseError as earlier:
        return earlier.step
    if not trained:
        return None
    end = config.phase.end
    if end < config.training.steps:
        if trainer.checkpointer.newest_saved != end:
            why = f"step {end} was not saved, from which the next phase begins"
            raise TrainingError(why, everywhere=True)
        trainer.checkpointer.close()
    return end


def phase_to_resume(config: Config, rank: int, store: "dist.Store") -> Config:
    """Return the recipe of the phase in which the checkpoint lies that a start resumes from, as the
    first rank finds it. store: of all ranks. Raises ConfigError on the first rank.
    """
    key = "step to resume from"
    if rank == 0:
        saved = SavedSteps(config.checkpoint, Path(config.job.dump_folder))
        store.set(key, str(saved.step_to_load() or 0))
    return phase_at(config, int(store.get(key)))


def free_memory() -> None:
    """Free what the last phase has had on the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_error(error: Exception, code: int) -> int:
    """Print the error in one line, and return the exit code.

    If all ranks have the same error, rank 0 prints it, and before the process group is up, one rank
    of each node.
    """
    prefix = ""
    if process_group_is_up():
        everywhere = getattr(error, "everywhere", False)
        prefix = "" if everywhere else f"[rank {os.environ['RANK']}] "
        prints = not everywhere or os.environ["RANK"] == "0"
    else:  # with a wrong environment the rank is unknown
        prints = exit_code.is_first_to_record(code) or str(error).startswith("environment:")
    if prints:
        print_line(f"error: {prefix}{error}")
    return code


def process_group_is_up() -> bool:
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def close_process_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


if __name__ == "__main__":
    exit_code.end_with(lambda: main(sys.argv[1:]))
