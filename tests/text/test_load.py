"""Sources are read, and what cannot be read is counted, named and, past a share, refused."""

from __future__ import annotations

import json

import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import Reading, read_corpus
from revela.text.readers import common, sources_of, write_source
from revela.types import Document


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_field_names_are_settable(reads):
    reading = Reading(text_field="body", title_field="name")
    ((document,), _) = reads({"a.jsonl": lines({"name": "n", "body": SENTENCE})}, reading=reading)
    assert (document.title, document.text) == ("n", SENTENCE)


def test_a_row_without_an_id_is_named_by_its_place(reads):
    ids = ("null", "NaN", '""')
    rows = [f'{{"_id": {given}, "text": "{SENTENCE} {i}"}}' for i, given in enumerate(ids, 1)]
    documents, _ = reads({"a.jsonl": lines(*rows)})
    assert [document.id for document in documents] == [f"a.jsonl:{i}" for i in (1, 2, 3)]


def test_bad_lines_are_counted_and_named_within_the_share(reads):
    rows = [{"text": f"{SENTENCE} {i}"} for i in range(20)]
    half_a_pair = '{"text": "' + SENTENCE + ' \\ud800"}'
    raw = lines(*rows, "{broken", {"text": 3}, half_a_pair, "[]").encode()
    raw += b'{"text": "f\xfcnf"}\n' + lines(rows[0]).encode()
    documents, report = reads({"a.jsonl": raw}, max_bad_share=0.2, distinct=False)
    assert len(documents) == 21 and report.bad == 5
    assert report.examples == {
        "broken JSON": ["a.jsonl:21"],
        'no text field "text"': ["a.jsonl:22"],
        "not UTF-8": ["a.jsonl:23", "a.jsonl:25"],
        "not a JSON object": ["a.jsonl:24"],
    }
    said = r"5 of 26 entries cannot be read.*a\.jsonl:21.*--max-bad-share"
    with pytest.raises(RevelaError, match=said):
        reads({}, max_bad_share=0.1)


def test_documents_with_half_a_pair_are_written_and_not_read(tmp_path):
    fields = Reading().fields()
    (source,) = sources_of([Document("a", f"{SENTENCE} \ud800"), Document("b", SENTENCE)])
    path = write_source(source, fields, tmp_path / "a.jsonl")
    documents, report = read_corpus([path])
    assert [d.id for d in documents] == ["b"] and report.examples == {"not UTF-8": ["a.jsonl:1"]}


def test_a_huge_line_is_skipped_without_being_held(reads, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    rows = lines({"text": "x " * 5000}, {"text": SENTENCE})
    documents, report = reads({"a.jsonl": rows}, max_bad_share=0.9)
    assert [d.text for d in documents] == [SENTENCE]
    assert report.examples == {"line over 0 MB": ["a.jsonl:1"]}


def test_short_and_duplicate_documents_are_counted(reads):
    """A title counts."""
    titled = {"title": "It is", "text": "not too short"}
    rows = ({"text": SENTENCE}, {"text": SENTENCE}, {"text": "too short"}, titled)
    documents, report = reads({"a.jsonl": lines(*rows)})
    assert len(documents) == 2 and report.words == 8 + 5
    assert report.skipped == {"duplicate text": 1, "shorter than a sentence": 1}


def test_a_sentence_without_spaces_is_one(reads):
    texts = ["蜜蜂通过舞蹈告诉同伴花的位置。", "ผึ้งเต้นรำเพื่อบอกเพื่อนว่าดอกไม้อยู่ที่ไหน", "蜜蜂。"]
    documents, report = reads({"a.jsonl": lines(*({"text": text} for text in texts))})
    assert [d.text for d in documents] == texts[:2]
    assert report.words == 7 + 6 and report.skipped == {"shorter than a sentence": 1}


CODE_OR_TEXT = [
    ({"_id": "pkg/module.py", "text": "# a comment first\nx = 1 + 2 + 3\n"}, "code"),
    ({"text": "def area(a, b):\n    return a * b + 1"}, "code"),
    ({"text": "from the start of the year, prices rose"}, "prose"),
    ({"text": "@bob thanks; see {you} (soon) with the others, I hope"}, "prose"),
    ({"text": "public schools (K-12) open at nine; most of them close at four."}, "prose"),
    ({"text": "function words (of, the, and) are left out: they say little"}, "prose"),
    ({"text": "class action: lawsuits (2008)\nThe first of them was lost."}, "prose"),
    ({"text": "from the archive (1914): import duties = 3 % of all revenue"}, "prose"),
    ({"text": "@cache\ndef area(a, b):\n    return a * b + 1"}, "code"),
    ({"text": "@Override\npublic int size() {\n    return this.size;\n}"}, "code"),
    ({"text": "private int most = 3;\nprivate int least = 2;\nint more = 1;"}, "code"),
    ({"text": "import os, re as r  # both\nimport sys\n\nprint(sys.path)"}, "code"),
    ({"text": "import java.util.List;\n\nclass A { List<String> all; }"}, "code"),
    ({"text": "import { a, b } from 'c'\n\nconsole.log(a, b)"}, "code"),
    ({"text": "from a.b import (\n    c,\n)\n\nc(1)\nc(2)"}, "code"),
    ({"text": "class Stack(list):\n    def push(self, x):\n        pass"}, "code"),
    ({"text": "class Stack : public Base {\n  int size;\n  int most;\n};"}, "code"),
    ({"text": "function area(a, b)\n  return a * b\nend"}, "code"),
    ({"text": "func (s *Stack) Push(x int) {\n\ts.all = append(s.all, x)\n}"}, "code"),
    ({"text": "pub fn push<T>(x: T) -> T {\n    x\n}"}, "code"),
    ({"text": "#include <stdio.h>\n\nint main() { return 0; }"}, "code"),
    ({"text": "class Mammalia\nMammals are a class of animals, as birds are."}, "prose"),
    ({"text": 'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println(1) }'}, "code"),
    ({"text": "<?php\nfunction f() { return 1 + 2 + 3 + 4; }"}, "code"),
    ({"text": "x = read(a, b)\ny = x + 1", "language": "python"}, "code"),
    ({"text": "x = read(a, b)\ny = x + 1", "path": "src/a.py"}, "code"),
    ({"text": "def area(a, b): is how Python begins a function", "language": "en"}, "prose"),
    ({"_id": "report.2024", "text": "class struggle was the theme of the day"}, "prose"),
]


@pytest.mark.parametrize(("row", "kind"), CODE_OR_TEXT)
def test_code_in_jsonl_is_known_by_its_id_or_its_first_words(reads, row, kind):
    assert reads({"a.jsonl": lines(row)})[0][0].kind == kind
