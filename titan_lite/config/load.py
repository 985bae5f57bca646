"""Read a recipe: a TOML file, what it extends, and the command line, checked at once into a Config.

    config = load_config("train_configs/debug_model.toml", ["--training.steps", "20"])
    config.training.steps              # 20
    config.origin("training.steps")    # "command line"

Precedence: command line > recipe > the recipe it `extends` > default. What was typed is merged over
the TOML, and pydantic checks all of it once. Every mistake is one line of a ConfigError, with the
place, the key, the value and what is accepted. Imports no torch.
"""

import copy
import functools
import operator
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from titan_lite.config.errors import ConfigError, did_you_mean, error_because_of, in_toml, shown
from titan_lite.config.families import FAMILIES
from titan_lite.config.from_weights import FLAVOR as FROM_WEIGHTS
from titan_lite.config.from_weights import KEY as INITIAL_LOAD_PATH
from titan_lite.config.from_weights import read_model
from titan_lite.config.help import accepted
from titan_lite.config.nearest import GONE, nearest_key, nearest_section
from titan_lite.config.phases import KEY as PHASES
from titan_lite.config.phases import tables_of_phases, with_phases
from titan_lite.config.section import Relative, Section
from titan_lite.config.sections import KEYS, SECTIONS, Config, choices_of, kind_of, table_of
from titan_lite.config.weights_folder import steps_in, tokenizer_in
from titan_lite.text import error_line, one_line

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib

COMMAND_LINE = "command line"
_PACKAGE = Path(__file__).parents[1]
# In a wheel the recipes lie in the package; in a checkout beside it.
SHIPPED = next(
    (_PACKAGE / "train_configs").glob("debug_model.toml"),
    _PACKAGE.parent / "train_configs/debug_model.toml",
).parent

