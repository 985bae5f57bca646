"""Recipes: a TOML file and the command line, read strictly into a Config.

    config, origins = load_config("train_configs/debug_model.toml", ["--training.steps", "20"])
    config.training.steps            # 20
    origins["training.steps"]        # "command line"

Precedence: command line > recipe > the recipe it `extends` > default. Every mistake (unknown section or key, wrong type, value
out of range, impossible combination) is one line of a `ConfigError`, with the place, the key, the value and what to use instead.
Standard library only.
"""

import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_lite.config import (
    KEYS,
    SECTIONS,
    Config,
    ConfigError,
    Corpus,
    Data,
    Mistakes,
    Parallelism,
)
from titan_lite.config.keys import batch_ramp, flatten, gradient_accumulation_steps
from titan_lite.config.row import one_line
from titan_lite.config.toml import (
    did_you_mean,
    files_beside,
    in_toml,
    parse_value,
    read_toml,
    shown,
)

_PACKAGE = Path(__file__).parents[1]
# In a wheel the recipes lie in the package; in a checkout beside it.
SHIPPED = next(
    (_PACKAGE / "train_configs").glob("debug_model.toml"),
    _PACKAGE.parent / "train_configs/debug_model.toml",
).parent
MOST = 10**15  # bound of numbers without one of their own; a float can still represent each integer
MOST_TEXT = 4096  # characters, the longest path
MOST_EXTENDED = 16  # recipes in a chain of `extends`


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """Read a recipe and the command line into (config, origins).

    recipe: path of a TOML file, or the name of a shipped one, such as llama3_8b. overrides: `--section.key value`,
    `--section.key=value`, and for booleans `--section.key` and `--no-section.key`. origins maps "section.key" to "default",
    "command line" or the file's path.
    Raises ConfigError with all mistakes in single keys, or if there are none, with all impossible combinations.
    """
    mistakes = Mistakes()
    recipe = find_recipe(Path(recipe))
    values, origins = _read_recipe(recipe, (), mistakes)
    for key, text in _parse_overrides(overrides, mistakes).items():
        with mistakes.noted():
            values[key] = _from_folder(
                KEYS[key], _parse_text(key, text), Path()
            )  # the saved recipe lies in another folder
            origins[key] = "command line"
    mistakes.refuse()
    for key in KEYS.keys() - values.keys():
        values[key], origins[key] = KEYS[key].default, "default"
    if not values["job.dump_folder"]:
        values["job.dump_folder"] = _check_value(
            "job.dump_folder", f"outputs/{recipe.stem}", str(recipe)
        )
    sections = {
        name: cls(**{f.name: values[f"{name}.{f.name}"] for f in dataclasses.fields(cls)})
        for name, cls in SECTIONS.items()
    }
    config = Config(**sections)
    for error in _impossible(config, origins):
        with mistakes.noted():
            raise error
    mistakes.refuse()
    return config, origins


def find_recipe(path: Path) -> Path:
    """Return the path itself if it exists, else that of the shipped recipe: llama3_8b or train_configs/llama3_8b.toml.

    Raises ConfigError for a word that names neither.
    """
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}
    name = path.name.removesuffix(".toml")
    if str(path.parent) not in (".", "train_configs") or os.path.lexists(path):
        return path
    if name in shipped:
        return shipped[name]
    if re.fullmatch(r"\w{1,64}", name):
        known = f"; use the path of a TOML file, or one of {', '.join(shipped)}"
        raise ConfigError(
            f"{one_line(str(path), 200)}: no such recipe{did_you_mean(name, shipped, otherwise=known)}"
        )
    return path


def to_toml(config: Config, origins: dict[str, str] | None = None) -> str:
    """Return all keys as TOML that loads back to the same config; with `origins`, each line has a comment with its origin."""
    lines = []
    for name, cls in SECTIONS.items():
        lines.append(f"[{name}]")
        for field in dataclasses.fields(cls):
            origin = "" if origins is None else f"  # {origins[f'{name}.{field.name}']}"
            line = f"{field.name} = {in_toml(getattr(getattr(config, name), field.name))}"
            lines.append(line + "".join(c if c.isprintable() else "?" for c in origin))
        lines.append("")
    return "\n".join(lines)


