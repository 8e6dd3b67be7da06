"""Queries that a language model writes while a retriever trains: as many as its steps need, in its
time, and always the same ones.
"""

from __future__ import annotations

import json
import time
from zlib import crc32

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_train import ctrl_c_after

from conftest import TINY, logged, make_rows
from revela.errors import RevelaError
from revela.training import generated_queries as query_lm
from revela.training import on_files
from revela.training.generated_queries import GeneratedQueries
from revela.training.lm import generate
from revela.training.methods import dream as dream_module
from revela.training.rank_heads import rank_heads
from revela.training.recipe import Recipe
from revela.training.step import Progress
from revela.training.train import train
from revela.training.training_set import TrainingSet
from revela.types import Document
from tests.collection_folder import write_judged, write_lines

SPLIT = dict(groups="split", targets=1)
DOCUMENTS = [Document(row["_id"], row["text"]) for row in make_rows(24)]


@pytest.fixture
def recipe(tiny_lm_folder):
    folder = str(tiny_lm_folder)
    settings = {"method": "dream-infonce"} | TINY | dict(max_steps=3, save_every=1)
    return Recipe.of(**settings, model=folder, lm=folder)


@pytest.fixture
def asked(monkeypatch):
    """What the writer is asked, which takes a moment, and asks the same of all chunks that begin
    alike.
    """
    texts: list[str] = []

    def write(passages):
        began = time.process_time()
        while time.process_time() < began + 0.02:
            pass
        texts.extend(passages)
        first = (passage.split()[0] for passage in passages)
        return ["nothing" if w.endswith("0") else f"Which {w} is it here?" for w in first]

    monkeypatch.setattr(generate, "writer", lambda *_: write)
    return texts


@pytest.fixture
def train_into(recipe, tmp_path):
    def run(name, file="q.jsonl", resume=False, documents=DOCUMENTS, **changes):
        data = TrainingSet(recipe, documents, queries_file=tmp_path / file)
        return train(recipe.replace(**changes), data, tmp_path / name, resume=resume)

    return run


def write_all(recipe, documents, file):
    """Have all queries written that training may ask for."""
    return TrainingSet(recipe, documents, queries_file=file, lazy_queries=False).rows


def of_run(folder):
    """Losses by step, and the saved tensors."""
    losses = {row["step"]: row["loss"] for row in logged(folder)}
    return losses, load_file(folder / "model.safetensors")


def assert_equal(one, other):
    """To rounding, which differs by batch on some processors."""
    assert one[0] == pytest.approx(other[0], rel=0, abs=1e-5)
    assert all(torch.allclose(v, other[1][k], rtol=0, atol=1e-5) for k, v in one[1].items())


def test_steps_wait_for_their_queries_whatever_is_kept(recipe, asked, train_into, tmp_path, caplog):
    caplog.set_level("INFO", "revela")
    train_into("one")
    assert len(asked) == query_lm.BLOCK
    said = [line for line in caplog.messages if "during training: at most" in line]
    assert len(said) == 1 and f"writes queries into {tmp_path / 'q.jsonl'}" in said[0]
    assert "queries for" in caplog.text and "not a question" in caplog.text
    train_into("two")
    assert len(asked) == query_lm.BLOCK
    write_all(recipe, DOCUMENTS, tmp_path / "q.jsonl")
    assert len(asked) > 2 * query_lm.BLOCK  # the rest of the corpus
    written = len(asked)
    train_into("three")
    assert len(asked) == written
    one, two, three = (of_run(tmp_path / name) for name in ("one", "two", "three"))
    assert_equal(one, two)
    assert_equal(one, three)
    texts = [json.loads(line)["passage"] for line in (tmp_path / "q.jsonl").open()]
    assert len(texts) == len(set(texts)) == len(asked)


def test_the_language_model_is_opened_once_for_all_blocks(asked, train_into, monkeypatch):
    opened, write = [], generate.writer(None)
    monkeypatch.setattr(generate, "writer", lambda folder, *_: opened.append(folder) or write)
    monkeypatch.setattr(query_lm, "BLOCK", 8)
    train_into("out")
    assert len(asked) > 2 * 8 and len(opened) == 1


