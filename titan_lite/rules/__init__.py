"""Rules across keys of a recipe, its layout and what it reads: what cannot be together.

    config, wrong = read_config("llama3_8b", arguments)  # wrong: messages about single keys
    check_all(config, 8, wrong)    # for 8 ranks; raises one ConfigError with all mistakes

A file has the rules of one section of the recipe. A rule is a function that yields a Mistake for
each key with a wrong value. Its decorator puts it into one of four lists, by what it needs:
`@rule_of_keys` the recipe, `@rule_of_layout` also the layout, `@rule_of_inputs` files, folders and
packages, `@rule_of_machine` torch and this machine (machine.py, which is not imported here). To add
one, write a function such as

    @rule_of_keys
    def key_needs_other_key(config: Config) -> Iterator[Mistake]:
        if config.section.key and not config.section.other:
            yield Mistake("section.key", config.section.key, "needs section.other", "...")

A rule that needs what is wrong itself finds nothing: a key whose value is wrong cannot be read
(config/load.py), and without a layout the rules that need one are left out. Rules of layouts import
torch only for the keys that need it. A field's own type and bounds are in config/sections.py.
Degrees, batches and stages that do not divide have no layout: Layout.from_config refuses them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config, ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.distributed.layout import Layout
from titan_lite.feature import part_of_each
from titan_lite.rules import (  # noqa: F401  # importing a section adds its rules
    activation_checkpoint,
    checkpoint,
    compile,
    data,
    fault_tolerance,
    job,
    lr_scheduler,
    metrics,
    model,
    optimizer,
    parallelism,
    phases,
    tokenizer,
    training,
    validation,
)
from titan_lite.rules.mistakes import (
    RULES_OF_INPUTS,
    RULES_OF_KEYS,
    RULES_OF_LAYOUT,
    Inputs,
    Mistake,
    apply,
    is_first_rank,
    raise_mistakes,
    told,
)

if TYPE_CHECKING:
    from titan_lite.checkpoint.run_identity import ListingsOfRun
    from titan_lite.data.tokenizer import Tokenizer

list(part_of_each("rules"))  # importing them adds them


def check_keys(config: Config, wrong: Sequence[str] = (), world_size: int | None = None) -> None:
    """Apply the rules of keys, and with world_size those of the layout on so many ranks. Raises one
    ConfigError with all mistakes.

    wrong: messages of `read_config`, which are of the error, too.
    """
    of_phases(config, lambda phase: raise_mistakes(phase, _lay_out(phase, world_size)[1]), wrong)


def of_phases(config: Config, check: Callable[[Config], None], wrong: Sequence[str] = ()) -> None:
    """Check the recipe of each phase of a run. Raises one ConfigError with what they raise, after
    the messages in `wrong`; MachineError only without any.
    """
    messages = list(wrong)
    for phase in config.phases:
        try:
            check(phase)
        except ConfigError as error:
            messages += map(str, error.args)
        except MachineError:
            if not messages:
                raise
    if messages:
        raise ConfigError(*dict.fromkeys(messages))


def check(config: Config, layout: Layout) -> None:
    """Apply the rules of keys and layout. Raises one ConfigError with all mistakes."""
    raise_mistakes(config, mistakes_in_recipe(config, layout))


def check_recipe(config: Config, world_size: int, wrong: Sequence[str] = ()) -> None:
    """Apply the rules of keys and layout for a number of ranks; and those of inputs, too, if there
    is a mistake, or if there are later phases. Raises one ConfigError with all mistakes, after
    those in `wrong`.
    """
    if (
        wrong
        or len(config.phases) > 1
        or any(_lay_out(phase, world_size)[1] for phase in config.phases)
    ):
        check_all(config, world_size, wrong)


def check_all(config: Config, world_size: int | None, wrong: Sequence[str] = ()) -> None:
    """Apply the rules of keys, layout and inputs: all that one process can check before a run,
    without torch. Raises one ConfigError with all mistakes, after those in `wrong`.

    world_size: None if it is not known; the rules of layouts are then left out.
    """
    of_phases(config, lambda phase: _check_phase(phase, world_size), wrong)


def _check_phase(config: Config, world_size: int | None) -> None:
    layout, mistakes = _lay_out(config, world_size)
    try:
        _, of_inputs = read_inputs(config, layout)
    except MachineError:
        raise_mistakes(config, mistakes)
        raise
    raise_mistakes(config, [*mistakes, *of_inputs])


def mistakes_in_keys(config: Config) -> list[Mistake]:
    return apply(RULES_OF_KEYS, config)


def mistakes_in_recipe(config: Config, layout: Layout) -> list[Mistake]:
    return [*mistakes_in_keys(config), *apply(RULES_OF_LAYOUT, config, layout)]


def _lay_out(config: Config, world_size: int | None) -> tuple[Layout | None, list[Mistake]]:
    """Return the layout, if the recipe has one, and the mistakes in keys and layout."""
    if world_size is None:
        return None, mistakes_in_keys(config)
    try:
        layout = Layout.from_config(config, world_size)
    except ConfigError as error:
        return None, [*mistakes_in_keys(config), *told(error, "parallelism.")]
    return layout, mistakes_in_recipe(config, layout)


def read_inputs(
    config: Config, layout: Layout | None, listings: "ListingsOfRun | None" = None
) -> tuple["Tokenizer | None", list[Mistake]]:
    """Return the tokenizer, if it can be read, and the mistakes in what a run needs beside its
    recipe: packages, its folder, a tokenizer that fits the model, documents that can be read, and a
    step that it can resume.

    listings: of its documents; None to list them now.
    """
    # imported here, since packages that only ./run_train.sh installs come with it
    from titan_lite.checkpoint.run_identity import list_documents
    from titan_lite.data.tokenizer import warn_of_lost_text

    found, mistakes = tokenizer.read_tokenizer(config)
    inputs = Inputs(layout, found, listings or list_documents(config))
    mistakes += apply(RULES_OF_INPUTS, config, inputs)
    if found and not mistakes and is_first_rank():
        warn_of_lost_text(found, config.model.tokenizer_path)
    return found, mistakes