def save_recipe(config: Config, folder: Path) -> None:
    """Write the resolved recipe to folder/config.toml. Raises ConfigError."""
    saved = dataclasses.replace(
        config, job=dataclasses.replace(config.job, dump_folder=str(folder.resolve()))
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(saved), encoding="utf-8")
    except OSError as error:
        wrong = f'job.dump_folder = "{config.job.dump_folder}": {error.strerror}: {error.filename}'
        raise ConfigError(f"{wrong}; use a folder that can be written") from None


def _from_folder(field: dataclasses.Field, value: Any, folder: Path) -> Any:
    """Return the value with its relative paths, or those of its tables, made absolute. Raises ConfigError."""
    if field.metadata["table"]:
        parts = dataclasses.fields(field.metadata["table"])
        return tuple(
            dataclasses.replace(
                table,
                **{
                    part.name: _from_folder(part, getattr(table, part.name), folder)
                    for part in parts
                },
            )
            for table in value
        )
    suffix = field.metadata["path"]
    if not value or not suffix or (suffix is not True and not value.endswith(suffix)):
        return value
    if "://" in value:
        return value  # a URL
    path = os.path.abspath(folder / value)
    if fault := _unfit([path]):
        raise ConfigError(
            f"{field.name} = {shown(value)}: {one_line(path, 200)}: {fault}; use another folder"
        )
    return path


def _read_recipe(
    path: Path, chain: tuple[str, ...], mistakes: Mistakes
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return {"section.key": value} and {"section.key": origin} of one file on top of the file it extends."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    with mistakes.noted():
        if fault := _unfit([str(path)]):
            raise ConfigError(f"{one_line(str(path), 200)}: {fault}; use another path")
        resolved = os.path.realpath(path)
        if resolved in chain:
            loop = " -> ".join((*chain[chain.index(resolved) :], resolved))
            raise ConfigError(
                f"{path}: extends is circular: {loop}; remove one of these `extends` lines"
            )
        if len(chain) > MOST_EXTENDED:
            raise ConfigError(
                f"{path}: extended through more than {MOST_EXTENDED} recipes; extend one of the first"
            )
        tables = read_toml(path, "recipe")
        base = tables.pop("extends", None)
        if base is not None:
            with mistakes.noted():
                values, origins = _read_recipe(_extended(path, base), (*chain, resolved), mistakes)
        for section, table in tables.items():
            with mistakes.noted():
                if section not in SECTIONS:
                    raise ConfigError(
                        f"{path}: unknown section [{shown(section)[1:-1]}]{nearest_section(section)}"
                    )
                if not isinstance(table, dict):
                    wrong = f"{section} = {shown(table)} should be a section"
                    raise ConfigError(f"{path}: {wrong}: write [{section}] and its keys below")
                for name, value in table.items():
                    with mistakes.noted():
                        key = f"{section}.{name}"
                        if key not in KEYS:
                            wrong = (
                                f"unknown key {shown(name)[1:-1]} = {shown(value)} in [{section}]"
                            )
                            raise ConfigError(f"{path}: {wrong}{nearest_key(section, name)}")
                        values[key] = _from_folder(
                            KEYS[key], _check_value(key, value, str(path)), path.parent
                        )
                        origins[key] = str(path)
    return values, origins


def _extended(path: Path, base: Any) -> Path:
    """Return the path of the recipe that the one at `path` extends with `extends = base`. Raises ConfigError."""
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f'{path}: extends = {shown(base)} is not a path; use one such as extends = "debug_model.toml"'
        )
    found = path.parent / base
    if not os.path.exists(found):
        wrong = f"extends = {shown(base)}: no such file (looked for {one_line(str(found), 200)})"
        raise ConfigError(f"{path}: {wrong}{files_beside(found)}")
    return found


