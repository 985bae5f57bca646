"""Rules across keys of a recipe and its layout: what cannot be together.

    check_keys(config)             # rules that need no number of ranks
    layout = Layout.from_config(config, world_size=8)
    check(config, layout)          # all of them; raises one ConfigError with all mistakes

A rule is a function that yields a Mistake for each key with a wrong value. A decorator adds it to
those that are applied: `@rule_of_keys` needs the recipe alone, `@rule` the layout too.
`@rule_with_torch` imports torch where its keys are used, so these come last, and most mistakes are
told in a fraction of a second. To add one, write a function such as

    @rule_of_keys
    def key_needs_other_key(config: Config) -> Iterator[Mistake]:
        if config.section.key and not config.section.other:
            yield Mistake("section.key", config.section.key, "needs section.other", "...")

What depends on the machine is in machine_rules.py, in the same form. A field's own type and bounds
are in config/sections.py. Nothing else refuses a recipe.
"""

import dataclasses
import functools
import importlib.util
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lite.config import (
    KEYS,
    Config,
    ConfigError,
    Corpus,
    Data,
    Model,
    batch_ramp,
    gradient_accumulation_steps,
)
from titan_lite.config.errors import in_toml, shown
from titan_lite.config.families import FAMILIES, ModelConfig, Shape
from titan_lite.config.from_weights import FLAVOR as FROM_WEIGHTS
from titan_lite.config.from_weights import (
    TOKENIZER_FILES,
    ModelOfWeights,
    keys_of_shape,
    read_model,
    steps_in,
)
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.pipeline_schedule import (
    ROUND,
    STAGES_PER_RANK,
    runs_halves,
    stages_per_rank,
)
from titan_lite.models.fqns import is_filtered
from titan_lite.models.loss_chunk import MAX_CHUNKS
from titan_lite.models.shapes import (
    derives_head_dim,
    module_fqns,
    parameter_shapes,
    shape_of,
    shape_words,
)
from titan_lite.optim.state import is_matrix
from titan_lite.sharding import chunk_range, chunk_size

if TYPE_CHECKING:
    from titan_lite.data.tokenizer import Tokenizer

SAMPLE = (
    "The 7 quick foxes' den\n\tdef f(x): return x ** 2  # naïve, 汉字, привет"  # for tokenizers
)


@dataclass(frozen=True)
class Mistake:
    """A key whose value cannot be."""

    key: str  # "section.name"
    value: object
    why: str  # what is wrong with it: the words after "section.name = value"
    instead: str  # what to use

    def message(self, config: Config) -> str:
        """Return the line that tells of it, with the file or "command line" that has the key."""
        key = self.key.partition("[")[0]
        text = f"{self.key} = {shown(self.value)} {self.why}; use {self.instead}"
        by_a_program = not config.was_set(key) and self.value != KEYS[key].default
        if by_a_program:  # such as the layouts of verify and of plan --search
            return text
        return f"{config.origin(key)}: {text}"


RuleOfKeys = Callable[[Config], Iterator[Mistake]]
Rule = Callable[[Config, Layout], Iterator[Mistake]]
RULES_OF_KEYS: list[RuleOfKeys] = []
RULES: list[Rule] = []
RULES_WITH_TORCH: list[Rule] = []


def rule_of_keys(function: RuleOfKeys) -> RuleOfKeys:
    RULES_OF_KEYS.append(function)
    return function


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def rule_with_torch(function: Rule) -> Rule:
    RULES_WITH_TORCH.append(function)
    return function


def check_keys(config: Config) -> None:
    """Apply the rules that need no number of ranks. Raises one ConfigError with all mistakes."""
    raise_mistakes(config, _mistakes_in_keys(config))


def check(config: Config, layout: Layout) -> None:
    """Apply every rule. Raises one ConfigError with all mistakes.

    Rules with torch are applied to what the others admit.
    """
    of_layout = [mistake for rule in RULES for mistake in rule(config, layout)]
    raise_mistakes(config, [*_mistakes_in_keys(config), *of_layout])
    raise_mistakes(
        config, [mistake for rule in RULES_WITH_TORCH for mistake in rule(config, layout)]
    )


def _mistakes_in_keys(config: Config) -> list[Mistake]:
    return [mistake for rule in RULES_OF_KEYS for mistake in rule(config)]


def raise_mistakes(config: Config, mistakes: Iterable[Mistake]) -> None:
    """Raise one ConfigError with all mistakes, if there are any."""
    messages = dict.fromkeys(mistake.message(config) for mistake in mistakes)  # each once
    if messages:
        raise ConfigError(*messages)


def alternatives(values: Iterable[object]) -> str:
    """Return [1, 2, 4] as "1 or 2 or 4"."""
    return " or ".join(str(value) for value in values)


