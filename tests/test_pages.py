"""The README, the quickstart and the examples run from top to bottom, on tiny models and small
corpora, each in a folder of its own; the commands of all other pages have verbs and flags that
exist, and their snippets import what exists.
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

import pytest
from markdown_it import MarkdownIt

from conftest import make_rows, parsed, tiny_retriever
from research import docs_site
from revela.cli import app
from revela.cli.main import prepare
from revela.types import ANSWERS
from tests.collection_folder import write_judged

ROOT = docs_site.ROOT
PAGES = docs_site.sources()
del PAGES["changelog.md"]  # what was run then, with the flags of then
PAGES |= {f"research/{path.name}": path for path in (ROOT / "research").rglob("*.md")}
PAGES["skills/revela"] = ROOT / "skills" / "revela" / "SKILL.md"
RUN = [
    *("index.md", "quickstart.md", "search.md", "serving.md", "measure.md", "train.md"),
    *(page for page in PAGES if page.startswith("examples/")),
]
NO_DEPENDENCIES = {"haystack", "haystack_integrations", "langchain_huggingface", "llama_index"}
TINY = dict(
    chunk_words=20, group_size=8, lora_rank=4, threads=1,
    held_out=0.2,
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


def check(page: str, block: Block) -> None:
    """Check a block without running it."""
    if block.language == "python":
        compile(block.text, f"{page}:{block.line}", "exec")
        unknown = absent_of(ast.parse(block.text)) - NO_DEPENDENCIES
        assert not unknown, f"{page}:{block.line}"
    elif block.language == "toml":
        check_recipe(block.text)
    elif block.language == "bash":
        for words in commands_of(block.text):
            check_command(words)
    else:
        assert block.language in ("", "text"), f"{page} has a block of {block.language}"


def check_command(words: list[str]) -> None:
    """A command's verb, flags, module or extra exist."""
    if words[0] == "revela":
        parse(words[1:])
    elif "-m" in words[:-1] and words[0] != "llama-server":  # of python, torchrun or taskset
        at = words.index("-m") + 1
        check_module(words[at], words[at + 1 :])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
        for name, _, flags in (word.partition("=") for word in words[2:]):
            check_module(f"research.benchmarks.{BENCHMARKS[name]}", shlex.split(flags))
    elif words[0] == "pip":
        check_extras(words)


def parse(tokens: list[str]) -> None:
    """Check a command's verb and flags."""
    assert parsed(tokens)[1] or tokens == ["cache"]  # which alone needs nothing


def check_recipe(text: str) -> None:
    from revela.training.recipe import Recipe, read_recipe

    recipe = Path("recipe.toml")
    recipe.write_text(text)
    settings, variants = read_recipe(recipe)
    assert tomllib.loads(text)
    for changes in variants.values() or [{}]:
        Recipe().merge({**settings, **changes})


def absent_of(tree: ast.Module) -> set[str]:
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
    if not name.startswith("research.benchmarks.") or "--help" in arguments:
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


class Reader:
    """Who follows a page: what has been made so far, and the service that answers."""

    def __init__(self, page: str) -> None:
        self.module = types.ModuleType(page.replace(".", "_"))
        sys.modules[self.module.__name__] = self.module  # dataclasses look themselves up
        self.page = page
        self.servers: list[object] = []

    def follow(self, block: Block) -> None:
        if block.language == "python":
            text = self.with_port(block.text)
            if self.page == "examples/own_method.md":  # which is also read for its method
                text = text.replace('if __name__ == "__main__":', "if True:")
            exec(compile(text, f"{self.page}:{block.line}", "exec"), vars(self.module))
        elif block.language == "bash":
            for words in commands_of(block.text):
                self.command([self.with_port(word) for word in words])
        else:
            check(self.page, block)

    def with_port(self, text: str) -> str:
        """The text with the address where the page's service listens here."""
        if not self.servers:
            return text
        port = self.servers[0].listening.getsockname()[1]
        return text.replace(ADDRESS, f"127.0.0.1:{port}")

    def command(self, words: list[str]) -> None:
        if words[:2] == ["revela", "serve"] and not self.servers:
            self.serve(words[1:])
        elif words[:2] in (["revela", "mcp"], ["revela", "serve"]):  # they would wait for clients
            check_command(words)
        elif words[0] == "revela":
            prepare(words[1:])
            try:
                app(words[1:], **RETURNS)
            except SystemExit as end:  # a search that finds nothing
                assert words[1] == "search" and end.code == 1
        elif words[0] == "curl":
            done = subprocess.run([*words, "-sf"], capture_output=True, timeout=60, check=True)
            assert json.loads(done.stdout)
        else:
            assert words[0] in ("make", "pip"), f"{self.page} has the command {words}"
            check_command(words)

    def serve(self, tokens: list[str]) -> None:
        """Serve on a free port, in a thread, to the end of the page."""
        thread = threading.Thread(target=app, args=(tokens,), kwargs=RETURNS)
        thread.start()
        started = time.monotonic()
        while not self.servers or not self.servers[-1].started:
            assert thread.is_alive() and time.monotonic() < started + 60, tokens
            time.sleep(0.01)
        self.servers[-1].thread = thread


