"""Every command and snippet of the documentation runs: on tiny models and small corpora, a page
from top to bottom in a folder of its own, in this process.

What cannot run here is named in ``NOT_RUN`` and ``NOT_INSTALLED``, with the reason; its flags are
checked by the command line's parser, and its imports from revela are resolved.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import pydoc_data.topics
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest
from markdown_it import MarkdownIt

from conftest import make_rows
from research import docs_site
from revela.cli import app
from revela.cli.main import add_settings

ROOT = docs_site.ROOT
MEASURED = {"results.md"}  # hours on collections that are not ours to ship: flags are checked
HISTORY = {"changelog.md", "notebook.md"}  # what was run then, with the flags of then
PAGES = {page: path for page, path in docs_site.sources().items() if page not in HISTORY}
NOT_RUN = {  # by what a command has in it
    "torchrun ": "several processes; tests/training/test_processes.py starts some",
    "--engine ray": "starts Ray; tests/test_on_ray.py does",
    "--cluster-column ": "reads what the snippet above it would write, with faiss",
    "revela push ": "writes to the hub; tests/retriever/test_publish.py answers for it",
    "--benchmark ": "reads data sets of the hub",
    "owner/name": "reads the hub",
    "intfloat/": "reads the hub",
    "google/": "reads the hub",
    "hf auth login": "writes to the hub",
    "convert_hf_to_gguf.py": "is llama.cpp's",
    "llama-server ": "is llama.cpp's",
    "cluster.py": "needs faiss",
    ".venv/bin/": "runs tests and benchmarks",
}
NOT_INSTALLED = {
    "datatrove": "for corpora beyond one process",
    "faiss": "for corpora beyond one process",
    "haystack": "not a dependency",
    "haystack_integrations": "not a dependency",
    "langchain_huggingface": "not a dependency",
    "llama_index": "not a dependency",
    "nemo_curator": "takes GPUs",
}
TINY = dict(
    chunk_words=20, group_size=8, lora_rank=4, precision="fp32", threads=1,
    check_queries=20, check_passages=40, held_out=0.2, surrogate_tokens=32,
)  # fmt: skip
LIMITS = dict(max_minutes=0, max_steps=2, max_tokens_read=0, groups_per_step=1)
RETURNS = dict(exit_on_error=False, print_error=False, result_action="return_value")
COMMAND = re.compile(r"(revela|python|pip|make|torchrun|taskset) ")
BENCHMARKS = {"BENCH": "speed", "DEMO": "demo"}  # variables of the Makefile
ADDRESS = "127.0.0.1:8080"


class Block(NamedTuple):
    """A fenced or indented block of a page."""

    language: str
    text: str
    line: int


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page that a reader may copy; indented ones if they hold commands."""
    found = []
    for token in MarkdownIt().parse(docs_site.markdown_of(path)):
        language = token.info or ("bash" if COMMAND.match(token.content) else "")
        if token.type == "fence" or (token.type == "code_block" and language):
            found.append(Block(language, token.content, token.map[0]))
    return found


def commands_of(text: str) -> list[list[str]]:
    """The words of each command, with what [--is optional]."""
    lines = re.sub(r"\[(--[^\]]*)\]", r"\1", text.replace("\\\n", " "))
    found = (shlex.split(line, comments=True) for line in lines.splitlines())
    return [words for words in found if words and not words[0].startswith("(")]


BLOCKS = {page: blocks for page, path in PAGES.items() if (blocks := blocks_of(path))}


