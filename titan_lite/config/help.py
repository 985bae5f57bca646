"""Print the keys of a recipe: their help, the values that they accept, a resolved recipe as TOML.

section_help("training")            # a line and the docstring of each key
accepted(KEYS["training.steps"])    # "an integer at least 1"
to_toml(config, origins=True)       # each line with a comment on where its value is from
"""

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from titan_lite.config.errors import error_because_of, in_toml
from titan_lite.config.sections import (
    SECTIONS,
    Config,
    changes_of,
    choices_of,
    kind_of,
    table_of,
)

WIDTH = 100  # columns of the help
WIDTH_OF_OPTIONS = 130  # of the line with an option's name, default and values
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def accepted(field: FieldInfo) -> str:
    """Return the values that a key accepts, in words."""
    return _accepted(field.annotation, field.metadata)


def _accepted(annotation: object, metadata: Iterable[object] = ()) -> str:
    arguments = get_args(annotation)
    kind = kind_of(annotation)
    if get_origin(annotation) is Annotated:
        inner, *marks = arguments
        infos = [mark for mark in marks if isinstance(mark, FieldInfo)]
        titles = [info.title for info in infos if info.title]
        if titles:
            return titles[0]
        return _accepted(inner, [part for info in infos for part in info.metadata])
    if get_origin(annotation) is Literal:
        words = ", ".join(map(in_toml, arguments))
        return f"one of {words}" if len(arguments) > 1 else words
    if kind is tuple:
        table = table_of(annotation)
        if table:
            return f"a list of tables of {', '.join(table.model_fields)}"
        words = ", ".join(map(in_toml, choices_of(annotation)))
        return f"a list of {words or 'strings'}"
    if arguments:  # a union
        return ", or ".join(_accepted(argument) for argument in arguments)
    bounds = " and ".join(filter(None, map(_bound, metadata)))
    return f"{_KINDS[kind]} {bounds}".rstrip()


def _bound(mark: object) -> str:
    """Return a bound of a number in words; "" for other marks of a field."""
    for name, words in _BOUNDS.items():
        if hasattr(mark, name):
            return f"{words} {getattr(mark, name)}"
    return ""


def section_help(name: str) -> list[str]:
    """Return lines on each key of a section: its option, default, accepted values and docstring."""
    lines = [f"[{name}]  {doc_of(name)}", ""]
    for key, field in SECTIONS[name].model_fields.items():
        words = f"default {in_toml(field.default)}"
        if kind_of(field.annotation) is bool:
            option = f"--{name}.{key}, --{name}.no-{key}"
        else:
            option = f"--{name}.{key}"
            words += f"; {accepted(field)}"
        lines += _wrapped(f"  {option} ({words})", WIDTH_OF_OPTIONS, first_indent="")
        lines += _wrapped(field.description or "", WIDTH)
    return lines


def doc_of(section: str) -> str:
    """Return the docstring of a section in one line."""
    return " ".join((SECTIONS[section].__doc__ or "").split())


def _wrapped(text: str, width: int, first_indent: str = " " * 6) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
    )


def to_toml(config: Config, *, origins: bool = False) -> str:
    """Return all keys as TOML that loads to the same values, but for secrets in URLs.

    config: of the run's first phase, which is followed by what others change.
    origins: each line has a comment on where its value is from.
    """
    lines = []
    for name, section in config.without_secrets():
        lines.append(f"[{name}]")
        for key, value in section:
            line = f"{key} = {in_toml(value)}"
            if origins:
                origin = config.origin(f"{name}.{key}")
                line += "  # " + "".join(c if c.isprintable() else "?" for c in origin)
            lines.append(line)
        lines.append("")
    for number in range(1, len(config.phases)):
        phase = config.phases[number].phase
        lines += ["[[phases]]", f"begin = {phase.begin}"]
        for key, value in changes_of(config.phases, number).items():
            lines.append(f"{key} = {in_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def save_recipe(config: Config, folder: Path) -> None:
    """Write the resolved recipe to folder/config.toml. Raises ConfigError."""
    first = config.phases[0] if len(config.phases) > 1 else config
    saved = first.replace(job=config.job.replace(dump_folder=str(folder.resolve())))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(saved), encoding="utf-8")
    except OSError as error:
        wrong = f'job.dump_folder = "{config.job.dump_folder}": {error.strerror}: {error.filename}'
        raise error_because_of(error, f"{wrong}; use a folder that can be written") from None
