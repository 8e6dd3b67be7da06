"""The two wings stand apart: what searches loads nothing of training, and passes few files."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from conftest import make_rows
from research.size import code_lines, files_of_method
from revela.encoders.embedded import MINILM, is_installed
from revela.training.methods.registry import METHODS
from tests.collection_folder import write_lines

WORD = re.compile(r"\w+").findall
SOURCE = Path(__file__).parents[1] / "src" / "revela"
# Runs a command line, or the same search of an index for the third time; prints the files that it
# passed (those with a function that ran, apart from what imports ran) until the end of each step of
# training, and then to its own end; and the modules that it imported.
TRACED = """
import contextlib, inspect, io, json, sys, threading

passed = [set()]

def trace(frame, event, arg):
    caller, code = frame, frame.f_code
    if not code.co_filename.startswith(source):
        return
    while caller and caller.f_code.co_flags & inspect.CO_OPTIMIZED:  # neither module nor class
        caller = caller.f_back
    if caller is None or caller.f_globals.get("__name__") == "__main__":
        passed[-1].add(code.co_filename)
        if code.co_qualname == "Progress.advance":
            passed.append(set())

source, command = sys.argv[1], json.loads(sys.argv[2])
from revela.cli import main
sys.argv = ["revela", *command]
if command[0] == "Index.search":
    from revela import Index
    index = Index.open(command[1])
    for query in ("ocean02", command[2]):
        index.search(query)
    main = lambda: index.search(command[2])
threading.settrace(trace)
sys.settrace(trace)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
sys.settrace(None)
print(json.dumps([list(map(sorted, passed)), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory, static_folder):  # the static one where MiniLM is not installed
    """Runs a command line next to an index; gives its files of revela by step, and all modules."""
    home = tmp_path_factory.mktemp("wings")
    model = MINILM if is_installed(MINILM) else str(static_folder)
    write_lines(home / "corpus.jsonl", make_rows(40))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    start = f"{SOURCE}{os.sep}"

    def run(*command: str) -> tuple[list[set[str]], list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", TRACED, start, json.dumps(command)],
            env=environment, cwd=home, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        passed, modules = json.loads(done.stdout.splitlines()[-1])
        return [set(part) for part in passed], modules

    run("index", "corpus.jsonl", "--model", model, "--out", "kept")
    assert (home / "kept").is_dir()
    return run


SEARCHING = [
    ("--help",),
    ("search", "kept", "ocean01"),
    ("search", "corpus.jsonl", "ocean01"),
    ("index", "corpus.jsonl", "--out", "kept", "--append"),
    ("serve", "--help"),
    ("mcp", "kept", "--show-config"),
]


@pytest.mark.parametrize("command", SEARCHING)
def test_what_searches_imports_nothing_of_training(traced, command):
    _, modules = traced(*command)
    assert "revela.cli.main" in modules
    assert not [name for name in modules if name.startswith(("revela.training", "torch"))]


def test_help_of_training_imports_torch_and_no_library_of_models(traced):
    """So that it takes half as long again as torch alone, at most."""
    _, modules = traced("train", "--help")
    assert {"revela.training.methods.registry", "torch"} <= set(modules)
    assert not {"transformers", "sentence_transformers", "scipy", "peft"} & set(modules)


def test_a_warm_search_passes_few_files(traced):
    traced("search", "kept", "ocean01")
    for command, most in (("search", 36), ("Index.search", 13)):
        (passed,), _ = traced(command, "kept", "ocean01")
        assert {"steps.py", "index_search.py"} <= {Path(file).name for file in passed}
        assert len(passed) <= most, names(passed)


def test_training_passes_few_files(traced, tiny_lm_folder):
    """Two steps of revela-gated, and a steady step: from the end of one to that of the next."""
    models = "--model", str(tiny_lm_folder), "--lm", str(tiny_lm_folder), "--layers", "2"
    small = "--chunk-words", "12", "--group-size", "8", "--gate-heads", "4"
    run = "--max-steps", "5", "--max-minutes", "0", "--warmup-steps", "0", "--near-duplicates", "0"
    passed, _ = traced("train", "corpus.jsonl", "--out", "trained", *models, *small, *run)
    assert len(passed) == 6
    first, steady = passed[0] | passed[1], passed[2] | passed[3]
    assert "document_attention.py" in {Path(file).name for file in steady}
    assert len(first) <= 53, names(first)
    assert len(steady) <= 12, names(steady)


def names(files: Iterable[str]) -> str:
    return "\n".join(sorted(str(Path(file).relative_to(SOURCE)) for file in files))


def test_no_file_is_long():
    """At most 400 lines of code: blank lines, comments and docstrings aside."""
    lengths = {file: code_lines(file.read_text(encoding="utf-8")) for file in SOURCE.rglob("*.py")}
    assert len(lengths) > 100 and not {file: n for file, n in lengths.items() if n > 400}


def test_a_method_is_read_in_one_file():
    """Of at most 350 lines, with at most seven others beside the loop, the data and the floor."""
    for method in METHODS.values():
        made, particular = files_of_method(method)
        assert len(made) <= 2 and len(particular) <= 8, particular
        file = Path(inspect.getfile(method))
        assert code_lines(file.read_text(encoding="utf-8")) <= 350


def test_functions_take_what_they_read():
    """The recipe, or another object of more than 20 fields, is taken or held in 27 places: what
    runs, estimates or refuses a whole run takes it. A result of a search is shown as a whole."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in SOURCE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    large = {c.name for c in classes if sum(isinstance(a, ast.AnnAssign) for a in c.body) > 20}
    large -= {"Result"}

    def words(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
        """The words of the annotations of its parameters or attributes."""
        parts = node.body if isinstance(node, ast.ClassDef) else ast.walk(node.args)
        annotated = [part for part in parts if isinstance(part, ast.AnnAssign | ast.arg)]
        return {word for a in annotated if a.annotation for word in WORD(ast.unparse(a.annotation))}

    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    takers = [n.name for n in (*functions, *classes) if words(n) & {"Recipe", *large}]
    assert "check_recipe" in takers and len(takers) <= 27, takers