Tables = dict[str, Any]  # {section: {key: value}} of a recipe, not checked yet
Origins = dict[str, str]  # by section and by "section.key": the file, or COMMAND_LINE
# The key that a message is about, and the message. For a word that is no key it is the word.
Wrong = tuple[str, str]


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and the command line.

    recipe: path of a TOML file, or the name of a shipped one, such as llama3_8b. overrides:
    `--section.key value`, `--section.key=value`, for a list `--section.key a,b` or `--section.key a
    b`, and for booleans `--section.key` and `--section.no-key`. Raises ConfigError with all
    mistakes in single keys. What cannot be together is in titan_lite/rules/.
    """
    config, wrong = read_config(recipe, overrides)
    if wrong:
        raise ConfigError(*wrong)
    return config


def read_config(
    recipe: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config, tuple[str, ...]]:
    """Read a recipe and the command line as `load_config`, for rules that tell more mistakes.

    Return what is known of the recipe, and the messages about what is wrong. A key is not known if
    its value is wrong, or if none is given and a word that is not understood may be meant for it;
    then reading it raises UnknownValue. Raises ConfigError for a file that is no recipe.
    """
    path = find_recipe(Path(os.path.expanduser(recipe)))
    tables, origins = read_recipe(path)
    typed, mistakes = parse_command_line(overrides)
    phases = tables.pop(PHASES, ())
    first, wrong = _checked(path, copy.deepcopy(tables), dict(origins), typed, mistakes)
    if wrong or not phases:
        return first, wrong
    later: list[Config] = []
    for number, phase in enumerate(phases, 1):
        changes = {name: table for name, table in phase.items() if name != "begin"}
        place = f"{origins[PHASES]}: phases[{number}]"
        if twice := [key for key in _keys_in(changes) if key in _keys_in(typed)]:
            return first, (
                f"{COMMAND_LINE}: --{twice[0]} would undo what {place} changes; leave it out, or"
                " change the recipe",
            )
        _merge(tables, origins, changes, place)
        config, wrong = _checked(path, copy.deepcopy(tables), dict(origins), typed, ())
        if wrong:
            return first, wrong
        later.append(config)
    try:
        return with_phases(first, later, [phase["begin"] for phase in phases]), ()
    except ConfigError as error:
        return first, tuple(f"{origins[PHASES]}: {message}" for message in error.args)


def _keys_in(tables: Tables) -> list[str]:
    return [f"{section}.{name}" for section, table in tables.items() for name in table]


def _checked(
    path: Path, tables: Tables, origins: Origins, typed: Tables, mistakes: Iterable[Wrong]
) -> tuple[Config, tuple[str, ...]]:
    """Return what is known of a recipe without phases, and messages, as `read_config`.

    typed: the keys of the command line. mistakes: in other words of it.
    """
    mistakes = list(mistakes)
    _merge(tables, origins, typed, COMMAND_LINE)
    mistakes += _fill_from_weights(tables, origins, path.stem)
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        mistakes = [*_messages(error, tables, origins), *mistakes]
        config = Config.model_validate(_without(tables, mistakes))
    if not config.job.dump_folder:
        config = config.replace(job=config.job.replace(dump_folder=f"outputs/{path.stem}"))
    if config.validation.has_documents:
        config = _validated_on_its_own(config, origins)
    config = config.replace(data=config.data.without_run(config.job.dump_folder))
    messages = tuple(dict.fromkeys(message for _, message in mistakes))
    if mistakes:
        places = {place for place, _ in mistakes}
        config = config.replace(
            **{
                name: section.without(_unknown_keys(name, places, origins), messages)
                for name, section in config
            }
        )
    config.set_origins({key: origins[key] for key in KEYS if key in origins})
    return config, messages


def _without(tables: Tables, mistakes: Iterable[Wrong]) -> Tables:
    """Return the tables without the keys and sections that have a mistake."""
    places = {place for place, _ in mistakes}
    return {
        section: {name: value for name, value in table.items() if f"{section}.{name}" not in places}
        for section, table in tables.items()
        if section in SECTIONS and isinstance(table, dict)
    }


def _unknown_keys(section: str, places: Collection[str], origins: Origins) -> list[str]:
    """Return the keys of a section whose values are not known.

    A word that is no key of it may be meant for any that is not given.
    """
    others = {place.partition(".")[0] for place in places if place not in KEYS}
    has_other_words = section in others or any(other not in SECTIONS for other in others)
    return [
        name
        for name in SECTIONS[section].model_fields
        if f"{section}.{name}" in places or (has_other_words and f"{section}.{name}" not in origins)
    ]


def _validated_on_its_own(config: Config, origins: Origins) -> Config:
    """Return a recipe whose [validation] has documents, with the defaults that follow from it."""
    if "validation.enable" not in origins:
        config = config.replace(validation=config.validation.replace(enable=True))
    if "data.validation_fraction" not in origins:
        config = config.replace(data=config.data.replace(validation_fraction=0.0))
    return config


# Files


def find_recipe(path: Path) -> Path:
    """Return the path of the shipped recipe that llama3_8b or train_configs/llama3_8b.toml names.

    A path that exists, or that lies in another folder, is returned as it is: `read_toml`
    refuses one that is not there. Raises ConfigError for a word that names no recipe.
    """
    if str(path).startswith("--"):
        raise ConfigError(
            f"{one_line(str(path), 200)} stands where the recipe is named; use one such as"
            " llama3_8b, or the path of a TOML file, and options after it"
        )
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}
    name = path.name.removesuffix(".toml")
    if str(path.parent) not in (".", "train_configs") or os.path.lexists(path):
        return path
    if name in shipped:
        return shipped[name]
    if re.fullmatch(r"\w{1,64}", name):
        known = f"; use the path of a TOML file, or one of {', '.join(shipped)}"
        raise ConfigError(
            f"{one_line(str(path), 200)}: no such"
            f" recipe{did_you_mean(name, shipped, otherwise=known)}"
        )
    return path


def read_recipe(path: Path, chain: tuple[str, ...] = ()) -> tuple[Tables, Origins]:
    """Return the tables of a recipe on top of those of the one it extends, with absolute paths.

    Raises ConfigError.

    chain: the recipes that lead to this one by `extends`.
    """
    resolved = os.path.realpath(path)
    if resolved in chain:
        loop = " -> ".join((*chain[chain.index(resolved) :], resolved))
        raise ConfigError(
            f"{path}: extends is circular: {loop}; remove one of these `extends` lines"
        )
    own = without_gone(read_toml(path, "recipe"))
    base = own.pop("extends", None)
    tables: Tables = {}
    origins: Origins = {}
    if base is not None:
        tables, origins = read_recipe(_extended(path, base), (*chain, resolved))
    has_phases = PHASES in own
    phases = tables_of_phases(own.pop(PHASES, []), str(path))
    _merge(tables, origins, _absolute(own, Config, path.parent), str(path))
    if has_phases:
        tables[PHASES] = [_absolute(phase, Config, path.parent) for phase in phases]
        origins[PHASES] = str(path)
    return tables, origins


def without_gone(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables of an earlier version without keys that are gone and did nothing in them."""
    left = dict(tables)
    for key in GONE:
        table, _, name = key.partition(".")
        keys = left.get(table)
        if isinstance(keys, dict) and keys.get(name) in GONE[key].defaults:
            left[table] = {other: value for other, value in keys.items() if other != name}
    return left