def _parse_overrides(arguments: Sequence[str], mistakes: Mistakes) -> dict[str, str]:
    """Parse `--section.key value` and its other forms into {"section.key": text}; the last one wins."""
    result: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        with mistakes.noted():
            key, text = _next_override(rest)
            result[key] = text
    return result


def _next_override(rest: list[str]) -> tuple[str, str]:
    """Remove the first option from the list of arguments and return it as (key, text). Raises ConfigError."""
    argument = rest.pop(0)
    written = one_line(argument, 100)
    if argument.endswith(".toml") and not argument.startswith("-"):
        raise ConfigError(
            f"command line: '{written}' is a second recipe; use one, with ./run_train.sh as CONFIG_FILE={written}"
        )
    if not argument.startswith("--"):
        raise ConfigError(
            f"command line: '{written}' is not an option; use --section.key value, such as --training.steps 100"
        )
    name, equals, text = argument[2:].partition("=")
    key = name.replace("-", "_").removeprefix("no_")
    negated = len(key) < len(name)
    follows = bool(rest) and not rest[0].startswith("--")
    if key not in KEYS:
        if follows and not equals:
            rest.pop(0)  # its value is not a second mistake
        raise ConfigError(
            f"command line: unknown option {written}{nearest_key(*key.partition('.')[::2])}"
        )
    is_bool = KEYS[key].type is bool
    if negated and (equals or not is_bool):
        raise ConfigError(
            f"command line: {written}: --no- is for booleans and takes no value; use --{key}=VALUE"
        )
    if negated:
        return key, "false"
    if not equals and is_bool:
        return key, rest.pop(0) if follows and rest[0].lower() in ("true", "false") else "true"
    if not equals and not follows:
        example = f"--{key}={in_toml(KEYS[key].default)}"
        raise ConfigError(
            f"command line: {written} has no value; use {example} ({_expected(KEYS[key])})"
        )
    return key, text if equals else rest.pop(0)


def _parse_text(key: str, text: str) -> Any:
    """Return a word of the command line as the key's type. Raises ConfigError."""
    kind = KEYS[key].type
    value: Any = text
    try:
        if kind is bool:
            value = {"true": True, "false": False}[text.lower()]
        elif kind in (int, float):
            value = kind(text.encode("ascii"))  # a ValueError for digits of other scripts
        elif KEYS[key].metadata["table"]:
            value = parse_value(text)
        elif kind is tuple:
            bare = (
                text.strip().removeprefix("[").removesuffix("]")
            )  # with brackets and quotes as in a recipe, or without
            value = [word.strip().strip("\"'") for word in bare.split(",") if word.strip()]
    except (KeyError, ValueError):
        wrong = f"--{key}={one_line(text, 100)}: expected {_expected(KEYS[key])}"
        raise ConfigError(f"command line: {wrong}, such as {in_toml(KEYS[key].default)}") from None
    return _check_value(key, value, "command line")