def write_text(folder: Path) -> None:
    folder.mkdir()
    for i, row in enumerate(make_rows(52, sentences=44)):  # a probe of position needs length
        (folder / f"{i}.md").write_text(f"# {row['title']}\n\n{row['text']}\n")


def give_task(monkeypatch) -> None:
    """mteb's tasks are a folder, as there is no network."""
    import mteb

    from tests.mteb_folder import folder_task

    write_judged(Path("judged"), make_rows(40))
    monkeypatch.setattr(mteb, "get_task", lambda name: folder_task(Path("judged")))


@pytest.fixture(scope="module")
def tiny_embedder(tiny_lm_folder, tmp_path_factory) -> Path:
    """An embedder that reads as much as the real ones."""
    folder = tmp_path_factory.mktemp("minilm-l6", numbered=False)
    tiny_retriever(tiny_lm_folder, max_tokens=256).save_pretrained(str(folder))
    return folder


@pytest.fixture
def tiny(monkeypatch, tiny_embedder, taught_lm_folder, in_process) -> None:
    """Embedded models are tiny, and so is all training."""
    import revela.cli.flags
    import revela.encoders.model_files
    import revela.training.evaluator  # whose defaults are the settings as they are
    import revela.training.recipe
    import revela.training.settings

    embedded = {"embedded:smollm2-135m": taught_lm_folder}
    monkeypatch.setattr(
        revela.encoders.model_files,
        "embedded_folder",
        lambda name: embedded.get(name, tiny_embedder),
    )
    monkeypatch.setattr(revela.training.settings.Training, "check_passages", 40)
    monkeypatch.setattr("revela.encoders.default_model.is_installed", lambda name: True)
    merge = revela.training.recipe.Recipe.merge

    def tiny_merge(self, given):
        recipe, unread = merge(self, given)
        changes = {k: v for k, v in TINY.items() if k not in given} | LIMITS
        if recipe.method.reads == "queries":
            changes["max_queries"] = 16
        if recipe.training.check_questions:
            changes["check_questions"] = 5
        return merge(recipe, changes)[0], unread

    monkeypatch.setattr(revela.training.recipe.Recipe, "merge", tiny_merge)

    monkeypatch.setattr("revela.training.lm.generate.writer", lambda *_: ask)
    topics = {row["title"].split()[2]: row["text"] for row in make_rows(40)}
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)


def ask(passages: list[str]) -> list[str]:
    """What a language model might write about each passage, and about no other."""
    return [f"What does number {crc32(p.encode())} say of {p.split()[1]}?" for p in passages]


@pytest.fixture
def reader(request, tiny, tmp_path, monkeypatch) -> Iterator[Reader]:
    import revela.searching.server.lifecycle as lifecycle

    monkeypatch.chdir(tmp_path)
    reader = Reader(request.param)
    listen, server_of = lifecycle.listen, lifecycle.server_of
    bound = []

    def listen_anywhere(host, port):
        bound.append(listen("127.0.0.1", 0))
        return bound[-1]

    def recorded(app, limits):
        server = server_of(app, limits)
        server.listening = bound[-1]
        reader.servers.append(server)
        return server

    monkeypatch.setattr(lifecycle, "listen", listen_anywhere)
    monkeypatch.setattr(lifecycle, "server_of", recorded)
    yield reader
    for server in reader.servers:
        server.should_exit = True
        server.thread.join(60)
    del sys.modules[reader.module.__name__]


