"""The two wings stand apart: what searches loads nothing of training, and passes few files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import make_rows
from research.size import code_lines
from revela.encoders.embedded import MINILM, is_installed
from tests.collection_folder import write_lines

SOURCE = Path(__file__).parents[1] / "src" / "revela"
# Runs a command line, or the same search of an index for the third time; prints the files that it
# passed (those with a function that ran, apart from what imports ran), and the modules that it
# imported.
TRACED = """
import contextlib, inspect, io, json, sys, threading

passed = set()

def trace(frame, event, arg):
    caller = frame
    while caller and caller.f_code.co_flags & inspect.CO_OPTIMIZED:  # neither module nor class
        caller = caller.f_back
    if caller is None or caller.f_globals.get("__name__") == "__main__":
        passed.add(frame.f_code.co_filename)

from revela.cli import main
sys.argv = ["revela", *json.loads(sys.argv[1])]
if sys.argv[1] == "Index.search":
    from revela import Index
    index = Index.open(sys.argv[2])
    for query in ("ocean02", sys.argv[3]):
        index.search(query)
    main = lambda: index.search(sys.argv[3])
threading.settrace(trace)
sys.settrace(trace)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
sys.settrace(None)
print(json.dumps([sorted(passed), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory, static_folder):  # the static one where MiniLM is not installed
    """Runs a command line beside an index; gives its files of revela and all modules."""
    home = tmp_path_factory.mktemp("wings")
    model = MINILM if is_installed(MINILM) else str(static_folder)
    write_lines(home / "corpus.jsonl", make_rows(40))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}

    def run(*command: str) -> tuple[list[str], list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", TRACED, json.dumps(command)],
            env=environment, cwd=home, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        passed, modules = json.loads(done.stdout.splitlines()[-1])
        return [file for file in passed if file.startswith(str(SOURCE))], modules

    run("index", "corpus.jsonl", "--model", model, "--out", "kept")
    assert (home / "kept").is_dir()
    return run


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("search", "kept", "ocean01"),
        ("search", "corpus.jsonl", "ocean01"),
        ("index", "corpus.jsonl", "--out", "kept", "--append"),
        ("serve", "--help"),
        ("mcp", "kept", "--show-config"),
    ],
)
def test_what_searches_imports_nothing_of_training(traced, command):
    _, modules = traced(*command)
    assert "revela.cli.main" in modules
    assert not [name for name in modules if name.startswith(("revela.training", "torch"))]


def test_help_of_training_reads_its_settings_alone(traced):
    _, modules = traced("train", "--help")
    assert "revela.training.settings.recipe" in modules and "torch" not in modules


def test_a_warm_search_passes_few_files(traced):
    traced("search", "kept", "ocean01")
    for command, most in (("search", 30), ("Index.search", 12)):
        passed, _ = traced(command, "kept", "ocean01")
        names = [Path(file).name for file in passed]
        assert {"steps.py", "index_search.py"} <= {*names} and len(names) <= most, " ".join(names)


def test_no_file_is_long():
    """At most 400 lines of code: blank lines, comments and docstrings aside."""
    lengths = {file: code_lines(file.read_text(encoding="utf-8")) for file in SOURCE.rglob("*.py")}
    assert len(lengths) > 100 and not {file: n for file, n in lengths.items() if n > 400}
