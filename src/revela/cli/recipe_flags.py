"""Settings as flags: one per field of each section and method; and the recipe they make.

Only the verbs of training import it, when they run or print their help: methods import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from revela.cli.flags import Flat
from revela.errors import RevelaError
from revela.training.groups.store import GroupFolder, is_group_folder
from revela.training.methods.base import Method
from revela.training.methods.registry import DEFAULT, FILES, METHODS, PRESETS, find_method
from revela.training.recipe import SECTIONS, Recipe, check_unread, read_recipe, settings_of
from revela.training.settings import RARE, Preset

TITLES = {"lm": "Language model"}
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]
Given = Annotated[Any, Parameter(parse=False)]
"""What flags gave; ``show_settings`` puts the dataclass of all flags in its place."""


def show_settings(verb: Any, tokens: Sequence[str]) -> None:
    """Give a verb its flags. All of them can be parsed; help lists those of the method that the
    command line names, leaves out rare ones, and says what the method is.
    """
    values = dict(pairwise(" ".join(tokens).replace("=", " ").split()))
    name = values.get("--method", values.get("--methods", DEFAULT))
    try:
        method, preset = find_method(name)
    except RevelaError:
        if {"--help", "-h"} & {*tokens}:
            raise  # otherwise the verb says so when it runs
        method, preset = find_method(DEFAULT)
    if tokens[0] == "train":
        text, heading, parameters = inspect.cleandoc(verb.__doc__).partition("Parameters\n")
        verb.__doc__ = f"{text}{about(name, method)}\n\n{heading}{parameters}"
    if "--method" in values:  # its own settings are shown, rare ones too
        its = settings_of(method).items()
        preset = {n: item.default for n, (section, item) in its if section == "method"} | preset
    flags = settings_flags(method, preset, without="method" if tokens[0] == "compare" else "")
    verb.__annotations__["given"] = Annotated[flags | None, Flat]


def about(name: str, method: type[Method]) -> str:
    """What the header of the file of a preset or method says: formula, symbols, cost, figures."""
    file = next((file for file in FILES if name in file.PRESETS), None)
    module = file or sys.modules.get(method.__module__)
    text = inspect.cleandoc((module and module.__doc__) or method.__doc__ or "")
    left_out = ("Differs", "Read next:", "Shapes:")
    parts = [part for part in text.split("\n\n") if not part.startswith(left_out)]
    parts += ["docs/methods.md has what differs from the paper, and the settings of each preset."]
    return re.sub(r"\n(Memory|When to use it|Measured): ", r"\n\n\1: ", "\n\n".join(parts))


def settings_flags(
    shown: type[Method], preset: Preset, names: Collection[str] = (), without: str = ""
) -> type:
    """A dataclass with a field per flag, None where it is not given; of these settings alone, if
    there are ``names``. Its defaults are the preset's; rare settings are shown if they are in it.
    """
    sections = sorted(SECTIONS, key=lambda section: section != "method")
    groups = {
        section: Group(TITLES.get(section) or section.capitalize(), sort_key=place)
        for place, section in enumerate(sections, 10)
    }
    text = (
        f"What to learn from: a preset ({', '.join(PRESETS)}; paper: as published), a method, "
        f"which has the preset of its name, or FILE.py:Class. [default: {DEFAULT}]"
    )
    about = Parameter(help=text, group=groups["method"])
    flags: dict[str, Any] = {"method": ("method", Annotated[str | None, about], None)}
    for method in (shown, *METHODS.values()):
        for name, (section, item) in settings_of(method).items():
            default = preset.get(name, item.default)
            text = " ".join((item.description or "").split())
            text += "" if default in ("", ()) else f" [default: {default}]"
            is_named = name in names or name in preset
            show = method is shown and (is_named or RARE not in item.metadata)
            kind: Any = item.annotation
            about = Parameter(help=text, show=show, group=groups[section], negative_iterable=())
            flags.setdefault(name, (name, Annotated[kind | None, about], None))
    fields = [flags[name] for name in names or flags if name != without]
    made = dataclasses.make_dataclass("Settings", fields, frozen=True)
    made.__module__ = __name__  # cyclopts takes classes of the module types for no dataclasses
    return made


def given_settings(given: Any) -> dict[str, Any]:
    """The flags that were given, by name."""
    values = vars(given) if given is not None else {}
    return {name: value for name, value in values.items() if value is not None}


def recipe_of(
    recipe_file: Path | None, given: Any, over: str | Recipe = DEFAULT, corpus: Sequence[Path] = ()
) -> Recipe:
    """The recipe of a command line.

    Args:
        over: the method if none is named, or the recipe of the run that is resumed.
        corpus: groups that were stored with other settings of the corpus are refused.
    """
    settings, variants = read_recipe(recipe_file) if recipe_file is not None else ({}, {})
    if variants:
        raise RevelaError(f"{recipe_file} has variants: run it with revela compare")
    settings |= given_settings(given)
    base, method = (Recipe(), {"method": over}) if isinstance(over, str) else (over, {})
    recipe, unread = base.merge(method | settings)
    check_unread([(recipe.method.name, unread)])
    for folder in filter(is_group_folder, corpus):
        GroupFolder(folder).check_settings(settings)
    return recipe
