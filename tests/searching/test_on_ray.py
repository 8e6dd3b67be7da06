"""``--engine ray`` makes what one process makes, whatever is killed: indexes and vectors.

All of it is in one file, so that Ray is started once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_rows
from revela.cli.flags import reader_of_parts
from revela.errors import RevelaError
from revela.searching import build_on_ray, on_ray
from revela.searching.index import Index
from revela.searching.on_ray import Cluster
from revela.searching.state import State, read_info
from revela.searching.table import Table, table_uri
from revela.text.load import READING, read_corpus
from revela.text.readers.common import ReadReport
from revela.types import Document
from tests.collection_folder import write_lines
from tests.searching.letters import counts_of
from tests.searching.test_kinds_of_file import write_kinds

for package in ("ray", "lance"):
    pytest.importorskip(package, reason="needs pip install '.[ray]'")

FLAGS = ("--chunk-words", 12, "--metadata", "year", "--precision", "fp32")
RAY = ("--engine", "ray", "--workers", 1, "--commit-every", 40)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "auto"])
def test_no_cluster_is_one_sentence_at_once(monkeypatch, address):
    """Before Ray is started for the other tests, which ``connected`` would use."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(RevelaError, match=f"^no Ray cluster answers at {address} "),
        on_ray.connected(Cluster(address)),
    ):
        pass


@pytest.fixture(scope="module")
def ray_session():
    with on_ray.connected(Cluster()):
        yield


def rows_of_corpus(count: int = 48) -> list[dict[str, object]]:
    return [{**row, "year": 2000 + i % 20} for i, row in enumerate(make_rows(count, sentences=3))]


def write_corpus(folder: Path, rows: list[dict[str, object]]) -> Path:
    """Half of the rows as JSONL without ids, half as Parquet in small row groups."""
    folder.mkdir()
    half = len(rows) // 2
    lines = ({k: v for k, v in row.items() if k != "_id"} for row in rows[:half])
    write_lines(folder / "a.jsonl", lines)
    pq.write_table(pa.Table.from_pylist(rows[half:]), folder / "b.parquet", row_group_size=5)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("ray") / "corpus", rows_of_corpus())


@pytest.fixture
def doing(ray_session, doing):
    return doing


@pytest.fixture
def index_by(doing):
    def index(corpus, out, model, *flags):
        return doing("index", corpus, "--out", out, "--model", model, *FLAGS, *flags)

    return index


def contents(folder: Path) -> tuple[dict[tuple[str, int], dict[str, object]], np.ndarray]:
    """Every row without its vector by document and chunk, and the vectors in that order."""
    found = Index.open(folder).table.lance.search().limit(10**6).to_list()
    rows = {(row["id"], row["chunk"]): row for row in found}
    assert len(rows) == len(found), "a row is there twice"
    vectors = np.array([rows[key].pop("vector") for key in sorted(rows)])
    return rows, vectors


def assert_equal(ours: Path, theirs: Path) -> None:
    """Rows, vectors and statistics of two indexes."""
    (rows, vectors), (wanted, known) = contents(ours), contents(theirs)
    assert rows == wanted
    np.testing.assert_allclose(vectors, known, atol=1e-5)
    mine, other = State(ours), State(theirs)
    assert mine.snapshot().chunks == other.snapshot().chunks
    assert mine.idf(["garden"]) == other.idf(["garden"]) > 0
    assert counts_of(mine) == counts_of(other)
    known, wanted = Index.open(ours).info, Index.open(theirs).info
    assert known.language == wanted.language and known.calibration.queries > 0
    assert known.calibration.queries == wanted.calibration.queries
    made = Index.open(ours).table
    assert made.version == made.number