def _check_value(key: str, value: Any, place: str, field: dataclasses.Field | None = None) -> Any:
    """Check type, range and choices of one value, and return it; an integer is accepted for a float. Raises ConfigError.

    field: the field of a key that is not in KEYS.
    """
    field = field or KEYS[key]
    if field.metadata["table"] and isinstance(value, list):
        mistakes, tables = Mistakes(), []
        for number, table in enumerate(value, 1):
            with mistakes.noted():
                tables.append(
                    _check_table(f"{key}[{number}]", table, place, field.metadata["table"])
                )
        mistakes.refuse()
        return tuple(tables)
    if field.type is float and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    if (
        field.type is tuple
        and isinstance(value, list)
        and all(isinstance(word, str) for word in value)
    ):
        value = tuple(value)
    section, _, name = key.rpartition(".")
    rule, wrong, instead = field.metadata, "", f", such as {name} = {in_toml(field.default)}"
    if type(value) is not field.type:
        wrong = f"expected {_expected(field)}"
    elif field.type in (str, tuple) and (
        fault := _unfit(value if field.type is tuple else (value,))
    ):
        wrong = fault
    elif (
        rule["unit"] == "path" and max(len(os.fsencode(part)) for part in value.split(os.sep)) > 255
    ):
        wrong = "has a name of more than 255 bytes, which no file has"
    elif rule["choices"]:
        admitted = [*map(re.escape, rule["choices"]), *filter(None, rule["or_like"][1:])]
        unknown = [
            word
            for word in ([value] if field.type is str else value)
            if not re.fullmatch("|".join(admitted), word)
        ]
        if unknown:
            wrong, instead = (
                f"expected {_expected(field)}",
                did_you_mean(unknown[0], rule["choices"]),
            )
    elif field.type in (int, float) and value != rule["also"]:
        compare = {
            "least": operator.ge,
            "above": operator.gt,
            "most": operator.le,
            "below": operator.lt,
        }
        inside = all(
            rule[bound] is None or holds(value, rule[bound]) for bound, holds in compare.items()
        )
        if not inside or not abs(value) <= (rule["most"] or MOST):  # nan is refused here, too
            most = f", at most {MOST:.0e}" if inside else ""
            wrong = f"out of range: expected {_expected(field)}{most}"
    if wrong:
        written = (
            key if "[" in key else f"[{section}] {name}"
        )  # a key of a table in a list, or of a section
        raise ConfigError(f"{place}: {written} = {shown(value)}: {wrong}{instead}")
    return value


def _unfit(words: Sequence[str]) -> str:
    """Return why no key can have these words as its value, or "" if it can."""
    if not all(map(_is_utf8, words)):
        return "not valid UTF-8"
    if any("\0" in word for word in words):
        return "has a NUL character"
    return (
        f"longer than {MOST_TEXT} characters" if max(map(len, words), default=0) > MOST_TEXT else ""
    )


def _is_utf8(text: str) -> bool:
    """Return False if the text is a file name or argument whose bytes are not UTF-8."""
    return text.isascii() or text.encode(errors="ignore").decode() == text


def _check_table(key: str, table: Any, place: str, cls: type) -> Any:
    """Return one element of a list of tables as its dataclass. Raises ConfigError. key: numbered, such as data.sources[1]."""
    fields, mistakes, values = (
        {field.name: field for field in dataclasses.fields(cls)},
        Mistakes(),
        {},
    )
    if not isinstance(table, dict):
        tables = key.partition("[")[0]
        raise ConfigError(
            f"{place}: {key} = {shown(table)}: expected a table; use [[{tables}]] with the keys of each below it"
        )
    for name, value in table.items():
        with mistakes.noted():
            if name not in fields:
                near = did_you_mean(name, fields, otherwise=f"; it has {', '.join(fields)}")
                raise ConfigError(
                    f"{place}: unknown key {shown(name)[1:-1]} = {shown(value)} in {key}{near}"
                )
            values[name] = _check_value(f"{key}.{name}", value, place, fields[name])
    mistakes.refuse()
    return cls(**values)


