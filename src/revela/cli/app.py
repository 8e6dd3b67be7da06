"""What the verbs share: the app, their flags' types, and where a setting comes from when no flag gives it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

from revela.config import PRESETS, Recipe
from revela.errors import RevelaError

app = App(
    name="revela",
    help="Raw text in, a dense retriever out: trained without labels, measured beside BM25, ready to search.",
    version_flags=["--version"],
)
Flat = Parameter(name="*", consume_multiple=True, negative_iterable=())
Preset = Literal["gated", "paper", "dream", "attention", "replug", "infonce", "pairs", "crop"]
DEFAULTS = Recipe()
Corpus = Annotated[list[Path], Parameter(negative=())]
Several = Parameter(negative=(), consume_multiple=True)
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]


def sources(verb: str, preset: str, recipe_file: Path | None) -> list[Dict]:
    """Where a setting comes from when no flag gives it: the recipe file, then the preset; if none is named, the file's objective's."""
    if recipe_file is None:
        return [Dict({verb: PRESETS.get(preset, {})})]
    if not recipe_file.is_file():
        raise RevelaError(f"{recipe_file} does not exist: give a TOML file of settings as --recipe")
    try:
        settings = tomllib.loads(recipe_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RevelaError(f"{recipe_file} is not TOML ({error}): mend it, or give another --recipe") from error
    implied = preset or str(settings.get("objective", ""))
    return [Dict({verb: settings}, source=str(recipe_file)), Dict({verb: PRESETS.get(implied, {})})]


def over(preset: str, recipe_file: Path | None) -> Recipe:
    """The recipe that this command line makes of a preset: read once more, as the recipe alone does not tell which flags were given."""
    app.config = sources("compare", preset, recipe_file)
    _, given, _ = app.parse_args(sys.argv[1:], exit_on_error=False)
    recipe: Recipe = given.arguments["recipe"]
    return recipe


def main() -> None:
    arguments = sys.argv[1:]
    named = {"--preset": "", "--objective": "", "--recipe": ""}  # these decide what the others' defaults are
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
