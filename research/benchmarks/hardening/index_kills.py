"""Kill commands that write an index at random moments, give any command next, and compare the index
with a fresh one of the documents that it holds.

Each command is a process of its own, forked from this one so that it begins at once, and ended by
SIGKILL. The next one is the same again, after which the index must be what the command makes
undisturbed, or another one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from research.benchmarks.hardening.made import (
    environment,
    fault,
    report,
    sentences,
    tiny_retriever,
)
from revela.cli import main
from revela.ranking.steps import Mode
from revela.searching import ingest
from revela.searching.index import Index
from revela.text.load import read_corpus

QUERIES = ["ocean3 engine4", "дом у реки", "中文文本", "violin1 violin2 violin3 garden5"]
OTHERS = ["Старый дом у реки построен из камня.", "这是一个中文文本。", "- one\r\n- two\r\n- three"]
COMMIT = 3000  # characters of the first commits, so that there are several
KINDS = ["index", "append", "sync", "delete"]
Command = list[str]


def forked(run: Callable[[], None], log: Path) -> int:
    """Start a process that runs this, with its output in a file; its id."""
    if child := os.fork():
        return child
    code = 1
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            run()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        file.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process; its exit code, negative if a signal has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def documents(rng: random.Random, names: list[str]) -> dict[str, str]:
    """A text for each name: paragraphs with headings, other scripts, lists and CRLF."""
    made = {}
    for name in names:
        parts = [sentences(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, 5))]
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(OTHERS))
        if rng.random() < 0.5:
            parts.insert(0, f"# About {rng.randrange(50)}")
        made[name] = "\n\n".join(parts)
    return made


class Place:
    """A folder of files, an index, and rows to append, always under the same paths. ``given`` keeps
    every version of what was written.
    """

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self.model = home, model
        self.docs, self.index, self.given = home / "docs", home / "index", home / "given"

    def write(self, texts: dict[str, str]) -> None:
        """Write files."""
        for folder in (self.docs, self.given / str(time.time_ns())):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8", newline="")

    def rows(self, texts: dict[str, str]) -> Path:
        """A file of rows."""
        path = self.given / f"{time.time_ns()}.jsonl"
        rows = ({"_id": name, "title": name[:3], "text": text} for name, text in texts.items())
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def command(self, *given: object) -> Command:
        return ["index", *map(str, given), "--out", str(self.index)]

    def new(self) -> Command:
        return self.command(self.docs, "--model", self.model, "--chunk-words", 25)


def scenario(kind: str, place: Place, rng: random.Random) -> tuple[Command | None, Command]:
    """Write files; the command that makes an index first, if any, and the one to be killed."""
    base = documents(rng, [f"b{i}.md" for i in range(rng.randint(8, 20))])
    more = documents(rng, [f"m{i}.md" for i in range(rng.randint(3, 30))])
    changed = documents(rng, rng.sample(sorted(base), 3))
    place.write(base)
    if kind == "index":
        place.write(more)
        return None, place.new()
    if kind == "append":
        return place.new(), place.command(place.rows(more | changed), "--append")
    if kind == "delete":
        return place.new(), [*place.command(), "--delete", *rng.sample(sorted(base), 4)]
    return place.new(), place.command("--sync", "--yes")


def change_files(place: Place, rng: random.Random) -> None:
    """What a sync has to do."""
    files = sorted(path.name for path in place.docs.iterdir())
    for name in rng.sample(files, rng.randint(0, len(files) - 1)):
        (place.docs / name).unlink()
    new = [f"m{i}.md" for i in range(rng.randint(3, 30))]
    place.write(documents(rng, [*new, *rng.sample(files, 3)]))


def next_command(command: Command, place: Place, rng: random.Random) -> Command:
    """What is given after a kill: the same again, or something else."""
    kind = rng.choice(["again", "again", "append", "delete", "sync", "search"])
    if kind == "append":
        names = ["b1.md", *(f"n{i}.md" for i in range(rng.randint(1, 9)))]
        return place.command(place.rows(documents(rng, names)), "--append")
    if kind == "delete":
        return [*place.command(), "--delete", "b0.md"]
    if kind == "sync":
        place.write(documents(rng, ["b2.md", "n0.md"]))
        return place.command("--yes", "--sync")  # is not the same command: files have changed
    if kind == "search":
        return ["search", str(place.index), QUERIES[0], "--json"]
    return command


# What is compared, in processes of their own


def check(place: Place, finished: bool = True) -> None:
    """Raise unless an index is what a fresh one of its documents is, and ``finished``."""
    index = Index.open(place.index)
    rows = index.table.lance.search().with_row_id(True).limit(10**6).to_list()
    words = index.info.settings.chunk_words
    documents, _ = read_corpus(sorted(place.given.iterdir()), distinct=False, min_words=1)
    known = {(document.id, ingest.digest_of(document, words)): document for document in documents}
    rows.sort(key=lambda row: row["_rowid"])
    held = dict.fromkeys((row["id"], row["digest"]) for row in rows)
    assert len({name for name, _ in held}) == len(held), "a document of two versions"
    settings = replace(index.info.settings, language=index.info.language)
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Index.create(temporary, index.model_folder, settings=settings)
        fresh.add(known[which] for which in held)
        assert not finished or not index.calibration.is_outdated(len(index)), "calibration"
        # Words are weighed by the rows that are indexed, which the next change brings about.
        compare(index, fresh, ("lexical", "dense") if finished else ("dense",))


def check_same(folder: Path, other: Path) -> None:
    """Raise unless an index is what another one is."""
    ours, theirs = Index.open(folder), Index.open(other)
    assert ours.info == theirs.info, (ours.info, theirs.info)
    compare(ours, theirs, ("lexical", "dense", "hybrid"))


def compare(ours: Index, theirs: Index, modes: Sequence[Mode]) -> None:
    """Rows, counts, idf, rankings and scores of two indices."""
    assert rows_of(ours) == rows_of(theirs), "rows"
    assert len(ours) == ours.state.snapshot().chunks == theirs.state.snapshot().chunks
    assert counts_of(ours) == counts_of(theirs), "the counts of terms"
    for query in QUERIES:
        terms = ours.table.query_terms(query)
        assert np.array_equal(ours.state.idf(terms), theirs.state.idf(terms)), "idf"
        for mode in modes:
            found, wanted = (
                {hit.id: hit.score for hit in index.search(query, 1000, mode)}
                for index in (ours, theirs)
            )
            assert found.keys() == wanted.keys(), (query, mode)
            assert np.allclose([found[name] for name in wanted], [*wanted.values()], rtol=1e-4)


def rows_of(index: Index) -> list[tuple[Any, ...]]:
    """What each row holds, in order."""
    rows = index.table.lance.search().limit(10**6).to_list()
    return sorted((row["id"], row["chunk"], row["passage"], row["terms"]) for row in rows)


def counts_of(index: Index) -> dict[int, int]:
    """How many chunks hold each term, by its hash."""
    return dict(index.state._database.execute("select hash, n from terms").fetchall())


class Kills:
    """Commands that are killed a few times each, from the same start."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.rng = home, random.Random(seed)
        self.log, self.killed, self.wrong = home / "log", Counter[str](), 0
        self.place = Place(home / "place", home / "model")
        home.mkdir()
        self.succeeds(lambda: tiny_retriever(home / "model"))

    def succeeds(self, run: Callable[[], object]) -> None:
        """Run something in a process of its own, which must succeed."""
        if ended(forked(run, self.log)):
            raise AssertionError(self.log.read_text()[-3000:])

    def scenario(self, kind: str, kills: int) -> None:
        """Kill a command of some kind so many times."""
        place, start, whole = self.place, self.home / "start", self.home / "whole"
        for folder in (place.home, start, whole):
            shutil.rmtree(folder, ignore_errors=True)
        first, command = scenario(kind, place, self.rng)
        if first:
            self.succeeds(lambda: revela(first))
        if kind == "sync":
            change_files(place, self.rng)
        shutil.copytree(place.home, start)
        begun = time.monotonic()
        self.succeeds(lambda: revela(command))
        seconds = time.monotonic() - begun
        shutil.copytree(place.index, whole)
        self.succeeds(lambda: check(place))
        for _ in range(kills):
            shutil.rmtree(place.home)
            shutil.copytree(start, place.home)
            after = self.rng.uniform(0, seconds)
            process = forked(lambda: revela(command), self.log)
            time.sleep(after)
            os.kill(process, signal.SIGKILL)
            if ended(process) != -signal.SIGKILL:
                self.killed["after its end"] += 1
                continue
            self.killed[kind] += 1
            following = next_command(command, place, self.rng)
            try:
                self.follow(command, following, whole)
            except AssertionError as error:
                self.wrong += 1
                kept = tempfile.mkdtemp(prefix="hardening-wrong-")
                shutil.copytree(self.home, kept, dirs_exist_ok=True)
                print(f"{kind} killed after {after:.3f} s, then {following}: {kept}\n{error}")

    def follow(self, command: Command, following: Command, whole: Path) -> None:
        """Give the next command after a kill, and compare."""
        if following != command:
            code = ended(forked(lambda: revela(following), self.log))
            assert not (wrong := fault(code, self.log.read_text())), wrong
            is_search = following[0] == "search"
            if code == 0:
                self.succeeds(lambda: check(self.place, finished=not is_search))
            if code == 0 and not is_search:
                return
        # The first one was all, or the index was not finished, has not what is to be deleted, or
        # was only read.
        code = ended(forked(lambda: revela(command), self.log))
        assert code == 0 or ("--delete" in command and code == 2), self.log.read_text()[-3000:]
        self.succeeds(lambda: check(self.place))
        if following == command or following[0] == "search":
            self.succeeds(lambda: check_same(self.place.index, whole))


def revela(command: Command) -> None:
    """The command line."""
    sys.argv = ["revela", *command]
    main()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--each", type=int, default=10, help="kills of a command")
    parser.add_argument("--minutes", type=float, default=60, help="at most")


def run(a: argparse.Namespace) -> int:
    """Kill commands; how many indices were not what they had to be."""
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="hardening-") as home,
        patch.object(ingest, "BATCH", COMMIT),
    ):
        os.environ.update(environment(Path(home) / "cache"))
        kills = Kills(Path(home) / "kills", a.seed)
        for kind in itertools.cycle(KINDS):
            minutes = (time.monotonic() - begun) / 60
            done = sum(kills.killed[kind] for kind in KINDS)
            if done >= a.kills or minutes > a.minutes:
                break
            kills.scenario(kind, min(a.each, a.kills - done))
            print(dict(kills.killed), kills.wrong, round(minutes, 1), flush=True)
    report("index", seed=a.seed, kills=done, of=kills.killed, wrong=kills.wrong, minutes=minutes)
    return kills.wrong
