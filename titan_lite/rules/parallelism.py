"""Rules of [parallelism]: degrees that divide the model, pipeline schedules, FSDP, compression."""

from collections.abc import Iterator

from titan_lite.config import KEYS, Config
from titan_lite.config.errors import alternatives, nearest_multiples
from titan_lite.config.schedules import SCHEDULES
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.pipeline_schedule import stages_per_rank
from titan_lite.models.shapes import module_fqns, parameter_shapes, shape_words
from titan_lite.rules.mistakes import Mistake, rule_of_keys, rule_of_layout
from titan_lite.sharding import chunk_range


@rule_of_layout
def every_tensor_parallel_rank_has_a_part(config: Config, layout: Layout) -> Iterator[Mistake]:
    tp = layout.degrees["tp"]
    # these are split unevenly where tp does not divide them
    split = {
        "hidden units": layout.model.hidden_dim,
        "tokens of the vocabulary": layout.model.vocab_size,
    }
    for what, count in split.items():
        if not chunk_range(count, tp, index=tp - 1):
            yield Mistake(
                key="parallelism.tensor_parallel_degree",
                value=tp,
                why=f"leaves a rank without any of the {count} {what}",
                instead="a lower degree",
            )


@rule_of_layout
def every_pipeline_rank_updates_a_parameter(config: Config, layout: Layout) -> Iterator[Mistake]:
    points = config.parallelism.pipeline_parallel_split_points
    degree = layout.degrees["pp"]
    if layout.copies_table and not all(layout.shapes_on(rank) for rank in range(degree)):
        yield Mistake(
            key="parallelism.pipeline_parallel_split_points",
            value=points,
            why=(
                "leaves a rank with the output alone, which is a copy of the embedding: the first"
                " stage updates tied weights"
            ),
            instead="norm or a layer as the last point",
        )


@rule_of_layout
def schedule_has_its_stages_per_rank(config: Config, layout: Layout) -> Iterator[Mistake]:
    if layout.degrees["pp"] == 1:
        return
    name = config.parallelism.pipeline_parallel_schedule
    schedule = SCHEDULES[name]
    usual = schedule.stages_per_rank
    per_rank = stages_per_rank(config.parallelism)
    if schedule.goes_round and per_rank < 2:
        why = f'is not for pipeline_parallel_schedule = "{name}", which has {usual} or more'
        instead = f'-1 or {usual}, or pipeline_parallel_schedule = "GPipe"'
    elif not schedule.goes_round and per_rank != usual:
        why = f'is not for pipeline_parallel_schedule = "{name}", which has {usual}'
        instead = f"-1 or {usual}"
        if per_rank > 1:
            instead += or_interleaved(layout)
    else:
        return
    yield Mistake("parallelism.pipeline_parallel_stages_per_rank", per_rank, why, instead)


@rule_of_layout
def schedule_has_its_microbatches(config: Config, layout: Layout) -> Iterator[Mistake]:
    degree = layout.degrees["pp"]
    if degree == 1:
        return
    key = "parallelism.pipeline_parallel_schedule"
    name = config.parallelism.pipeline_parallel_schedule
    microbatches = layout.pipeline.microbatches
    sequences = layout.microbatch_size
    batch = (
        f"training.local_batch_size / pipeline_parallel_microbatch_size = {microbatches}"
        " microbatches"
    )
    if name == "1F1B" and microbatches < degree:
        why = f"needs as many microbatches as stages, {degree}, but {batch}"
        instead = f"training.local_batch_size = {degree * sequences}"
        instead += ', or pipeline_parallel_schedule = "GPipe"'
        yield Mistake(key, name, why, instead)
    rounds = _rounds(layout)
    if SCHEDULES[name].goes_round and microbatches % rounds:
        why = f"with {degree} ranks goes in {rounds} rounds, which do not divide {batch}"
        fitting = nearest_multiples(layout.local_batch_size, degree * sequences)
        yield Mistake(key, name, why, f"training.local_batch_size = {alternatives(fitting)}")


def _rounds(layout: Layout) -> int:
    """Return the rounds of an interleaved schedule, which have equally many microbatches."""
    return max(1, layout.pipeline.microbatches // layout.degrees["pp"])


def or_interleaved(layout: Layout) -> str:
    """Return the end of a message that offers "Interleaved1F1B", where it has its microbatches."""
    if layout.pipeline.microbatches % _rounds(layout):
        return ""
    return ', or pipeline_parallel_schedule = "Interleaved1F1B"'


@rule_of_keys
def gathered_weights_are_kept_or_freed(config: Config) -> Iterator[Mistake]:
    key = "parallelism.fsdp_keep_gathered"
    kept = config.parallelism.fsdp_keep_gathered
    # the default is in every saved recipe, and is no request
    is_request = kept not in ((), KEYS[key].default)
    if is_request and config.parallelism.fsdp_reshard_after_forward == "always":
        yield Mistake(
            key=key,
            value=kept,
            why='is not for parallelism.fsdp_reshard_after_forward = "always", which keeps none',
            instead='fsdp_reshard_after_forward = "default", or fsdp_keep_gathered = []',
        )


@rule_of_layout
def resharded_weights_are_gathered_again(config: Config, layout: Layout) -> Iterator[Mistake]:
    if layout.gathers_once and config.parallelism.fsdp_reshard_after_forward == "always":
        yield Mistake(
            key="parallelism.fsdp_reshard_after_forward",
            value="always",
            why=(
                'has no effect with fsdp_communication = "step", which keeps weights gathered for a'
                f" step of {layout.microbatches} microbatches"
            ),
            instead='fsdp_communication = "microbatch"',
        )


@rule_of_layout
def cudnn_attends_from_whole_sequences(config: Config, layout: Layout) -> Iterator[Mistake]:
    degree = layout.degrees["cp"]
    if config.training.attention_kernel == "cudnn" and degree > 1:
        yield Mistake(
            key="training.attention_kernel",
            value="cudnn",
            why=(
                f"is not for parallelism.context_parallel_degree = {degree}: its causal mask is one"
                " of whole sequences"
            ),
            instead='"auto" or "FA2"',
        )


@rule_of_layout
def kept_modules_are_in_the_model(config: Config, layout: Layout) -> Iterator[Mistake]:
    kept = config.parallelism.fsdp_keep_gathered
    stage_modules = module_fqns(layout.model.n_layers)
    for name in kept:
        if name in stage_modules or parameter_shapes(layout.model, [name]):
            continue
        yield Mistake(
            key="parallelism.fsdp_keep_gathered",
            value=kept,
            why=f'has "{name}", which has no parameter in flavor {shape_words(config.model)}',
            instead=(
                f"tok_embeddings, layers.0 to layers.{layout.model.n_layers - 1}, norm, output or"
                " modules within them"
            ),
        )
