"""A recipe: all settings of a run, merged from a preset of its method, a recipe file, and flags or
keyword arguments.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from revela.errors import RevelaError
from revela.training import settings as sections
from revela.training.methods.base import Method
from revela.training.methods.registry import DEFAULT, METHODS, find_method
from revela.training.methods.revela import Revela

OF_GENERATED_QUERIES = {"query_lm", "queries_file", "question_prompt"}
"Settings of [queries] that every method reads with --check-questions."
FIELDS = "__pydantic_fields__"
"Where a section's class has its fields, by name."
NEEDS = {"interleaved_passages": "--groups interleaved", "probe_questions": "--heads ''"}
"Settings that have no effect without another flag."
OF_CLUSTERS = ("cluster_size", "packing", "kmeans_steps", "kmeans_starts")
NEEDS |= dict.fromkeys(OF_CLUSTERS, "--groups cluster")
NEEDS |= dict.fromkeys(vars(sections.Context)[FIELDS].keys() - {"context"}, "--context")


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run; the defaults are the preset ``revela-gated``.

    >>> Recipe.of("dream", group_size=8).groups.group_size
    8
    """

    corpus: sections.Corpus = field(default_factory=sections.Corpus)
    groups: sections.Groups = field(default_factory=sections.Groups)
    queries: sections.Queries = field(default_factory=sections.Queries)
    retriever: sections.Retriever = field(default_factory=sections.Retriever)
    context: sections.Context = field(default_factory=sections.Context)
    fit: sections.Fit = field(default_factory=sections.Fit)
    lm: sections.LM = field(default_factory=sections.LM)
    method: Method = field(default_factory=Revela)
    optimizer: sections.Optimizer = field(default_factory=sections.Optimizer)
    training: sections.Training = field(default_factory=sections.Training)

    @property
    def pairs(self) -> tuple[Path, ...]:
        """The folders of judged queries that the method trains on.

        Raises:
            RevelaError: there is none, and queries are to be judged.
        """
        folders = tuple(map(Path, getattr(self.method, "pairs", ())))
        if not folders and self.queries.queries == "judged":
            raise RevelaError("--queries judged are those of --pairs: give their folder")
        return folders

    @property
    def negatives(self) -> int:
        """Mined negatives per query; 0: none."""
        return int(getattr(self.method, "negatives", 0))

    @classmethod
    def of(cls, method: str | Method = DEFAULT, **settings: Any) -> Recipe:
        """The recipe of a method, with some settings replaced.

        Args:
            method: name of a preset or a method, FILE.py:Class, or an instance of a method.
            settings: by name, such as ``chunk_words=30``.

        Raises:
            RevelaError: the method or a setting is unknown, a value is out of bounds, or the method
                does not read a setting.
        """
        return cls().replace(method=method, **settings)

    def replace(self, **settings: Any) -> Recipe:
        """This recipe with some settings replaced. A ``method`` by name brings the settings of its
        preset.
        """
        recipe, unread = self.merge(settings)
        # Programs name one LM for several methods, of which some read none.
        check_unread([(recipe.method.name, unread - {"lm"})])
        return recipe

    def merge(self, settings: Mapping[str, Any]) -> tuple[Recipe, set[str]]:
        """As ``replace``, but the names of settings that the method does not read are returned, not
        refused.
        """
        method = settings.get("method", self.method)
        if not isinstance(method, Method):
            kind, preset = find_method(str(method))
            recipe, _ = dataclasses.replace(self, method=kind()).merge(preset)
            return recipe.merge({**settings, "method": recipe.method})
        known, unread = settings_of(type(method)), set[str]()
        changes: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name in known:
                changes.setdefault(known[name][0], {})[name] = value
            elif name != "method":
                unread.add(name)
                if not methods_with(name):
                    where = "docs/command-line.md lists all of them"
                    raise RevelaError(f"this version has no setting {name}: {where}")
        recipe = dataclasses.replace(self, method=method)
        try:
            for section, values in changes.items():
                new = dataclasses.replace(getattr(recipe, section), **values)
                recipe = dataclasses.replace(recipe, **{section: new})
        except ValidationError as error:
            first = error.errors()[0]
            flag, fault = str(first["loc"][0]).replace("_", "-"), first["msg"]
            fault = fault.removeprefix("Input ")
            raise RevelaError(f"--{flag} {first['input']}: it {fault}") from error
        return recipe, unread | (settings.keys() & recipe.without_effect)

    @property
    def has_written_queries(self) -> bool:
        """Whether the method reads queries that a language model writes about the corpus."""
        reads_queries = self.method.reads == "queries" and self.queries.queries == "lm"
        return reads_queries and not (self.queries.questions or self.pairs)

    @property
    def without_effect(self) -> set[str]:
        """The names of settings that this recipe does not read, whatever their values."""
        names, method = set[str](), self.method
        if method.reads != "queries":
            read = OF_GENERATED_QUERIES if self.training.check_questions else set()
            names |= vars(sections.Queries)[FIELDS].keys() - read
        if not (method.reads_lm or method.reads == "queries" or self.training.check_questions):
            names.add("lm")
        heads = getattr(method, "heads", "").removeprefix("published")
        on = {f"--groups {self.groups.groups}", "--context" * bool(self.context.context)}
        on.add(f"--heads {heads!r}")
        return names | {name for name, needed in NEEDS.items() if needed not in on}

    def to_dict(self) -> dict[str, Any]:
        """Name -> value of every setting, as JSON types; ``method`` is its name."""
        values: dict[str, Any] = {"method": self.method.name}
        for name, (section, _) in settings_of(type(self.method)).items():
            value = getattr(getattr(self, section), name)
            values[name] = list(value) if isinstance(value, tuple) else value
        return values


