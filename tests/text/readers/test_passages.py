"""Passages of one title, one after the other, are one article again."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.errors import RevelaError
from revela.text.load import Reading, joined_by_title, read_corpus
from revela.text.readers import common
from revela.text.readers.common import ReadReport
from revela.types import Document

ROWS = [
    ("1", "Aaron Aaron is a prophet, and the brother of", "Aaron"),
    ("2", "Moses. He spoke for him.", "Aaron"),
    ("3", "Abel was a shepherd in those days.", "Abel"),
    ("4", "Much later one came back to Aaron once more.", "Aaron"),
]


def test_a_file_of_passages_as_dpr_has_it(tmp_path):
    (tmp_path / "psgs.tsv").write_text(
        "id\ttext\ttitle\n" + "".join(f'{i}\t"{text}"\t{title}\n' for i, text, title in ROWS)
    )
    documents, report = read_corpus([tmp_path], Reading(join_titles=True))
    assert [(d.id, d.title) for d in documents] == [("1", "Aaron"), ("3", "Abel"), ("4", "Aaron")]
    assert (
        documents[0].text == "Aaron Aaron is a prophet, and the brother of Moses. He spoke for him."
    )
    assert "joined 4 passages into 3 articles by title" in report.lines()
    assert len(read_corpus([tmp_path])[0]) == 4


def test_an_article_may_go_on_in_the_next_file(tmp_path):
    for name, rows in (("a.jsonl", ROWS[:1]), ("b.jsonl", ROWS[1:])):
        (tmp_path / name).write_text(
            "".join(
                json.dumps(dict(zip(("docid", "text", "title"), row, strict=True))) + "\n"
                for row in rows
            )
        )
    assert [d.id for d in read_corpus([tmp_path], Reading(join_titles=True))[0]] == ["1", "3", "4"]


@given(st.lists(st.tuples(st.sampled_from(["", "A", "B"]), st.text(max_size=5)), max_size=30))
def test_nothing_is_lost_or_moved(rows):
    documents = [Document(str(i), text, title) for i, (title, text) in enumerate(rows)]
    found = list(joined_by_title(iter(documents), ReadReport()))
    assert " ".join(d.text for d in found) == " ".join(d.text for d in documents)
    assert all(a.title != b.title or not a.title for a, b in itertools.pairwise(found))
    assert len([d for d in found if not d.title]) == sum(not title for title, _ in rows)


def test_a_title_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    with pytest.raises(
        RevelaError, match=r'share the title "Untitled" \(from 0 on\).*--title-field'
    ):
        list(
            joined_by_title(
                (Document(str(i), "x" * 50, "Untitled") for i in itertools.count()), ReadReport()
            )
        )
