"""Settings as flags: one per field of each section and objective; and the recipe they make."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter

from revela.corpus.load import Reading
from revela.encoder.prompts import Given as GivenPrompts
from revela.errors import RevelaError
from revela.files import check_free
from revela.on_ray import Cluster
from revela.settings import (
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

if TYPE_CHECKING:
    from revela.corpus.parts import DocumentReader

Corpus = Annotated[list[Path], Parameter(negative=())]


def check_out(_type: object, path: Path | None) -> None:
    """Refuse an address: folders are locked, renamed and synchronised, which object stores cannot
    do.

    Raises:
        RevelaError: it is an address, whose slashes Path has merged; or a name that is not UTF-8,
            which Arrow and Lance cannot open.
    """
    if path is not None and re.search("[\ud800-\udfff]", str(path)):
        raise RevelaError(f"--out {str(path)!a} is no UTF-8: give another name")
    if path is not None and re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        raise RevelaError(
            f"--out is {str(path).replace(':/', '://', 1)}, an address: give a folder of a file "
            "system, as that of a mounted bucket"
        )


Out = Annotated[Path, Parameter(validator=check_out)]
Several = Parameter(negative=(), consume_multiple=True)
Preset = Annotated[str, Parameter(show_default=False)]
RecipeFile = Annotated[Path | None, Parameter(name="--recipe")]
Flat = Parameter(name="*", consume_multiple=True, negative_iterable=())
"A dataclass whose fields are flags of their own."
Given = Annotated[Any, Parameter(parse=False)]
"""What flags gave; ``show_settings`` puts the dataclass of all flags in its place."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where the work is done."""

    engine: Literal["local", "ray"] = "local"
    "Work in this process, or in many by Ray, here or on a cluster."
    address: str = ""
    """Address of a running Ray cluster; auto: this machine's. Empty: start Ray here, and stop it at
    the end."""
    workers: int = 0
    "With --engine ray: processes that hold a model. 0: one per GPU, or one per two processors."
    gpus_per_worker: float = 1.0
    "With --engine ray: GPUs per process, where there are any."

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.address, self.workers, self.gpus_per_worker)


ENGINE = Engine()


@dataclasses.dataclass(frozen=True)
class PromptFlags:
    """Prompts in place of those that an embedder's folder names."""

    query_prompt: str | None = None
    "Text before every query. Default: that of the model's folder, or of a known model."
    passage_prompt: str | None = None
    "Text before every passage. Default: likewise."

    @property
    def given(self) -> GivenPrompts:
        return self.query_prompt, self.passage_prompt


PROMPTS = PromptFlags()


def reader_of_parts(
    reading: Reading, metadata: Sequence[str], rename_repeated: bool = False
) -> DocumentReader:
    """How --engine ray reads a corpus for search; ``rename_repeated`` as for ``read_corpus``.

    Raises:
        RevelaError: titles are to be joined, over files that it reads apart.
    """
    if reading.join_titles:
        raise RevelaError(
            "--join-titles joins rows of neighbouring files, which --engine ray reads apart: join "
            "them before, or give --engine local"
        )
    from revela.corpus.parts import DocumentReader
    from revela.corpus.readers.rows import Fields

    fields = Fields(reading.text_field, reading.title_field, tuple(metadata))
    return DocumentReader(fields, 1, rename_repeated)


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


def check_paths(corpus: Sequence[Path], out: Path | None) -> None:
    """Refuse a corpus that does not exist, and a folder that is taken, before torch is imported."""
    if out is not None:
        check_free(out)
    for source in corpus:
        if not (source.exists() or str(source).startswith("hub:")):
            from revela.corpus.readers import files_of
            from revela.corpus.readers.common import ReadReport

            next(files_of(source, ReadReport()))  # says what a corpus may be


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
