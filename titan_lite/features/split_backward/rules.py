"""Rules of schedules that split backward."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.pipeline_schedule import runs_halves
from titan_lite.rules.mistakes import Mistake, rule_of_layout
from titan_lite.rules.parallelism import or_interleaved

KEY = "parallelism.pipeline_parallel_schedule"


@rule_of_layout
def dual_pipe_has_its_microbatches(config: Config, layout: Layout) -> Iterator[Mistake]:
    name = config.parallelism.pipeline_parallel_schedule
    stages = 2 * layout.degrees["pp"]
    microbatches = layout.pipeline.microbatches
    if layout.degrees["pp"] > 1 and name == "DualPipeV" and microbatches < stages:
        batch = (
            f"training.local_batch_size / pipeline_parallel_microbatch_size = {microbatches}"
            " microbatches"
        )
        why = f"needs as many microbatches as stages, {stages}, but {batch}"
        instead = f"training.local_batch_size = {stages * layout.microbatch_size}"
        instead += ', or pipeline_parallel_schedule = "ZBVZeroBubble"'
        yield Mistake(KEY, name, why, instead)


@rule_of_layout
def zero_bubble_cuts_a_backward_that_can_be_cut(
    config: Config, layout: Layout
) -> Iterator[Mistake]:
    name = config.parallelism.pipeline_parallel_schedule
    if not runs_halves(config.parallelism) or config.compile.enable:
        return  # a compiled backward has graphs of the halves
    if config.activation_checkpoint.mode != "none":
        why = (
            "cuts backward in two, and in eager mode each half would recompute every block, the"
            " second one once for each weight"
        )
        instead = 'compile.enable = true, or activation_checkpoint.mode = "none"'
        yield Mistake(KEY, name, why, instead + or_interleaved(layout))
