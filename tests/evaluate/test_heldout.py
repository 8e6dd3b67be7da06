"""The label-free tasks ask what they say, and the check scores them."""

from __future__ import annotations

import numpy as np

from conftest import make_rows
from revela.data.heldout import docstring_task, split_held_out, tasks
from revela.data.queries import Answer
from revela.data.store import stored
from revela.evaluate.heldout import HeldOutCheck
from revela.types import Document

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
    documents = stored(Document, DOCUMENTS)
    rest, held = split_held_out(documents, 0.25, 100)
    again, same = split_held_out(stored(Document, DOCUMENTS[::-1]), 0.25, 100)
    assert len(held) == 10 and {d.id for d in held} == {d.id for d in same}
    assert not {d.id for d in rest} & {d.id for d in held} and len(rest) == len(again) == 30
    assert len(split_held_out(documents, 0.25, 3)[1]) == 3


def test_sibling_and_title_tasks():
    sibling, title = tasks(DOCUMENTS, 12, 20, 500, 0)
    assert (sibling.name, title.name) == ("sibling", "title") and len(sibling.queries) == 20
    for query, relevant, excluded in zip(sibling.queries, sibling.relevant, sibling.excluded, strict=True):
        (own,) = excluded
        assert sibling.passages[own].startswith(query) and own not in relevant and relevant
    owners = {t: i for i, t in enumerate(d.title for d in DOCUMENTS)}
    for query, relevant in zip(title.queries, title.relevant, strict=True):
        text = DOCUMENTS[owners[query]].text
        assert all(title.passages[i] in text for i in relevant)


def test_docstrings_are_cut_out_of_their_functions():
    task = docstring_task([Document("m.py", SOURCE, kind="code")], 100)
    assert dict(zip(task.queries, task.passages, strict=True)) == {
        "Multiply the two sides of a rectangle.": "def area(width, height):\n    return width * height",
        "Count the corners of this shape.": "def corners(self):\n    return 4",
    }


def test_check_scores_an_oracle_at_one_and_bm25_below():
    built = tasks(DOCUMENTS, 12, 20, 500, 0)

    class Topics:
        """Knows a text's topic by its first topic word."""

        def encode_passages(self, texts, progress=False):
            names = [d.title.split()[2] for d in DOCUMENTS]
            return np.array([[float(n in t.lower()) for n in names] for t in texts], dtype=np.float32)

        encode_queries = encode_passages

    check = HeldOutCheck(built)
    assert check(Topics())["sibling"] > 0.9
    assert set(check.bm25()) == {"sibling", "title"} and check.bm25()["sibling"] > 0.5


def test_questions_ask_for_the_chunk_that_they_were_written_about():
    written = []

    def ask(passages):
        written.append(passages)
        return [Answer(f"Where is {p}?") if i % 2 else Answer(rejected="empty") for i, p in enumerate(passages)]

    bare = [Document(d.id, d.text.split(".")[0]) for d in DOCUMENTS]  # one chunk each and no title: nothing else can be asked
    assert tasks(bare, 12, 20, 500, 0) == [] == tasks(bare, 12, 20, 500, 0, 9, ask)  # four of nine are too few
    (task,) = tasks(bare, 12, 20, 500, 0, 10, ask)
    assert task.name == "question" and len(task.queries) == 5 and task.passages == [d.text for d in bare]
    for query, relevant, excluded in zip(task.queries, task.relevant, task.excluded, strict=True):
        (own,) = relevant
        assert query == f"Where is {task.passages[own]}?" and not excluded
    (few,) = tasks(bare, 12, 3, 500, 1, 30, ask)
    assert len(few.queries) == 3 and [len(w) for w in written] == [9, 10, 30]
    assert written[2][:10] == written[1] and written[1][:9] == written[0]  # whatever the seed, so that no question is written twice
    names = [task.name for task in tasks(DOCUMENTS, 12, 20, 500, 0, 10, ask)]
    assert names == ["sibling", "title", "question"]


def test_one_long_document_does_not_crowd_out_the_others():
    long = Document("long", " ".join(d.text for d in DOCUMENTS) * 3)
    sibling = tasks([long, *DOCUMENTS], 12, 100, 164, 0)[0]
    assert len(sibling.passages) == 164 and len(sibling.queries) > 30  # a few chunks are too short to halve
