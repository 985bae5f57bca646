"""Rules of [validation]: documents that are not trained on."""

from collections.abc import Iterator

from titan_lite.config import Config, Data
from titan_lite.rules.mistakes import Mistake, rule_of_keys


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


def documents_in_both(data: Data, validation: Data) -> Iterator[Mistake]:
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
