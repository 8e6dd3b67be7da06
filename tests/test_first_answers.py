"""The first answers of a folder: by its words, while its vectors are made."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import make_rows, wait_for, write_texts
from revela.cli.mcp import IndexOpener
from revela.cli.search import _print_first_answer
from revela.encoders.prompts import OWN
from revela.errors import QueryError, RevelaError
from revela.searching import changes, folder_index
from revela.searching.index import Index
from revela.searching.manifest import Indexing
from revela.searching.server import Site, lifecycle
from revela.searching.server.mcp import Tools
from revela.searching.word_search import Words
from revela.types import Document

GUIDE = "# Guide\r\n\r\nThe castle is old.\r\n\r\n## Garden\r\n\r\n" + "It is quiet there. " * 40
MIXED = [
    Document("guide.md", GUIDE + "The garden opens at nine."),
    Document("a.txt", "An engine and a violin in the garden of the castle.", "Engines"),
    Document("list.txt", "- apples\n- a garden hose\n- nails\n" * 30),
    Document("zh.txt", "花园每天早上九点开门。" * 20),
    Document("empty.txt", "."),
]


@pytest.fixture
def docs(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_index, "SOON", 0)
    folder = write_texts(tmp_path / "docs", make_rows(40, sentences=4))
    (folder / "zebra.txt").write_text("A zebra stands alone.")
    return folder


def test_words_find_what_an_index_finds_by_words(tmp_path, static_folder):
    settings = Indexing(chunk_words=30)
    index = Index.create(tmp_path / "index", static_folder, settings=settings)
    rows = [Document(f"d{i}", row["text"]) for i, row in enumerate(make_rows(40, sentences=9))]
    index.add([*MIXED, *rows])
    words = Words([*MIXED, *rows], 30)
    assert len(words) == 45
    for query in ("garden", "where is the castle", "ocean01 engine02", "九点开门", "zzz"):
        found, expected = words.search(query, 50), index.search(query, 50, mode="lexical")
        assert {hit.id for hit in found} == {hit.id for hit in expected}, query
        assert [hit.id for hit in found[:1]] == [hit.id for hit in expected[:1]]
        assert all(0 < hit.score <= 1 and hit.confidence is None for hit in found)
        assert [hit.score for hit in found] == sorted((h.score for h in found), reverse=True)
    # An index goes by vectors, which words alone do not have.
    assert not words.search("of the") and index.search("of the", mode="lexical")
    assert words.chunks("none") == []
    for document in MIXED[:4]:
        same = [replace(hit, language=None) for hit in index.chunks(document.id)]
        assert words.chunks(document.id) == same
        assert "".join(hit.text for hit in words.chunks(document.id)) == document.text


def test_words_refuse_what_needs_an_index():
    words = Words(MIXED, 120)
    with pytest.raises(QueryError, match=r"5 documents are being encoded.*Filters"):
        words.search("garden", where={"id": "a.txt"})
    with pytest.raises(QueryError, match="the query is empty"):
        words.search(" ")


def at_commits(monkeypatch, call):
    """Have a function called before each commit to an index, which takes many."""
    commit = changes.Changes.commit
    monkeypatch.setattr("revela.searching.ingest.BATCH", 3000)
    monkeypatch.setattr(
        changes.Changes, "commit", lambda self, *some: call(*some) or commit(self, *some)
    )


def test_words_come_before_vectors_and_learn_how_far_these_are(docs, static_folder, monkeypatch):
    given, shares = [], []
    at_commits(monkeypatch, lambda *_: shares.append(given[0].made))

    def early(words):
        assert not shares
        assert [hit.id for hit in words.search("zebra")] == ["zebra.txt"]
        given.append(words)

    index = folder_index.open_any(docs, static_folder, on_partial_index=early)
    assert len(shares) > 3 and shares == sorted({*shares}) and shares[0] == 0
    assert len(given) == 1 and given[0].made == 1 and len(given[0]) == 41 <= len(index)
    assert "100 % of the text is done" in given[0].notice
    folder_index.open_any(docs, static_folder, on_partial_index=pytest.fail)  # it has an index now


def test_an_old_index_answers_before_many_changes_are_in(docs, static_folder, capsys, monkeypatch):
    monkeypatch.setattr(folder_index, "SOON", 2000)
    folder_index.open_any(docs, static_folder)
    (docs / "small.txt").write_text("A yak.")
    index = folder_index.open_any(docs, static_folder, on_partial_index=pytest.fail)
    before, given = index.documents, []
    for i in range(3):
        text = f"The okapi number {i} eats leaves. " * 60
        (docs / f"new{i}.txt").write_text(text)

    def early(old):
        given.append((old.documents, old.notice, [hit.id for hit in old.search("yak")][:1]))
        _print_first_answer("yak", 5, old)

    index = folder_index.open_any(docs, static_folder, on_partial_index=early)
    lacks = "3 new or changed documents are not searched yet."
    assert given == [(before, lacks, ["small.txt"])] and not index.notice
    assert index.documents == before + 3
    shown = capsys.readouterr().out
    assert shown.startswith(f"{lacks} The full answer follows.")
    assert "small.txt:1" in shown


def test_small_texts_and_indexes_are_not_searched_by_words_first(docs, static_folder, monkeypatch):
    monkeypatch.setattr(folder_index, "SOON", 2**20)
    index = folder_index.open_any(docs, static_folder, on_partial_index=pytest.fail)
    folder_index.open_any(index.folder, on_partial_index=pytest.fail)


def stop_after(monkeypatch, commits, error):
    """Have the process stop in a commit, as Ctrl-C and SIGTERM do."""
    done = []

    def count(*some):
        done.append(some)
        if len(done) > commits:
            raise error

    at_commits(monkeypatch, count)
    return done


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_stopped_search_says_what_is_kept_goes_on(doing, docs, static_folder, monkeypatch, error):
    asked = ("search", docs, "zebra", "--model", static_folder)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, error)
        code, out, err = doing(*asked)
    assert code in (130, 143)
    assert out.startswith("By words only: ") and "/zebra.txt:1  [" in out
    assert "run the same command again to resume" in err
    kept = int(err.split("stopped: ")[1].split(" of 41 documents")[0])
    assert 0 < kept < 41
    with monkeypatch.context() as patch:
        again = stop_after(patch, 99, error)
        code, out, err = doing(*asked)
    assert code == 0 and out.count("/zebra.txt:1  [") == 2
    assert sum(len({*rows["id"].to_pylist()}) for rows, *_ in again) == 41 - kept
    code, out, err = doing(*asked)
    assert out.count("/zebra.txt:1  [") == 1 and "By words only" not in out


def test_a_search_stopped_in_the_finish_says_all_is_kept(doing, docs, static_folder, monkeypatch):
    asked = ("search", docs, "zebra", "--model", static_folder)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(changes, "calibrate", stop)
        code, out, err = doing(*asked)
    assert code == 130 and "being encoded (0 % of the text is done)" in out
    assert "stopped: 41 of 41 documents are in the index: run the same command" in err
    code, out, err = doing(*asked)
    assert code == 0 and "being encoded (100 % of the text is done)" in out
    assert "being encoded" not in doing(*asked)[1]


@pytest.mark.parametrize(
    "more", ["--json", "--where id='zebra.txt'", "--min-score 0", "--mode dense"]
)
def test_one_answer_is_printed_where_words_cannot_give_it(doing, docs, static_folder, more):
    code, out, err = doing("search", docs, "zebra", "--model", static_folder, more)
    assert code == 0 and "By words only" not in out, err


class Held:
    """``open_any``, held between the words and the index."""

    def __init__(self, *errors):
        self.errors, self.words_given, self.go_on = [*errors], threading.Event(), threading.Event()
        self.index = SimpleNamespace(notice="")

    def __call__(self, path, model, prompts, on_partial_index):
        if self.errors and (error := self.errors.pop(0)):
            raise error
        on_partial_index(Words(MIXED, 120))
        self.words_given.set()
        assert self.go_on.wait(60)
        if self.errors:
            raise self.errors.pop(0)
        return self.index


@pytest.fixture
def held(monkeypatch):
    def hold(*errors):
        open_any = Held(*errors)
        monkeypatch.setattr(folder_index, "open_any", open_any)
        monkeypatch.setattr(lifecycle, "sync_periodically", lambda *_, **__: nullcontext())
        return open_any

    return hold


def test_agents_are_answered_by_words_and_told_so_until_the_index_is_there(held):
    making, opener = held(), IndexOpener(Path("docs"), None, OWN)
    tools = Tools(Site("docs"), opener.index, {})
    answer = tools.search("garden", k=2).structured_content
    assert len(answer["results"]) == 2 and answer["note"].startswith("By words only: ")
    assert tools.fetch("a.txt").structured_content["text"] == MIXED[1].text
    making.go_on.set()
    wait_for(lambda: opener.index() is making.index)


def test_what_failed_is_tried_again_at_the_next_call(held):
    failed = RevelaError("docs holds no document")
    making, opener = held(failed, None, failed), IndexOpener(Path("docs"), None, OWN)
    with pytest.raises(RevelaError, match="holds no document"):
        opener.index()
    assert isinstance(opener.index(), Words)  # the second time words are counted,
    making.go_on.set()  # and then it fails
    wait_for(lambda: not opener._runs)
    wait_for(lambda: opener.index() is making.index)
