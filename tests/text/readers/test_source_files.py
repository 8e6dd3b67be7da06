"""What holds for every format: folders are searched, changes under the reader are noticed, and one
bad file is no disaster.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import time
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.text.readers import READERS, read_sources
from revela.text.readers.common import ReadReport
from revela.text.readers.rows import Fields

FIELDS = Fields("text", "title")


def zstd(raw: bytes) -> bytes:
    return pa.compress(raw, "zstd", asbytes=True)


def write(path: Path, rows: int) -> None:
    texts = [f"{SENTENCE} Number {i}." for i in range(rows)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    elif path.suffix == ".csv":
        path.write_text("\n".join(["text", *texts]))
    else:
        raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize(
    ("ending", "keep"),
    [(".jsonl", 0), (".jsonl", 1), *((name, 0.3) for name in (".jsonl.gz", ".csv", ".parquet"))],
)
def test_a_file_that_changes_while_it_is_read_is_one_sentence(tmp_path, ending, keep):
    """Truncated, written to, or deleted, whether the rest is still readable or not."""
    path = tmp_path / f"a{ending}"
    write(path, 10_000)
    reading = read_sources([path], FIELDS, ReadReport())
    next(reading)
    if keep:
        os.truncate(path, int(path.stat().st_size * keep))
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(RevelaError, match=rf"a{ending} changed while it was read: .*run again"):
        list(reading)


def test_one_damaged_file_of_each_kind_costs_nothing_but_itself(reads):
    """Bytes that are no file of any kind, under every ending that a reader claims."""
    bad = b"\x80\x81 \xff no file at all\n\xfe" * 30
    files = {"good.txt": SENTENCE, **{f"Posts{ending}": bad for ending in READERS}}
    documents, report = reads(files, max_bad_share=1.0)
    assert [d.id for d in documents] == ["good.txt"]
    assert report.bad >= len(READERS)


def test_nothing_known_is_said_with_what_is_known(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x\0")
    with pytest.raises(RevelaError, match=r"no document found in .*1 \.bin \(binary\).*Parquet"):
        read_corpus([tmp_path])
    with pytest.raises(RevelaError, match=r"skipped 1: binary \(a\.bin\); revela reads .*Parquet"):
        read_corpus([tmp_path / "a.bin"])


def test_what_decodes_as_text_is_read_whatever_its_ending(reads):
    texts = ["README", "LICENSE", "a.log", "b.xyz", "c.XYZ", "d.org", "e.css", "f.vue", "g.gz"]
    texts += ["h.xyz.zst", "sub/i.xyz", "j.tex.gz", "k"]
    files = dict[str, bytes]()
    for name in texts:
        raw = f"{'#!/bin/sh' if name == 'k' else SENTENCE}\n{SENTENCE} {name}.".encode()
        raw = gzip.compress(raw) if name.endswith(".gz") else raw
        files[name] = zstd(raw) if name.endswith(".zst") else raw
    documents, report = reads(files, max_bad_share=0)
    assert [d.id for d in documents] == sorted(texts)
    assert {d.id for d in documents if d.kind == "code"} == {"e.css", "f.vue", "k"}
    assert report.lines()[1:] == []


def test_files_that_are_not_read_are_counted_by_their_ending(reads):
    packed = gzip.compress(b"member\0\0\0" * 99)
    files = {
        **dict.fromkeys(["a.xyz", "b.XYZ", "c.lib", "Program"], b"\x7fELF\0\1\2"),
        **dict.fromkeys(["c.png", "d.jpg", "e.mp4", "g.svg"], SENTENCE.encode()),
        **{"h.tar.gz": packed, "i.zip": packed, "j.doc": packed, "k.tar.xz": packed},
        **dict.fromkeys([".hidden.xyz", "~$a.docx", "app.min.js", "b.js.map"], b"x"),
        **dict.fromkeys(["package-lock.json", "uv.lock"], b"x"),
        "bundle.js": b"var a=1;" * 999,
        "q.txt": SENTENCE.encode(),
    }
    _, report = reads(files, max_bad_share=0)
    share = 1000 * len(SENTENCE) // (len(SENTENCE) + len(packed)) / 10
    assert report.lines() == [
        f"read 1 document, 8 words: {share} % of the bytes of files that may hold text",
        "not read: 2 .js, 1 .map (minified); 2 .xyz, 1 with no ending, 1 .lib (binary); 1 .json, "
        "1 .lock (lock file); 1 .docx (lock of an open document); 1 .png, 1 .jpg, 1 .mp4, 1 .svg "
        "(no text); 1 .tar, 1 .zip, 1 .xz (archive: unpack it); 1 .doc (save it as .docx)",
    ]
    assert not report.skipped


ENCODED = {
    "a.txt": ("Grüße aus dem Süden, für alle.", "latin-1", "windows-1252"),
    "b.log": ("Пчёлы танцуют, чтобы показать цветы.", "cp1251", "windows-1251"),
    "c.md": ("蜜蜂は花の場所を踊りで教えるという。", "cp932", "cp932"),
    "d": ("蜜蜂跳舞，告诉同伴花在哪里，有多远。", "gb18030", "gb18030"),
    "e.csv": ("kind,text\n1,Grüße aus dem Süden\n", "utf-16", "UTF-16"),
    "f.py": ("# coding: latin-1\nx = 'Grüße aus dem Süden, für alle'\n", "latin-1", "windows-1252"),
    "g.xml": ("<?xml version='1.0' encoding='koi8-r'?><a>Пчёлы</a>", "koi8-r", "koi8-r"),
    "h.txt": ("Bees dance for flowers", "utf-32", "UTF-32"),
    "i.txt": ("Bats hear the echoes", "utf-16-le", "UTF-16-LE"),
    "j.txt": ("Bees dance: “here” — or €3.", "cp1252", "windows-1252"),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_encodings_are_found_and_named(reads, line_end):
    files = {n: t.replace("\n", line_end).encode(codec) for n, (t, codec, _) in ENCODED.items()}
    documents, report = reads(files, min_words=1, max_bad_share=0)
    found = {d.id.split(":")[0]: d.text for d in documents}
    for name, (text, _, encoding) in ENCODED.items():
        assert found[name].replace("\r", "") in text and found[name], name
        assert name in report.examples[f"read as {encoding}"]
    assert not report.skipped and "2: read as windows-1251" not in report.lines()


def test_few_wrong_bytes_do_not_change_the_encoding(reads):
    sentence = SENTENCE.encode()
    wrong = "Grüße für alle. ".encode() * 50 + b"\xe9 " + sentence
    log = sentence * 99 + b"\0" * 20 + b"after a kill"
    documents, report = reads({"a.txt": wrong, "b.log": log})
    assert "für alle. \ufffd A" in documents[0].text and "after a kill" in documents[1].text
    assert not report.noted and not report.skipped


def test_what_git_ignores_and_programs_make_is_left_out(tmp_path):
    tree = tmp_path / "tree"
    names = {
        "read": "a.txt keep.secret.txt src/top.txt src/b.txt env.py/c.txt d.gen.txt sub/top.txt "
        "sub/x.secret.txt",
        "ignored": "out/x.txt y.secret.txt top.txt mine.txt src/z.gen.txt src/out/x.txt",
        "made": "build/x.txt venv/lib/x.txt src/node_modules/x.txt my-env/x.txt "
        "src/__pycache__/x.py my-index/index.json my-index/passages.lance/x.txt",
    }
    files = {
        ".gitignore": "out/\n*.secret.txt\n!keep.secret.txt\n/top.txt\n",
        ".git/info/exclude": "mine.txt\n",
        "src/.gitignore": "*.gen.txt\n",
        **dict.fromkeys(["my-env/pyvenv.cfg", "sub/.git/HEAD"], ""),
        **{name: how for how, some in names.items() for name in some.split()},
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text if name.count("git") else f"{SENTENCE} {text} {name}.")
    documents, report = read_corpus([tree])
    assert sorted(d.id for d in documents) == sorted(n for n, t in files.items() if t == "read")
    assert sum(report.unread.values()) == 12
    assert report.lines()[1].startswith("not read: 4 .txt, 2 out/ (ignored by git); 1 ")
    # What is named itself is read, below a work tree as well; without one, nothing is ignored.
    inner = {d.id for d in read_corpus([tree / "src"])[0]}
    assert inner == {"b.txt", "top.txt"}
    for folder in ("out", "build", "src/out"):
        assert [d.id for d in read_corpus([tree / folder])[0]] == ["x.txt"]
    (tree / ".git").rename(tmp_path / "gone")
    assert "mine.txt" in {d.id for d in read_corpus([tree])[0]}


def test_reports_add_up_and_are_one_screen():
    both, other = ReadReport(), ReadReport()
    for number in (*range(14), 13):
        both.leave_unread(Path(f"a.{number:02}"), "binary")
    both.leave_unread(Path("b.docx"), "pip install it")
    both.note("read as UTF-16", "d.txt")
    other.note("read as UTF-16", "c.txt")
    other.skip("damaged", "e.pdf", bad=True)
    both.add(other)
    named = ", ".join(f"1 .{number:02}" for number in range(9))
    assert both.lines()[1:] == [
        "2: read as UTF-16 (d.txt, c.txt)",
        f"not read: 2 .13, {named}, 4 other endings (binary); 1 .docx (pip install it)",
        "skipped 1: damaged (e.pdf)",
    ]
    for _ in range(2):
        both.skip("shorter than a sentence", "d.txt")
    for number in range(99):
        both.skip(f"row of {number} fields under a header of 200", f"a.csv:{number}", bad=True)
    assert len(both.lines()) == 16 and both.lines()[-1] == "89 other lines of this kind"
    assert not any("shorter" in line for line in both.lines()), "faults are named first"


def test_zstd_of_each_format(reads):
    rows = [json.dumps({"text": f"{SENTENCE} {i}."}) + "\n" for i in range(3)]
    page = f"<title>T</title><p>{SENTENCE} Page.</p>"
    contents = {"a.jsonl": "".join(rows), "b.md": f"{SENTENCE} Text.", "c.html": page}
    contents |= {"d.csv": f"text\n{SENTENCE} Row.", "e.json": rows[0]}
    files = {f"{name}.zst": zstd(text.encode()) for name, text in contents.items()}
    files["f.ndjson.zst"] = b"".join(zstd(line.encode()) for line in rows)  # of several frames
    documents, report = reads(files, distinct=False)
    assert [d.id for d in documents] == [
        *(f"a.jsonl.zst:{i}" for i in (1, 2, 3)),
        *("b.md.zst", "c.html.zst", "d.csv.zst:2", "e.json.zst"),
        *(f"f.ndjson.zst:{i}" for i in (1, 2, 3)),
    ]
    assert not report.skipped and documents[4].title == "T"


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_or_something_else_is_named(reads, ending):
    rows = "".join(json.dumps({"text": f"{SENTENCE} {i}."}) + "\n" for i in range(9999)).encode()
    cut = (gzip.compress if ending == ".gz" else zstd)(rows)[:-30]
    files = {f"cut.jsonl{ending}": cut, f"other.jsonl{ending}": b"nothing of the kind"}
    _, report = reads(files, max_bad_share=1)
    ((reason, places),) = report.examples.items()
    assert reason == "damaged or encrypted .jsonl"
    assert [place.partition(": ")[0] for place in places] == [*files]


SUBTITLES = {
    "a.srt": "\ufeff1\n00:00:01,000 --> 00:00:04,000\n<i>The bees leave</i>\nat noon.\n\n2\n"
    "00:00:04,500 --> 00:00:07,000 X1:10\n{\\an8}NOTE: 3 of them\n4\n\n",
    "a.vtt": "WEBVTT - film\n\nNOTE by\nhand\n\nSTYLE\n::cue {color: red}\n\nintro\n"
    "00:01.000 --> 00:04.000 align:start\n<v Anna>The bees <c.x>leave</c>\nat noon.\n\n"
    "01:00:05.000 --> 01:00:07.000\nNOTE: 3 of them\n4\n",
}


@pytest.mark.parametrize("name", SUBTITLES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_of_subtitles_the_speech_is_read(reads, name, end):
    ((document,), _) = reads({name: SUBTITLES[name].replace("\n", end)})
    assert document.text == "The bees leave\nat noon.\nNOTE: 3 of them\n4"


FRONT = """---
title: Kick-off
layout: post
draft: true
project: "Apollo"
attendees: [Anna, 'Otto']
people:
  - Mira
