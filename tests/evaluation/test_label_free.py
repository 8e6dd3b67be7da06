"""Label-free tasks: what each one asks, and how the check scores it."""

from __future__ import annotations

import zlib

import numpy as np

from conftest import MadeUpEncoder, make_rows
from revela.evaluation.collection import Collection, load_collection, save_collection
from revela.evaluation.label_free import SENTENCES, HeldOutCheck, docstring_task, tasks
from revela.ranking.bm25 import BM25
from revela.ranking.fusion import fuse_scores
from revela.ranking.sentence_test import SentenceTest
from revela.text.load import split_held_out
from revela.text.spool import arrow_list
from revela.types import Document
from tests.searching.letters import max_bm25

DOCUMENTS = [Document(r["_id"], r["text"], r["title"]) for r in make_rows(40)]
SOURCE = '''
def area(width, height):
    """Multiply the two sides of a rectangle.

    More words.
    """
    return width * height

class Shape:
    def corners(self):
        """Count the corners of this shape."""
        return 4

def bare(x):
    return x
'''


def test_held_out_documents_do_not_depend_on_order():
    documents = arrow_list(Document, DOCUMENTS)
    rest, held = split_held_out(documents, 0.25, 100)
    again, same = split_held_out(arrow_list(Document, DOCUMENTS[::-1]), 0.25, 100)
    assert len(held) == 10 and {d.id for d in held} == {d.id for d in same}
    assert not {d.id for d in rest} & {d.id for d in held} and len(rest) == len(again) == 30
    assert len(split_held_out(documents, 0.25, 3)[1]) == 3


def asked(task):
    """(query, ids of the passages that answer it, text of the passage that it is of, if any)."""
    texts = dict(zip(task.document_ids, task.documents, strict=True))
    for name, query in zip(task.query_ids, task.queries, strict=True):
        yield query, [*task.qrels[name]], texts[name] if name in task.among_documents else ""


def test_sibling_and_title_tasks():
    sibling, title = tasks(DOCUMENTS, 12, 20, 500, 0)
    assert (sibling.name, title.name) == ("sibling", "title") and len(sibling.queries) == 20
    texts = dict(zip(sibling.document_ids, sibling.documents, strict=True))
    for query, relevant, own in asked(sibling):
        assert own.startswith(query) and relevant and own not in map(texts.get, relevant)
    text_of = {document.title: document.text for document in DOCUMENTS}
    for query, relevant, own in asked(title):
        assert all(texts[name] in text_of[query] for name in relevant) and not own


def test_tasks_of_chinese_documents():
    sentence = "第{}号蜂巢的蜜蜂通过舞蹈告诉同伴第{}处花丛的位置。"
    documents = [
        Document(str(i), "".join(sentence.format(i, n) for n in range(6)), f"第{i}号蜂巢里的蜜蜂")
        for i in range(8)
    ]
    sibling, title = tasks(documents, 30, 20, 500, 0)
    assert len(sibling.queries) == len(title.queries) == 8
    for query, _, own in asked(sibling):
        assert own.startswith(query) and 0.4 < len(query) / len(own) < 0.6


def test_a_task_is_saved_as_a_folder_that_is_read_again(tmp_path):
    for task in tasks(DOCUMENTS, 12, 20, 500, 0):
        save_collection(task, tmp_path / task.name)
        read = load_collection(tmp_path / task.name)
        for field in ("name", "document_ids", "query_ids", "queries", "qrels", "sources"):
            assert getattr(read, field) == getattr(task, field)
        assert read.documents == [text.strip() for text in task.documents]
        assert read.among_documents == task.among_documents


def test_docstrings_are_cut_out_of_their_functions():
    task = docstring_task([Document("m.py", SOURCE, kind="code")], 100)
    bodies = [
        "def area(width, height):\n    return width * height",
        "def corners(self):\n    return 4",
    ]
    assert task.documents == bodies
    sentences = ["Multiply the two sides of a rectangle.", "Count the corners of this shape."]
    assert task.queries == sentences