def test_writing_is_training_time(asked, train_into):
    batches = query_lm.BLOCK // query_lm.WRITING_BATCH
    outcome = train_into("out", max_steps=1)
    assert outcome.minutes * 60 >= batches * 0.02
    # The first step is the last when its queries have taken all the time.
    limit = batches * 0.02 / 60 / 2
    outcome = train_into("late", file="other.jsonl", max_steps=0, max_minutes=limit)
    assert outcome.steps == 1


def test_resume_equals_unbroken(recipe, asked, train_into, tmp_path, monkeypatch):
    """Through several blocks and into the second epoch, whatever became of the file meanwhile."""
    monkeypatch.setattr(query_lm, "BLOCK", 16)
    some, file = dict(documents=DOCUMENTS[:8], max_steps=9), tmp_path / "broken.jsonl"
    train_into("whole", **some)
    for stop in (3, 6, 9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Progress, "advance", ctrl_c_after(3 if stop < 9 else 99))
            outcome = train_into("broken", file.name, stop > 3, **some)
        assert outcome.steps == stop and bool(outcome.signal) == (stop < 9)
        if stop == 3:
            write_all(recipe, DOCUMENTS[:8], file)
        else:
            file.unlink()
    assert_equal(of_run(tmp_path / "whole"), of_run(tmp_path / "broken"))