def nearest_multiples(value: int, factor: int) -> list[int]:
    """Return the multiples of `factor` that are next to `value`."""
    below = max(factor, value // factor * factor)
    above = math.ceil(value / factor) * factor
    return sorted({below, above})


def nearest_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` next to `value`, which is none and above 1."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = max(divisor for divisor in divisors if divisor < value)
    above = [divisor for divisor in divisors if divisor > value]
    return [below, *above[:1]]


# Keys alone


@rule_of_keys
def a_step_is_loaded_from_checkpoints(config: Config) -> Iterator[Mistake]:
    checkpoint = config.checkpoint
    if checkpoint.enable:
        return
    why = "loads nothing from checkpoints that are off"
    if checkpoint.load_step != -1:
        yield Mistake("checkpoint.load_step", checkpoint.load_step, why, "checkpoint.enable = true")
    if checkpoint.must_resume:
        yield Mistake("checkpoint.must_resume", True, why, "checkpoint.enable = true")


@rule_of_keys
def async_tensor_parallelism_is_done_by_inductor(config: Config) -> Iterator[Mistake]:
    key = "parallelism.enable_async_tensor_parallel"
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if config.parallelism.tensor_parallel_degree == 1:
        yield Mistake(key, True, "has no collective to overlap", "tensor_parallel_degree = 2")
    if not config.compile.compiles("model"):
        why = "is done by the compiler, and the model is not compiled"
        instead = 'compile.enable = true and compile.components = ["model", "loss"]'
        yield Mistake(key, True, why, instead)
    elif config.compile.backend != "inductor":
        yield Mistake(key, True, "is done by Inductor", 'compile.backend = "inductor"')


@rule_of_keys
def lr_schedule_is_as_long_as_the_run(config: Config) -> Iterator[Mistake]:
    schedule = config.lr_scheduler
    steps = config.training.steps
    if schedule.total_steps == -1:
        return
    if schedule.total_steps < schedule.warmup_steps:
        yield Mistake(
            key="lr_scheduler.warmup_steps",
            value=schedule.warmup_steps,
            why=f"is longer than lr_scheduler.total_steps = {schedule.total_steps}",
            instead=f"warmup_steps = {max(1, schedule.total_steps // 10)}",
        )
    if schedule.total_steps < steps:
        yield Mistake(
            key="lr_scheduler.total_steps",
            value=schedule.total_steps,
            why=f"ends before training.steps = {steps}",
            instead="-1 or at least that many",
        )


@rule_of_keys
def there_is_a_tokenizer(config: Config) -> Iterator[Mistake]:
    path = config.model.tokenizer_path
    weights = config.checkpoint.initial_load_path
    if not path:
        why = "names no file"
        if weights and Path(weights).is_dir():  # whose tokenizer would stand for the empty path
            names = " nor ".join(TOKENIZER_FILES[:2])
            why += f", and {weights} (checkpoint.initial_load_path) has neither {names}"
        instead = 'a tokenizer file, such as "../assets/tokenizer/debug.model"'
        yield Mistake("model.tokenizer_path", path, why, instead)


@rule_of_keys
def initial_weights_are_of_this_model(config: Config) -> Iterator[Mistake]:
    weights = _initial_weights(config)
    if weights is None:
        return
    model = config.model
    theirs = keys_of_shape(dataclasses.asdict(shape_of(Model().replace(flavor="", **weights.keys))))
    ours = keys_of_shape(dataclasses.asdict(shape_of(model)))
    differing = [
        name
        for name, value in theirs.items()
        if ours.get(name, value) != value and name != "max_seq_len"  # a limit
    ]
    set_here = [
        name
        for name in differing
        if (
            config.was_set("model.name")
            if name == "name"  # whose default is a family
            else getattr(model, name) != KEYS[f"model.{name}"].default
        )
    ]
    for name in set_here:
        yield Mistake(
            key=f"model.{name}",
            value=ours[name],
            why=(
                f"is not that of checkpoint.initial_load_path: {weights.file} has"
                f" {in_toml(theirs[name])}"
            ),
            instead=f"{name} = {in_toml(theirs[name])}, or remove it",
        )
    of_flavor = [name for name in differing if name not in set_here]
    if of_flavor:
        words = ", ".join(
            f"{name} = {in_toml(ours[name])} (not {in_toml(theirs[name])})" for name in of_flavor
        )
        yield Mistake(
            key="model.flavor",
            value=model.flavor,
            why=f"is not that of checkpoint.initial_load_path ({weights.file}): {words}",
            instead=f'"{FROM_WEIGHTS}"',
        )


@rule_of_keys
def rotary_scaling_has_a_factor_and_two_bounds(config: Config) -> Iterator[Mistake]:
    model = config.model
    scaling = shape_of(model).rope_scaling
    others = ("low_freq_factor", "high_freq_factor", "original_max_seq_len")
    idle = [f"rope_scaling_{name}" for name in others if getattr(model, f"rope_scaling_{name}")]
    if scaling is None and idle:
        yield Mistake(
            key="model.rope_scaling_factor",
            value=model.rope_scaling_factor,
            why=f"leaves the rotary frequencies as they are, so {', '.join(idle)} has no effect",
            instead=f"a factor above 1, or remove {' and '.join(idle)}",
        )
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Mistake(
            key="model.rope_scaling_high_freq_factor",
            value=scaling.high_freq_factor,
            why=f"is not above rope_scaling_low_freq_factor = {scaling.low_freq_factor}",
            instead=f"at least {2 * scaling.low_freq_factor}",
        )


def _initial_weights(config: Config) -> ModelOfWeights | None:
    """Return the model of the weights that a run starts with; None if it goes on from a step of its
    own, or from torchtitan's, whose tensors are compared when they are opened. Raises ConfigError.
    """
    checkpoint = config.checkpoint
    own_steps = Path(config.job.dump_folder, checkpoint.folder)
    if not checkpoint.initial_load_path or (checkpoint.enable and steps_in(own_steps)):
        return None
    try:
        return read_model(checkpoint.initial_load_path, config.model.name)
    except ConfigError as error:
        raise ConfigError(f"{config.origin('checkpoint.initial_load_path')}: {error}") from None


# Files that a run writes over, or appends to, in its folder and in the folder of its steps
WRITTEN = (
    "config.toml",
    "*.jsonl",
    "compile.json",
    "restarts.json*",
    "lock",
    "loss.png",
    "timeline.*",
    "wandb_id",
)


@rule
def no_file_of_the_run_is_a_link_out_of_its_folder(
    config: Config, layout: Layout
) -> Iterator[Mistake]:
    """The run would write into a file that is not its own. A folder may be a link, as to a disk."""
    run_folder = Path(config.job.dump_folder)
    steps = run_folder / config.checkpoint.folder
    for folder in dict.fromkeys((run_folder, steps)):
        for path in files_written(folder):
            if path.is_symlink() and not path.is_dir() and not _is_within(path, run_folder, steps):
                yield Mistake(
                    key="job.dump_folder",
                    value=config.job.dump_folder,
                    why=f"has the link {path} to {os.readlink(path)}, which the run would write to",
                    instead="a folder without it, or remove the link",
                )


def files_written(folder: Path) -> list[Path]:
    """Return the files of the folder that a run would write over, or append to."""
    return sorted(path for pattern in WRITTEN for path in folder.glob(pattern))


def _is_within(path: Path, *folders: Path) -> bool:
    """Return True if what a path leads to lies in one of the folders. A loop of links does not."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return False
    return any(folder.resolve() in target.parents for folder in folders)


@rule_of_keys
def there_is_something_to_compile(config: Config) -> Iterator[Mistake]:
    compile = config.compile
    if not compile.enable:
        return
    if not compile.components:
        yield Mistake(
            key="compile.components",
            value=compile.components,
            why="leaves nothing to compile, but compile.enable = true",
            instead='components = ["model", "loss"], or compile.enable = false',
        )
    if compile.bucketing == "listed" and not compile.buckets:
        yield Mistake(
            key="compile.bucketing",
            value=compile.bucketing,
            why="needs compile.buckets",
            instead=(
                'buckets = ["tok_embeddings", "layers.0 layers.1"], or bucketing = "block", which'
                " needs none"
            ),
        )
    if compile.bucketing == "auto" and not compile.reordering:
        yield Mistake(
            key="compile.reordering",
            value=compile.reordering,
            why='is not for compile.bucketing = "auto", which orders what it buckets',
            instead='reordering = true or bucketing = "block"',
        )


@rule_of_keys
def activation_checkpointing_has_an_option(config: Config) -> Iterator[Mistake]:
    option = config.activation_checkpoint.selective_ac_option
    is_number = option.isascii() and option.isdigit() and int(option) > 0
    if option not in ("op", "op/2") and not is_number:
        yield Mistake(
            key="activation_checkpoint.selective_ac_option",
            value=option,
            why="is no option",
            instead='"op", "op/2", or a number of blocks in quotes, such as "2"',
        )


@rule_of_keys
def memory_budget_is_for_the_compiler(config: Config) -> Iterator[Mistake]:
    mode = config.activation_checkpoint.mode
    if mode == "memory_budget" and not config.compile.compiles("model"):
        yield Mistake(
            key="activation_checkpoint.mode",
            value=mode,
            why="lets the compiler choose, and the model is not compiled",
            instead=(
                'compile.enable = true with "model" in compile.components, or mode = "selective"'
            ),
        )


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
            instead='"default" to keep these, or fsdp_keep_gathered = []',
        )


@rule_of_keys
def batches_are_whole(config: Config) -> Iterator[Mistake]:
    """Tell a wrong batch before the number of ranks is known, where the recipe has all degrees."""
    batch_ramp(config.training.global_batch_ramp)  # raises ConfigError
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree != -1:
        dp_degree = (
            parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
        )
        gradient_accumulation_steps(config.training, dp_degree)  # raises ConfigError
    return iter(())


# Documents


def tables_of_documents(config: Config) -> list[Data]:
    """Return [data], and [validation] if it has documents of its own."""
    return [config.data, *([config.validation_data] if config.validation.has_documents else [])]


@rule_of_keys
def sources_stand_alone(config: Config) -> Iterator[Mistake]:
    for section in (config.data, config.validation):
        table = "data" if section is config.data else "validation"
        if not section.sources:
            continue
        origin = config.origin(f"{table}.sources")
        for name in Corpus.model_fields:
            value = getattr(section, name)
            default = type(section).model_fields[name].default
            if value != default:
                yield Mistake(
                    key=f"{table}.{name}",
                    value=value,
                    why=f"is beside {table}.sources ({origin}), which replace it",
                    instead=(
                        "it within these, or sources = []; if an extended recipe has it, use"
                        f" {name} = {in_toml(default)}"
                    ),
                )


@rule_of_keys
def sources_differ(config: Config) -> Iterator[Mistake]:
    for data in tables_of_documents(config):
        first: dict[Corpus, int] = {}  # number of the first source with these documents
        for number, source in enumerate(data.sources, start=1):
            same = first.setdefault(source.replace(weight=1.0), number)
            if same != number:
                sources = data.key("sources")
                yield Mistake(
                    key=f"{sources}[{number}].dataset",
                    value=source.dataset,
                    why=f"has the same documents as {sources}[{same}], which would be read twice",
                    instead="one of them with the sum of both weights",
                )


@rule_of_keys
def documents_can_be_found(config: Config) -> Iterator[Mistake]:
    examples = {"local": "corpus/*.jsonl", "prepared": "prepared/books"}
    defaults = {"subset": "", "split": Corpus.model_fields["split"].default}
    for source in [part for data in tables_of_documents(config) for _, part in data.mixture()]:
        dataset = source.key("dataset")
        has_path = source.dataset in examples
        if has_path and not source.path:
            why = f"needs {source.key('path')}"
            instead = f'one such as path = "{examples[source.dataset]}"'
            yield Mistake(dataset, source.dataset, why, instead)
        if source.path and not has_path:
            why = f'is not read for {dataset} = "{source.dataset}"'
            instead = f'{dataset} = "local" or "prepared", or remove path'
            yield Mistake(source.key("path"), source.path, why, instead)
        for name, default in defaults.items():
            key = source.key(name)
            value = getattr(source, name)
            is_default = value == (KEYS[key].default if key in KEYS else default)
            if not is_default and "/" not in source.dataset:
                why = f'is only for datasets of the hub (dataset = "{source.dataset}")'
                instead = 'one such as dataset = "HuggingFaceFW/fineweb", or remove it'
                yield Mistake(key, value, why, instead)


@rule_of_keys
def validation_has_documents(config: Config) -> Iterator[Mistake]:
    validation = config.validation
    if not validation.enable or validation.has_documents or config.data.validation_fraction > 0:
        return
    if any(source.dataset != "c4" for _, source in config.data.mixture()):
        yield Mistake(
            key="validation.enable",
            value=True,
            why="needs documents that are not trained on",
            instead=(
                "validation.path for files of its own, data.validation_fraction = 0.05, or"
                " validation.enable = false"
            ),
        )


@rule_of_keys
def validation_reads_its_documents(config: Config) -> Iterator[Mistake]:
    validation = config.validation
    if not validation.enable or validation.has_documents:
        return
    for name in ("subset", "split", "text_field"):
        value = getattr(validation, name)
        if value != type(validation).model_fields[name].default:
            yield Mistake(
                key=f"validation.{name}",
                value=value,
                why="has no effect without documents of its own",
                instead="validation.path or validation.dataset",
            )


# The model's shape


@rule
def sequences_fit_the_rotary_tables(config: Config, layout: Layout) -> Iterator[Mistake]:
    longest = shape_of(config.model).max_seq_len
    if layout.seq_len > longest:
        yield Mistake(
            key="training.seq_len",
            value=layout.seq_len,
            why="is more than the model's max_seq_len",
            instead=f"at most {longest}",
        )


@rule
def query_heads_share_key_value_heads_evenly(config: Config, layout: Layout) -> Iterator[Mistake]:
    model = layout.model
    if model.n_heads % model.n_kv_heads:
        divisors = [count for count in range(1, model.n_heads + 1) if model.n_heads % count == 0]
        yield Mistake(
            key="model.n_heads",
            value=model.n_heads,
            why=(
                f"is not a multiple of model.n_kv_heads = {model.n_kv_heads}"
                f"{_of_flavor(config, 'n_kv_heads')}, and key/value heads are shared evenly"
            ),
            instead=f"model.n_kv_heads = {alternatives(divisors)}",
        )


@rule
def dimensions_of_a_head_rotate_in_pairs(config: Config, layout: Layout) -> Iterator[Mistake]:
    model = layout.model
    multiple = 2 * model.n_heads
    if not derives_head_dim(config.model):
        if model.head_dim % 2:
            yield Mistake(
                key="model.head_dim",
                value=model.head_dim,
                why="is odd, and a head's dimensions rotate in pairs",
                instead=f"model.head_dim = {alternatives(nearest_multiples(model.head_dim, 2))}",
            )
    elif model.dim % multiple:
        yield Mistake(
            key="model.dim",
            value=model.dim,
            why=(
                f"is not a multiple of 2 x model.n_heads = {model.n_heads}"
                f"{_of_flavor(config, 'n_heads')}, and a head's dimensions rotate in pairs"
            ),
            instead=f"model.dim = {alternatives(nearest_multiples(model.dim, multiple))}",
        )


def _of_flavor(config: Config, name: str) -> str:
    return "" if getattr(config.model, name) else " of the flavor"


# Parallelism


@rule
def tensor_parallel_degree_divides(config: Config, layout: Layout) -> Iterator[Mistake]:
    tp = layout.degrees["tp"]
    model = layout.model
    divided = {
        "attention heads": model.n_heads,
        "key/value heads": model.n_kv_heads,
        "tokens of training.seq_len": layout.seq_len,
    }
    for what, count in divided.items():
        if count % tp:
            fitting = [
                degree
                for degree in range(1, model.n_kv_heads + 1)
                if not any(number % degree for number in divided.values())
            ]
            yield Mistake(
                key="parallelism.tensor_parallel_degree",
                value=tp,
                why=f"does not divide the {count} {what}",
                instead=alternatives(fitting),
            )


@rule_with_torch
def a_family_of_ones_own_is_whole(config: Config, layout: Layout) -> Iterator[Mistake]:
    if layout.model.family not in FAMILIES:
        from titan_lite.distributed.tensor_parallel import check_styles
        from titan_lite.models.transformer import check_own_family

        check_own_family(layout.model, splits_sequences=layout.degrees["cp"] > 1)
        if layout.degrees["tp"] > 1:
            check_styles(parameter_shapes(layout.model), layout.model.family)
    yield from ()


@rule
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


@rule
def context_parallel_ranks_have_two_chunks(config: Config, layout: Layout) -> Iterator[Mistake]:
    cp = layout.degrees["cp"]
    tp = layout.degrees["tp"]
    multiple = 2 * cp * tp
    if cp > 1 and layout.seq_len % multiple:
        shared = f" that {tp} tensor-parallel ranks share" if tp > 1 else ""
        yield Mistake(
            key="parallelism.context_parallel_degree",
            value=cp,
            why=f"cannot cut training.seq_len = {layout.seq_len} into 2 x {cp} chunks{shared}",
            instead=f"seq_len = {alternatives(nearest_multiples(layout.seq_len, multiple))}",
        )


@rule
def every_pipeline_rank_updates_a_parameter(config: Config, layout: Layout) -> Iterator[Mistake]:
    points = config.parallelism.pipeline_parallel_split_points
    if any(not layout.shapes_on(rank) for rank in range(layout.degrees["pp"])):
        yield Mistake(
            key="parallelism.pipeline_parallel_split_points",
            value=points,
            why=(
                "leaves a rank with the output alone, which is a copy of the embedding: the first"
                " stage updates tied weights"
            ),
            instead="norm or a layer as the last point",
        )


@rule
def schedule_has_its_stages_per_rank(config: Config, layout: Layout) -> Iterator[Mistake]:
    if layout.degrees["pp"] == 1:
        return
    name = config.parallelism.pipeline_parallel_schedule
    usual = STAGES_PER_RANK[name]
    per_rank = stages_per_rank(config.parallelism)
    if name in ROUND and per_rank < 2:
        why = f'is not for pipeline_parallel_schedule = "{name}", which has {usual} or more'
        instead = f'-1 or {usual}, or "1F1B"'
    elif name not in ROUND and per_rank != usual:
        other = "Interleaved1F1B" if per_rank > 1 else "1F1B"
        why = f'is not for pipeline_parallel_schedule = "{name}", which has {usual}'
        instead = f'-1 or {usual}, or "{other}"'
    else:
        return
    yield Mistake("parallelism.pipeline_parallel_stages_per_rank", per_rank, why, instead)


@rule
def schedule_has_its_microbatches(config: Config, layout: Layout) -> Iterator[Mistake]:
    degree = layout.degrees["pp"]
    if degree == 1:
        return
    key = "parallelism.pipeline_parallel_schedule"
    name = config.parallelism.pipeline_parallel_schedule
    microbatches = layout.pipeline.microbatches
    batch = (
        f"training.local_batch_size / pipeline_parallel_microbatch_size = {microbatches}"
        " microbatches"
    )
    if name == "1F1B" and microbatches < degree:
        why = f"needs as many microbatches as stages, {degree}, but {batch}"
        yield Mistake(key, name, why, f'{degree} of them, or "GPipe"')
    rounds = max(1, microbatches // degree)
    if name in ROUND and microbatches % rounds:
        why = f"with {degree} ranks goes in {rounds} rounds, which do not divide {batch}"
        fitting = [microbatches // degree * degree, (microbatches // degree + 1) * degree]
        yield Mistake(key, name, why, f"{alternatives(fitting)} of them")
    stages = 2 * degree
    if name == "DualPipeV" and microbatches < stages:
        why = f"needs as many microbatches as stages, {stages}, but {batch}"
        yield Mistake(key, name, why, f'{stages} of them, or "ZBVZeroBubble"')


@rule
def zero_bubble_cuts_a_backward_that_can_be_cut(
    config: Config, layout: Layout
) -> Iterator[Mistake]:
    key = "parallelism.pipeline_parallel_schedule"
    name = config.parallelism.pipeline_parallel_schedule
    if not runs_halves(config.parallelism) or config.compile.compiles("model"):
        return  # a compiled backward has graphs of the halves
    if config.compile.compiles("loss"):
        why = "cuts backward in two, which a compiled loss with a model in eager mode cannot be"
        yield Mistake(key, name, why, 'compile.components = ["model", "loss"] or "Interleaved1F1B"')
    if config.activation_checkpoint.mode != "none":
        why = (
            "cuts backward in two, and in eager mode each half would recompute every block, the"
            " second one once for each weight"
        )
        yield Mistake(
            key,
            name,
            why,
            'compile.enable = true, activation_checkpoint.mode = "none" or "Interleaved1F1B"',
        )


# FSDP, and gradients between replicas


@rule
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


@rule
def kept_modules_are_in_the_model(config: Config, layout: Layout) -> Iterator[Mistake]:
    kept = config.parallelism.fsdp_keep_gathered
    for name in _unknown_modules(kept, layout.model):
        yield _no_parameters(config, layout, "parallelism.fsdp_keep_gathered", kept, name)


def _unknown_modules(names: Sequence[str], model: ModelConfig) -> list[str]:
    """Return the names of no module of a stage and of no parameters, over all pipeline stages."""
    stage_modules = module_fqns(model.n_layers)
    return [
        name for name in names if name not in stage_modules and not parameter_shapes(model, [name])
    ]


def _no_parameters(
    config: Config, layout: Layout, key: str, value: Sequence[str], name: str
) -> Mistake:
    return Mistake(
        key=key,
        value=value,
        why=f'has "{name}", which has no parameter in flavor {shape_words(config.model)}',
        instead=(
            f"tok_embeddings, layers.0 to layers.{layout.model.n_layers - 1}, norm, output or"
            " modules within them"
        ),
    )


@rule
def compression_has_replicas_and_steps(config: Config, layout: Layout) -> Iterator[Mistake]:
    parallelism = config.parallelism
    if parallelism.replicate_compression == "none":
        return
    if layout.degrees["dp_replicate"] == 1:
        yield Mistake(
            key="parallelism.replicate_compression",
            value=parallelism.replicate_compression,
            why="has no effect with data_parallel_replicate_degree = 1",
            instead="2 or more",
        )
    steps = config.training.steps
    if parallelism.replicate_uncompressed_steps >= steps:
        yield Mistake(
            key="parallelism.replicate_uncompressed_steps",
            value=parallelism.replicate_uncompressed_steps,
            why=f"is all of training.steps = {steps}, and nothing would be compressed",
            instead='fewer, or replicate_compression = "none"',
        )


@rule_with_torch
def compression_makes_gradients_smaller(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.parallelism.replicate_compression == "none":
        return
    from titan_lite.distributed.memory import compressed_sizes

    if not any(factors for _, factors in compressed_sizes(config, layout).values()):
        yield Mistake(
            key="parallelism.replicate_rank",
            value=config.parallelism.replicate_rank,
            why=(
                "is too large: the factors of every shard would have more than a quarter of its"
                " numbers, so all would travel as they are"
            ),
            instead='a smaller rank, or replicate_compression = "none"',
        )


# Loss and optimizer


@rule
def loss_chunk_is_a_part_of_a_microbatch(config: Config, layout: Layout) -> Iterator[Mistake]:
    chunk = config.training.loss_chunk_tokens
    tokens = layout.tokens_per_microbatch
    smallest = chunk_size(tokens, MAX_CHUNKS)
    if chunk >= tokens:
        why = f"has no effect: a rank has {tokens:,} tokens of a microbatch"
        instead = f"-1, or less than {tokens}"
    elif 0 < chunk < smallest:
        why = f"cuts the {tokens:,} tokens of a microbatch into more than {MAX_CHUNKS} chunks"
        instead = f"at least {smallest}"
    else:
        return
    yield Mistake("training.loss_chunk_tokens", chunk, why, instead)


@rule
def only_adamw_is_compiled(config: Config, layout: Layout) -> Iterator[Mistake]:
    name = config.optimizer.name
    if name != "AdamW" and config.compile.compiles("optimizer"):
        yield Mistake(
            key="compile.components",
            value=config.compile.components,
            why=(
                f'has the optimizer, and the update of optimizer.name = "{name}" is not compiled,'
                " as most of it is products of large matrices"
            ),
            instead='compile.components = ["model", "loss"]',
        )


# Compilation


@rule
def chunks_divide_the_tokens(config: Config, layout: Layout) -> Iterator[Mistake]:
    chunks = config.compile.tensor_parallel_chunks
    tp = layout.degrees["tp"]
    tokens = layout.seq_len // layout.degrees["cp"] // tp
    if tp > 1 and config.compile.compiles("model") and tokens % chunks:
        yield Mistake(
            key="compile.tensor_parallel_chunks",
            value=chunks,
            why=(
                f"does not divide the {tokens:,} tokens of a sequence that a tensor-parallel rank"
                " has"
            ),
            instead=alternatives(nearest_divisors(tokens, chunks)),
        )


@rule
def listed_buckets_merge_parameters(config: Config, layout: Layout) -> Iterator[Mistake]:
    key = "compile.buckets"
    buckets = config.compile.buckets
    if not config.compile.compiles("model") or config.compile.bucketing != "listed":
        return
    names = [name for bucket in buckets for name in bucket.split()]
    for name in _unknown_modules(names, layout.model):
        yield _no_parameters(config, layout, key, buckets, name)
    for name, count in Counter(names).items():
        if count > 1:
            yield Mistake(
                key, buckets, f'has "{name}" twice, but a parameter has one bucket', "it once"
            )
    sizes = [len(parameter_shapes(layout.model, bucket.split())) for bucket in buckets]
    if max(sizes, default=0) < 2:
        yield Mistake(
            key=key,
            value=buckets,
            why="has no bucket with two parameters, so nothing would be merged",
            instead='such as "layers.0 layers.1", or compile.bucketing = "none"',
        )


@rule
def collectives_of_a_microbatch_are_bucketed(config: Config, layout: Layout) -> Iterator[Mistake]:
    bucketing = config.compile.bucketing
    if not config.compile.compiles("model") or bucketing in ("block", "none"):
        return
    if layout.gathers_once:
        yield Mistake(
            key="compile.bucketing",
            value=bucketing,
            why=(
                'has nothing to bucket: parallelism.fsdp_communication = "step" gathers once for'
                f" {layout.microbatches} microbatches"
            ),
            instead='fsdp_communication = "microbatch" or bucketing = "block"',
        )


# Float8


@rule
def float8_products_are_not_overlapped_by_inductor(
    config: Config, layout: Layout
) -> Iterator[Mistake]:
    if config.float8.enable and config.parallelism.enable_async_tensor_parallel:
        yield Mistake(
            key="parallelism.enable_async_tensor_parallel",
            value=True,
            why="is not for float8: Inductor does not overlap collectives with its products",
            instead="false, or float8.enable = false",
        )


@rule
def weights_gathered_in_float8_have_one_scale(config: Config, layout: Layout) -> Iterator[Mistake]:
    float8 = config.float8
    if float8.enable and float8.all_gather and float8.recipe != "tensorwise":
        yield Mistake(
            key="float8.all_gather",
            value=True,
            why=(
                "is for tensorwise scales: backward multiplies by the columns of a weight, and"
                f' float8.recipe = "{float8.recipe}" has scales of its rows'
            ),
            instead='recipe = "tensorwise" or all_gather = false',
        )


@rule
def float8_has_layers_to_compute(config: Config, layout: Layout) -> Iterator[Mistake]:
    if not config.float8.enable:
        return
    filters = config.float8.filter_fqns
    layers = _linear_layers(layout.model)
    for name in filters:
        if not any(is_filtered(fqn, [name]) for fqn in layers):
            yield Mistake(
                key="float8.filter_fqns",
                value=filters,
                why=f'has "{name}", which is no part of the name of a linear layer in a block',
                instead=(
                    'such as "attention.wk" or "layers.0" (embedding and output never are in'
                    " float8)"
                ),
            )
    if all(is_filtered(fqn, filters) for fqn in layers):
        why = "has nothing to do: float8.filter_fqns leaves no layer to compute in float8"
        yield Mistake("float8.enable", True, why, "false")


def _linear_layers(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the weights of the blocks' linear layers, by the FQN of the layer."""
    return {
        fqn.removesuffix(".weight"): shape
        for fqn, shape in parameter_shapes(model).items()
        if is_matrix(fqn)
    }


@rule_with_torch
def float8_products_have_multiples_of_16(config: Config, layout: Layout) -> Iterator[Mistake]:
    if not config.float8.enable:
        return
    from titan_lite.distributed.tensor_parallel import weight_dim
    from titan_lite.models.float8 import DIM_MULTIPLE

    key = "float8.enable"
    needs = f"and dimensions of float8 products are multiples of {DIM_MULTIPLE}"
    tokens = layout.tokens_per_microbatch
    if tokens % DIM_MULTIPLE:
        why = f"is impossible: a microbatch has {tokens} tokens on a rank, {needs}"
        yield Mistake(key, True, why, "another training.seq_len or training.local_batch_size")
    for fqn, shape in _linear_layers(layout.model).items():
        if is_filtered(fqn, config.float8.filter_fqns):
            continue
        split_dim = weight_dim(fqn, layout.model.family)
        rows, columns = (
            size / layout.degrees["tp"] if dim == split_dim else size
            for dim, size in enumerate(shape)
        )
        if rows % DIM_MULTIPLE or columns % DIM_MULTIPLE:
            name = fqn.split(".", 2)[2]  # in its block
            yield Mistake(
                key=key,
                value=True,
                why=f"is impossible: {fqn}.weight is {rows:g} x {columns:g} on a rank, {needs}",
                instead=f'float8.filter_fqns = ["{name}"] or a lower tensor_parallel_degree',
            )
            return  # the same layer of other blocks is alike


def float8_has_results_on_gpus(config: Config) -> Iterator[Mistake]:
    """Yield a mistake for float8 products whose results no GPU has in the recipe's dtype.

    CPUs have them, so this is no rule of every recipe: machine rules and the planner ask.
    """
    recipe = config.float8.recipe
    dtype = config.training.mixed_precision_param
    if config.float8.enable and recipe != "tensorwise" and dtype != "bfloat16":
        why = "has results in bfloat16 alone on GPUs"
        instead = 'training.mixed_precision_param = "bfloat16"'
        yield Mistake("float8.recipe", recipe, why, instead)


# Files


@rule_with_torch
def machine_has_a_profile(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.compile.machine:
        from titan_lite.cost.profiles import load_machine

        load_machine(config.compile.machine)  # raises ConfigError with what is wrong in the file
    return iter(())


def check_inputs(config: Config, layout: Layout) -> "Tokenizer":
    """Check what a run needs beside its recipe: packages, its folder, a tokenizer that fits the
    model, documents that can be read, and a step that it can go on from. Return the tokenizer.

    Needs no torch, so that one process can check before a run. Raises ConfigError.
    """
    # imported here, since packages that only ./run_train.sh installs come with it
    from titan_lite.data.documents import check_data
    from titan_lite.data.prepared import check_prepared
    from titan_lite.data.tokenizer import load_tokenizer

    raise_mistakes(config, _missing_packages(config))
    raise_mistakes(config, _dump_folder_cannot_be_written(config))
    raise_mistakes(config, _only_the_weights_have_a_tokenizer(config))
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    raise_mistakes(config, _vocabulary_is_too_small(config, layout, tokenizer))
    raise_mistakes(config, _tokenizer_is_not_that_of_the_weights(config, tokenizer))
    tables = tables_of_documents(config) if config.validation.enable else [config.data]
    for data in tables:
        check_data(data)
        for _, source in data.mixture():
            if source.dataset == "prepared":
                check_prepared(source, tokenizer.sha256, tokenizer.vocab_size)
    if len(tables) > 1:
        raise_mistakes(config, _documents_in_both(*tables))
    if os.environ.get("RANK", "0") == "0":  # all ranks would open ranks x files
        _check_resume(config, layout, tokenizer)
    return tokenizer


def _dump_folder_cannot_be_written(config: Config) -> Iterator[Mistake]:
    """Yield a mistake if the run's folder is not there and cannot be made, or is not writable."""
    folder = Path(config.job.dump_folder).absolute()
    why = ""
    for path in (folder, *folder.parents):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not path.is_symlink():
                continue  # to be made
            why = f"cannot be made: {path} is a link to {os.readlink(path)}, which is not there"
        except OSError as error:  # such as a link that leads to itself
            why = f"cannot be made: {path}: {error.strerror}"
        else:
            if not path.is_dir():
                why = f"cannot be made: {path} is no folder"
            elif not os.access(path, os.W_OK):
                why = f"cannot be made: {path} may not be written"
        break
    if why:
        instead = "a folder that can be created and written"
        yield Mistake("job.dump_folder", config.job.dump_folder, why, instead)


def _documents_in_both(data: Data, validation: Data) -> Iterator[Mistake]:
    """Yield a mistake for each source of validation that is trained on, or a copy of it."""
    from titan_lite.data.source_identity import identify

    trained = {
        content: (name, part)
        for (_, part), source in zip(data.mixture(), identify(data), strict=True)
        for content, name in source.documents().items()
    }
    for (_, part), source in zip(validation.mixture(), identify(validation), strict=True):
        both = {
            name: trained[content]
            for content, name in source.documents().items()
            if content in trained
        }
        if not both:
            continue
        name, (name_in_training, part_of_training) = next(iter(both.items()))
        trained_key = _key_of_documents(part_of_training)
        what = f"documents of {trained_key}"
        if part.dataset == "local":
            several = len(both) > 1
            what = f"{len(both):,} files" if several else "a file"
            what += f" of {trained_key}, or {'copies' if several else 'a copy'}"
        same = name if name == name_in_training else f"{name} is {name_in_training} there"
        yield Mistake(
            key=_key_of_documents(part),
            value=part.path or part.dataset,
            why=f"has {what} ({same})",
            instead="documents that are not trained on",
        )


def _key_of_documents(data: Data) -> str:
    return data.key("path" if data.path else "dataset")


def _missing_packages(config: Config) -> Iterator[Mistake]:
    if config.metrics.enable_wandb and not is_installed("wandb"):
        yield Mistake(
            key="metrics.enable_wandb",
            value=True,
            why="needs wandb, which is not installed here",
            instead="it after pip install wandb, or enable_wandb = false",
        )


def is_installed(module: str) -> bool:
    """Return True if a module can be imported.

    A folder without sources, such as wandb's output, cannot.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _check_resume(config: Config, layout: Layout, tokenizer: "Tokenizer") -> None:
    """Raise ConfigError if the run cannot go on from the step that it would load."""
    from titan_lite.checkpoint.resume import compare
    from titan_lite.checkpoint.run_identity import documents_of_run, run_identity
    from titan_lite.checkpoint.steps import SavedSteps

    saved = SavedSteps(config.checkpoint, Path(config.job.dump_folder))
    step = saved.step_to_load()
    if step is not None:
        identity = run_identity(config, layout, tokenizer)
        find_documents = functools.partial(documents_of_run, config)
        changes = compare(saved.read_state(step), identity, find_documents)
        changes.refuse_unless_accepted(config.checkpoint)


def _vocabulary_is_too_small(
    config: Config, layout: Layout, tokenizer: "Tokenizer"
) -> Iterator[Mistake]:
    size = layout.model.vocab_size
    if tokenizer.vocab_size > size:
        model = "model.vocab_size" if config.model.vocab_size else f"flavor {config.model.flavor}"
        yield Mistake(
            key="model.tokenizer_path",
            value=config.model.tokenizer_path,
            why=f"has {tokenizer.vocab_size} tokens, but {model} has room for {size}",
            instead=(
                "that flavor's tokenizer, a flavor with room, or model.vocab_size ="
                f" {tokenizer.vocab_size}"
            ),
        )


def _only_the_weights_have_a_tokenizer(config: Config) -> Iterator[Mistake]:
    path = config.model.tokenizer_path
    weights = None if Path(path).exists() else _initial_weights(config)
    if weights is not None and Path(weights.tokenizer).is_file():
        yield Mistake(
            key="model.tokenizer_path",
            value=path,
            why=f"is not there, but checkpoint.initial_load_path has {weights.tokenizer}",
            instead='that, or tokenizer_path = ""',
        )


def _tokenizer_is_not_that_of_the_weights(
    config: Config, tokenizer: "Tokenizer"
) -> Iterator[Mistake]:
    """Yield a mistake if text has other ids than those that the initial weights know.

    One tokenizer may be two files, such as Llama's tokenizer.model and tokenizer.json.
    """
    from titan_lite.data.tokenizer import load_tokenizer

    weights = _initial_weights(config)
    path = config.model.tokenizer_path
    if weights is None or weights.tokenizer in ("", path) or not Path(weights.tokenizer).is_file():
        return
    try:
        theirs = load_tokenizer(weights.tokenizer)
    except ConfigError:  # such as SentencePiece's, which is not read
        return
    if theirs.sha256 == tokenizer.sha256:
        return
    other = _other_token(tokenizer, theirs)
    if other or theirs.encode(SAMPLE) != tokenizer.encode(SAMPLE):
        yield Mistake(
            key="model.tokenizer_path",
            value=path,
            why=(
                "gives text other ids than the tokenizer of checkpoint.initial_load_path,"
                f" {weights.tokenizer}{other}"
            ),
            instead='that, or tokenizer_path = ""',
        )


def _other_token(tokenizer: "Tokenizer", theirs: "Tokenizer") -> str:
    """Return words for the first id that is another token of text there, "" if none is.

    Special tokens may have other names, as Llama 3's reserved ones, and one may have more tokens.
    """
    ours = tokenizer.pieces()
    others = theirs.pieces()
    ids = [id for id, piece in others.items() if ours.get(id, piece) != piece]
    if not ids:
        return ""
    first = min(ids)
    return f" (first {first}: {shown(ours[first])}, and there {shown(others[first])})"
