"""Writes build/docs, of which mkdocs makes the site: ``make docs``.

The pages are the files that a reader of the repository sees. README.md is the first one;
CONTRIBUTING.md, CHANGELOG.md and the examples are pages too. Links between files of the repository
become links between pages.

python -m research.docs_site
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # pages of files outside docs/
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in sorted((ROOT / "examples").glob("*.py"))
    },
}
PICTURES = ["research/results/from-raw-curves.png"]  # that pages show
ORIGINS = {page: origin for origin, page in ELSEWHERE.items()}  # of an example, the file
INDEX = "examples/train_on_a_folder.md"  # what a link to the folder leads to
LINK = re.compile(r"\[(?P<words>[^\[\]]*)\]\((?!\w+:|#)(?P<target>[^()\s]+)\)")


def sources() -> dict[str, Path]:
    """The file that each page is made of, by the page's path in the site."""
    pages = {path.relative_to(ROOT / "docs").as_posix(): path for path in ROOT.glob("docs/**/*.md")}
    others = {page: ROOT / origin for origin, page in ELSEWHERE.items()}
    return dict(sorted((pages | others).items()))


PAGES = set(sources())


def markdown_of(path: Path) -> str:
    """A page as Markdown that GitHub would show."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    # A script without cells is a page of code.
    return page_of_script(text) if "\n# %%" in text else f"# {path.name}\n\n```python\n{text}```\n"


def page_of_script(text: str) -> str:
    """The Markdown of a script with percent cells: its comments as text, its code as blocks."""
    parts = []
    for cell in re.split(r"^# %%", text, flags=re.M)[1:]:
        kind, _, body = cell.partition("\n")
        if kind.strip() == "[markdown]":
            parts.append(re.sub(r"^# ?", "", body.strip(), flags=re.M))
        else:
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def with_links(markdown: str, page: str) -> str:
    """Links to files of the repository, from the file that a page is made of, as links to pages;
    of a link to a file that is no page (the notebook), its words.
    """
    folder = posixpath.dirname(ORIGINS.get(page, f"docs/{page}"))

    def linked(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        target = posixpath.normpath(posixpath.join(folder, target))
        found = INDEX if target == "examples" else target.removeprefix("docs/")
        found = ELSEWHERE.get(target, found)
        if target in PICTURES:
            return f"[{match['words']}]({posixpath.basename(target)})"
        if found not in PAGES and not (ROOT / "docs" / found).is_file():
            return match["words"]
        path = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"[{match['words']}]({path}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(linked, markdown)


def with_lists(markdown: str) -> str:
    """With a blank line before every list, which Python-Markdown wants and GitHub does not."""
    lines, is_code = [], False
    for line in markdown.split("\n"):
        is_code ^= line.startswith("```")
        starts = line.startswith("- ") and not is_code and lines and lines[-1].strip()
        if starts and not lines[-1].startswith(("- ", "  ")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    built = ROOT / "build" / "docs"
    shutil.rmtree(built, ignore_errors=True)
    shutil.copytree(ROOT / "docs", built)  # images, too
    for picture in PICTURES:
        shutil.copy(ROOT / picture, built)
    for page, source in sources().items():
        (built / page).parent.mkdir(exist_ok=True)
        text = with_links(with_lists(markdown_of(source)), page)
        (built / page).write_text(text, encoding="utf-8")
