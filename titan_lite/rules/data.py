"""Rules of [data], and of the documents that [validation] has of its own."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titan_lite.config import KEYS, Config, Corpus, Data
from titan_lite.config.errors import in_toml
from titan_lite.rules.mistakes import Inputs, Mistake, rule_of_inputs, rule_of_keys, told_by
from titan_lite.rules.validation import documents_in_both, documents_in_several_sources

if TYPE_CHECKING:
    from titan_lite.data.listing import Listing
    from titan_lite.data.tokenizer import Tokenizer

EXAMPLES = {"local": "corpus/*.jsonl", "prepared": "prepared/books"}  # of path, by dataset


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
    defaults = {"subset": "", "split": Corpus.model_fields["split"].default}
    for source in [part for data in tables_of_documents(config) for _, part in data.mixture()]:
        dataset = source.key("dataset")
        has_path = source.dataset in EXAMPLES
        if has_path and not source.path:
            why = f"needs {source.key('path')}"
            instead = f'one such as path = "{EXAMPLES[source.dataset]}"'
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


@rule_of_inputs
def documents_can_be_read(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    """Read a document of each source. If all can be read, none may be in two sources that must not
    share documents. The first rank of a node checks.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    tables = {"documents": config.data, "validation_documents": config.validation_data}
    wrong = [
        mistake
        for name, listings in inputs.listings.items()
        for listing in listings
        for mistake in _unreadable(tables[name], listing, inputs.tokenizer)
    ]
    yield from wrong
    if wrong:
        return
    if len(inputs.listings) > 1:
        yield from documents_in_both(*inputs.listings.values())
    elif config.validation.enable:
        yield from documents_in_several_sources(inputs.listings["documents"])


def _unreadable(
    table: Data, listing: "Listing", tokenizer: "Tokenizer | None"
) -> Iterator[Mistake]:
    """Yield the mistakes in a source of a table."""
    from titan_lite.data.documents import check_data
    from titan_lite.data.prepared import check_prepared

    source = listing.data
    key = source.key("path")
    if source.dataset in EXAMPLES and not source.path:
        return  # which is a mistake in keys
    if source.dataset != "prepared":
        yield from told_by(key, check_data, table, [listing])
    elif tokenizer:
        of_tokenizer = (tokenizer.sha256, tokenizer.vocab_size)
        yield from told_by(key, lambda: check_prepared(source, listing.prepared, *of_tokenizer))
