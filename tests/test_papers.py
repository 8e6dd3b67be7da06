"""What docs/papers.md names exists: files, names in them, methods, presets, flags and their values;
so do the files and names of how-it-works.md.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import get_origin

import pytest
from pydantic import TypeAdapter

from conftest import parsed
from revela.errors import RevelaError
from revela.training.methods.registry import METHODS, PRESETS
from revela.training.recipe import Recipe, settings_of

ROOT = Path(__file__).parents[1]
PAPERS = (ROOT / "docs" / "papers.md").read_text()
TEXT = PAPERS + (ROOT / "docs" / "how-it-works.md").read_text()
# `path.py`, or `path.py: name`, then more of its names: `path.py: name`, `another`, `.method`
NAMED = [
    (path, name)
    for path, first, more in re.findall(
        r"`([^`\s]+\.(?:py|toml))(?:: ([\w.]+))?`((?:, `\.?[a-zA-Z_][\w]*`)*)", TEXT
    )
    for name in (
        first,
        *(
            re.sub(r"^\.", f"{first.split('.')[0]}.", other)
            for other in re.findall(r"`(.+?)`", more)
        ),
    )
]
CLASS_MEMBERS = re.findall(r"`([A-Z]\w+\.\w+)`", TEXT)
SOURCES = [ROOT / "src" / "revela", ROOT]
HEADER = ["equation or design choice", "where", "as published?", "setting"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAPERS.splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
SETTINGS = {
    name: field for method in METHODS.values() for name, (_, field) in settings_of(method).items()
}


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


def settings_in(flags: str) -> dict[str, object]:
    """The settings of a command line by name; None for a flag without a value."""
    given: dict[str, object] = {}
    for flag, value in re.findall(r"--([a-z-]+)((?: (?!--)\S+)*)", flags):
        name = flag.replace("-", "_")
        assert name in SETTINGS, f"no method has a setting --{flag}"
        kind, words = SETTINGS[name].annotation, shlex.split(value)
        if get_origin(kind) is tuple:
            given[name] = list(TypeAdapter(kind).validate_python(words))
        else:
            given[name] = TypeAdapter(kind).validate_strings(" ".join(words)) if value else None
    return given


def is_accepted(method: str, settings: dict[str, object]) -> bool:
    try:
        Recipe.of(method, **settings)
    except RevelaError:
        return False
    return True


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_what_is_named_is_there(path, name):
    file = file_of(path)
    assert file is not None, f"there is no {path}"
    assert not name or name in names_in(file), f"{path} has no {name}"


def test_class_members_without_a_file_are_there_and_names_were_found():
    known = set().union(*(names_in(file) for file in SOURCES[0].rglob("*.py")))
    assert set(CLASS_MEMBERS) <= known
    assert sum(path.startswith("tests/") for path, _ in NAMED) > 9
    assert sum(bool(name) for _, name in NAMED) > 100
    assert ("training/methods/dream.py", "candidate_scores") in NAMED
    assert "PromptMaker.tail" in CLASS_MEMBERS


def test_every_table_has_the_four_columns_and_every_row_says_where_and_how():
    assert ROWS.count(HEADER) == PAPERS.count("|---|---|---|---|\n") == PAPERS.count("\n## ")
    for row in ROWS:
        assert len(row) == 4 and all(row), row
        choice, where, published, setting = row
        if row != HEADER:
            assert re.search(r"`[^`\s]+\.(py|toml)", where), choice
            assert re.match(r"yes\b|no: \S", published), choice
            assert re.search(r"`|always|none yet|none: \w", setting), choice


def test_every_method_and_preset_is_named_and_no_other():
    for method in METHODS.values():
        assert f"`{method.__module__.removeprefix('revela.').replace('.', '/')}.py`" in PAPERS
    stems = "|".join({name.partition("-")[0] for name in METHODS})
    named = set(re.findall(rf"`((?:{stems})(?:-[a-z]+)*)`", PAPERS))
    assert {*PRESETS, *METHODS} - {"revela"} == named


@pytest.mark.parametrize("command", dict.fromkeys(re.findall(r"`(revela \w+ .+?|--.+?)`", PAPERS)))
def test_every_command_is_parsed_and_every_flag_is_a_setting_with_such_a_value(command):
    if command.startswith("revela"):
        assert parsed(shlex.split(command)[1:])[1]
        return
    given = {name: value for name, value in settings_in(command).items() if value is not None}
    assert any(is_accepted(method, given) for method in METHODS)


@pytest.mark.parametrize(("preset", "flags"), re.findall(r"`([a-z-]+)` \(`(--.+?)`\)", PAPERS))
def test_a_preset_has_the_settings_that_stand_beside_it(preset, flags):
    recipe = Recipe.of(preset).to_dict()
    for name, value in settings_in(flags).items():
        assert recipe[name] == (True if value is None else value), name