def _impossible(config: Config, origins: dict[str, str]) -> Iterator[ConfigError]:
    """Yield an error for each impossible combination of values."""
    values = flatten(config)

    def wrong(key: str, why: str) -> ConfigError:
        return ConfigError(
            f"{origins[key]}: [{key.replace('.', '] ', 1)} = {shown(values[key])}{why}"
        )

    for key in ("checkpoint.load_step", "checkpoint.must_resume"):
        if values[key] != KEYS[key].default and not config.checkpoint.enable:
            yield wrong(key, ": nothing is loaded; use checkpoint.enable = true")
    yield from _impossible_overlap(config, wrong)
    schedule, steps, stage = config.lr_scheduler, config.training.steps, config.compile
    if -1 < schedule.total_steps < schedule.warmup_steps:
        fix = f"use warmup_steps = {max(1, schedule.total_steps // 10)}"
        yield wrong(
            "lr_scheduler.warmup_steps",
            f" is longer than lr_scheduler.total_steps = {schedule.total_steps}; {fix}",
        )
    if -1 < schedule.total_steps < steps:
        yield wrong(
            "lr_scheduler.total_steps",
            f" ends before training.steps = {steps}; use -1 or at least that many",
        )
    if not config.model.tokenizer_path:
        yield wrong(
            "model.tokenizer_path",
            ' names no file; use a tokenizer file, such as "../assets/tokenizer/debug.model"',
        )
    if stage.enable and not stage.components:
        fix = 'use components = ["model", "loss"], or compile.enable = false'
        yield wrong(
            "compile.components", f" leaves nothing to compile, but compile.enable = true; {fix}"
        )
    if stage.enable and stage.bucketing == "plan" and not stage.buckets:
        fix = 'use buckets = ["tok_embeddings", "layers.0 layers.1"], or bucketing = "block", which needs none'
        yield wrong("compile.bucketing", f" needs compile.buckets; {fix}")
    if stage.enable and stage.bucketing == "auto" and not stage.reordering:
        fix = 'use reordering = true or bucketing = "block"'
        yield wrong(
            "compile.reordering",
            f': compile.bucketing = "{stage.bucketing}" orders what it buckets; {fix}',
        )
    option = config.activation_checkpoint.selective_ac_option
    if option not in ("op", "op/2") and not (
        option.isascii() and option.isdigit() and int(option) > 0
    ):
        fix = 'expected "op", "op/2", or a number of blocks in quotes, such as "2"'
        yield wrong("activation_checkpoint.selective_ac_option", f": {fix}")
    if config.activation_checkpoint.mode == "memory_budget" and not stage.compiles("model"):
        fix = 'use compile.enable = true with "model" in compile.components, or mode = "selective"'
        yield wrong(
            "activation_checkpoint.mode",
            f" lets the compiler choose, and the model is not compiled; {fix}",
        )
    layout, training = config.parallelism, config.training
    # the default is in every saved recipe, and is no request
    if layout.fsdp_reshard_after_forward == "always" and layout.fsdp_keep_gathered not in (
        (),
        Parallelism.fsdp_keep_gathered,
    ):
        fix = 'use "default" to keep these, or fsdp_keep_gathered = []'
        yield wrong(
            "parallelism.fsdp_keep_gathered",
            f': parallelism.fsdp_reshard_after_forward = "always" keeps none; {fix}',
        )
    try:
        batch_ramp(training.global_batch_ramp)
        if layout.data_parallel_shard_degree != -1:
            gradient_accumulation_steps(
                training, layout.data_parallel_replicate_degree * layout.data_parallel_shard_degree
            )
    except ConfigError as error:
        yield error
    yield from _impossible_sources(config, origins["data.sources"], wrong)


def _impossible_overlap(
    config: Config, wrong: Callable[[str, str], ConfigError]
) -> Iterator[ConfigError]:
    """Yield an error for each reason why asynchronous tensor parallelism has nothing to do."""
    key = "parallelism.enable_async_tensor_parallel"
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if config.parallelism.tensor_parallel_degree == 1:
        yield wrong(key, " has no collective to overlap; use tensor_parallel_degree = 2")
    if not config.compile.compiles("model"):
        fix = 'use compile.enable = true and compile.components = ["model", "loss"]'
        yield wrong(key, f" is done by the compiler, and the model is not compiled; {fix}")
    elif config.compile.backend != "inductor":
        yield wrong(key, ' is done by Inductor; use compile.backend = "inductor"')


