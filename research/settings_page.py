"""Writes docs/settings.md, the list of all settings: ``make settings``.

python -m research.settings_page
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from revela.settings import OBJECTIVES, SECTIONS, documented, flag_of, objective_class, presets

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Generated from the package by `make settings`; do not edit.

A setting has one name everywhere: `--chunk-words 30` on the command line, `chunk_words=30` in
`Retriever.train(...)` and `Recipe.of(...)`, and in a recipe file

```toml
[corpus]
chunk_words = 30

[groups]
kind = "random"        # --groups random

[objective]
name = "dream"         # --objective dream
tau = 0.1

[variants.small.retriever]   # for revela compare: the rest of the file, with these changes
layers = 4
```

A flag wins over a recipe file, and a file over a preset. `--help` leaves out settings with a ·.
"""


def page() -> str:
    """The page as text."""
    parts = [HEAD, "## Presets\n", "| preset | sets |", "|---|---|"]
    for name, settings in presets().items():
        changes = ", ".join(f"`{key} = {value!r}`" for key, value in settings.items())
        parts.append(f"| {name} | {changes} |")
    for section, kind in SECTIONS.items():
        parts += ["", f"## {section}", "", *table(section, kind)]
    for name in OBJECTIVES:
        kind = objective_class(name)
        parts += ["", f"## objective: {name}", "", f"{kind.__doc__}", "", *table("objective", kind)]
    return "\n".join(parts) + "\n"


def table(section: str, kind: Any) -> list[str]:
    """Rows of Markdown: flag, default, what it does."""
    rows = ["| flag | default | |", "|---|---|---|"]
    texts, hints = documented(kind), get_type_hints(kind)
    for item in dataclasses.fields(kind):
        flag = flag_of(section, item.name).replace("_", "-")
        key = f" (`{item.name}`)" if flag_of(section, item.name) != item.name else ""
        mark = " ·" if item.metadata.get("rare") else ""
        default = (
            " ".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
        )
        text = texts[item.name].replace("|", "\\|")
        if get_origin(hints[item.name]) is Literal:
            choices = (choice or "(empty)" for choice in get_args(hints[item.name]))
            text += f" One of {', '.join(choices)}."
        shown = f"`{default}`" if default != "" else ""
        rows.append(f"| `--{flag}`{key}{mark} | {shown} | {text} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