def world_size_of(recipe: Path) -> int:
    """Return the number of ranks in a recipe's comment, or in that of one that it extends.

    Raises ConfigError if there is none.
    """
    path: Path | None = recipe
    while path is not None:
        text = path.read_text(encoding="utf-8")
        comment = re.search(r"^# world_size: ([1-9]\d*)$", text, re.MULTILINE)
        if comment is not None:
            return int(comment[1])
        base = read_toml(path, "recipe").get("extends")
        path = None if base is None else _extended(path, base)
    raise ConfigError(
        f"{recipe} has no line `# world_size: N`, nor has a recipe that it extends; use"
        " --world-size N"
    )


def read_toml(path: Path, what: str = "file") -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(
            f"{path} is a pipe or a device, and every rank reads a {what} again; write it to a file"
        )
    try:
        # an editor may put a byte order mark first
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}{_files_beside(path)}") from None
    except OSError as error:
        fix = "use a TOML file such as train_configs/debug_model.toml"
        why = f"{path}: cannot be read ({error.strerror}); {fix}"
        raise error_because_of(error, why) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"byte {error.object[error.start]:#04x} is not UTF-8 (at line {line})"
        raise ConfigError(f"{path}: not valid TOML: {wrong}; save it as UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error_line(error)}") from None


def _extended(path: Path, base: Any) -> Path:
    """Return the path of the recipe that `extends = base` names. Raises ConfigError."""
    if not isinstance(base, str) or not base:
        fix = 'use one such as extends = "debug_model.toml"'
        raise ConfigError(f"{path}: extends = {shown(base)} is not a path; {fix}")
    found = path.parent / os.path.expanduser(base)
    if not os.path.exists(found):
        wrong = f"extends = {shown(base)}: no such file (looked for {one_line(str(found), 200)})"
        raise ConfigError(f"{path}: {wrong}{_files_beside(found)}")
    return found


def _files_beside(path: Path) -> str:
    """Return the end of a message about a missing recipe: the recipes in its folder."""
    found = sorted(
        file.name for file in path.parent.glob("*.toml") if file.name != "pyproject.toml"
    )
    if found:
        known = f"; {path.parent} has {', '.join(found[:20])}"
    else:
        known = "; the shipped recipes are in train_configs/"
    return did_you_mean(path.name, found, within=f"{path.parent}/", otherwise=known)


def _absolute(values: Mapping[str, Any], cls: type[Section], folder: Path) -> dict[str, Any]:
    """Return the keys of a table of this class as pydantic wants them.

    Paths are absolute, and lists are tuples.
    """
    result = {}
    for name, value in values.items():
        field = cls.model_fields.get(name)
        table = table_of(field.annotation) if field else None
        if isinstance(value, dict):
            value = _absolute(value, table, folder) if table else value
        elif isinstance(value, list):
            value = tuple(
                _absolute(part, table, folder) if table and isinstance(part, dict) else part
                for part in value
            )
        elif isinstance(value, str) and field and (mark := _mark_of_path(value, field)):
            value = os.path.expanduser(value)
            value = os.path.abspath(folder / value) if mark.to_recipe else value
        result[name] = value
    return result


def _mark_of_path(value: str, field: FieldInfo) -> Relative | None:
    """Return the mark of a value that is a path on disk: not empty, and no URL."""
    if not value or "://" in value:
        return None
    marks = (mark for mark in field.metadata if isinstance(mark, Relative))
    return next((mark for mark in marks if value.endswith(mark.suffix)), None)