def test_a_repeated_question_goes_when_both_chunks_are_known(recipe, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(query_lm, "BLOCK", 2)
    words = ["ocean1", "garden1", "ocean1", "ocean0", "engine1", "engine1"]
    texts = [f"{word} is chunk {i} of them all." for i, word in enumerate(words)]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    data = TrainingSet(recipe.replace(chunk_words=30), documents, queries_file=tmp_path / "q.jsonl")
    written = data.generated_queries
    groups = written.groups(lambda epoch: iter([[0, 1], [2, 3], [4, 5]]))
    first = groups(0)
    assert next(first) == [0, 1] and len(asked) == 2
    assert [written.row(i).query[:12] for i in (0, 1)] == ["Which ocean1", "Which garden"]
    assert next(first, None) is None and len(asked) == 6  # 2 repeats 0, 3 has none, 4 and 5 are one
    assert [written.row(i).query for i in (2, 3, 4, 5)] == [""] * 4
    assert list(groups(1)) == [[0, 1]] and len(asked) == 6
    assert [written.row(i).query[:12] for i in (0, 1)] == ["", "Which garden"]
    said = written.summary()
    assert "queries for 1 of 6 chunks" in said and "4 asked of several" in said


def test_one_chunk_of_each_split_document_is_asked_about(recipe, asked, tmp_path, caplog):
    caplog.set_level("INFO", "revela")
    documents = [*DOCUMENTS, Document("short", "A note.")]
    drawn = []
    for seed in (0, 1):
        recipe = recipe.replace(**SPLIT, max_queries=10, seed=seed)
        data = TrainingSet(recipe, documents, queries_file=tmp_path / f"{seed}.jsonl")
        groups, number = data.groups(None, tmp_path)
        rows = [[data.generated_queries.row(i) for i in group] for group in groups(0)]
        assert number == 10 and len(data.rows) == 80 and len(asked) == 10
        for group in rows:
            (target,) = [row.text.strip() for row in group if row.query]
            assert target in asked and {row.document for row in group} == {group[0].document}
        assert sum(len(group) == 8 for group in rows) == len(rows) > 5
        drawn.append([*asked])
        asked.clear()
    assert drawn[0] != drawn[1] and "too short to be split, left out: 1 of 25" in caplog.text
    taken = TrainingSet(recipe.replace(queries="telling-sentence"), DOCUMENTS).rows
    assert (np.bincount(taken.column("document"), taken.column("query") != "") <= 1).all()


def test_questions_by_another_program_train(recipe, train_into, succeeds, tmp_path, monkeypatch):
    def ask(passages):
        return [f"Which {p.split()[0]} is number {crc32(p.encode())}?" for p in passages]

    monkeypatch.setattr(generate, "writer", lambda *_: ask)
    text, file = tmp_path / "text.jsonl", tmp_path / "chunks.jsonl"
    write_lines(text, ({"_id": d.id, "text": d.text} for d in DOCUMENTS))
    small = "--method dream-infonce --groups split --targets 1 --group-size 8 --held-out 0"
    assert "24 chunks" in succeeds("queries", text, small, f"--chunks {file} --near-duplicates 0")
    chunks = [json.loads(line)["chunk"] for line in file.open()]
    pairs = zip(chunks, ask([chunk.strip() for chunk in chunks]), strict=True)
    write_lines(tmp_path / "asked.jsonl", ({"chunk": c, "question": q} for c, q in pairs))
    train_into("written", **SPLIT)
    monkeypatch.delattr(generate, "writer")
    train_into("brought", **SPLIT, questions=str(tmp_path / "asked.jsonl"))
    assert_equal(of_run(tmp_path / "written"), of_run(tmp_path / "brought"))


BAD_LINES = [
    *(('{"chunk": "It."}', "has no .chunk. and"), ("Why?", "has no .chunk. and")),
    ('{"chunk": "It.", "question": "Who?"}', "asks about a chunk that the corpus does not"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES)
def test_a_question_without_its_chunk_is_refused(recipe, tmp_path, line, why):
    file, chunk = tmp_path / "asked.jsonl", TrainingSet(recipe, DOCUMENTS).chunks[5].text
    file.write_text(json.dumps({"chunk": chunk.strip(), "question": "Which?"}) + f"\n{line}\n")
    with pytest.raises(RevelaError, match=f"asked.jsonl:2 {why}"):
        TrainingSet(recipe.replace(questions=str(file)), DOCUMENTS).rows.column("query")


def test_without_a_single_query_nothing_is_left_behind(train_into, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "writer", lambda *_: lambda some: ["no"] * len(some))
    with pytest.raises(RevelaError, match="no chunk has a query: try another --queries than lm"):
        train_into("out")
    assert not (tmp_path / "out").exists()


LATE = [
    *(({}, True), ({"groups": "cluster"}, False), ({"negatives": 1}, False)),
    *(({"queries": "first-sentence"}, False), ({"method": "contrastive-crop"}, False)),
]


@pytest.mark.parametrize(("changes", "late"), LATE)
def test_only_what_can_wait_is_written_late(recipe, tmp_path, asked, changes, late):
    data = TrainingSet(recipe.replace(**changes), DOCUMENTS, queries_file=tmp_path / "q.jsonl")
    assert isinstance(data.generated_queries, GeneratedQueries) == late
    has_queries = any(data.rows.column("query"))
    assert has_queries == (not late and data.recipe.method.reads == "queries")
    assert bool(asked) == (has_queries and data.recipe.queries.queries == "lm")


@pytest.mark.parametrize(("minutes", "late"), [(1.0, False), (0.0, True)])
def test_runs_compared_by_time_find_queries(recipe, asked, tmp_path, monkeypatch, minutes, late):
    def begun(own, data, *_, **__):
        assert (data.generated_queries is not None) == late
        assert any(data.rows.column("query")) != late
        raise ZeroDivisionError

    monkeypatch.setattr(on_files, "train", begun)
    corpus = write_lines(tmp_path / "c.jsonl", [{"_id": d.id, "text": d.text} for d in DOCUMENTS])
    judged = write_judged(tmp_path / "judged", make_rows(3))
    recipe = recipe.replace(max_minutes=minutes, queries_file=str(tmp_path / "q"))
    with pytest.raises(ZeroDivisionError):
        on_files.train_on_files([corpus], tmp_path / "out", recipe, on=[judged], points=1)
    assert bool(asked) != late


def test_heads_are_probed_as_training_reads(
    recipe, asked, train_into, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO", "revela")
    dream = {"method": "dream", "group_size": 8, "query_heads": 3}
    _, ranking = rank_heads(recipe.replace(**dream), DOCUMENTS, tmp_path / "heads.jsonl")
    few = 3 * query_lm.BLOCK
    assert len(ranking) == 16 and 64 <= len(asked) <= few
    assert "for those that look from a question to its answer, once" in caplog.text
    train_into("known", "one.jsonl", **dream)
    n_asked = len(asked)
    monkeypatch.setattr(dream_module, "is_judge", lambda _: True)
    monkeypatch.setattr(dream_module, "PUBLISHED_HEADS", [(9, 9), *(h[:2] for h in ranking)])
    rank_heads(recipe.replace(**dream, probe_questions=8), DOCUMENTS, tmp_path / "few.jsonl")
    assert len(asked) - n_asked == query_lm.BLOCK < n_asked
    assert "16 of the 17 published heads" in caplog.text
    (tmp_path / "cache").rename(tmp_path / "gone")
    train_into("probed", "two.jsonl", **dream)
    assert_equal(of_run(tmp_path / "known"), of_run(tmp_path / "probed"))
