"""Rules across keys of a recipe and its layout: what cannot be together.

    check_keys(config)             # rules that need no number of ranks
    layout = Layout.from_config(config, world_size=8)
    check(config, layout)          # all of them; raises one ConfigError with all mistakes

A file has the rules of one section of the recipe. A rule is a function that yields a Mistake for
each key with a wrong value. A decorator adds it to those that are applied: `@rule_of_keys` needs
the recipe alone, `@rule` the layout too. `@rule_with_torch` imports torch where its keys are used,
so these come last, and most mistakes are reported in a fraction of a second. To add one, write a
function such as

    @rule_of_keys
    def key_needs_other_key(config: Config) -> Iterator[Mistake]:
        if config.section.key and not config.section.other:
            yield Mistake("section.key", config.section.key, "needs section.other", "...")

What depends on the machine is in machine.py, in the same form; it alone imports torch, and is not
imported here. A field's own type and bounds are in config/sections.py. Degrees, batches and stages
that do not divide have no layout: Layout.from_config refuses them.
"""

import os
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.rules import (  # noqa: F401  # importing a section adds its rules
    activation_checkpoint,
    compile,
    data,
    experts,
    fault_tolerance,
    float8,
    lr_scheduler,
    optimizer,
    parallelism,
    training,
)
from titan_lite.rules.checkpoint import check_resume
from titan_lite.rules.fault_tolerance import missing_torchft
from titan_lite.rules.job import dump_folder_cannot_be_written, recipe_would_be_replaced
from titan_lite.rules.metrics import missing_packages
from titan_lite.rules.mistakes import (
    RULES,
    RULES_OF_KEYS,
    RULES_WITH_TORCH,
    Mistake,
    raise_mistakes,
)
from titan_lite.rules.tokenizer import (
    only_the_weights_have_a_tokenizer,
    tokenizer_is_not_that_of_the_weights,
    vocabulary_is_too_small,
)
from titan_lite.rules.validation import documents_in_both, documents_in_several_sources

if TYPE_CHECKING:
    from titan_lite.checkpoint.run_identity import ListingsOfRun
    from titan_lite.data.tokenizer import Tokenizer


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


def check_inputs(
    config: Config, layout: Layout, listings: "ListingsOfRun | None" = None
) -> "Tokenizer":
    """Check what a run needs beside its recipe: packages, its folder, a tokenizer that fits the
    model, documents that can be read, and a step that it can go on from. Return the tokenizer.

    listings: of its documents; None to list them now. Documents are checked by the first rank of a
    node.

    Needs no torch, so that one process can check before a run. Raises ConfigError.
    """
    # imported here, since packages that only ./run_train.sh installs come with it
    from titan_lite.checkpoint.run_identity import list_documents
    from titan_lite.data.documents import check_data
    from titan_lite.data.prepared import check_prepared
    from titan_lite.data.tokenizer import load_tokenizer, warn_of_lost_text

    raise_mistakes(config, missing_packages(config))
    raise_mistakes(config, missing_torchft(config))
    raise_mistakes(config, dump_folder_cannot_be_written(config))
    raise_mistakes(config, recipe_would_be_replaced(config))
    raise_mistakes(config, only_the_weights_have_a_tokenizer(config))
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    raise_mistakes(config, vocabulary_is_too_small(config, layout, tokenizer))
    raise_mistakes(config, tokenizer_is_not_that_of_the_weights(config, tokenizer))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return tokenizer
    listings = listings or list_documents(config)
    tables = {"documents": config.data, "validation_documents": config.validation_data}
    for name, of_sources in listings.items():
        check_data(tables[name], of_sources)
        for listing in of_sources:
            if listing.data.dataset == "prepared":
                info = listing.prepared
                check_prepared(listing.data, info, tokenizer.sha256, tokenizer.vocab_size)
    if len(listings) > 1:
        raise_mistakes(config, documents_in_both(*listings.values()))
    elif config.validation.enable:
        raise_mistakes(config, documents_in_several_sources(listings["documents"]))
    if os.environ.get("RANK", "0") == "0":  # all ranks would open ranks x files
        warn_of_lost_text(tokenizer, config.model.tokenizer_path)
        check_resume(config, layout, tokenizer, listings)
    return tokenizer
