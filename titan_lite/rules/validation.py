"""Rules of [validation]: documents that are not trained on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from titan_lite.config import Config, Data
from titan_lite.rules.mistakes import Mistake, rule_of_keys

if TYPE_CHECKING:
    from titan_lite.data.listing import Listing

Document = tuple[str, Data]  # its name, and the source that it is in


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


def documents_in_both(
    data: Sequence["Listing"], validation: Sequence["Listing"]
) -> Iterator[Mistake]:
    """Yield a mistake for each source of validation that is trained on, or a copy of it."""
    trained = {
        content: (name, listing.data)
        for listing in data
        for content, name in listing.identity.documents().items()
    }
    for listing in validation:
        part = listing.data
        if shared := _shared(listing.identity.documents(), part, trained):
            yield Mistake(
                key=_key_of_documents(part),
                value=part.path or part.dataset,
                why=shared,
                instead="documents that are not trained on",
            )


def documents_in_several_sources(data: Sequence["Listing"]) -> Iterator[Mistake]:
    """Yield a mistake for each source that has documents of one before it, or copies, by other
    names: some that are held out of one source would be trained on in the other.
    """
    if len(data) == 1:  # its files need not be hashed
        return
    of_field: dict[str, dict[str, Document]] = {}  # another column has other texts
    for listing in data:
        part, documents = listing.data, listing.identity.documents()
        before = of_field.setdefault(part.text_field, {})
        renamed = {
            content: name
            for content, name in documents.items()
            if content in before and before[content][0] != name
        }
        if shared := _shared(renamed, part, before):
            yield Mistake(
                key=_key_of_documents(part),
                value=part.path or part.dataset,
                why=f"{shared}: what is held out of one source may be trained on in the other",
                instead="sources without common documents, or validation.path",
            )
        before |= {content: (name, part) for content, name in documents.items()}


def _shared(documents: Mapping[str, str], part: Data, others: Mapping[str, Document]) -> str:
    """Return which documents of a source are those of others, or copies, in words; "" if none."""
    both = {name: others[content] for content, name in documents.items() if content in others}
    if not both:
        return ""
    name, (other_name, other_part) = next(iter(both.items()))
    other_key = _key_of_documents(other_part)
    what = f"documents of {other_key}"
    if part.dataset == "local":
        several = len(both) > 1
        what = f"{len(both):,} files" if several else "a file"
        what += f" of {other_key}, or {'copies' if several else 'a copy'}"
    same = name if name == other_name else f"{name} is {other_name} there"
    return f"has {what} ({same})"


def _key_of_documents(data: Data) -> str:
    return data.key("path" if data.path else "dataset")