class Reader:
    """Who follows a page: what has been made so far, and the service that answers."""

    def __init__(self, page: str, provided: dict[str, Callable[[Path], None]]) -> None:
        self.module = types.ModuleType(page.replace(".", "_"))
        sys.modules[self.module.__name__] = self.module  # dataclasses look themselves up
        self.page, self.provided = page, provided
        self.servers: list[object] = []

    def follow(self, block: Block) -> None:
        if block.language == "python":
            self.python(self.with_port(block.text), block.line)
        elif block.language == "bash":
            for words in commands_of(block.text):
                self.command([self.with_port(word) for word in words])
        elif block.language == "toml":
            self.recipe(block.text)
        else:
            assert not block.language, f"{self.page} has a block of {block.language}"

    def with_port(self, text: str) -> str:
        """The text with the address where the page's service listens here."""
        if not self.servers:
            return text
        port = self.servers[0].listening.getsockname()[1]
        return text.replace(ADDRESS, f"127.0.0.1:{port}")

    def recipe(self, text: str) -> None:
        from revela.settings import merge, read_recipe

        Path("recipe.toml").write_text(text)
        settings, variants = read_recipe(Path("recipe.toml"))
        assert settings == read_recipe(Path("recipe.toml"))[0] and tomllib.loads(text)
        for changes in variants.values() or [{}]:
            merge("", {**settings, **changes}, {})

    def python(self, text: str, line: int) -> None:
        code = compile(text, f"{self.page}:{line}", "exec")
        absent = check_imports(ast.parse(text))
        if unknown := absent - NOT_INSTALLED.keys():
            pytest.fail(f"{self.page}:{line}: there is no package {min(unknown)}")
        if absent or "nemo_curator" in text:
            return
        self.provide(text)
        exec(code, vars(self.module))
        if "query_vector" in vars(self.module):
            self.compare_vectors()

    def compare_vectors(self) -> None:
        """A snippet for another framework gives revela's own vectors."""
        from revela import Retriever

        found, retriever = vars(self.module), Retriever("my-retriever", precision="fp32")
        queries = retriever.encode_queries(["how are invoices archived"])
        texts = ["Invoices are kept for ten years.", "The garden opens at nine."]
        passages = retriever.encode_passages(texts)
        np.testing.assert_allclose([found.pop("query_vector")], queries, atol=1e-5)
        np.testing.assert_allclose(found.pop("passage_vectors"), passages, atol=1e-5)

    def command(self, words: list[str]) -> None:
        line = shlex.join(words) + " "
        runs = self.page not in MEASURED and not any(mark in line for mark in NOT_RUN)
        if words[0] == "revela":
            (self.revela if runs else parse)(words[1:])
        elif "-m" in words[:-1] and words[0] != "llama-server":  # of python, torchrun or taskset
            at = words.index("-m") + 1
            check_module(words[at], words[at + 1 :])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
            for name, _, flags in (word.partition("=") for word in words[2:]):
                check_module(f"research.benchmarks.{BENCHMARKS[name]}", shlex.split(flags))
        elif words[0] == "pip":
            check_extras(words)
        elif words[0] == "curl":
            done = subprocess.run([*words, "-sf"], capture_output=True, timeout=60, check=True)
            assert json.loads(done.stdout)
        elif runs:
            pytest.fail(f"{self.page} has the command {line!r}: run it, or say in NOT_RUN why not")

    def revela(self, tokens: list[str]) -> None:
        self.provide(shlex.join(tokens))
        if tokens[0] == "serve":
            self.serve(tokens)
            return
        add_settings(tokens)
        app(tokens, **RETURNS)

    def provide(self, text: str) -> None:
        """Make the inputs that a text names, unless they are there or it makes them."""
        for name, make in self.provided.items():
            named = re.search(rf"(?<![\w/-])(?<!--out ){re.escape(name)}(?![\w-])", text)
            if named and not Path(name).exists():
                make(Path(name))

    def serve(self, tokens: list[str]) -> None:
        """Serve on a free port, in a thread. The page's first service stays until its end."""
        count = len(self.servers)
        thread = threading.Thread(target=app, args=(tokens,), kwargs=RETURNS)
        thread.start()
        started = time.monotonic()
        while len(self.servers) == count or not self.servers[-1].started:
            assert thread.is_alive() and time.monotonic() < started + 60, tokens
            time.sleep(0.01)
        self.servers[-1].thread = thread
        if count:
            self.stop(self.servers.pop())

    @staticmethod
    def stop(server) -> None:
        server.should_exit = True
        server.thread.join(60)


def parse(tokens: list[str]) -> None:
    """Check a command's verb and flags."""
    add_settings(tokens)
    assert app.parse_args(tokens, exit_on_error=False, print_error=False)[1].arguments


def check_imports(tree: ast.Module) -> set[str]:
    """The packages that are not installed; all that is imported from revela is there."""
    absent = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("revela"):
            for name in node.names:
                assert hasattr(importlib.import_module(str(node.module)), name.name), name.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            packages = {str(name).partition(".")[0] for name in names}
            absent |= {name for name in packages if importlib.util.find_spec(name) is None}
    return absent


class Parsed(Exception):
    """The flags of a benchmark were right."""


def check_module(name: str, arguments: list[str]) -> None:
    """A module exists, and the parser of revela's, or of a benchmark's, takes these flags."""
    if name == "revela":
        parse(arguments)
        return
    assert importlib.util.find_spec(name), name
    if not name.startswith("research.") or "--help" in arguments:
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *_: object) -> None:
        parse_args(parser, arguments)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        runpy.run_module(name, run_name="__main__")


