"""Writes docs/command-line.md (every verb and every setting) and docs/objectives.md: ``make
reference``.

python -m research.reference_pages
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module, resources
from pathlib import Path
from typing import Literal, get_args, get_origin

from revela.cli import app
from revela.training.settings import OBJECTIVES, RARE, SECTIONS, Objective, presets, settings_of

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = """# Command line

Generated from the package by `make reference`; do not edit. `revela VERB --help` says the same.
"""
SETTINGS = """## Settings of training

A setting has one name everywhere: `--chunk-words 30` on the command line, `chunk_words=30` in
`Retriever.train(...)` and `revela.training.settings.Recipe.of(...)`, and in a recipe file, which
`revela train` and `revela compare` take as `--recipe recipe.toml`:

```toml
[corpus]
chunk_words = 30

[groups]
groups = "random"      # --groups random

[objective]
name = "dream"         # --objective dream
tau = 0.1

[variants.small.retriever]   # for revela compare: the rest of the file, with these changes
layers = 4
```

A flag wins over a recipe file, and a file over a preset. `--help` leaves out settings with a ·.
"""
OBJECTIVES_HEAD = """# Objectives

Generated from the objectives by `make reference`; do not edit. [Make a model](train.md)
says which one to take, [results](results.md#which-objective-is-best-at-equal-time) what each gave,
and [papers](papers.md) goes through the papers equation by equation.
"""


def pages() -> dict[Path, str]:
    """The text of every generated page, by its path."""
    return {
        DOCS / "command-line.md": "\n".join([COMMANDS, *verbs(), SETTINGS, *settings()]) + "\n",
        DOCS / "objectives.md": "\n".join([OBJECTIVES_HEAD, *map(objective, OBJECTIVES)]),
    }


def verbs() -> list[str]:
    """Each verb in the words of its help, by groups."""
    whole = app.generate_docs(heading_level=1, usage_name="revela")
    whole = re.sub(r"^(revela \w+) -m \S+", r"\1", whole, flags=re.M)  # the module that runs
    parts = re.split(r"^## revela (\w+)\n", whole, flags=re.M)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    shown = []
    for group in sorted({app[name].group[0] for name in texts}, key=lambda group: group.sort_key):
        shown.append(f"## {group.name}\n")
        for name, text in texts.items():
            if app[name].group[0] == group:
                shown += [f"### {name}", text.replace("```console", "```text").rstrip() + "\n"]
    return shown


def settings() -> list[str]:
    """What all objectives share, and where the settings of each are."""
    parts = ["### Presets\n", "| preset | sets |", "|---|---|"]
    for name, changed in presets().items():
        changes = ", ".join(f"`{key} = {value!r}`" for key, value in changed.items())
        parts.append(f"| {name} | {changes} |")
    for section in SECTIONS:
        if section != "objective":
            parts += ["", f"### {section}", "", *table(section)]
    links = " · ".join(f"[{name}](objectives.md#{name})" for name in OBJECTIVES)
    return [*parts, "", "### objective", "", f"Each has settings of its own: {links}"]


def objective(name: str) -> str:
    """What an objective's file says about it, its presets, and its settings."""
    kind = OBJECTIVES[name]
    module = import_module(f"revela.training.methods.{kind.module}")
    file = Path(*module.__name__.split(".")).with_suffix(".py")
    # The legend of shapes is for who reads the code.
    text = re.sub(r"\n\nShapes:.*", "", inspect.cleandoc(module.__doc__ or ""), flags=re.S)
    text = re.sub(r"^(Cost|When to use it): ", r"\n**\1:** ", text, flags=re.M)
    parts = [f"## {name}", "", f"{kind.__doc__}", "", re.sub(r"\n{3,}", "\n\n", text), ""]
    parts += [f"The file is `src/{file.as_posix()}`.", ""]
    for preset, changed in presets().items():
        if changed.get("objective") == name:
            toml = resources.files("revela.training").joinpath("presets", f"{preset}.toml")
            command = f"revela train docs/ --preset {preset} --out {preset}-retriever"
            parts += ["```bash", command, "```", ""]
            parts += ["```toml", toml.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join([*parts, *table("objective", kind)]) + "\n"


def table(section: str, objective: type[Objective] = Objective) -> list[str]:
    """Rows of Markdown: flag, default, what it does."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for name, (its_section, item) in settings_of(objective).items():
        if its_section != section:
            continue
        mark = " ·" if RARE in item.metadata else ""
        default = " ".join(map(str, item.default)) if name == "matryoshka" else item.default
        text = " ".join((item.description or "").split()).replace("|", "\\|")
        if get_origin(item.annotation) is Literal:
            choices = (choice or "(empty)" for choice in get_args(item.annotation))
            text += f" One of {', '.join(choices)}."
        shown = f"`{default}`" if default != "" else ""
        rows.append(f"| `--{name.replace('_', '-')}`{mark} | {shown} | {text} |")
    return rows


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
