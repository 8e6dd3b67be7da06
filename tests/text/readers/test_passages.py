"""Passages of one title, one after the other, are one article again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.errors import RevelaError
from revela.text.load import Reading, joined_by_title
from revela.text.readers import common
from revela.text.readers.common import ReadReport
from revela.types import Document
from tests.collection_folder import write_lines

JOINED = Reading(join_titles=True)
ROWS = [
    ("1", "Aaron Aaron is a prophet, and the brother of", "Aaron"),
    ("2", "Moses. He spoke for him.", "Aaron"),
    ("3", "Abel was a shepherd in those days.", "Abel"),
    ("4", "Much later one came back to Aaron once more.", "Aaron"),
]


def test_a_file_of_passages_as_dpr_has_it(reads):
    rows = "".join(f'{i}\t"{text}"\t{title}\n' for i, text, title in ROWS)
    documents, report = reads({"psgs.tsv": f"id\ttext\ttitle\n{rows}"}, reading=JOINED)
    assert [(d.id, d.title) for d in documents] == [("1", "Aaron"), ("3", "Abel"), ("4", "Aaron")]
    assert documents[0].text == f"{ROWS[0][1]} {ROWS[1][1]}"
    assert "joined 4 passages into 3 articles by title" in report.lines()
    assert len(reads({})[0]) == 4


def test_an_article_may_go_on_in_the_next_file(tmp_path, reads):
    rows = [dict(zip(("docid", "text", "title"), row, strict=True)) for row in ROWS]
    write_lines(tmp_path / "a.jsonl", rows[:1])
    write_lines(tmp_path / "b.jsonl", rows[1:])
    assert [d.id for d in reads({}, reading=JOINED)[0]] == ["1", "3", "4"]


@given(st.lists(st.tuples(st.sampled_from(["", "A", "B"]), st.text(max_size=5)), max_size=30))
def test_nothing_is_lost_or_moved(rows):
    documents = [Document(str(i), text, title) for i, (title, text) in enumerate(rows)]
    found = list(joined_by_title(iter(documents), ReadReport()))
    assert " ".join(d.text for d in found) == " ".join(d.text for d in documents)
    assert all(a.title != b.title or not a.title for a, b in itertools.pairwise(found))
    assert len([d for d in found if not d.title]) == sum(not title for title, _ in rows)


def test_a_title_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    rows = (Document(str(i), "x" * 50, "Untitled") for i in itertools.count())
    said = r'share the title "Untitled" \(from 0 on\).*--title-field'
    with pytest.raises(RevelaError, match=said):
        list(joined_by_title(rows, ReadReport()))
