"""The figures of a small made-up package, and the limits on them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from research.benchmarks import house

HELP = """\
│ *  CORPUS --corpus   What to read. [required]  │
│ *  --out PATH        Where to write; see also  │
│                      --resume. [required]      │
│    --tau FLOAT       Temperature.              │
╰───────────────────────────────────────────────╯
╭─ Groups ──────────────────────────────────────╮
│ --group-size INT  Chunks.                     │
"""


@pytest.fixture
def package(tmp_path):
    """Of 90 lines: 1 in each __init__.py, 2 in __main__.py, 82 and 4 in the others."""
    folder = tmp_path / "small"
    (folder / "part").mkdir(parents=True)
    for inside in (folder, folder / "part"):
        (inside / "__init__.py").write_text("# Nothing.\n")
    (folder / "__main__.py").write_text(f"HELP = {HELP!r}\nprint(HELP)\n")
    (folder / "store.py").write_text(
        '"""Doc."""\n\nclass Long:\n    async def most(self):\n        """Doc."""\n'
        + "        x = 1\n" * 59
        + "    def just(self):\n"
        + "        x = 1\n" * 17
    )
    wide = f"# Why.\n\nx = {'1' * 97}\ny = {'1' * 96}\n"
    (folder / "part" / "store.py").write_text(wide)
    return folder


def run(package, *limits):
    command = [sys.executable, "-m", "research.benchmarks.house", package, *limits]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_figure(package):
    done = run(package)
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    wide = len(f"HELP = {HELP!r}")
    assert [(name, int(value), *about) for name, value, *about in rows] == [
        ("files", 5),
        ("lines", 90),
        ("code-lines", 85, "neither blank nor a comment; docstrings count"),
        ("longest-function", 61, "most in store.py"),
        ("long-functions", 1, "over 60 lines"),
        ("repeated-names", 1, "store.py"),
        ("train-settings", 4, "in small train --help"),
        ("widest-line", wide, "in __main__.py"),
        ("wide-lines", 2, "over 100 columns"),
    ]


def test_the_package_measured_by_default_is_revela():
    assert (house.PACKAGE / "settings.py").is_file()


def test_limits(package):
    assert run(package, "--limits", "longest-function=61", "files=5", "lines=1000").returncode == 0
    done = run(package, "--limits", "longest-function=60", "files=5", "wide-lines=0")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "longest-function: 61 is over its limit of 60",
        "wide-lines: 2 is over its limit of 0",
    ]
    assert run(package, "--limits", "files").returncode == 2
    done = run(package, "--limits", "fils=5")
    assert done.returncode == 2 and "no figure is called fils: there are files" in done.stderr