- Ida
Ort: Köln  # the office
budget: 1200
done: false
aliases: []
tags:
location: ""
created: 2024-06-05
cssclasses: wide
client:
  name: ACME
---

Bees cluster.
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_front_matter_is_text_and_fields_but_for_layout_and_empty_keys(reads, end):
    toml = "+++\ntitle = 'How bees fly'\nproject = 'Zeus'\nbudget = 7\ntags = []\n+++\nThey do.\n"
    files = {"a.md": FRONT.replace("\n", end), "b.md": toml, "c.md": "No front matter, and bees.\n"}
    asked = ["project", "attendees", "people", "Ort", "budget", "done", "tags", "created", "client"]
    first, second, third = reads(files, metadata=asked, min_words=1)[0]
    for said in ("Apollo", "Anna", "Mira", "Ida", "Köln", "1200", "2024-06-05", "ACME"):
        assert said in first.text
    for left_out in ("layout", "draft", "Kick-off", "done", "aliases", "tags", "location", "css"):
        assert left_out not in first.text
    assert first.title == "Kick-off" and first.text.index("Bees") > first.text.index("ACME")
    assert first.text.count("\n") == FRONT.count("\n"), "lines keep their numbers"
    assert first.metadata == {
        "project": "Apollo",
        "attendees": '["Anna", "Otto"]',
        "people": '["Mira", "Ida"]',
        "Ort": "Köln",
        "budget": 1200,
        "done": False,
        "created": "2024-06-05",
        "client": "name: ACME",
    }
    assert second.metadata == {"project": "Zeus", "budget": 7} and "tags" not in second.text
    assert second.title == "How bees fly" and second.text.split("\n")[6:] == ["They do.", ""]
    assert third.metadata == {} and reads({})[0][0].metadata == {}


