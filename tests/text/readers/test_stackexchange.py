"""Posts.xml: a question and its answers are one document, wherever in the file they stand."""

from __future__ import annotations

import gzip
import random
from xml.sax.saxutils import quoteattr

import pytest

from revela.errors import RevelaError
from revela.text.load import read_corpus

BODY = "<p>A sentence of post {0} with enough words.</p>\n<pre><code>x = {0}\n  y\n</code></pre>"


def row(number: int, kind: int = 1, **more: object) -> str:
    values = {"Id": number, "PostTypeId": kind, "Body": BODY.format(number), **more}
    return f"  <row {' '.join(f'{name}={quoteattr(str(v))}' for name, v in values.items())} />\n"


def dump(rows: list[str]) -> bytes:
    head = '\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>\n'
    return f"{head}{''.join(rows)}</posts>".encode()


ROWS = [
    row(1, Title="How do I &lt;x&gt; it?", Score=3),
    row(2, Title="Why?", Score=0),
    row(3, 2, ParentId=1, Score=-1),
    row(4, 2, ParentId=2, Score=5),
    row(5, 2, ParentId=1, Score=12),
    row(6, 2, ParentId=1, Score=2),
]


def order(text: str) -> list[int]:
    return [int(line.split("post ")[1].split()[0]) for line in text.splitlines() if "post " in line]


@pytest.mark.parametrize("seed", range(4))
def test_answers_follow_their_question_best_first(reads, seed):
    rows = random.Random(seed).sample(ROWS, len(ROWS)) if seed else ROWS
    documents, report = reads({"Posts.xml": dump(rows)})
    assert [(d.id, d.title, order(d.text)) for d in documents] == [
        ("Posts.xml:1", "How do I &lt;x&gt; it?", [1, 5, 6, 3]),
        ("Posts.xml:2", "Why?", [2, 4]),
    ]
    text = documents[0].text
    assert "x = 5\n  y" in text and "<p>" not in text and not report.skipped


def test_what_is_no_question_or_answer_is_counted(reads):
    torn = '  <row Id="10" PostTypeId="1" />\n'
    rows = [*ROWS, row(7, 4), row(8, 2, ParentId=99), row(9, 2), torn]
    documents, report = reads({"Posts.xml.gz": gzip.compress(dump(rows))}, max_bad_share=0.5)
    assert len(documents) == 2
    assert report.examples == {
        "neither question nor answer": ["Posts.xml.gz:7"],
        "post without Id, ParentId or Body": [f"Posts.xml.gz:{number}" for number in (9, 10)],
        "answers without their question": ["Posts.xml.gz:99"],
    }
    assert report.bad == 2


def test_half_a_file_is_named(reads):
    raw = dump(ROWS)
    with pytest.raises(RevelaError, match=r"damaged or encrypted \.xml \(Posts\.xml: .*line 8"):
        reads({"Posts.xml": raw[: raw.index(b'Id="6"')]})


def test_other_xml_is_text(tmp_path):
    (tmp_path / "settings.xml").write_text("<settings><row Body='of the hive'/></settings>")
    for source in (tmp_path, tmp_path / "settings.xml"):
        (document,) = read_corpus([source], min_words=1)[0]
        assert "Body='of the hive'" in document.text and document.kind == "code"


def test_entities_do_not_expand_without_end(reads):
    """The billion laughs: expat refuses, and that is a damaged file."""
    more = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
    row = '<row Id="1" PostTypeId="1" Body="&a9;"/>'
    page = f'<!DOCTYPE posts [<!ENTITY a0 "ha">{more}]><posts>{row}</posts>'
    with pytest.raises(RevelaError, match=r"Posts\.xml"):
        reads({"Posts.xml": page})
