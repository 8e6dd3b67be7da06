"""Files, functions, classes and methods named in docs/papers.md and how-it-works.md exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("papers.md", "how-it-works.md"))
# `path.py`, or `path.py: name`, then more of its names: `path.py: name`, `another`, `.method`
NAMED = [
    (path, name)
    for path, first, more in re.findall(
        r"`([^`\s]+\.py)(?:: ([\w.]+))?`((?:, `\.?[a-zA-Z_][\w]*`)*)", TEXT
    )
    for name in (
        first,
        *(
            re.sub(r"^\.", f"{first.split('.')[0]}.", other)
            for other in re.findall(r"`(.+?)`", more)
        ),
    )
]
METHODS = re.findall(r"`([A-Z]\w+\.\w+)`", TEXT)
SOURCES = [ROOT / "src" / "revela", ROOT]


def file_of(path: str) -> Path | None:
    """The file below src/revela or the root; a bare name means the only file of that name."""
    if "/" in path:
        return next((base / path for base in SOURCES if (base / path).is_file()), None)
    found = [file for base in ("src", "tests") for file in (ROOT / base).rglob(path)]
    return found[0] if len(found) == 1 else None


def names_in(file: Path) -> set[str]:
    """Functions, classes and constants of a file; methods and fields as Class.name."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(part, ast.FunctionDef):
                found.add(f"{node.name}.{part.name}")
            elif isinstance(part, ast.AnnAssign):
                found.add(f"{node.name}.{ast.unparse(part.target)}")
    return found


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_what_is_named_is_there(path, name):
    file = file_of(path)
    assert file is not None, f"there is no {path}"
    assert not name or name in names_in(file), f"{path} has no {name}"


def test_methods_without_a_file_are_there_and_names_were_found():
    assert set(METHODS) <= set().union(*(names_in(file) for file in SOURCES[0].rglob("*.py")))
    assert sum(path.startswith("tests/") for path, _ in NAMED) > 9
    assert sum(bool(name) for _, name in NAMED) > 50
    assert (
        "training/methods/find_heads.py",
        "candidate_scores",
    ) in NAMED and "DreamLoss.answer_loss" in METHODS
    assert ("training/lm/language_model.py", "LanguageModel.logits") in NAMED