def _merge(tables: Tables, origins: Origins, upper: Tables, origin: str) -> None:
    """Put the keys of `upper` over those of `tables`, and note their origin."""
    for section, table in upper.items():
        if not isinstance(tables.setdefault(section, {}), dict):
            continue  # a wrong value, which pydantic reports later
        origins[section] = origin
        if isinstance(table, dict):
            tables[section].update(table)
            origins.update({f"{section}.{name}": origin for name in table})
        else:
            tables[section] = table


# The folder of weights


def _fill_from_weights(tables: Tables, origins: Origins, name: str) -> list[Wrong]:
    """Fill keys of [model] that are not set from the weights at checkpoint.initial_load_path.

    With the flavor "from_weights", or with a path and no flavor, these are all keys, and flavor
    becomes "". With another flavor they are tokenizer_path and the family (model.name).

    name: of the recipe. Return messages.
    """
    model = tables.get("model", {})
    checkpoint = tables.get("checkpoint", {})
    if not isinstance(model, dict) or not isinstance(checkpoint, dict):
        return []  # pydantic reports the wrong value
    path = checkpoint.get("initial_load_path", "")
    if not isinstance(path, str):
        return []
    if model.get("flavor", FROM_WEIGHTS if path else "") != FROM_WEIGHTS:
        if path and not (model.get("tokenizer_path") and model.get("name")):
            _fill_family_and_tokenizer(tables, origins, path)
        return []
    if not path:
        return _no_model(
            f'{origins["model.flavor"]}: model.flavor = "{FROM_WEIGHTS}" needs {INITIAL_LOAD_PATH};'
            " use a Hugging Face folder, a checkpoint or a run's folder as that"
        )
    try:
        weights = read_model(path, _family_in(tables))
    except ConfigError as error:
        why = f"{origins[INITIAL_LOAD_PATH]}: {error}{_way_without_weights(tables, name)}"
        return _no_model(why)
    if weights is None:
        return _no_model(
            f"{origins[INITIAL_LOAD_PATH]}: {INITIAL_LOAD_PATH} = {shown(path)}: a checkpoint of"
            " torchtitan does not have the shape of its model; use it with model.flavor, or with"
            " the keys of [model]"
        )
    keys = dict(weights.keys)
    if weights.tokenizer:
        keys["tokenizer_path"] = weights.tokenizer
    unset = {
        name: value
        for name, value in keys.items()
        if name not in model or (name != "name" and model[name] == KEYS[f"model.{name}"].default)
    }
    _merge(tables, origins, {"model": {"flavor": "", **unset}}, str(weights.file))
    return []


def _no_model(message: str) -> list[Wrong]:
    """Return a message about weights that give no keys of [model]."""
    return [(place, message) for place in ("model", "model.flavor", INITIAL_LOAD_PATH)]


def _fill_family_and_tokenizer(tables: Tables, origins: Origins, path: str) -> None:
    """Set model.name and model.tokenizer_path, where they are not set, to the family and the
    tokenizer of checkpoint.initial_load_path, if it has them.
    """
    try:
        weights = read_model(path, _family_in(tables))
    except ConfigError:  # a rule reports it, if the run begins with the weights
        weights = None
    tokenizer = weights.tokenizer if weights else tokenizer_in(Path(path))
    model = tables.get("model", {})
    keys = {}
    if tokenizer and not model.get("tokenizer_path"):
        keys["tokenizer_path"] = tokenizer
    if weights and not model.get("name"):
        keys["name"] = weights.keys["name"]
    if keys:
        _merge(tables, origins, {"model": keys}, path)


def _family_in(tables: Tables) -> str:
    """Return model.name if it is set; "" if not, or if it is no text."""
    name = tables.get("model", {}).get("name")
    return name if isinstance(name, str) and (name in FAMILIES or name.endswith(".py")) else ""


