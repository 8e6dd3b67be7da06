"""The core, where the packages of the extras cannot be imported: it indexes,
searches, serves and evaluates, and what needs an extra ends with one sentence.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from mcp import Client, StdioServerParameters

from conftest import make_rows, serving, write_texts
from revela.cli.main import TRAINING_VERBS
from tests.collection_folder import write_collection, write_lines

SOURCE = Path(__file__).parents[1] / "src"
MISSING = (
    *("torch", "transformers", "sentence_transformers", "accelerate", "peft", "datasets", "pandas"),
    *("scipy", "sklearn", "fastkmeans", "gguf", "onnx", "onnxruntime", "onnxscript", "mteb"),
    "pytrec_eval",
)
SITE = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in MISSING:
            return PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
VERBS = """
import contextlib, io, json, sys
from revela.cli.main import TRAINING_VERBS
from revela.cli import main

for command in json.loads(sys.argv[1]):
    sys.argv = ["revela", *command]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
MODULES = """
import importlib, pkgutil, revela

for module in pkgutil.walk_packages(revela.__path__, "revela."):
    if module.name != "revela.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, "|", error.name)
for name in revela.__all__:
    try:
        getattr(revela, name)
    except revela.RevelaError as error:
        print(name, "|", error)
"""
# Modules that need an extra at import, with all that is in them.
EXTRAS = ("revela.training.", "revela.evaluation.mteb", "revela.cli.recipe_flags")
EXTRAS += ("revela.encoders.torch_", "revela.encoders.graph_export")
EXTRAS += tuple(f"revela.cli.{verb}" for verb in (*TRAINING_VERBS, "fit"))


