"""A recipe: all settings of a run, merged from a preset (``presets/*.toml``), a recipe file, and
flags or keyword arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from revela.errors import RevelaError
from revela.training.settings import sections
from revela.training.settings.objectives import OBJECTIVES, Objective, Revela, objective_class

OF_GENERATED_QUERIES = {"query_lm", "queries_file"}
"Settings of [queries] that every objective reads with --check-questions."
FIELDS = "__pydantic_fields__"
"Where a section's class has its fields, by name."


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run; the defaults are the ``gated`` preset.

    >>> Recipe.of(preset="dream", group_size=8).groups.group_size
    8
    """

    corpus: sections.Corpus = field(default_factory=sections.Corpus)
    groups: sections.Groups = field(default_factory=sections.Groups)
    queries: sections.Queries = field(default_factory=sections.Queries)
    retriever: sections.Retriever = field(default_factory=sections.Retriever)
    context: sections.Context = field(default_factory=sections.Context)
    fit: sections.Fit = field(default_factory=sections.Fit)
    lm: sections.LM = field(default_factory=sections.LM)
    objective: Objective = field(default_factory=Revela)
    training: sections.Training = field(default_factory=sections.Training)

    @property
    def pairs(self) -> str:
        """The folder of judged queries that the objective trains on; "": none."""
        return str(getattr(self.objective, "pairs", ""))

    @classmethod
    def of(cls, preset: str = "", **settings: Any) -> Recipe:
        """A preset's recipe, with some settings replaced.

        Args:
            preset: name of a preset; "": that of the objective.
            settings: by name, such as ``chunk_words=30`` or ``objective="dream"``.

        Raises:
            RevelaError: there is no such preset or setting, a value is out of bounds, or the
                objective does not read a setting.
        """
        recipe, unread = merge_settings(preset, settings)
        check_unread([(recipe.objective.name, unread)])
        return recipe

    def replace(self, **settings: Any) -> Recipe:
        """This recipe with some settings replaced. A new objective begins with its own defaults."""
        recipe, unread = self.merge(settings)
        check_unread([(recipe.objective.name, unread)])
        return recipe

    def merge(self, settings: Mapping[str, Any]) -> tuple[Recipe, set[str]]:
        """As ``replace``, but the names of settings that the objective does not read are returned,
        not refused.
        """
        objective = settings.get("objective", self.objective)
        if not isinstance(objective, Objective):
            is_same = objective == self.objective.name
            objective = self.objective if is_same else objective_class(str(objective))()
        known, unread = settings_of(type(objective)), set[str]()
        changes: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name in known:
                changes.setdefault(known[name][0], {})[name] = value
            elif name != "objective":
                unread.add(name)
                if not objectives_with(name):
                    where = "docs/command-line.md lists all of them"
                    raise RevelaError(f"this version has no setting {name}: {where}")
        recipe = dataclasses.replace(self, objective=objective)
        try:
            for section, values in changes.items():
                new = dataclasses.replace(getattr(recipe, section), **values)
                recipe = dataclasses.replace(recipe, **{section: new})
        except ValidationError as error:
            first = error.errors()[0]
            flag, fault = str(first["loc"][0]).replace("_", "-"), first["msg"]
            fault = fault.removeprefix("Input ")
            raise RevelaError(f"--{flag} {first['input']}: it {fault}") from error
        if objective.reads != "queries":
            read = OF_GENERATED_QUERIES if recipe.training.check_questions else set()
            unread |= changes.get("queries", {}).keys() - read
        return recipe, unread

    def to_dict(self) -> dict[str, Any]:
        """Name -> value of every setting, as JSON types; ``objective`` is its name."""
        values: dict[str, Any] = {"objective": self.objective.name}
        for name, (section, _) in settings_of(type(self.objective)).items():
            value = getattr(getattr(self, section), name)
            values[name] = list(value) if isinstance(value, tuple) else value
        return values


SECTIONS: dict[str, Any] = {item.name: item.default_factory for item in dataclasses.fields(Recipe)}


def settings_of(objective: type[Objective]) -> dict[str, tuple[str, FieldInfo]]:
    """Setting -> its section and field, for a recipe with this objective."""
    settings: dict[str, tuple[str, FieldInfo]] = {}
    for section, kind in (SECTIONS | {"objective": objective}).items():
        for base in reversed(kind.__mro__):  # pydantic reads the help of a class's own fields
            for name, item in vars(base).get(FIELDS, {}).items():
                if item.description or name not in settings:
                    settings[name] = section, item
    return settings


def objectives_with(setting: str) -> list[str]:
    """The objectives that declare this setting; none for one of a section that all share."""
    return [name for name, kind in OBJECTIVES.items() if setting in vars(kind)[FIELDS]]


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Preset -> its settings by name."""
    folder = resources.files("revela.training").joinpath("presets")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    texts = {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}
    names = sorted(texts, key=lambda name: (name != "gated", name != "paper", name))
    return {name: _flattened(tomllib.loads(texts[name]), name) for name in names}


def merge_settings(preset: str, settings: Mapping[str, Any]) -> tuple[Recipe, set[str]]:
    """As ``Recipe.of``, but the names of settings that the objective does not read are returned,
    not refused.
    """
    if preset and preset not in presets():
        raise RevelaError(f"--preset {preset}: give one of {', '.join(presets())}")
    objective = settings.get("objective", "")
    base = presets().get(preset or str(objective), {})
    named = {"objective": objective or base.get("objective", "revela")}
    recipe, _ = Recipe().merge(base | named)
    return recipe.merge({**settings, **named})


def read_recipe(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read a TOML file: its settings by name, and those of its variants ([variants.NAME]).

    Raises:
        RevelaError: the file is missing, is not TOML, or has an unknown section.
    """
    if not file.is_file():
        raise RevelaError(f"{file} does not exist: give a TOML file of settings as --recipe")
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RevelaError(
            f"{file} is not TOML ({error}): correct it, or give another --recipe"
        ) from error
    variants = tables.pop("variants", {})
    for name, table in variants.items():
        if not isinstance(table, dict):
            raise RevelaError(f"{file}: variant {name!r} is no table: write [variants.{name}]")
        if not name.replace("-", "").replace("_", "").isalnum():
            raise RevelaError(
                f"{file}: a variant is called {name!r}, but names a folder: use letters, digits, "
                "- and _"
            )
    changes = {name: _flattened(table, str(file)) for name, table in variants.items()}
    return _flattened(tables, str(file)), changes


def _flattened(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of all sections, by name; [objective] has its name as ``name``."""
    flat: dict[str, Any] = {}
    for section, values in tables.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise RevelaError(
                f"{where}: {section} is no section of settings: docs/command-line.md shows them"
            )
        for name, value in values.items():
            flat["objective" if (section, name) == ("objective", "name") else name] = value
    return flat


def check_unread(unread: Sequence[tuple[str, set[str]]]) -> None:
    """Raise RevelaError for a given setting that no recipe reads.

    Args:
        unread: of each recipe, its objective and the names of the settings that it does not read.
    """
    if unread and (names := set.intersection(*(names for _, names in unread))):
        name, ours = min(names), " and ".join(dict.fromkeys(objective for objective, _ in unread))
        of_queries = [o for o, kind in OBJECTIVES.items() if kind.reads == "queries"]
        others = objectives_with(name) or of_queries
        raise RevelaError(
            f"--{name.replace('_', '-')} has no effect on --objective {ours}: "
            f"leave it out, or train {' or '.join(others)}"
        )
