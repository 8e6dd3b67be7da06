"""A recipe: all settings of a run, merged from a preset (``presets/*.toml``), a recipe file, and
flags or keyword arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from revela.errors import RevelaError
from revela.training.settings.objectives import OBJECTIVES, Objective, Revela, objective_class
from revela.training.settings.sections import (
    LM,
    Context,
    Corpus,
    Fit,
    Groups,
    Queries,
    Retriever,
    Training,
)

SECTIONS: dict[str, Any] = {
    "corpus": Corpus,
    "groups": Groups,
    "queries": Queries,
    "retriever": Retriever,
    "context": Context,
    "fit": Fit,
    "lm": LM,
    "training": Training,
}
GENERATION = ("query_lm", "queries_file")
"Settings of generated queries. With --check-questions every objective reads them."
FLAGS = {
    ("groups", "kind"): "groups",
    ("queries", "source"): "queries",
    ("context", "slots"): "context",
    ("lm", "model"): "lm",
}


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run; the defaults are the ``gated`` preset.

    >>> Recipe.of(preset="dream", group_size=8).groups.group_size
    8
    """

    corpus: Corpus = field(default_factory=Corpus)
    groups: Groups = field(default_factory=Groups)
    queries: Queries = field(default_factory=Queries)
    retriever: Retriever = field(default_factory=Retriever)
    context: Context = field(default_factory=Context)
    fit: Fit = field(default_factory=Fit)
    lm: LM = field(default_factory=LM)
    objective: Objective = field(default_factory=Revela)
    training: Training = field(default_factory=Training)

    @property
    def pairs(self) -> str:
        """The folder of judged queries that the objective trains on; "": none."""
        return str(getattr(self.objective, "pairs", ""))

    @classmethod
    def of(cls, preset: str = "", **settings: Any) -> Recipe:
        """A preset's recipe, with some settings replaced.

        Args:
            preset: name of a preset; "": that of the objective.
            settings: by flag name, such as ``chunk_words=30`` or ``objective="dream"``.

        Raises:
            RevelaError: there is no such preset or setting, or a value is out of bounds.
        """
        return build_recipe(preset, {}, settings)

    def replace(self, **settings: Any) -> Recipe:
        """This recipe with some settings replaced, by flag name. A new objective begins with its
        own defaults.
        """
        objective = settings.pop("objective", self.objective)
        if objective == self.objective.name:
            objective = self.objective
        elif isinstance(objective, str):
            objective = objective_class(objective)()
        recipe, unread = _apply(dataclasses.replace(self, objective=objective), settings)
        check_unread([(recipe, unread)])
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Flag name -> value of every setting, as JSON types; ``objective`` is its name."""
        values: dict[str, Any] = {"objective": self.objective.name}
        for section, item in fields_of(self.objective):
            value = getattr(getattr(self, section), item.name)
            values[flag_of(section, item.name)] = list(value) if isinstance(value, tuple) else value
        return values


def flag_of(section: str, name: str) -> str:
    """The flag of a field, with underscores."""
    return FLAGS.get((section, name), name)


def fields_of(objective: Any) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(section, field) of every setting of a recipe with this objective."""
    for section, kind in SECTIONS.items():
        yield from ((section, item) for item in dataclasses.fields(kind))
        if section == "lm":
            yield from (("objective", item) for item in dataclasses.fields(objective))


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Preset -> its settings by flag name."""
    folder = resources.files("revela.training").joinpath("presets")
    texts = {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }
    names = sorted(texts, key=lambda name: (name != "gated", name != "paper", name))
    return {name: _flattened(tomllib.loads(texts[name]), name)[0] for name in names}


def build_recipe(preset: str, file: Mapping[str, Any], given: Mapping[str, Any]) -> Recipe:
    """Merge a preset, a recipe file and given settings; later ones win.

    Args:
        preset: its name; "": that of the given objective, or of the file's.
        file, given: settings by flag name.

    Raises:
        RevelaError: there is no such preset or setting, a value is out of bounds, or the objective
            does not read a setting in ``file`` or ``given``.
    """
    recipe, unread = merge_settings(preset, file, given)
    check_unread([(recipe, unread)])
    return recipe


def merge_settings(
    preset: str, file: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Recipe, set[str]]:
    """``build_recipe``, but unread settings are returned beside the recipe, not refused."""
    requested = given.get("objective") or file.get("objective") or ""
    implied = preset or (requested if isinstance(requested, str) else "")
    if preset and preset not in presets():
        raise RevelaError(f"--preset {preset}: give one of {', '.join(presets())}")
    base = presets().get(implied, {})
    objective: Any = requested or base.get("objective", "revela")
    if not isinstance(objective, Objective):
        objective = objective_class(str(objective))()
    overrides = {k: v for k, v in {**file, **given}.items() if k != "objective"}
    own = {flag_of(section, item.name) for section, item in fields_of(objective)}
    layers = {k: v for k, v in base.items() if k in own} | overrides
    return _apply(Recipe(objective=objective), layers, frozenset(overrides))


def read_recipe(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read a TOML file: its settings by flag name, and those of its variants ([variants.NAME]).

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
    return _flattened(tables, str(file))


def _flattened(
    tables: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    variants = tables.get("variants", {})
    for name, table in variants.items():
        if not isinstance(table, dict):
            raise RevelaError(f"{where}: variant {name!r} is no table: write [variants.{name}]")
        if not name.replace("-", "").replace("_", "").isalnum():
            raise RevelaError(
                f"{where}: a variant is called {name!r}, but names a folder: use letters, digits, "
                "- and _"
            )
    flat: dict[str, Any] = {}
    for section, values in tables.items():
        if section == "variants":
            continue
        if section not in (*SECTIONS, "objective") or not isinstance(values, dict):
            raise RevelaError(
                f"{where}: {section} is no section of settings: docs/command-line.md shows them"
            )
        for name, value in values.items():
            is_name = (section, name) == ("objective", "name")
            flat["objective" if is_name else flag_of(section, name)] = value
    return flat, {name: _flattened(table, where)[0] for name, table in variants.items()}


def objectives_with(name: str) -> list[str]:
    """The objectives that have a setting of this flag name."""
    return [
        objective
        for objective, kind in OBJECTIVES.items()
        if name in {item.name for item in dataclasses.fields(kind)}
    ]


def _apply(
    recipe: Recipe, settings: Mapping[str, Any], overrides: frozenset[str] | None = None
) -> tuple[Recipe, set[str]]:
    """The recipe with these settings, and the names in ``overrides`` that it does not read."""
    overrides = frozenset(settings) if overrides is None else overrides
    places = {flag_of(s, item.name): (s, item.name) for s, item in fields_of(recipe.objective)}
    unread = {name for name in overrides if name not in places}
    for name in unread:
        if not objectives_with(name):
            raise RevelaError(
                f"this version has no setting {name}: docs/command-line.md lists all of them"
            )
    changes: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name in places:
            section, key = places[name]
            changes.setdefault(section, {})[key] = value
    sections = {
        section: _replaced(section, getattr(recipe, section), values)
        for section, values in changes.items()
    }
    made = dataclasses.replace(recipe, **sections)
    if made.objective.reads != "queries":
        given = {flag_of("queries", item.name) for item in dataclasses.fields(Queries)} & overrides
        unread |= given - set(GENERATION if made.training.check_questions else ())
    return made, unread


def _replaced(section: str, settings: Any, values: Mapping[str, Any]) -> Any:
    try:
        return dataclasses.replace(settings, **values)
    except ValidationError as error:
        first = error.errors()[0]
        flag = flag_of(section, str(first["loc"][0])).replace("_", "-")
        raise RevelaError(
            f"--{flag} {first['input']}: it {first['msg'].removeprefix('Input ')}"
        ) from error


def check_unread(made: Sequence[tuple[Recipe, set[str]]]) -> None:
    """Raise RevelaError for a given setting that none of these recipes reads.

    ``made``: each recipe, and the names of the given settings that it does not read.
    """
    names = set.intersection(*(unread for _, unread in made)) if made else set()
    if not names:
        return
    name = min(names)
    ours = " and ".join(dict.fromkeys(recipe.objective.name for recipe, _ in made))
    others = objectives_with(name) or [
        o for o, kind in OBJECTIVES.items() if kind.reads == "queries"
    ]
    raise RevelaError(
        f"--{name.replace('_', '-')} has no effect on --objective {ours}: "
        f"leave it out, or train {' or '.join(others)}"
    )
