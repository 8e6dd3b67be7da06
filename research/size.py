"""How large the project is: lines of src (by package), tests and research, the settings of
`train --help`, and how many files a reader of a method opens.

python -m research.size
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from revela.training.methods.base import Method
from revela.training.methods.registry import METHODS

ROOT = Path(__file__).parents[1]
# A row of the help that begins with a flag, or with an argument and its flag.
SETTING = re.compile(r"│ (?:[ *]  )?(?:[A-Z]+ )?--[a-z]", re.M)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines of Python without blank lines, comments and docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


# Files that all methods share, which a reader of one method need not open: the loop and the data.
# All that is outside of training/ is the floor.
LOOP = {"train", "step", "checkpoint", "checks", "check_settings", "record", "outcome", "evaluator"}
LOOP |= {"distributed", "device", "groups_per_batch", "models", "settings", "recipe"}
LOOP |= {"methods.base", "retriever.module", "retriever.build", "retriever.save", "retriever.fit"}
LOOP |= {"retriever.card", "retriever.static_trainable"}
DATA = {"training_set", "build_groups", "negatives", "generated_queries", "lm.generate"}
DATA |= {f"groups.{name}" for name in ("order", "strategies", "similarity", "store", "prebuilt")}
TRAINING = "revela.training."


def imports_of(module: str) -> dict[str, set[str]]:
    """Module below training/ -> the names that a module imports from it, inside functions too. A
    name that is only passed on counts for the module that defines it.
    """
    found: dict[str, set[str]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(TRAINING):
            for alias in node.names:
                owner = _definer(str(node.module), alias.name)
                found.setdefault(owner.removeprefix(TRAINING), set()).add(alias.name)
    return found


def _tree(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return ast.parse(file.read_text(encoding="utf-8"))


def _definer(module: str, name: str) -> str:
    """The module that defines what ``from module import name`` gives."""
    path = ROOT / "src" / Path(*module.split("."))
    if (path / f"{name}.py").is_file():
        return f"{module}.{name}"
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return _definer(str(node.module), name)
    return module


def files_of_method(method: type[Method]) -> tuple[set[str], set[str]]:
    """The files that hold what a method's ``build`` gives and its settings; and all files that are
    particular to it, apart from LOOP, DATA and the floor.
    """
    own = method.__module__.removeprefix(TRAINING)
    tree = ast.parse(textwrap.dedent(inspect.getsource(method.build)))
    called = {
        n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and hasattr(n.func, "id")
    }
    made = {own}
    for owner, names in imports_of(TRAINING + own).items():
        if any(name in called and name[0].isupper() for name in names) and owner not in LOOP | DATA:
            made.add(owner)
    particular, waiting = set[str](), [own]
    while waiting:
        module = waiting.pop()
        if module not in particular:
            particular.add(module)
            waiting += imports_of(TRAINING + module).keys() - LOOP - DATA
    return made, particular


def packages(texts: Mapping[Path, str]) -> str:
    """Lines of code of each package of src, the wings first."""
    count = Counter[str]()
    for file, text in texts.items():
        if file.suffix == ".py":
            first, *below = file.relative_to(ROOT / "src" / "revela").parts
            count[first if below else "its own files"] += code_lines(text)
    wings = {"searching": 0, "training": 0}
    return ", ".join(f"{name} {count[name]:,}" for name in wings | dict(count.most_common()))


def main() -> None:
    for folder in ("src", "tests", "research"):
        command = ["git", "ls-files", "-co", "--exclude-standard", folder]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        files = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
        files = [file for file in files if file.suffix not in (".md", ".png")]
        texts = {file: file.read_text(encoding="utf-8") for file in files}
        python = [text for file, text in texts.items() if file.suffix == ".py"]
        lines = sum(map(len, map(str.splitlines, texts.values())))
        code = sum(map(code_lines, python))
        print(f"{folder}: {lines:,} lines in {len(texts)} files, {code:,} of them code")
        if folder == "src":
            print(f"  {packages(texts)}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, "-m", "revela", "train", "--help"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    print(f"train --help: {len(SETTING.findall(shown.stdout))} settings")
    print("method: files of equation, batches, settings and loss; files that are particular to it")
    for name, method in METHODS.items():
        made, particular = files_of_method(method)
        print(f"{name}: {len(made)}; {len(particular)} ({', '.join(sorted(particular))})")


if __name__ == "__main__":
    main()