@pytest.mark.parametrize("reader", RUN, indirect=True)
def test_the_page_runs(reader, monkeypatch):
    if reader.page in ("index.md", "search.md", "serving.md", "measure.md", "train.md"):
        write_text(Path("docs"))
    if reader.page == "search.md":
        write_text(Path("notes"))
        write_text(Path("mail"))
    if reader.page == "index.md":
        write_judged(Path("beir", "scifact"), make_rows(40))
    if reader.page == "train.md":
        for split in ("test", "train"):
            write_judged(Path("judged"), make_rows(40), split)
    if reader.page == "quickstart.md":
        shutil.copytree(ROOT / "research" / "recipes", "src")
        shutil.copy(ROOT / "examples" / "own_method.py", "src")
    monkeypatch.setenv("TOKEN", "a token of some length")
    if reader.page == "examples/mteb_hybrid.md":
        give_task(monkeypatch)
    for block in BLOCKS[reader.page]:
        reader.follow(block)
    if reader.page in AFTER:
        AFTER[reader.page](vars(reader.module))


@pytest.mark.parametrize("page", [page for page in BLOCKS if page not in RUN])
def test_the_page_has_commands_and_snippets_that_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS[page]:
        check(page, block)


def after_readme(found: dict[str, object]) -> None:
    assert found["scores"].shape == (1, 2)


def after_train_on_a_folder(found: dict[str, object]) -> None:
    assert len(found["hits"]) == 5 and found["scores"].keys() >= {"sibling_ndcg@10", "mean_ndcg@10"}


def after_adapt_an_embedder(found: dict[str, object]) -> None:
    from revela import Retriever

    start = Retriever("embedded:minilm-l6", precision="fp32")
    texts = ["ocean1 ocean2"]
    adapted = Retriever("runs/adapted", precision="fp32").encode_queries(texts)
    assert abs(adapted - start.encode_queries(texts)).max() > 1e-6
    assert found["before"].keys() == found["after"].keys()


def after_own_method(found: dict[str, object]) -> None:
    methods = {
        name: json.loads(Path("runs", name, "run.json").read_text())["method"]
        for name in ("neighbours", "contrastive-crop", "revela-gated")
    }
    assert all(name.startswith(method) for name, method in methods.items())


def after_mteb_hybrid(found: dict[str, object]) -> None:
    from revela import evaluate

    ours = evaluate(["embedded:minilm-l6"], ["judged"], precision="fp32")["judged"]
    fused = ours["embedded:minilm-l6 + BM25"].means["ndcg@10"]
    assert len(found["scores"]) == 4 and fused > 0.5
    assert found["scores"]["Revela"] == pytest.approx(fused, abs=1e-4)


AFTER: dict[str, Callable[[dict[str, object]], None]] = {
    "index.md": after_readme,
    "examples/train_on_a_folder.md": after_train_on_a_folder,
    "examples/adapt_an_embedder.md": after_adapt_an_embedder,
    "examples/own_method.md": after_own_method,
    "examples/mteb_hybrid.md": after_mteb_hybrid,
}


def test_the_pages_are_found():
    assert {"methods.md", *RUN} <= BLOCKS.keys()
    bash = [block for blocks in BLOCKS.values() for block in blocks if block.language == "bash"]
    commands = [words for block in bash for words in commands_of(block.text)]
    verbs = {words[1] for words in commands if words[0] == "revela"}
    assert verbs >= {"train", "eval", "probe", "index", "search", "serve", "compare"}
    assert sum(words[0] == "revela" for words in commands) > 50


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_flags_that_exist(page):
    tokens = MarkdownIt().parse(docs_site.markdown_of(PAGES[page]))
    for part in (part for token in tokens for part in token.children or []):
        if part.type == "code_inline" and (verb := re.match(r"revela ([a-z]+)\b", part.content)):
            prepare([verb[1]])
            arguments = app[verb[1]].assemble_argument_collection()
            known = {"--help"}.union(*(argument.names for argument in arguments))
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", part.content))
            assert flags <= known, part.content


def test_filters_of_the_service_are_taken():
    from revela.searching.filters import where_sql

    tokens = MarkdownIt().parse(docs_site.markdown_of(PAGES["serving.md"]))
    shown = next(token.content for token in tokens if token.type == "code_block")
    for line in shown.splitlines():
        assert where_sql(json.loads(line), {"year": "int64", "lang": "string"})


def test_the_skill_has_every_answer_of_a_search():
    rows = re.findall(r"^\| `?(\w+)`? \|", PAGES["skills/revela"].read_text(), re.M)
    assert rows[1:] == [answer or "null" for answer in ANSWERS]


def test_the_readme_has_at_most_90_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
