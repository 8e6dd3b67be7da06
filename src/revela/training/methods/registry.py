"""Find a method or a preset by name, or a user's own method by file and class."""

from __future__ import annotations

import runpy
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from revela.errors import RevelaError, first_line
from revela.training.methods import cde, contrastive, dream, dwell, replug, revela
from revela.training.methods.base import Method
from revela.training.settings import Preset

FILES = (revela, replug, dream, cde, contrastive, dwell)
METHODS: dict[str, type[Method]] = {
    "revela": revela.Revela,
    "replug": replug.Replug,
    "replug-questions": replug.ReplugQuestions,
    "dream": dream.Dream,
    "cde": cde.CDE,
    "contrastive-pairs": contrastive.Pairs,
    "contrastive-crop": contrastive.Crops,
    "dwell-spans": dwell.Spans,
}
PRESETS: dict[str, Preset] = {
    name: settings for file in FILES for name, settings in file.PRESETS.items()
}
"All settings that a preset leaves out have their defaults."
DEFAULT = "revela-gated"


def find_method(name: str) -> tuple[type[Method], Preset]:
    """The class of a method, and the settings of its preset.

    Args:
        name: a preset, a method (with the preset of its name, if there is one), or FILE.py:Class.

    Raises:
        RevelaError: the name is unknown, or the class is not a ``Method``.
    """
    if name in PRESETS:
        settings = {**PRESETS[name]}
        return METHODS[settings.pop("method")], settings
    if name in METHODS:
        return METHODS[name], {}
    file, has_class, last = name.rstrip(":").rpartition(".py:")
    if has_class:
        return _method_in_file(Path(f"{file}.py"), last), {}
    if last.endswith(".py"):
        raise RevelaError(f"--method {last} lacks the name of the class: give {last}:Class")
    names, stem = list(dict.fromkeys([*PRESETS, *METHODS])), name.lower().partition("-")[0]
    close = [other for other in names if name.lower() in other or other.startswith(stem)]
    close = list(dict.fromkeys([*close, *get_close_matches(name.lower(), names)]))
    mean = "did you mean" if close else "give FILE.py:Class, or one of"
    raise RevelaError(f"--method {name} is unknown: {mean} {', '.join(close or names)}")


def _method_in_file(file: Path, class_name: str) -> type[Method]:
    """A subclass of ``Method`` in a file of Python, which is run."""
    if not file.is_file():
        raise RevelaError(f"--method {file}:{class_name}: {file} does not exist")
    try:
        found = runpy.run_path(str(file), run_name=file.stem).get(class_name)
    except Exception as error:
        raise RevelaError(f"{file} raises {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(found, type) or not issubclass(found, Method):
        raise RevelaError(
            f"{file} has no class {class_name!r} that is a subclass of "
            f"revela.training.methods.base.Method: name one, {file}:Class"
        )
    lacks = {
        "name": not found.name,
        "build()": found.build is Method.build,
        "window_words()": found.reads == "windows" and found.window_words is Method.window_words,
        "@checked above it": "__pydantic_fields__" not in vars(found),
    }
    if missing := [part for part, is_missing in lacks.items() if is_missing]:
        raise RevelaError(f"{file}: class {class_name} lacks {' and '.join(missing)}: write it")
    try:
        found()
    except ValidationError as error:
        setting = error.errors()[0]["loc"][0]
        raise RevelaError(f"{file}: {class_name}.{setting} has no default: give it one") from error
    found.file = f"{file.absolute()}:{class_name}"
    return found