def test_killed_workers_and_drivers_leave_the_rows_that_one_process_makes(
    index_by, monkeypatch, static_folder, tmp_path
):
    corpus, model = write_corpus(tmp_path / "corpus", rows_of_corpus(200)), static_folder
    out, alone = tmp_path / "index", tmp_path / "alone"
    assert index_by(corpus, alone, model)[0] == 0
    arguments = ["index", corpus, "--out", out, "--model", model, *FLAGS, *RAY]
    driver = subprocess.Popen(
        [sys.executable, "-m", "revela", *map(str, arguments)], stderr=subprocess.DEVNULL
    )
    first = wait_for_rows(out, driver, 1)
    kill_an_actor(driver.pid)
    assert wait_for_rows(out, driver, first + 1) < len(Index.open(alone)), "it was done before"
    driver.kill()
    driver.wait()
    with pytest.raises(RevelaError, match="is not finished: run the same revela index again"):
        Index.open(out)
    code, _, err = index_by(corpus, out, model, "--vectors", "int8")
    assert code == 2 and "was begun with another model or other settings" in err
    monkeypatch.setattr("revela.text.parts.PART", 5000)  # several parts of the Parquet file
    code, said, err = index_by(corpus, out, model, *RAY)
    assert code == 0, err
    new, unchanged = map(int, re.findall(r"(\d+) documents are new.*?(\d+) unchanged", said)[0])
    assert "read 200 documents" in said and new + unchanged == 200 and new and unchanged
    assert_equal(out, alone)
    ours, theirs = read_info(out), read_info(alone)
    scale, expected = ours.calibration.scores["hybrid"], theirs.calibration.scores["hybrid"]
    assert scale == pytest.approx(expected, rel=1e-4)  # sums, in another order of the rows
    theirs = replace(theirs, calibration=replace(theirs.calibration, scores={"hybrid": scale}))
    assert ours == theirs and ours.columns == {"year": "int64"}
    assert len(list(Path(table_uri(out), "data").iterdir())) == 1, "orphans are left"
    hits = [Index.open(folder).search("garden", 10) for folder in (out, alone)]
    assert [(h.id, h.text) for h in hits[0]] == [(h.id, h.text) for h in hits[1]]


def kill_an_actor(driver: int) -> None:
    """Kill one of the actors of a process's Ray."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_text()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            above = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if "_Actor" in name and int(above) == driver:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("no actor is there")


def wait_for_rows(folder: Path, driver: subprocess.Popen, least: int) -> int:
    """How many rows are committed, once there are so many."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert driver.poll() is None, "it ended before it could be killed"
        if Path(table_uri(folder), "_versions").is_dir():
            try:
                if (found := len(Table.open(folder, read_info(folder)))) >= least:
                    return found
            except RevelaError:
                pass
        time.sleep(0.02)
    raise AssertionError("nothing is committed")


def test_what_is_appended_and_replaced_is_what_one_process_makes(
    succeeds, index_by, monkeypatch, static_folder, tmp_path
):
    rows = [dict(row, _id=f"it's {i}") for i, row in enumerate(rows_of_corpus())]
    before, after = tmp_path / "before.jsonl", tmp_path / "after.parquet"
    write_lines(before, rows[:30])
    changed = [dict(row, text=f"another text of {i}.") for i, row in enumerate(rows[20:26])]
    pq.write_table(pa.Table.from_pylist([*changed, *rows[26:]]), after)
    for name, flags in (("local", ()), ("ray", ("--engine", "ray", "--commit-every", 40))):
        out = tmp_path / name
        assert index_by(before, out, static_folder)[0] == 0
        if flags:  # the memory of what drives must not grow with the table
            monkeypatch.setattr(Table, "pack", lambda *_: pytest.fail("packed by the driver"))
        said = succeeds("index", after, "--out", out, "--append", *flags, "--precision", "fp32")
        assert "18 documents are new, 6 replaced, 4 unchanged" in said
    assert_equal(tmp_path / "ray", tmp_path / "local")


def write_repeated(folder: Path) -> Path:
    """Rows of two files and of groups of rows in Parquet share ids."""
    folder.mkdir()
    rows = [dict(row, _id=str(i % 7)) for i, row in enumerate(rows_of_corpus(30))]
    rows[4]["_id"] = "alone"
    write_lines(folder / "a.jsonl", rows[:10])
    write_lines(folder / "b.jsonl", rows[10:15])
    pq.write_table(pa.Table.from_pylist(rows[15:]), folder / "c.parquet", row_group_size=4)
    return folder


