"""The methods and their presets, by name; and a method of one's own, by file and class."""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path

from revela.errors import RevelaError, first_line
from revela.training.methods import cde, contrastive, dream, dwell, gains, replug, revela
from revela.training.methods.base import Method
from revela.training.settings import Preset

FILES = (revela, replug, dream, cde, contrastive, dwell, gains)
METHODS: dict[str, type[Method]] = {
    "revela": revela.Revela,
    "replug": replug.Replug,
    "dream": dream.Dream,
    "cde": cde.CDE,
    "contrastive-pairs": contrastive.Pairs,
    "contrastive-crop": contrastive.Crops,
    "dwell-spans": dwell.Spans,
    "gains": gains.Gains,
}
PRESETS: dict[str, Preset] = {
    name: settings for file in FILES for name, settings in file.PRESETS.items()
}
"All settings that a preset leaves out have their defaults."
DEFAULT = "revela-gated"


def find_method(name: str) -> tuple[type[Method], Preset]:
    """The class of a method, and the settings of its preset.

    Args:
        name: of a preset; of a method, with the preset of its name if there is one; or
            FILE.py:Class.

    Raises:
        RevelaError: there is no such preset or method, or the class is no method.
    """
    if name in PRESETS:
        settings = {**PRESETS[name]}
        return METHODS[settings.pop("method")], settings
    if name in METHODS:
        return METHODS[name], {}
    file, colon, class_name = name.rpartition(".py:")
    if colon:
        return _method_in_file(Path(f"{file}.py"), class_name), {}
    names = list(dict.fromkeys([*PRESETS, *METHODS]))
    close = [*get_close_matches(name, names), *(other for other in names if name in other)]
    shown = ", ".join(dict.fromkeys(close or names))
    mean = f"did you mean {shown}?" if close else f"give one of {shown}, or FILE.py:Class"
    raise RevelaError(f"--method {name} is unknown: {mean}")


def _method_in_file(file: Path, class_name: str) -> type[Method]:
    """A subclass of ``Method`` in a file of Python, which is run."""
    if not file.is_file():
        raise RevelaError(f"--method {file}:{class_name}: {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"revela_method_{file.stem}", file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of their class
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RevelaError(f"{file} raises {type(error).__name__}: {first_line(error)}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, Method):
        raise RevelaError(
            f"{file} has no class {class_name} that is a subclass of "
            "revela.training.methods.base.Method: name one after the colon"
        )
    missing = [] if found.name else ["name"]
    if found.build is Method.build:
        missing.append("build()")
    if found.reads == "windows" and found.window_words is Method.window_words:
        missing.append("window_words()")
    try:
        found()
    except ValueError as error:
        why = f"{class_name}() fails: {first_line(error)}"
        raise RevelaError(f"{file}: {why}: give every setting a default") from error
    if missing:
        raise RevelaError(f"{file}: class {class_name} lacks {' and '.join(missing)}: write it")
    return found