def _impossible_sources(
    config: Config, origin: str, wrong: Callable[[str, str], ConfigError]
) -> Iterator[ConfigError]:
    """Yield an error for each impossible combination in [data]. origin: that of data.sources. wrong: (key, why) -> error."""
    sources = config.data.sources
    for field in dataclasses.fields(Corpus) if sources else ():
        if getattr(config.data, field.name) != field.default:
            fix = f"move it into these, or use sources = []; if an extended recipe has it, use {field.name} = "
            fix += in_toml(field.default)
            yield wrong(
                f"data.{field.name}", f" is beside data.sources ({origin}), which replace it; {fix}"
            )
    again: dict[Corpus, int] = {}
    for number, source in enumerate(sources, start=1):
        first = again.setdefault(dataclasses.replace(source, weight=1.0), number)
        if first != number:
            yield ConfigError(
                f"{origin}: data.sources[{first}] and [{number}] have the same documents, which would be read twice; "
                "use one of them with the sum of both weights"
            )
    for _, source in config.data.mixture():

        def of(name: str, why: str, source: Data = source) -> ConfigError:
            value = shown(getattr(source, name))
            return (
                ConfigError(f"{origin}: {source.key(name)} = {value}{why}")
                if sources
                else wrong(f"data.{name}", why)
            )

        here = {"local": "corpus/*.jsonl", "prepared": "prepared/books"}.get(source.dataset)
        if here and not source.path:
            yield of("dataset", f' needs {source.key("path")}; use one such as path = "{here}"')
        if source.path and not here:
            fix = f'{source.key("dataset")} = "local" or "prepared" (it is "{source.dataset}"); use one of these or remove path'
            yield of("path", f" is only read with {fix}")
        if (source.subset or source.split != "train") and "/" not in source.dataset:
            fix = f'(dataset = "{source.dataset}"); use one such as dataset = "HuggingFaceFW/fineweb", or remove it'
            yield of(
                "subset" if source.subset else "split", f" is only for datasets of the hub {fix}"
            )
        if (
            config.validation.enable
            and config.data.validation_fraction == 0
            and source.dataset not in ("c4", "prepared")
        ):
            fix = "use data.validation_fraction = 0.05, or validation.enable = false"
            yield wrong("validation.enable", f" needs held-out documents; {fix}")


def _expected(field: dataclasses.Field) -> str:
    """Return the admitted values with their unit, such as 'a number above 0 (L2 norm)'."""
    unit = "" if field.metadata["choices"] else field.metadata["unit"]
    return admitted_values(field) + (f" ({unit})" if unit not in ("", "bool", "integer") else "")


def admitted_values(field: dataclasses.Field) -> str:
    rule = field.metadata
    kinds = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        tuple: "a list of strings",
    }
    if rule["choices"]:
        named = ("a list of " if field.type is tuple else "one of ") + ", ".join(
            f'"{choice}"' for choice in rule["choices"]
        )
        return named + (f", or {rule['or_like'][0]}" if rule["or_like"][0] else "")
    if rule["table"]:
        return "a list of tables of " + ", ".join(
            part.name for part in dataclasses.fields(rule["table"])
        )
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    bounds = " and ".join(
        f"{word} {rule[name]}" for name, word in words.items() if rule[name] is not None
    )
    also = f", or {rule['also']}" if rule["also"] is not None else ""
    return f"{kinds[field.type]}{' ' + bounds if bounds else ''}{also}"  # type: ignore[index]


def nearest_section(section: str) -> str:
    """Return the end of a message about an unknown section. It names the key called so, the nearest section, or all sections."""
    homes = [key for key in KEYS if key.endswith(f".{section}")]
    if homes:
        return f"; {section} is a key: {' or '.join(homes)}"
    return did_you_mean(section, SECTIONS, otherwise=f"; known sections: {', '.join(SECTIONS)}")


def nearest_key(section: str, name: str) -> str:
    """Return the end of a message about an unknown key. It names this key's other section, the nearest key, or all keys."""
    if section not in SECTIONS:
        return did_you_mean(
            f"{section}.{name}", KEYS if name else (), otherwise=nearest_section(section)
        )
    elsewhere = [key for key in KEYS if key.endswith(f".{name}")]
    names = [f.name for f in dataclasses.fields(SECTIONS[section])]
    near = did_you_mean(
        name, names, within=f"{section}.", otherwise=f"; [{section}] has {', '.join(names)}"
    )
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else near