def _way_without_weights(tables: Tables, name: str) -> str:
    """Return the end of a message about weights that cannot be read, or "".

    A run that has checkpoints of its own needs no weights any more: the end names its recipe.
    """
    job = tables.get("job")
    dump_folder = job.get("dump_folder") if isinstance(job, dict) else None
    folder = Path(
        dump_folder if dump_folder and isinstance(dump_folder, str) else f"outputs/{name}"
    )
    steps = steps_in(folder)
    recipe = folder / "config.toml"
    resumes = tables["checkpoint"].get("enable", KEYS["checkpoint.enable"].default)
    if resumes is not True or not steps or not recipe.is_file():
        return ""
    return f"; with {recipe} as recipe the run resumes from its own {steps[0].name} without weights"


# The command line


def parse_command_line(arguments: Sequence[str]) -> tuple[Tables, list[Wrong]]:
    """Return the keys that are typed, as tables of a recipe, and what is wrong with other words."""
    tables: Tables = {}
    mistakes: list[Wrong] = []
    for typed, words in _options(arguments):
        key = typed.removeprefix("--").partition("=")[0].replace("-", "_")
        section, _, name = key.partition(".")
        positive = f"{section}.{name.removeprefix('no_')}"
        if positive in KEYS and KEYS[positive].annotation is bool:
            tables.setdefault(section, {})[name.removeprefix("no_")] = key == positive
            mistakes += _words_after_boolean(positive, words)
        elif key in KEYS:
            try:
                tables.setdefault(section, {})[name] = _value_of(key, words)
            except ConfigError as error:
                mistakes.append((key, str(error)))
        elif typed:
            mistakes.append((key, _unknown_option(typed, key)))  # words may be its value
        else:
            mistakes += [_stray_word(word) for word in words]
    return _absolute(tables, Config, Path()), mistakes