def test_check_scores_an_oracle_at_one_and_bm25_below():
    built = tasks(DOCUMENTS, 12, 20, 500, 0)

    class Topics(MadeUpEncoder):
        """Knows a text's topic by its first topic word."""

        def encode_passages(self, texts, progress=False):
            names = [d.title.split()[2] for d in DOCUMENTS]
            return np.array([[n in t.lower() for n in names] for t in texts], dtype=np.float32)

        encode_queries = encode_passages

    check = HeldOutCheck(built)
    scores, bm25 = check(Topics()), check.bm25()
    assert scores["sibling"] > 0.9
    assert list(scores) == ["sibling", "sibling + BM25", "title", "title + BM25"]
    assert set(bm25) == {"sibling", "title"} and bm25["sibling"] > 0.5
    task = Collection.of("title", {"a": "a green hill", "b": "salt sea"}, [("q", "sea", ["a"])])
    assert HeldOutCheck([task]).bm25() == {"title": 0.0}  # the hill has no word of the query


def test_the_fused_score_of_a_task_is_that_of_the_fusion_without_what_is_excluded():
    """Against a loop over all passages, each scored by itself."""

    class Noise(MadeUpEncoder):
        scale = 1.0

        def encode_passages(self, texts, progress=False):
            drawn = (np.random.default_rng(zlib.crc32(text.encode())) for text in texts)
            vectors = np.stack([rng.normal(size=16) for rng in drawn]).astype(np.float32)
            return self.scale * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

        encode_queries = encode_passages

    sibling, _ = tasks(DOCUMENTS, 12, 20, 100, 0)
    encoder, texts = Noise(), sibling.documents
    vectors, queries = encoder.encode_passages(texts), encoder.encode_queries(sibling.queries)
    rule, bm25 = SentenceTest(texts, "auto", SENTENCES)(encoder, vectors).rule, BM25(texts)
    best = [max_bm25(bm25, query) for query in sibling.queries]
    indices, scores = bm25.top_k(sibling.queries, len(texts))
    gains = []
    for q, (own, relevant) in enumerate(sibling.qrels.items()):
        left = [d for d in range(len(texts)) if d != int(own)]
        cosines = {d: float(queries[q] @ vectors[d]) for d in left}
        shares = {
            int(d): float(s / best[q])
            for d, s in zip(indices[q], scores[q], strict=True)
            if s > 0 and d != int(own)
        }
        ranked = list(fuse_scores(cosines, shares, rule))[:10]
        gain = sum(1 / np.log2(i + 2) for i, d in enumerate(ranked) if str(d) in relevant)
        gains.append(gain / sum(1 / np.log2(i + 2) for i in range(min(10, len(relevant)))))
    check = HeldOutCheck([sibling])
    found = check(encoder)["sibling + BM25"]
    assert np.isclose(found, np.mean(gains)) and found > 0.1
    encoder.by_dot = True
    by_rank = check(encoder)
    encoder.scale = 100.0
    assert check(encoder) == by_rank and by_rank["sibling + BM25"] != found


def test_questions_ask_for_the_chunk_that_they_were_written_about():
    written = []

    def ask(passages):
        written.append(passages)
        return [f"Where is {p}?" if i % 2 else "" for i, p in enumerate(passages)]

    # One chunk each and no title: nothing else can be asked.
    bare = [Document(d.id, d.text.split(".")[0]) for d in DOCUMENTS]
    assert tasks(bare, 12, 20, 500, 0) == []
    assert tasks(bare, 12, 20, 500, 0, 9, ask) == []  # four of nine are too few
    (task,) = tasks(bare, 12, 20, 500, 0, 10, ask)
    assert task.name == "question" and task.documents == [d.text for d in bare]
    assert len(task.queries) == 5
    for query, (own,), of_passage in asked(task):
        assert query == f"Where is {bare[int(own)].text}?" and not of_passage
    (few,) = tasks(bare, 12, 3, 500, 1, 30, ask)
    assert len(few.queries) == 3 and [len(w) for w in written] == [9, 10, 30]
    # Whatever the seed, so that no question is written twice.
    assert written[2][:10] == written[1] and written[1][:9] == written[0]
    names = [task.name for task in tasks(DOCUMENTS, 12, 20, 500, 0, 10, ask)]
    assert names == ["sibling", "title", "question"]


def test_one_long_document_does_not_crowd_out_the_others():
    long = Document("long", " ".join(d.text for d in DOCUMENTS) * 3)
    sibling = tasks([long, *DOCUMENTS], 12, 100, 164, 0)[0]
    assert len(sibling.documents) == 164
    assert len(sibling.queries) > 30  # a few chunks are too short to halve