def check_extras(words: list[str]) -> None:
    """Extras and constraints of pip install are those of the project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[2:]:
        if named := re.fullmatch(r"(?:revela-retriever|\.)\[(.+)\]", word):
            assert set(named[1].split(",")) <= extras["optional-dependencies"].keys(), word
        assert not word.endswith(".txt") or (ROOT / word).is_file(), word


@pytest.fixture(scope="module")
def provided(saved_retriever, tiny_lm_folder) -> dict[str, Callable[[Path], None]]:
    """What pages take for granted, and how to make it."""
    rows = make_rows(40)

    def text(folder: Path) -> None:
        folder.mkdir()
        for i, row in enumerate(make_rows(40, sentences=60)):  # a probe of position needs length
            (folder / f"{i}.md").write_text(f"# {row['title']}\n\n{row['text']}\n")

    def code(folder: Path) -> None:
        folder.mkdir()
        for i, row in enumerate(rows):
            name, doc = f"find_{row['title'].split()[2]}", row["text"].replace(".", ".\n    ")
            source = f'def {name}(value):\n    """{doc}"""\n    return value.{name}[{i}]\n'
            (folder / f"part{i}.py").write_text(source)

    def judged(folder: Path) -> None:
        (folder / "qrels").mkdir(parents=True)
        with (folder / "corpus.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        with (folder / "queries.jsonl").open("w") as file:
            for i, row in enumerate(rows):
                file.write(json.dumps({"_id": f"q{i}", "text": row["text"].split(".")[0]}) + "\n")
        lines = "".join(f"q{i}\t{row['_id']}\t1\n" for i, row in enumerate(rows))
        for split in ("train", "test"):
            (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)

    def index(folder: Path) -> None:
        from revela import Document, Retriever

        if not Path("my-retriever").exists():
            retriever(Path("my-retriever"))
        documents = [
            Document(row["_id"], row["text"], metadata={"year": 2000 + i, "lang": "en"})
            for i, row in enumerate(rows)
        ]
        Retriever("my-retriever", precision="fp32").index(
            documents, folder, metadata=["year", "lang"], keep_tokens=True
        )

    def retriever(folder: Path) -> None:
        shutil.copytree(saved_retriever, folder)

    return {
        **dict.fromkeys(("docs/", "papers/", "corpus/", "deduplicated/"), text),
        **dict.fromkeys(("code/", "src/"), code),
        **dict.fromkeys(("judged/", "beir/scifact", "scifact"), judged),
        "my-retriever": retriever,
        "my-index": index,
        "my-language-model": lambda folder: shutil.copytree(tiny_lm_folder, folder),
    }


@pytest.fixture(scope="module")
def tiny_embedder(tiny_lm_folder, tmp_path_factory) -> Path:
    """An embedder that reads as much as the real ones."""
    from revela.retriever.build import build_retriever

    folder = tmp_path_factory.mktemp("tiny-embedder")
    prompts = dict(query_prompt="query: ", passage_prompt="passage: ")
    settings = dict(layers=2, pooling="mean", max_tokens=512, lower_case=False)
    build_retriever(tiny_lm_folder, **settings, **prompts).save_pretrained(str(folder))
    return folder


@pytest.fixture
def tiny(monkeypatch, tiny_embedder, taught_lm_folder) -> None:
    """Embedded models are tiny, and so is all training."""
    import revela.cli.flags
    import revela.settings
    import revela.weights

    embedded = {"embedded:minilm-l6": tiny_embedder, "embedded:smollm2-135m": taught_lm_folder}
    monkeypatch.setattr(revela.weights, "_embedded", lambda name, wheel: embedded[name])
    merge = revela.settings.merge

    def tiny_merge(preset, file, given):
        recipe, unread = merge(preset, file, given)
        changes = {k: v for k, v in TINY.items() if k not in {**file, **given}} | LIMITS
        if recipe.objective.reads == "queries":
            changes["max_queries"] = 16
        if recipe.training.check_questions:
            changes["check_questions"] = 5
        if recipe.retriever.lora_rank == 0:
            changes.pop("lora_rank", None)
        if recipe.retriever.train_tokens:
            changes["train_tokens"] = 64
        if recipe.retriever.model.startswith("new:"):
            changes["model"] = "new:tiny"
        return recipe.but(**changes), unread

    monkeypatch.setattr(revela.settings, "merge", tiny_merge)
    monkeypatch.setattr(revela.cli.flags, "merge", tiny_merge)
    monkeypatch.setattr("revela.lm.generate.writer", lambda *_: ask)
    topics = {row["title"].split()[2]: row["text"] for row in make_rows(40)}
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)


def ask(passages: list[str]) -> list[str]:
    """What a language model might write about each passage, and about no other."""
    return [f"What does number {crc32(p.encode())} say of {p.split()[1]}?" for p in passages]


@pytest.fixture
def reader(request, provided, tiny, tmp_path, monkeypatch) -> Iterator[Reader]:
    import revela.server.lifecycle as lifecycle

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "secret")
    reader = Reader(request.param, provided)
    listen, server_of = lifecycle.listen, lifecycle.server_of
    bound = []

    def listen_anywhere(host, port):
        bound.append(listen("127.0.0.1", 0))
        return bound[-1]

    def recorded(service, limits):
        server = server_of(service, limits)
        server.listening = bound[-1]
        reader.servers.append(server)
        return server

    monkeypatch.setattr(lifecycle, "listen", listen_anywhere)
    monkeypatch.setattr(lifecycle, "server_of", recorded)
    yield reader
    for server in reader.servers:
        reader.stop(server)
    del sys.modules[reader.module.__name__]


@pytest.mark.parametrize("reader", BLOCKS, indirect=True)
def test_the_page_runs(reader):
    for block in BLOCKS[reader.page]:
        reader.follow(block)
    if check := AFTER.get(reader.page):
        check(vars(reader.module))


def after_readme(found: dict[str, object]) -> None:
    assert found["scores"].shape == (1, 2) and Path("report.html").is_file()


def after_sentence_transformers(found: dict[str, object]) -> None:
    (file,) = re.findall(r"my-run/\S+\.csv", PAGES["sentence-transformers.md"].read_text())
    assert len(Path(file).read_text().splitlines()) == 4
    assert found["model"].settings["query_prompt"] == "query: "


def after_train_on_a_folder(found: dict[str, object]) -> None:
    assert len(found["hits"]) == 5 and found["scores"].keys() >= {"sibling_ndcg@10", "mean_ndcg@10"}


def after_adapt_an_embedder(found: dict[str, object]) -> None:
    from revela import Retriever

    start = Retriever("embedded:minilm-l6", precision="fp32")
    texts = ["ocean1 ocean2"]
    adapted = Retriever("runs/adapted", precision="fp32").encode_queries(texts)
    assert abs(adapted - start.encode_queries(texts)).max() > 1e-6
    assert found["before"].keys() == found["after"].keys()


def after_own_objective(found: dict[str, object]) -> None:
    losses = {
        name: json.loads(Path("runs", name, "run.json").read_text())["objective"]
        for name in ("neighbours", "crop", "revela")
    }
    assert all(name == objective for name, objective in losses.items())


AFTER = {
    "index.md": after_readme,
    "sentence-transformers.md": after_sentence_transformers,
    "examples/train_on_a_folder.md": after_train_on_a_folder,
    "examples/adapt_an_embedder.md": after_adapt_an_embedder,
    "examples/own_objective.md": after_own_objective,
}


def test_the_pages_are_found():
    assert {"index.md", "quickstart.md", "objectives/revela.md", *AFTER} <= BLOCKS.keys()
    commands = [
        words
        for blocks in BLOCKS.values()
        for block in blocks
        if block.language == "bash"
        for words in commands_of(block.text)
    ]
    verbs = {words[1] for words in commands if words[0] == "revela"}
    assert verbs >= {"train", "eval", "probe", "index", "search", "serve", "compare", "report"}
    assert sum(words[0] == "revela" for words in commands) > 50


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_flags_that_exist(page):
    tokens = MarkdownIt().parse(docs_site.markdown_of(PAGES[page]))
    for part in (part for token in tokens for part in token.children or []):
        if part.type == "code_inline" and (verb := re.match(r"revela ([a-z]+)\b", part.content)):
            add_settings([verb[1]])
            arguments = app[verb[1]].assemble_argument_collection()
            known = {"--help"}.union(*(argument.names for argument in arguments))
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", part.content))
            assert flags <= known, part.content


def test_filters_of_the_service_are_taken():
    from revela.index.filters import where_sql

    tokens = MarkdownIt().parse(docs_site.markdown_of(PAGES["serving.md"]))
    (shown,) = [token.content for token in tokens if token.type == "code_block"]
    for line in shown.splitlines():
        assert where_sql(json.loads(line), {"year": "int64", "lang": "string"})


def test_what_is_not_run_is_still_there():
    everything = "".join(block.text for blocks in BLOCKS.values() for block in blocks)
    assert [mark for mark in NOT_RUN if mark not in everything] == []
    assert [name for name in NOT_INSTALLED if f" {name}" not in everything] == []


def test_the_readme_has_at_most_90_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_links_of_the_repository_lead_to_pages():
    """mkdocs checks all links; this needs no mkdocs."""
    for page, path in docs_site.sources().items():
        text = docs_site.with_links(docs_site.markdown_of(path), page)
        for target in docs_site.LINK.findall(re.sub(r"```.*?```", "", text, flags=re.S)):
            found = (Path(page).parent / target).as_posix()
            found = str(Path("/", found).resolve().relative_to("/"))
            assert found in docs_site.sources() or (ROOT / "docs" / found).is_file(), (page, target)