def _options(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option and the words up to the next one, of which `--option=word` has the first.

    Words before all options are those of the option "".
    """
    options: list[tuple[str, list[str]]] = [("", [])]
    for argument in arguments:
        if argument.startswith("--") and argument != "--":
            _, equals, word = argument.partition("=")
            options.append((argument, [word] if equals else []))
        else:
            options[-1][1].append(argument)
    return options


def option(key: str, text: str) -> str:
    """Return the option that sets a key to a value, given as text.

    true and false are --section.key and --section.no-key.
    """
    section, _, name = key.partition(".")
    if KEYS[key].annotation is not bool:
        return f"--{key}={text}"
    if text == "true":
        return f"--{key}"
    if text == "false":
        return f"--{section}.no-{name}"
    raise ConfigError(f"{key} = {shown(text)}: expected true or false")


def _value_of(key: str, words: Sequence[str]) -> Any:
    """Return the words typed for a key as its type, or as text where they have another form, which
    pydantic then reports.

    Raises ConfigError for several words or none where one is needed.
    """
    field = KEYS[key]
    kind = kind_of(field.annotation)
    if not all(map(_is_utf8, words)):
        raise ConfigError(f"{COMMAND_LINE}: --{key} = {shown(' '.join(words))}: not valid UTF-8")
    if kind is tuple and not table_of(field.annotation):
        entries = (entry.strip() for word in words for entry in word.split(","))
        return tuple(filter(None, entries))
    if len(words) != 1:
        wrong = f"several values: {' '.join(words)}" if words else "no value"
        raise ConfigError(f"{COMMAND_LINE}: --{key} has {wrong}; use one: {accepted(field)}")
    word = words[0]
    try:
        if kind is tuple:
            return tomllib.loads(f"value = {word}")["value"]
        if kind is int and re.fullmatch("[+-]?[0-9]{1,30}", word):
            return int(word)
        if kind is float and word.isascii():
            return float(word)
    except ValueError:
        pass
    return word


def _is_utf8(word: str) -> bool:
    """Return False if the bytes of an argument are not UTF-8, which Python has as surrogates."""
    return word.encode(errors="ignore").decode() == word


def _words_after_boolean(key: str, words: Sequence[str]) -> Iterator[Wrong]:
    """Yield what is wrong with words after an option that has no value."""
    for number, word in enumerate(words):
        if number or word.endswith(".toml"):
            yield _stray_word(word)
        else:
            fix = f"use {option(key, 'true')} for true, {option(key, 'false')} for false"
            yield key, f"{COMMAND_LINE}: --{key} {shown(word)}: it takes no value; {fix}"


def _unknown_option(typed: str, key: str) -> str:
    """Return a message about an option that does not exist."""
    negated = key.removeprefix("no_")
    if negated != key and negated in KEYS:
        fix = f"; use {option(negated, 'false')}"
    else:
        fix = nearest_key(key)
    return f"{COMMAND_LINE}: unknown option {one_line(typed, 100)}{fix}"


def _stray_word(word: str) -> Wrong:
    written = one_line(word, 100)
    if word.endswith(".toml"):
        fix = f"use one, with ./run_train.sh as CONFIG_FILE={written}"
        return "", f"{COMMAND_LINE}: '{written}' is a second recipe; {fix}"
    fix = "use --section.key value, such as --training.steps 100"
    return "", f"{COMMAND_LINE}: '{written}' is not an option; {fix}"


# pydantic's errors in our words

KeyPath = tuple[str | int, ...]  # ("data", "sources", 0, "weight")


def _messages(error: ValidationError, tables: Tables, origins: Origins) -> list[Wrong]:
    """Return a message for each wrong key.

    A union has an error for each of its types, and a list for each entry: one is reported.
    """
    messages: dict[KeyPath, Wrong] = {}
    for part in error.errors(include_url=False):
        table, path, field = _find(part["loc"])
        value = functools.reduce(operator.getitem, path, tables)  # type: ignore[arg-type]
        section, name = path[0], path[-1]
        place = ".".join(map(str, path[:2]))
        origin = origins.get(place, origins[str(section)])
        written = _dotted(path)
        if part["type"] == "extra_forbidden":
            message = _unknown(table, path, value)
        elif part["type"] == "model_type" and len(path) == 1:
            message = (
                f"{section} = {shown(value)} should be a section: write [{section}] and its keys"
                " below"
            )
        elif part["type"] == "model_type":
            fix = f"use [[{_dotted(path[:-1])}]] with the keys of each below it"
            message = f"{written} = {shown(value)}: expected a table; {fix}"
        else:
            assert field is not None
            example = f"{name} = {in_toml(field.default)}"
            if origin == COMMAND_LINE and len(path) == 2:
                example = f"--{written} {in_toml(field.default)}"
            message = f"{written} = {shown(value)}: {_why(part, field, example)}"
        messages.setdefault(path, (place, f"{origin}: {message}"))
    return list(messages.values())


def _find(loc: Sequence[str | int]) -> tuple[type[Section], KeyPath, FieldInfo | None]:
    """Return the table that an error is in, the path of its key, and its field.

    The field is None for an unknown key, and for an error in the table itself.

    loc: as pydantic has it, with the entry of a list and the type of a union at its end.
    """
    table: type[Section] = Config
    path: KeyPath = ()
    field: FieldInfo | None = None
    for part in loc:
        if path and isinstance(part, str):
            inner = table_of(field.annotation) if field else None
            if inner is None:
                break
            table = inner
        elif path and not (field and table_of(field.annotation)):
            break
        path += (part,)
        if isinstance(part, str):
            field = table.model_fields.get(part)
    return table, path, field


def _dotted(path: KeyPath) -> str:
    """("data", "sources", 0, "weight") -> data.sources[1].weight"""
    words = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(words).removeprefix(".")


def _unknown(table: type[Section], path: KeyPath, value: Any) -> str:
    """Return a message about a section or key that does not exist."""
    name = str(path[-1])
    written = shown(name)[1:-1]
    if len(path) == 1:
        return f"unknown section [{written}]{nearest_section(name)}"
    if len(path) == 2:
        near = nearest_key(f"{path[0]}.{name}")
        return f"unknown key {written} = {shown(value)} in [{path[0]}]{near}"
    known = table.model_fields
    near = did_you_mean(name, known, otherwise=f"; it has {', '.join(known)}")
    return f"unknown key {written} = {shown(value)} in {_dotted(path[:-1])}{near}"


def _why(part: Any, field: FieldInfo, example: str) -> str:
    """Return why a value is wrong, and what is accepted, with the key's default as an example."""
    if part["type"] == "value_error":
        return str(part["ctx"]["error"])
    expected = f"expected {accepted(field)}"
    choices = choices_of(field.annotation)
    if choices and isinstance(part["input"], str):
        return expected + did_you_mean(part["input"], choices)
    return f"{expected}, such as {example}"
