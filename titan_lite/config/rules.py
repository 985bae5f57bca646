"""Rules across keys of a recipe: each is a function that yields a message for what cannot be
together.

check(config)          # raises ConfigError with all mistakes

What depends on the number of ranks is in rules.py of the package, and what depends on the
machine in check.py.
"""

from collections.abc import Callable, Iterator

from titan_lite.config.batch_sizes import batch_ramp, gradient_accumulation_steps
from titan_lite.config.errors import ConfigError, in_toml, shown
from titan_lite.config.sections import KEYS, Config, Corpus, Data

Rule = Callable[[Config], Iterator[str]]


def check(config: Config) -> None:
    """Apply every rule. Raises one ConfigError with all mistakes."""
    mistakes = [mistake for rule in RULES for mistake in rule(config)]
    if mistakes:
        raise ConfigError(*dict.fromkeys(mistakes))


def _wrong(config: Config, key: str, why: str) -> str:
    """Return a message about the value of a key."""
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return f"{config.origin(key)}: [{section}] {name} = {shown(value)}{why}"


def a_step_is_loaded_from_checkpoints(config: Config) -> Iterator[str]:
    if config.checkpoint.enable:
        return
    fix = ": nothing is loaded; use checkpoint.enable = true"
    if config.checkpoint.load_step != -1:
        yield _wrong(config, "checkpoint.load_step", fix)
    if config.checkpoint.must_resume:
        yield _wrong(config, "checkpoint.must_resume", fix)


def asynchronous_tensor_parallelism_has_what_it_overlaps(config: Config) -> Iterator[str]:
    key = "parallelism.enable_async_tensor_parallel"
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if config.parallelism.tensor_parallel_degree == 1:
        why = " has no collective to overlap; use tensor_parallel_degree = 2"
        yield _wrong(config, key, why)
    if not config.compile.compiles("model"):
        fix = 'use compile.enable = true and compile.components = ["model", "loss"]'
        yield _wrong(config, key, f" is done by the compiler, and the model is not compiled; {fix}")
    elif config.compile.backend != "inductor":
        yield _wrong(config, key, ' is done by Inductor; use compile.backend = "inductor"')


def the_schedule_is_as_long_as_the_run(config: Config) -> Iterator[str]:
    schedule, steps = config.lr_scheduler, config.training.steps
    if schedule.total_steps == -1:
        return
    if schedule.total_steps < schedule.warmup_steps:
        fix = f"use warmup_steps = {max(1, schedule.total_steps // 10)}"
        why = f" is longer than lr_scheduler.total_steps = {schedule.total_steps}; {fix}"
        yield _wrong(config, "lr_scheduler.warmup_steps", why)
    if schedule.total_steps < steps:
        why = f" ends before training.steps = {steps}; use -1 or at least that many"
        yield _wrong(config, "lr_scheduler.total_steps", why)


def there_is_a_tokenizer(config: Config) -> Iterator[str]:
    if not config.model.tokenizer_path:
        fix = 'use a tokenizer file, such as "../assets/tokenizer/debug.model"'
        yield _wrong(config, "model.tokenizer_path", f" names no file; {fix}")


def there_is_something_to_compile(config: Config) -> Iterator[str]:
    compile = config.compile
    if not compile.enable:
        return
    if not compile.components:
        fix = 'use components = ["model", "loss"], or compile.enable = false'
        why = f" leaves nothing to compile, but compile.enable = true; {fix}"
        yield _wrong(config, "compile.components", why)
    if compile.bucketing == "listed" and not compile.buckets:
        fix = (
            'use buckets = ["tok_embeddings", "layers.0 layers.1"], or bucketing = "block", which'
            " needs none"
        )
        yield _wrong(config, "compile.bucketing", f" needs compile.buckets; {fix}")
    if compile.bucketing == "auto" and not compile.reordering:
        fix = 'use reordering = true or bucketing = "block"'
        why = f': compile.bucketing = "auto" orders what it buckets; {fix}'
        yield _wrong(config, "compile.reordering", why)


def activations_are_kept_in_a_way_that_there_is(config: Config) -> Iterator[str]:
    option = config.activation_checkpoint.selective_ac_option
    is_number = option.isascii() and option.isdigit() and int(option) > 0
    if option not in ("op", "op/2") and not is_number:
        fix = 'expected "op", "op/2", or a number of blocks in quotes, such as "2"'
        yield _wrong(config, "activation_checkpoint.selective_ac_option", f": {fix}")
    by_compiler = config.activation_checkpoint.mode == "memory_budget"
    if by_compiler and not config.compile.compiles("model"):
        fix = 'use compile.enable = true with "model" in compile.components, or mode = "selective"'
        why = f" lets the compiler choose, and the model is not compiled; {fix}"
        yield _wrong(config, "activation_checkpoint.mode", why)