SECTIONS: dict[str, Any] = {item.name: item.default_factory for item in dataclasses.fields(Recipe)}


def settings_of(method: type[Method]) -> dict[str, tuple[str, FieldInfo]]:
    """Setting -> its section and field, for a recipe with this method."""
    settings: dict[str, tuple[str, FieldInfo]] = {}
    for section, kind in (SECTIONS | {"method": method}).items():
        for base in reversed(kind.__mro__):  # pydantic reads the help of a class's own fields
            for name, item in vars(base).get(FIELDS, {}).items():
                if item.description or name not in settings:
                    settings[name] = section, item
    return settings


def methods_with(setting: str) -> list[str]:
    """The methods that declare this setting; none for one of a section that all share."""
    return [name for name, kind in METHODS.items() if setting in vars(kind)[FIELDS]]


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
        raise RevelaError(f"{file} is not TOML ({error}): correct it, or give another") from error
    variants = tables.pop("variants", {})
    for name, table in variants.items():
        if not isinstance(table, dict):
            raise RevelaError(f"{file}: variant {name!r} must be a table: write [variants.{name}]")
        if not name.replace("-", "").replace("_", "").isalnum():
            raise RevelaError(f"{file}: name variant {name!r} by letters, digits, - and _")
    changes = {name: _flattened(table, str(file)) for name, table in variants.items()}
    return _flattened(tables, str(file)), changes


def _flattened(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of all sections, by name; ``method`` is in [method]."""
    flat: dict[str, Any] = {}
    for section, values in tables.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise RevelaError(f"{where}: {section} is not a section: docs/command-line.md has all")
        flat |= values
    return flat


def check_unread(unread: Sequence[tuple[str, set[str]]]) -> None:
    """Raise RevelaError for a given setting that no recipe reads.

    Args:
        unread: of each recipe, its method and the names of the settings that it does not read.
    """
    if unread and (names := set.intersection(*(names for _, names in unread))):
        name, ours = min(names), " and ".join(dict.fromkeys(method for method, _ in unread))
        others = methods_with(name)
        others = others or [m for m in METHODS if name not in Recipe.of(m).without_effect]
        flag, remedy = name.replace("_", "-"), f"train {' or '.join(others)}"
        if name in NEEDS:
            ours, remedy = f"{ours} without {NEEDS[name]}", f"give {NEEDS[name]}"
        raise RevelaError(f"--{flag} has no effect on --method {ours}: leave it out, or {remedy}")