TITLED = {
    "---\ntitle: >-  \n  How bees\n  fly\nday: 3\n---\nThey do.": "a.md",
    "---\ntitle: |\n  How bees fly\n\n---\nThey do.": "a.md",
    '---\ntitle: "How bees fly"\n---\nThey do.': "a.md",
    "How bees fly\n============\n\nThey do.": "a.rst",
    "\n======\n How bees fly\n======\nThey do.": "a.rst",
    "#+TITLE: How bees fly\nThey do.": "a.org",
}


@pytest.mark.parametrize("text", TITLED)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_titles_of_text(reads, text, end):
    ((document,), _) = reads({TITLED[text]: text.replace("\n", end)}, min_words=1)
    assert document.title == "How bees fly"


PICTURE = base64.b64encode(random.Random(0).randbytes(300)).decode()
WRAPPED = "\n".join(PICTURE[i : i + 76] for i in range(0, len(PICTURE), 76))
DRAWING = "<svg xmlns='http://www.w3.org/2000/svg'><path d='M 0 0 (1,2)'/></svg>"
DATA = [
    f"![a](data:image/png;base64,{PICTURE})",
    f"![a](https://img.shields.io/badge/x?logo=data:image/svg%2bxml;base64%2C{quote(PICTURE, '')})",
    f"![a](https://a.b/?logo=data%3Aimage%2Fpng%3Bbase64%2C{quote(PICTURE, '')})",
    f"data:image/png;base64,{WRAPPED}\n",
    f"data:image/png;base64,{WRAPPED}\n".replace("\n", "\r\n"),
    f"url(data:font/woff2;charset=utf-8;base64,{PICTURE})",
    f"url(data:;base64,{PICTURE})",
    f"DATA:image/PNG;BASE64,{PICTURE}",
    f"<img src='data:image/gif;base64,{PICTURE}'>",
    f"data:image/png;base64,{PICTURE.replace('+', '-').replace('/', '_')}",
    f'url("data:image/svg+xml;utf8,{DRAWING}")',
    f'url("data:image/svg+xml,{quote(DRAWING)}")',
    f'url("data:image/svg+xml,{DRAWING.replace("<", "%3C").replace(">", "%3E")}")',
]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", ["a.md", "a.jsonl"])
def test_embedded_data_is_left_out_and_what_stands_around_it_is_kept(reads, data, name):
    text = f"Before it.\n{data} and plain words follow after it.\nThe last line."
    written = json.dumps({"text": text}) if name == "a.jsonl" else text
    ((document,), _) = reads({name: written})
    assert document.text.count("\n") == text.count("\n"), "lines keep their numbers"
    for said in ("Before it.", "and plain words follow after it.", "The last line."):
        assert said in document.text
    assert len(document.text) < len(text) - 40 and "M 0 0" not in document.text
    assert not any(PICTURE[i : i + 20] in document.text for i in range(0, 380, 5))


LIKE_DATA = [
    "The metadata:foo,bar and data: a, b; see data/base, and database64,x.",
    "var x = {data:[1,2,3],name:'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'};",
    "A data:image/png without any data, and data:,Hello in short.",
]


@pytest.mark.parametrize("text", LIKE_DATA)
def test_what_only_looks_like_embedded_data_is_kept(reads, text):
    assert reads({"a.txt": text}, min_words=1)[0][0].text == text


@pytest.mark.parametrize(
    "piece", ["data:", "data:a/b,<svg ", "data:a/b;", "data:%3Csvg ", "---\n- "]
)
def test_no_text_with_data_takes_long(reads, piece):
    start = time.perf_counter()
    reads({"a.md": piece * (10**6 // len(piece))}, min_words=0)
    assert time.perf_counter() - start < 10
