"""Settings as flags: one per field of each section and objective; and the recipe they make.

Only the verbs of training import it, when they run or print their help.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from revela.errors import RevelaError
from revela.training.settings import (
    OBJECTIVES,
    SECTIONS,
    Objective,
    Recipe,
    build_recipe,
    check_unread,
    descriptions,
    fields_of,
    flag_of,
    is_rare,
    merge_settings,
    presets,
    read_recipe,
)

Preset = Annotated[str, Parameter(show_default=False)]
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]
Given = Annotated[Any, Parameter(parse=False)]
"""What flags gave; ``show_settings`` puts the dataclass of all flags in its place."""


def show_settings(verb: Any, tokens: Sequence[str]) -> None:
    """Give a verb its flags. All of them can be parsed; help lists those of the objective that the
    command line names, and leaves out rare ones.
    """
    values = dict(zip(tokens, [*tokens[1:], ""], strict=True))
    values |= dict(
        token.split("=", 1) for token in tokens if token.startswith("--") and "=" in token
    )
    preset = presets().get(values.get("--preset", ""), {})
    objective = values.get("--objective", preset.get("objective", "revela"))
    flags = settings_flags(OBJECTIVES.get(objective, OBJECTIVES["revela"]))
    verb.__annotations__["given"] = Annotated[
        flags | None, Parameter(name="*", consume_multiple=True)
    ]


def settings_flags(shown: type[Objective]) -> type:
    """A dataclass with a field per flag, None where it is not given."""
    names = f"What is learned from: {', '.join(OBJECTIVES)}."
    about = Parameter(help=names, group=_group("objective"))
    fields: dict[str, Any] = {"objective": (Annotated[str | None, about], None)}
    for objective in (shown, *OBJECTIVES.values()):
        for section, item in fields_of(objective):
            kind: Any = SECTIONS.get(section, objective)
            name = flag_of(section, item.name)
            if name not in fields:
                is_shown = kind in (*SECTIONS.values(), shown) and not is_rare(kind, item.name)
                fields[name] = (_flag(section, kind, item, is_shown), None)
    made = dataclasses.make_dataclass(
        "Settings", [(name, kind, default) for name, (kind, default) in fields.items()], frozen=True
    )
    made.__module__ = __name__  # cyclopts takes classes of the module types for no dataclasses
    return made


def _flag(section: str, kind: Any, item: dataclasses.Field[Any], is_shown: bool) -> Any:
    """The annotation of a field that is a flag."""
    default = getattr(kind, item.name)
    default = " ".join(map(str, default)) if isinstance(default, tuple) else default
    about = Parameter(
        help=f"{descriptions(kind).get(item.name, '')} [default: {default}]".replace(
            " [default: ]", ""
        ),
        show=is_shown,
        group=_group(section),
        negative_iterable=(),
    )
    return Annotated[get_type_hints(kind)[item.name] | None, about]


@functools.cache
def _group(section: str) -> Group:
    title = "Language model" if section == "lm" else section.capitalize()
    order = ["objective", *SECTIONS]
    return Group(title, sort_key=order.index(section) + 10)


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
    return build_recipe(preset, settings, given_settings(given))


def recipes_of(names: Sequence[str], recipe_file: Path | None, given: Any) -> dict[str, Recipe]:
    """The recipe of each preset, and of each variant of the recipe file, by the name of its run.

    Raises:
        RevelaError: two are equal, or none of them reads a setting that is given.
    """
    settings, variants = read_recipe(recipe_file) if recipe_file is not None else ({}, {})
    recipes: dict[str, Recipe] = {}
    made = []
    for preset in names:
        for variant, changes in (variants or {"": {}}).items():
            recipe, unread = merge_settings(preset, {**settings, **changes}, given_settings(given))
            parts = (preset if len(names) > 1 or not variant else "", variant)
            name = "-".join(part for part in parts if part)
            if same := next((other for other, known in recipes.items() if known == recipe), None):
                raise RevelaError(
                    f"{same} and {name} are equal: leave out the flag or setting that makes them so"
                )
            recipes[name] = recipe
            made.append((recipe, unread))
    check_unread(made)
    return recipes