def site_without(names) -> str:
    """A sitecustomize.py with which these packages cannot be imported."""
    return SITE.replace("MISSING", str(set(names)))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process without the extras, with a cache of its own."""
    home = tmp_path_factory.mktemp("core")
    (home / "sitecustomize.py").write_text(site_without(MISSING))
    path = os.pathsep.join(map(str, (home, SOURCE)))
    return {**os.environ, "PYTHONPATH": path, "REVELA_CACHE": str(home / "cache")}


@pytest.fixture
def docs(tmp_path):
    return write_texts(tmp_path / "docs", make_rows(16))


@pytest.fixture
def run(environment, tmp_path):
    """Runs command lines in one process; gives (exit code, stdout, stderr) of each."""

    def results(*commands: str) -> list[tuple[int, str, str]]:
        given = json.dumps([command.split() for command in commands])
        done = subprocess.run(
            [sys.executable, "-c", VERBS, given],
            env=environment, cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(found) == len(commands)
        return found

    return results


@pytest.fixture
def succeed(run):
    """The same for commands that end well; gives what each has printed."""

    def outputs(*commands: str) -> list[str]:
        found = run(*commands)
        for command, (code, out, err) in zip(commands, found, strict=True):
            assert code == 0, (command, out, err)
        return [out for _, out, _ in found]

    return outputs


def test_nothing_is_left_of_the_extras_and_other_modules_and_names_are_there(environment):
    command = [sys.executable, "-c", MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failed = dict(line.split(" | ") for line in done.stdout.splitlines())
    install = "run pip install '.[train]' in a checkout of revela"
    for name in ("LabelFreeEvaluator", "fit"):
        error = failed.pop(name)
        assert f"revela.{name} needs " in error and install in error
    assert set(failed.values()) <= set(MISSING)
    assert not [module for module in failed if not module.startswith(EXTRAS)]
    assert failed["revela.training.device"] == "torch"


@pytest.mark.parametrize("name", ["static", "embedded:minilm-l6"])
def test_indexes_are_made_changed_and_searched(succeed, docs, static_folder, name, tmp_path):
    model = static_folder if name == "static" else name
    write_lines(tmp_path / "more.jsonl", [{"id": "new", "text": "A zebra and a quagga."}])
    made, _, appended, found, deleted, vectors = succeed(
        f"index docs --out kept --model {model} --sync",
        "index --out kept --sync",
        "index more.jsonl --out kept --append",
        "search kept quagga --top 1 --json --mode lexical",
        "index --out kept --delete new",
        f"encode docs --out vectors.parquet --model {model}",
    )
    assert "16 documents are new" in made and "holds 17 passages" in appended
    assert [hit["id"] for hit in json.loads(found)["data"]] == ["new"]
    assert "deleted 1 document," in deleted and "16 vectors of" in vectors
    searched, listed, cleared = succeed(
        f"search docs ocean01 --model {model} --explain", "cache", "cache --clear"
    )
    assert "ocean01" in searched and str(docs) in listed and "MB freed" in cleared


def test_indexes_retrievers_and_texts_are_scored(succeed, static_folder, tmp_path):
    numbered = enumerate(make_rows(120))
    rows = [{**row, "_id": str(i), "title": f"all about {i}"} for i, row in numbered]
    queries = {f"q{i}": " ".join(rows[i]["text"].split()[:6]) for i in range(12)}
    judged = {(f"q{i}", str(i)): 1 for i in range(12)}
    write_collection(tmp_path / "beir", rows, queries, judged)
    _, scored, ranked = succeed(
        f"index beir/corpus.jsonl --out kept --model {static_folder}",
        f"eval kept {static_folder} --on beir --json scores.json",
        f"eval {static_folder} --text beir/corpus.jsonl",
    )
    systems = json.loads((tmp_path / "scores.json").read_text())["beir"]
    assert {"BM25", "kept"} < systems.keys() and len(systems) >= 4
    assert systems["BM25"]["means"]["ndcg@10"] > 0.8 and systems["BM25"]["margin"] is not None
    assert "BM25" in scored and "without labels" in ranked


def test_programs_are_served(environment, docs, static_folder):
    how = ("serve", docs, "--model", static_folder, "--port", "0")
    with serving(*how, env=environment) as (server, line, url):
        asked = {"query": "ocean01", "mode": "lexical"}
        hits = httpx.post(f"{url}v1/search", json=asked, timeout=60).json()["data"]
        assert "ocean01" in hits[0]["text"]
        asked = {"input": ["a text"], "model": re.findall(r" as (\S+);", line)[0]}
        (vector,) = httpx.post(f"{url}v1/embeddings", json=asked, timeout=60).json()["data"]
        assert sum(x * x for x in vector["embedding"]) == pytest.approx(1, abs=1e-3)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 128 + signal.SIGINT


def test_agents_are_served(environment, docs, static_folder):
    async def ask():
        arguments = ["-m", "revela", "mcp", str(docs), "--model", str(static_folder)]
        how = StdioServerParameters(command=sys.executable, args=arguments, env=environment)
        async with Client(how, mode="auto") as client:
            none = await client.call_tool("fetch", {"id": "other.md"})
            assert none.is_error and "not in the index" in none.content[0].text
            return await client.call_tool("search", {"query": "ocean01"})

    first, *_ = asyncio.run(ask()).structured_content["results"]
    file = docs / first["id"]
    assert "ocean01" in file.read_text() and "ocean01" in first["text"]
    assert (first["path"], first["url"]) == (str(file), file.as_uri())


def test_a_missing_extra_is_one_sentence(run, docs, static_folder, saved_retriever, tiny_lm_folder):
    needs = {
        "train docs --out out": "train",
        f"fit docs --model {tiny_lm_folder} --out out": "train",
        "compare docs --on docs --out out": "train",
        f"probe {static_folder} docs": "train",
        "heads docs": "train",
        "queries docs --out out": "train",
        "groups docs --out out": "train",
        f"search docs ocean --model {saved_retriever}": "train",
        f"export {static_folder} --out out": "train",
        f"index hub:owner/name --model {static_folder} --out out": "hub",
        f"eval {static_folder} --benchmark SciFact": "benchmarks",
    }
    for (command, extra), (code, _, err) in zip(needs.items(), run(*needs), strict=True):
        assert code == 2, (command, err)
        *_, last = err.strip().splitlines()
        sentence = rf"revela: .+ needs ({'|'.join(MISSING)}): run pip install '\.\["
        assert re.match(rf"{sentence}{extra}\]' in a checkout of revela$", last), (command, err)
        assert "Traceback" not in err
    assert not (docs.parent / "out").exists()
