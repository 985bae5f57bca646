"""A table of a recipe: what sections.py and the keys of features are made of.

    class PowerSGDKeys(Section):            # titan_lite/features/powersgd/keys.py
        table = "parallelism"               # the table that gets these keys
        replicate_rank: int = Field(8, ge=1)

    PowerSGDKeys.of(config).replicate_rank

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model

from titan_lite.config.errors import ConfigError
from titan_lite.features import part_of_each
from titan_lite.text import without_secrets

if TYPE_CHECKING:
    from titan_lite.config.sections import Config

Own = TypeVar("Own", bound="Section")


class UnknownValue(ConfigError):
    """A key is read whose value is wrong. It has all messages about the wrong recipe."""


class Section(BaseModel):
    """One table of a recipe, or the keys that a feature adds to a table."""

    table: ClassVar[str] = ""  # of keys of a feature: where they are in a recipe

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # "5" and true are no 5; an integer of TOML is a float, too
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    _wrong: tuple[str, ...] = PrivateAttr(())  # messages of `without`

    if not TYPE_CHECKING:  # a type checker would then know every attribute

        def __getattr__(self, name: str) -> object:
            """Raise UnknownValue for a key that `without` has taken away."""
            if name in type(self).model_fields:
                raise UnknownValue(*self._wrong)
            return super().__getattr__(name)

    @classmethod
    def of(cls: type[Own], config: Config) -> Own:
        """Return the table of a recipe that has these keys of a feature."""
        section = getattr(config, cls.table)
        assert isinstance(section, cls)
        return section

    def without(self: Own, names: Iterable[str], wrong: Sequence[str]) -> Own:
        """Return a copy that does not have these keys: they have a wrong value, or none that is
        known. wrong: all messages about the recipe.
        """
        copy = self.model_copy()
        copy._wrong = tuple(wrong)
        for name in names:
            del copy.__dict__[name]
        return copy

    def replace(self: Own, **values: object) -> Own:
        """Return a copy with other values, whose types and bounds are not checked.

        Raises TypeError for an unknown key.
        """
        if unknown := values.keys() - type(self).model_fields:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=values)

    def without_secrets(self: Own) -> Own:
        """Return a copy to be written or shown, without passwords and tokens in URLs."""
        return self.replace(**{name: _without_secrets(value) for name, value in self})


def _without_secrets(value: object) -> object:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Section):
        return value.without_secrets()
    if isinstance(value, tuple):
        return tuple(map(_without_secrets, value))
    return value


@dataclass(frozen=True)
class Relative:
    """Marks a path: relative to the recipe's folder in a recipe, and to the current one on the
    command line. A ~ at its beginning is the user's home.

    suffix: only values that end with it are paths. to_recipe: False for what a run writes, which is
    relative to the folder that it is started in.
    """

    suffix: str = ""
    to_recipe: bool = True


RecipePath = Annotated[str, Relative()]
OutputPath = Annotated[str, Relative(to_recipe=False)]


class SelectsModules:
    """Marks names of modules, or parts of them, that are treated otherwise than others."""


ModuleNames = Annotated[tuple[str, ...], SelectsModules()]


def with_added_keys(table: str) -> Callable[[type[Own]], type[Own]]:
    """Decorate the class of a table: features may add keys to it."""

    def extended(section: type[Own]) -> type[Own]:
        added = [keys for keys in added_keys() if keys.table == table]
        return _derived(section, added) if added else section

    return extended


def with_added_tables(config: type[Own]) -> type[Own]:
    """Decorate the class of a recipe: it gets the tables that only features have."""
    tables = {keys.table: keys for keys in added_keys() if keys.table not in config.model_fields}
    return _derived(config, [], **{name: (keys, keys()) for name, keys in tables.items()})


def added_values(key: str) -> dict[str, str]:
    """Return the values that features add to a key, such as "compile.bucketing", in words."""
    found: dict[str, str] = {}
    for module in part_of_each("keys"):
        found |= getattr(module, "VALUES", {}).get(key, {})
    return found


def added_keys() -> list[type[Section]]:
    """Return the classes of keys that features add."""
    return [keys for module in part_of_each("keys") for keys in module.KEYS]


def _derived(section: type[Own], added: Sequence[type[Section]], **fields: Any) -> type[Own]:
    """Return a subclass of the same name. Its keys come in the order of section, added, fields."""
    names = [*section.model_fields, *(name for keys in added for name in keys.model_fields)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"features add keys to {section.__name__} that are there: {sorted(twice)}")
    bases = (*reversed(added), section)
    derived: Any = create_model(
        section.__name__, __base__=bases, __module__=section.__module__, **fields
    )
    derived.__doc__ = section.__doc__
    return cast("type[Own]", derived)