def write_named_as_a_place(folder: Path) -> Path:
    """A row has the id that another would get by its place."""
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"_id": "a.jsonl:2", "text": "abc"}\n{"text": "b"}\n')
    return folder


@pytest.mark.parametrize("write", [write_repeated, write_named_as_a_place, write_kinds])
@pytest.mark.parametrize("size", [1, 10**6])
def test_documents_and_their_ids_are_those_of_one_process(
    ray_session, monkeypatch, tmp_path, size, write
):
    corpus = write(tmp_path / "corpus")
    monkeypatch.setattr("revela.text.parts.PART", size)
    how = dict(distinct=False, min_words=1, rename_repeated=True)
    documents, report = read_corpus([corpus], **how)
    surveyed = build_on_ray.SurveyedCorpus([corpus], reader_of_parts(READING, (), True))
    if write == write_repeated:
        assert len(surveyed.parts) == (1 if size > 1 else 6)
    read = [surveyed.reading.documents(part, ReadReport()) for part in surveyed.parts]
    assert list(chain.from_iterable(read)) == list(documents)
    assert len({document.id for document in documents}) == len(documents) == len(surveyed)
    assert surveyed.report.lines() == report.lines()
    assert surveyed.report.unread == report.unread
    renamed = ": rows with the id of another row or file: their place is their id"
    assert write == write_kinds or renamed in "".join(report.lines())


@pytest.mark.parametrize(
    ("lines", "flags", "sentence"),
    [
        ('{"_id": 1, "text": "abc"}\n', ("--join-titles",), "--join-titles joins rows"),
        ('{"_id": 1, "text": "abc", "year": 7}\n', ("--metadata", "yaer"),
         'no document has a field "yaer"'),
        ("hub:a/b", (), "--engine ray reads files that all workers see"),
    ],
)  # fmt: skip
def test_a_bad_corpus_is_one_sentence_before_anything_is_written(
    refused, static_folder, tmp_path, lines, flags, sentence
):
    path, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    path.write_text(lines)
    corpus = lines if lines.startswith("hub:") else path
    given = ("index", corpus, "--model", static_folder, *flags, "--out")
    err = refused(*given, out, "--engine", "ray")
    assert sentence in err and not out.exists()
    if "--metadata" in flags:
        assert refused(*given, tmp_path / "alone") == err


def test_where_no_locks_are_kept_the_version_of_the_table_tells(
    ray_session, static_folder, tmp_path
):
    index = Index.create(tmp_path / "other", static_folder)
    version = index.table.version
    index.add([Document("a", "Some words.")])
    with pytest.raises(RevelaError, match=r"another process has written to .*other meanwhile"):
        on_ray.commit(table_uri(index.folder), version, [], [])


def test_a_model_that_is_another_on_a_worker_is_refused(
    ray_session, corpus, saved_retriever, tmp_path
):
    index = Index.create(tmp_path / "index", saved_retriever)
    info = replace(index.info, fingerprint="0123")  # as if the model were another there
    reader = reader_of_parts(READING, ())
    job = build_on_ray.Job(index.folder, info, None, reader, "fp32")
    with pytest.raises(RevelaError, match="is not the same model on every machine"):
        job.load()


def test_an_error_of_an_actor_is_one_sentence(ray_session):
    def load():
        from revela.errors import RevelaError

        raise RevelaError("what is wrong: what to do")

    def read(item):
        yield {"item": item}

    with pytest.raises(RevelaError, match=r"^what is wrong: what to do$"):
        list(on_ray.stream([1, 2, 3], read, load, lambda rows: rows[0], Cluster(workers=1), 1))


def test_vectors_by_ray_are_those_of_one_process(succeeds, corpus, static_folder, tmp_path):
    found = []
    for engine in ("local", "ray"):
        out = tmp_path / engine / "vectors.parquet"
        said = succeeds(
            "encode", corpus, "--out", out, "--model", static_folder,
            *FLAGS[:2], *FLAGS[4:], "--engine", engine,
        )  # fmt: skip
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        rows = sorted(pq.read_table(out).to_pylist(), key=lambda row: (row["id"], row["chunk"]))
        vectors = [row.pop("vector") for row in rows]
        found.append((rows, vectors, said.splitlines()[-1][:20]))
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)
