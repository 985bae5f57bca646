"""Rules of [data], and of the documents that [validation] has of its own."""

from collections.abc import Iterator

from titan_lite.config import KEYS, Config, Corpus, Data
from titan_lite.config.errors import in_toml
from titan_lite.rules.mistakes import Mistake, rule_of_keys


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
