"""Settings as flags: one per field of each section and objective; and the recipe they make.

Only the verbs of training import it, when they run or print their help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from revela.cli.flags import Flat
from revela.errors import RevelaError
from revela.training.settings import (
    OBJECTIVES,
    RARE,
    SECTIONS,
    Objective,
    Recipe,
    check_unread,
    merge_settings,
    presets,
    read_recipe,
    settings_of,
)

TITLES = {"lm": "Language model"}
Preset = Annotated[str, Parameter(show_default=False)]
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]
Given = Annotated[Any, Parameter(parse=False)]
"""What flags gave; ``show_settings`` puts the dataclass of all flags in its place."""


def show_settings(verb: Any, tokens: Sequence[str]) -> None:
    """Give a verb its flags. All of them can be parsed; help lists those of the objective that the
    command line names, and leaves out rare ones.
    """
    values = dict(pairwise(" ".join(tokens).replace("=", " ").split()))
    preset = presets().get(values.get("--preset", ""), {})
    objective = values.get("--objective", preset.get("objective", "revela"))
    flags = settings_flags(OBJECTIVES.get(objective, OBJECTIVES["revela"]))
    verb.__annotations__["given"] = Annotated[flags | None, Flat]


def settings_flags(shown: type[Objective], names: Collection[str] = ()) -> type:
    """A dataclass with a field per flag, None where it is not given; of these settings alone, if
    there are ``names``.
    """
    sections = sorted(SECTIONS, key=lambda section: section != "objective")
    groups = {
        section: Group(TITLES.get(section) or section.capitalize(), sort_key=place)
        for place, section in enumerate(sections, 10)
    }
    text = f"What is learned from: {', '.join(OBJECTIVES)}."
    about = Parameter(help=text, group=groups["objective"])
    flags: dict[str, Any] = {"objective": ("objective", Annotated[str | None, about], None)}
    for objective in (shown, *OBJECTIVES.values()):
        for name, (section, item) in settings_of(objective).items():
            default = "" if item.default in ("", ()) else f" [default: {item.default}]"
            text = " ".join((item.description or "").split()) + default
            show = objective is shown and (name in names or RARE not in item.metadata)
            kind: Any = item.annotation
            about = Parameter(help=text, show=show, group=groups[section], negative_iterable=())
            flags.setdefault(name, (name, Annotated[kind | None, about], None))
    fields = [flags[name] for name in names or flags]
    made = dataclasses.make_dataclass("Settings", fields, frozen=True)
    made.__module__ = __name__  # cyclopts takes classes of the module types for no dataclasses
    return made


def given_settings(given: Any) -> dict[str, Any]:
    """The flags that were given, by name."""
    values = vars(given) if given is not None else {}
    return {name: value for name, value in values.items() if value is not None}


def recipe_of(preset: str, recipe_file: Path | None, given: Any) -> Recipe:
    """The recipe of a command line."""
    settings, variants = read_recipe(recipe_file) if recipe_file is not None else ({}, {})
    if variants:
        raise RevelaError(
            f"{recipe_file} holds {len(variants)} variants ({', '.join(variants)}): "
            "train them by revela compare"
        )
    recipe, unread = merge_settings(preset, settings | given_settings(given))
    check_unread([(recipe.objective.name, unread)])
    return recipe


def recipes_of(names: Sequence[str], recipe_file: Path | None, given: Any) -> dict[str, Recipe]:
    """The recipe of each preset, and of each variant of the recipe file, by the name of its run.

    Raises:
        RevelaError: two are equal, or none of them reads a setting that is given.
    """
    settings, variants = read_recipe(recipe_file) if recipe_file is not None else ({}, {})
    recipes, made = dict[str, Recipe](), list[tuple[str, set[str]]]()
    for preset in names:
        for variant, changes in (variants or {"": {}}).items():
            recipe, unread = merge_settings(preset, settings | changes | given_settings(given))
            parts = (preset if len(names) > 1 or not variant else "", variant)
            name = "-".join(part for part in parts if part)
            if same := next((other for other, known in recipes.items() if known == recipe), None):
                raise RevelaError(
                    f"{same} and {name} are equal: leave out the flag or setting that makes them so"
                )
            recipes[name] = recipe
            made.append((recipe.objective.name, unread))
    check_unread(made)
    return recipes
