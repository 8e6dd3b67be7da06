"""Writes docs/command-line.md (every verb and setting), docs/methods.md, and llms.txt, the list of
all pages for language models: ``make reference``.

python -m research.reference_pages
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin

import revela
from revela.cli import app
from revela.training.methods.base import Method
from revela.training.methods.registry import METHODS, PRESETS
from revela.training.recipe import SECTIONS, settings_of
from revela.training.settings import RARE, Preset

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMANDS = """# Command line

Generated from the package by `make reference`; do not edit. `revela VERB --help` says the same.
"""
SETTINGS = """## Settings of training

A setting has one name everywhere: `--chunk-words 30` on the command line, `chunk_words=30` in
`revela.train(...)` and `revela.training.recipe.Recipe.of(...)`, and in a recipe file, which
`revela train` and `revela compare` take as `--recipe recipe.toml`:

```toml
[corpus]
chunk_words = 30

[groups]
groups = "random"      # --groups random

[method]
method = "dream"       # --method dream
tau = 0.1

[variants.small.retriever]   # for revela compare: the rest of the file, with these changes
layers = 4
```

A flag wins over a recipe file, and a file over the preset of its method. `--help` leaves out
settings with a ·.
"""
HEAD = """# Methods

Generated from the methods' files by `make reference`; do not edit. [Train](train.md) says
which one to take, [results](results.md#which-method-is-best-at-equal-time) what each gave, and
[papers](papers.md) goes through the papers equation by equation.
"""


def pages() -> dict[Path, str]:
    """The text of every generated page, by its path."""
    modules = list(dict.fromkeys(method.__module__ for method in METHODS.values()))
    return {
        DOCS / "command-line.md": "\n".join([COMMANDS, *verbs(), SETTINGS, *settings()]) + "\n",
        DOCS / "methods.md": "\n".join([HEAD, *map(file_of_methods, modules)]),
        ROOT / "llms.txt": "\n".join(lines_for_language_models()) + "\n",
    }


def lines_for_language_models() -> list[str]:
    """llms.txt (llmstxt.org): the pages of mkdocs.yml by section, each with its first sentence."""
    lines = ["# revela", "", f"> {' '.join((revela.__doc__ or '').split(chr(10) * 2)[0].split())}"]
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    nav = nav.partition("  - Project:\n")[0]
    for section, title, page in re.findall(r"^  - (.+):$|^ +- (.+): (.+\.md)$", nav, re.M):
        if section:
            lines += ["", f"## {section}", ""]
        elif (DOCS / page).is_file():
            lines.append(f"- [{title}](docs/{page}): {_first_sentence(DOCS / page)}")
        elif page.startswith("examples/"):
            lines.append(f"- [{title}]({page.removesuffix('md')}py)")
    return lines


def _first_sentence(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    paragraph = next(part for part in text.split("\n\n") if re.match(r"\w|`", part))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.) ", plain)[0].rstrip(":")


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
    """What all methods share, and where the settings of each are."""
    parts = ["### Presets\n", "| preset | sets |", "|---|---|"]
    for name, changed in PRESETS.items():
        changes = ", ".join(f"`{key} = {value!r}`" for key, value in changed.items())
        parts.append(f"| {name} | {changes} |")
    for section in SECTIONS:
        if section != "method":
            parts += ["", f"### {section}", "", *table(section)]
    files = dict.fromkeys(kind.__module__.rpartition(".")[2] for kind in METHODS.values())
    links = " · ".join(f"[{file}](methods.md#{file})" for file in files)
    return [*parts, "", "### method", "", f"Each has settings of its own: {links}"]


def file_of_methods(name: str) -> str:
    """What a file of methods says about itself, its presets, and the settings of each method."""
    module = import_module(name)
    path = "/".join(name.split("."))
    # The legend of shapes is for who reads the code.
    text = re.sub(r"\n\nShapes:.*", "", inspect.cleandoc(module.__doc__ or ""), flags=re.S)
    text = re.sub(r"^(Cost|Memory|When to use it|Measured): ", r"\n**\1:** ", text, flags=re.M)
    text = re.sub(r"^((?:Differs|Read next).*?:)$", r"**\1**\n", text, flags=re.M)
    parts = [f"## {name.rpartition('.')[2]}", "", re.sub(r"\n{3,}", "\n\n", text), ""]
    parts += [f"The file is `src/{path}.py`.", ""]
    for preset, changed in module.PRESETS.items():
        judged = " --pairs JUDGED" * (changed.get("queries") == "judged")
        command = f"revela train docs/ --method {preset}{judged} --out {preset}-retriever"
        rows = toml_of(changed)
        method = f"`{preset}` is method `{changed['method']}`"
        parts += [f"{method}, with" if rows else f"{method} with its defaults.", ""]
        parts += ["```toml", *rows, "```", ""] if rows else []
        parts += ["```bash", command, "```", ""]
    for method in METHODS.values():
        if method.__module__ == name:
            parts += [f"### Settings of {method.name}", "", f"{method.__doc__}", ""]
            parts += [*table("method", method), ""]
    return "\n".join(parts) + "\n"


def toml_of(preset: Preset) -> list[str]:
    """The settings of a preset as a recipe file, by section."""
    known = settings_of(METHODS[preset["method"]])
    sections: dict[str, list[str]] = {}
    for name, value in preset.items():
        if name != "method":
            shown = str(value).lower() if isinstance(value, bool) else json.dumps(value)
            sections.setdefault(known[name][0], []).append(f"{name} = {shown}")
    return [row for title, rows in sections.items() for row in (f"[{title}]", *rows, "")][:-1]


def table(section: str, method: type[Method] = Method) -> list[str]:
    """Rows of Markdown: flag, default, what it does."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for name, (its_section, item) in settings_of(method).items():
        if its_section != section:
            continue
        mark = " ·" if RARE in item.metadata else ""
        default = item.default
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
