"""Size and shape of the package's code: `make house`.

    python -m research.benchmarks.house
    python -m research.benchmarks.house --limits longest-function=60 wide-lines=0

With limits it exits 1 if a figure is above its limit.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "src" / "revela"
LONG, WIDE = 60, 100  # lines of a function, columns of a line
# A row of the help that begins with a flag, or with an argument and its flag. Its text goes on in
# rows that are further in; a panel with a required setting has a column for the star.
SETTING = re.compile(r"│ (?:[ *]  )?(?:[A-Z]+ )?--[a-z]")


class Figure(NamedTuple):
    """A number with a remark."""

    value: int
    about: str = ""


def figures(package: Path) -> dict[str, Figure]:
    """The figures of the package in this folder, by name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    lines = [(line, path) for path, text in texts.items() for line in text.splitlines()]
    functions = sorted(
        (
            (node.end_lineno - node.lineno + 1, f"{node.name} in {path.relative_to(package)}")
            for path, text in texts.items()
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        ),
        reverse=True,
    )
    names = Counter(path.name for path in texts if path.name != "__init__.py")
    repeated = sorted(name for name, count in names.items() if count > 1)
    widest, where = max(((len(line), path) for line, path in lines), default=(0, package))
    code = [line for line, _ in lines if line.strip() and not line.lstrip().startswith("#")]
    return {
        "files": Figure(len(texts)),
        "lines": Figure(len(lines)),
        "code-lines": Figure(len(code), "neither blank nor a comment; docstrings count"),
        "longest-function": Figure(*next(iter(functions), (0, ""))),
        "long-functions": Figure(sum(n > LONG for n, _ in functions), f"over {LONG} lines"),
        "repeated-names": Figure(len(repeated), " ".join(repeated)),
        "train-settings": Figure(train_settings(package), f"in {package.name} train --help"),
        "widest-line": Figure(widest, f"in {where.relative_to(package)}"),
        "wide-lines": Figure(sum(len(line) > WIDE for line, _ in lines), f"over {WIDE} columns"),
    }


def train_settings(package: Path) -> int:
    """How many settings ``train --help`` of a package shows."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "COLUMNS": "200"}
    command = [sys.executable, "-m", package.name, "train", "--help"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return sum(SETTING.match(line) is not None for line in shown.stdout.splitlines())


def limit(text: str) -> tuple[str, int]:
    """NAME=NUMBER -> both."""
    name, _, number = text.partition("=")
    return name, int(number)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("package", type=Path, nargs="?", default=PACKAGE)
    parser.add_argument("--limits", type=limit, nargs="+", default=[], metavar="NAME=NUMBER")
    arguments = parser.parse_args()
    found = figures(arguments.package.resolve())
    limits = dict(arguments.limits)
    if unknown := limits.keys() - found:
        parser.error(f"no figure is called {min(unknown)}: there are {', '.join(found)}")
    for name, (value, about) in found.items():
        print(f"{name:18}{value:8,}  {about}".rstrip())
    exceeded = [name for name, most in limits.items() if found[name].value > most]
    for name in exceeded:
        value, most = found[name].value, limits[name]
        print(f"{name}: {value:,} is over its limit of {most:,}", file=sys.stderr)
    sys.exit(bool(exceeded))


if __name__ == "__main__":
    main()