def gathered_weights_are_kept_or_freed(config: Config) -> Iterator[str]:
    key = "parallelism.fsdp_keep_gathered"
    kept = config.parallelism.fsdp_keep_gathered
    # the default is in every saved recipe, and is no request
    asked = kept not in ((), KEYS[key].default)
    if asked and config.parallelism.fsdp_reshard_after_forward == "always":
        fix = 'use "default" to keep these, or fsdp_keep_gathered = []'
        why = f': parallelism.fsdp_reshard_after_forward = "always" keeps none; {fix}'
        yield _wrong(config, key, why)


def batches_are_whole(config: Config) -> Iterator[str]:
    parallelism = config.parallelism
    try:
        batch_ramp(config.training.global_batch_ramp)
        if parallelism.data_parallel_shard_degree != -1:
            shards = parallelism.data_parallel_shard_degree
            copies = parallelism.data_parallel_replicate_degree
            gradient_accumulation_steps(config.training, copies * shards)
    except ConfigError as error:
        yield from error.args


def sources_stand_alone(config: Config) -> Iterator[str]:
    data, origin = config.data, config.origin("data.sources")
    if not data.sources:
        return
    for name, field in Corpus.model_fields.items():
        if getattr(data, name) != field.default:
            default = f"{name} = {in_toml(field.default)}"
            fix = (
                "move it into these, or use sources = []; if an extended recipe has it, use"
                f" {default}"
            )
            why = f" is beside data.sources ({origin}), which replace it; {fix}"
            yield _wrong(config, f"data.{name}", why)
    first: dict[Corpus, int] = {}
    for number, source in enumerate(data.sources, start=1):
        same = first.setdefault(source.replace(weight=1.0), number)
        if same != number:
            yield (
                f"{origin}: data.sources[{same}] and [{number}] have the same documents, which"
                " would be read twice; use one of them with the sum of both weights"
            )


def documents_can_be_found(config: Config) -> Iterator[str]:
    for _, source in config.data.mixture():
        example = {"local": "corpus/*.jsonl", "prepared": "prepared/books"}.get(source.dataset)
        if example and not source.path:
            fix = f'use one such as path = "{example}"'
            yield _wrong_source(config, source, "dataset", f" needs {source.key('path')}; {fix}")
        if source.path and not example:
            fix = f'{source.key("dataset")} = "local" or "prepared" (it is "{source.dataset}")'
            why = f" is only read with {fix}; use one of these or remove path"
            yield _wrong_source(config, source, "path", why)
        for name in ("subset", "split"):
            is_set = getattr(source, name) != Corpus.model_fields[name].default
            if is_set and "/" not in source.dataset:
                fix = 'use one such as dataset = "HuggingFaceFW/fineweb", or remove it'
                only = f'is only for datasets of the hub (dataset = "{source.dataset}")'
                yield _wrong_source(config, source, name, f" {only}; {fix}")


def _wrong_source(config: Config, source: Data, name: str, why: str) -> str:
    """Return a message about a key of a source of documents, one of data.sources or [data] itself."""
    if not config.data.sources:
        return _wrong(config, f"data.{name}", why)
    value = shown(getattr(source, name))
    return f"{config.origin('data.sources')}: {source.key(name)} = {value}{why}"


def validation_has_documents(config: Config) -> Iterator[str]:
    if not config.validation.enable or config.data.validation_fraction > 0:
        return
    if any(source.dataset != "c4" for _, source in config.data.mixture()):
        fix = "use data.validation_fraction = 0.05, or validation.enable = false"
        yield _wrong(config, "validation.enable", f" needs held-out documents; {fix}")


RULES: tuple[Rule, ...] = (
    a_step_is_loaded_from_checkpoints,
    asynchronous_tensor_parallelism_has_what_it_overlaps,
    the_schedule_is_as_long_as_the_run,
    there_is_a_tokenizer,
    there_is_something_to_compile,
    activations_are_kept_in_a_way_that_there_is,
    gathered_weights_are_kept_or_freed,
    batches_are_whole,
    sources_stand_alone,
    documents_can_be_found,
    validation_has_documents,
)
