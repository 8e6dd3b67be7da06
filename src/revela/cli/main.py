"""What the verbs share: the app, their flags' types, and where a setting comes from when no flag
gives it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

from revela.cli.printing import print_log
from revela.errors import RevelaError
from revela.settings import PRESETS, Indexing, Recipe, refuse_unread

app = App(
    name="revela",
    help="Raw text in, a dense retriever out: trained without labels, measured beside BM25, ready to search.",
    version_flags=["--version"],
)
Flat = Parameter(name="*", consume_multiple=True, negative_iterable=())
Preset = Literal[
    "gated", "paper", "gains", "dream", "attention", "replug", "infonce", "pairs", "crop"
]
DEFAULTS = Recipe()
INDEXING = Indexing()
Corpus = Annotated[list[Path], Parameter(negative=())]
Several = Parameter(negative=(), consume_multiple=True)
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]


def sources(verb: str, preset: str, recipe_file: Path | None, variant: str = "") -> list[Dict]:
    """Where a setting comes from when no flag gives it: the recipe file, one of its variants over
    the rest of it, then the preset.

    If no preset is named, it is that of the file's objective.
    """
    if recipe_file is None:
        return [Dict({verb: PRESETS.get(preset, {})})]
    settings, variants = read_recipe(recipe_file)
    if variants and verb != "compare":
        raise RevelaError(
            f"{recipe_file} holds {len(variants)} variants ({', '.join(variants)}): train them by revela compare"
        )
    settings |= variants.get(variant, {})
    implied = preset or str(settings.get("objective", ""))
    return [Dict({verb: settings}, source=str(recipe_file)), Dict({verb: PRESETS.get(implied, {})})]


def read_recipe(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings of a TOML file, and its tables: a variant each, by name."""
    if not file.is_file():
        raise RevelaError(f"{file} does not exist: give a TOML file of settings as --recipe")
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RevelaError(
            f"{file} is not TOML ({error}): mend it, or give another --recipe"
        ) from error
    variants = {
        name: settings.pop(name)
        for name, value in list(settings.items())
        if isinstance(value, dict)
    }
    if odd := [name for name in variants if not re.fullmatch(r"[\w-]+", name)]:
        raise RevelaError(
            f"{file}: a variant is called {odd[0]!r}, but names a folder: use letters, digits, - and _"
        )
    return settings, variants


def over(preset: str, recipe_file: Path | None, variant: str = "") -> Recipe:
    """The recipe that this command line makes of a preset: read once more, as the recipe alone does
    not tell which flags were given.
    """
    app.config = sources("compare", preset, recipe_file, variant)
    _, given, _ = app.parse_args(sys.argv[1:], exit_on_error=False)
    recipe: Recipe = given.arguments.get("recipe", DEFAULTS)  # not there if nothing at all differs
    return recipe


def each_over(presets: Sequence[str], recipe_file: Path | None) -> dict[str, Recipe]:
    """``over`` for every preset, and every variant of the recipe file, by the name that the run
    gets.

    Raises:
        RevelaError: two come out the same, or a setting says nothing to any of them.
    """
    variants = list(read_recipe(recipe_file)[1]) if recipe_file is not None else []
    recipes: dict[str, Recipe] = {}
    made = []
    for preset, variant in product(presets, variants or [""]):
        name = "-".join(
            part for part in (preset if len(presets) > 1 or not variant else "", variant) if part
        )
        recipe = over(preset, recipe_file, variant)
        if same := next((other for other, made in recipes.items() if made == recipe), None):
            raise RevelaError(
                f"{same} and {name} come out the same: leave away the flag or setting that levels them"
            )
        recipes[name] = recipe
        made.append((preset, recipe))
    refuse_unread(made)
    return recipes


def main() -> None:
    arguments = sys.argv[1:]
    # What search prints to stdout may be JSON that a program reads.
    print_log("stderr" if arguments[:1] == ["search"] else "stdout")
    named = {
        "--preset": "",
        "--objective": "",
        "--recipe": "",
    }  # these decide what the others' defaults are
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag in named:
            named[flag] = value or following
    try:
        if arguments[:1] in (["train"], ["heads"], ["compare"], ["groups"], ["queries"]):
            file = Path(named["--recipe"]) if named["--recipe"] else None
            app.config = sources(arguments[0], named["--preset"] or named["--objective"], file)
        app(arguments, exit_on_error=False)
    except CycloptsError:  # it has printed what was wrong
        raise SystemExit(2) from None
    except RevelaError as error:
        print(f"revela: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
