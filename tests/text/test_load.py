"""Sources are read, and what cannot be read is counted, named and, past a share, refused."""

from __future__ import annotations

import gzip
import json

import pytest

from revela.errors import RevelaError
from revela.text.load import Reading, read_corpus
from revela.text.readers import common

SENTENCE = "A sentence that has more than five words."


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_reads_folders_files_and_gzip(tmp_path):
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(f"# Two\n{SENTENCE}".encode()))
    (tmp_path / "c.py").write_text("def f(a, b):\n    return a + b + 1\n")
    (tmp_path / "d.html").write_text(
        "<html><head><title>T</title><script>no()</script></head>"
        f"<body><p>{SENTENCE} Three.</p></body></html>"
    )
    (tmp_path / "e.jsonl").write_text(
        lines({"title": "x", "text": f"{SENTENCE} Four."}, {"text": f"{SENTENCE} Five."})
    )
    (tmp_path / "f.bin").write_bytes(b"\0\1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "g.txt").write_text(f"{SENTENCE} hidden")
    documents, report = read_corpus([tmp_path])
    ids = ["a.txt", "b.md.gz", "c.py", "d.html", "e.jsonl:1", "e.jsonl:2"]
    assert [d.id for d in documents] == ids
    assert [d.kind for d in documents] == ["prose", "prose", "code", "prose", "prose", "prose"]
    assert documents[3].title == "T" and "no()" not in documents[3].text
    assert report.documents == 6 and report.words == sum(
        len(d.full_text.split()) for d in documents
    )


def test_field_names_are_settable(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"name": "n", "body": SENTENCE}))
    documents, _ = read_corpus(
        [tmp_path / "a.jsonl"], Reading(text_field="body", title_field="name")
    )
    assert documents[0].title == "n" and documents[0].text == SENTENCE


def test_bad_lines_are_counted_and_named_within_the_share(tmp_path):
    rows = [{"text": f"{SENTENCE} {i}"} for i in range(20)]
    half_a_pair = '{"text": "' + SENTENCE + ' \\ud800"}'
    text = lines(*rows, "{broken", {"text": 3}, half_a_pair, "[]").encode()
    (tmp_path / "a.jsonl").write_bytes(text + b'{"text": "f\xfcnf"}\n' + lines(rows[0]).encode())
    documents, report = read_corpus([tmp_path], max_bad_share=0.2, distinct=False)
    assert len(documents) == 21 and report.bad == 5
    assert report.examples == {
        "broken JSON": ["a.jsonl:21"],
        'no text field "text"': ["a.jsonl:22"],
        "not UTF-8": ["a.jsonl:23", "a.jsonl:25"],
        "not a JSON object": ["a.jsonl:24"],
    }
    with pytest.raises(
        RevelaError, match=r"5 of 26 entries cannot be read.*a\.jsonl:21.*--max-bad-share"
    ):
        read_corpus([tmp_path], max_bad_share=0.1)


def test_a_huge_line_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text(lines({"text": "x " * 5000}, {"text": SENTENCE}))
    documents, report = read_corpus([tmp_path], max_bad_share=0.9)
    assert [d.text for d in documents] == [SENTENCE]
    assert report.examples == {"line over 0 MB": ["a.jsonl:1"]}


def test_short_and_duplicate_documents_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        lines({"text": SENTENCE}, {"text": SENTENCE}, {"text": "too short"})
    )
    documents, report = read_corpus([tmp_path])
    assert len(documents) == 1
    assert report.skipped == {"duplicate text": 1, "shorter than a sentence": 1}


def test_a_sentence_without_spaces_is_one(tmp_path):
    texts = ["蜜蜂通过舞蹈告诉同伴花的位置。", "ผึ้งเต้นรำเพื่อบอกเพื่อนว่าดอกไม้อยู่ที่ไหน", "蜜蜂。"]
    (tmp_path / "a.jsonl").write_text(lines(*({"text": text} for text in texts)))
    documents, report = read_corpus([tmp_path])
    assert [d.text for d in documents] == texts[:2]
    assert report.words == 7 + 6 and report.skipped == {"shorter than a sentence": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing", "does not exist"),
        (lambda p: p, "no document found"),
    ],
)
def test_nothing_to_read_is_one_sentence(tmp_path, make, message):
    with pytest.raises(RevelaError, match=message):
        read_corpus([make(tmp_path)])


@pytest.mark.parametrize(
    ("row", "kind"),
    [
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
    ],
)
def test_code_in_jsonl_is_known_by_its_id_or_its_first_words(tmp_path, row, kind):
    (tmp_path / "a.jsonl").write_text(lines(row))
    assert read_corpus([tmp_path])[0][0].kind == kind
