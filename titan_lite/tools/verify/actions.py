"""Check the stages of a pipeline, and the actions of every rank: no tensors.

    for what in wrong_stages(layout.pipeline, n_layers): ...
    for what in wrong_actions(order_of(config.parallelism, layout.pipeline), layout.pipeline):
        ...                                 # in words; none if the schedule is right

Each rank goes through its own list, as in a plan (tools/plan/timetable.py), and all must come to
their ends.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from titan_lite.distributed.pipeline import keep_modules
from titan_lite.distributed.pipeline_schedule import Order, PipelineSchedule, computations
from titan_lite.tools.plan.timetable import run_order
from titan_lite.tools.verify import specification


def wrong_stages(pipeline: PipelineSchedule, n_layers: int) -> Iterator[str]:
    """Yield what is wrong with the modules of the stages, and with what is left of the model on
    each.
    """
    modules = specification.modules(n_layers)
    of_stages = [fqn for stage in pipeline.modules for fqn in stage]
    if of_stages != modules:
        lost = [fqn for fqn in modules if fqn not in of_stages]
        unknown = [fqn for fqn in of_stages if fqn not in modules]
        how = "they are in another order, or twice"
        if lost:
            how = f"none has {', '.join(lost)}"
        elif unknown:
            how = f"there is no {', '.join(unknown)}"
        yield f"the stages do not have the modules of the model: {how}"
    for number, stage in enumerate(pipeline.modules):
        model = nn.Module()
        model.layers = nn.ModuleDict({str(layer): nn.Identity() for layer in range(n_layers)})
        for name in ("tok_embeddings", "norm", "output"):
            model.add_module(name, nn.Identity())
        keep_modules(model, stage)
        left = {fqn for fqn, module in model.named_modules() if isinstance(module, nn.Identity)}
        if more := sorted(left.difference(stage)):
            yield f"stage {number} has {', '.join(more)}, which are of others"
        if fewer := sorted(set(stage) - left):
            yield f"stage {number} lacks {', '.join(fewer)}"


def wrong_actions(order: Order, pipeline: PipelineSchedule) -> Iterator[str]:
    """Yield what is wrong with the actions of each rank: missing, doubled, of another rank's stage,
    or in an order in which ranks wait for ever.
    """
    for rank, actions in order.items():
        own = set(itertools.product(pipeline.stages_of(rank), range(pipeline.microbatches)))
        kinds: dict[tuple[int, int | None], list[str]] = defaultdict(list)
        for kind, stage, microbatch in computations(actions):
            kinds[stage, microbatch].append(kind)
        for stage, microbatch in kinds:
            if (stage, microbatch) not in own:
                yield (
                    f"pipeline rank {rank} has microbatch {microbatch} of stage {stage}, which is"
                    " not its own"
                )
        for stage, microbatch in sorted(own):
            done = "".join(sorted(kinds[stage, microbatch]))
            if done not in ("BF", "FIW"):
                yield (
                    f"pipeline rank {rank}: microbatch {microbatch} of stage {stage} has"
                    f" {done or 'nothing'}, not F and B, or F, I and W"
                )
    try:
        run_order(order, lambda kind, stage: 1.0)
    except ValueError as stuck:
        yield str(stuck)
