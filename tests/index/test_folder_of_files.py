"""A folder of many formats, indexed at the command line: every document is found by a word of its
last sentence, and what was not read is named.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

sys.path.append(str(Path(__file__).parents[1] / "corpus" / "readers"))
from letters import build, extend, rows_of
from test_office import docx, epub, notebook, pptx, xlsx

from revela import Index, cli
from revela.corpus.parts import DocumentReader, parts_of
from revela.corpus.readers import read_sources
from revela.corpus.readers.common import ReadReport
from revela.corpus.readers.rows import Fields
from revela.index import encode_corpus
from revela.types import Document

LAST = {
    "a.docx": "zebra",
    "b.pptx": "walrus",
    "c.xlsx": "yak",
    "d.epub": "Zwergotter",
    "e.ipynb": "quokka",
    "f.json:1": "narwhal",
    "f.json:2": "okapi",
    "g.json": "tapir",
    "h.txt": "银杏",
    "i.md": "axolotl",
    "j.jsonl.zst:1": "ibex",
    "k.docx": "медовуха",
}
FILLER = "Much is said before the end of it comes. " * 30


@pytest.fixture
def folder(tmp_path):
    for package in ("mammoth", "pptx", "openpyxl"):
        pytest.importorskip(package, reason="needs the office extra")
    path = tmp_path / "folder"
    path.mkdir()
    docx(path / "a.docx", "# Guide", FILLER, "The last word is zebra.")
    pptx(path / "b.pptx", ("One", FILLER, ("a", "b"), ""), ("Two", "", ("c",), "Say walrus."))
    xlsx(path / "c.xlsx", {"One": [[FILLER]], "Two": [["the last of all", "yak"]]})
    epub(path / "d.epub", {"1.xhtml": f"<p>{FILLER}</p>", "2.xhtml": "<p>Ein Zwergotter.</p>"})
    notebook(path / "e.ipynb", ("markdown", FILLER), ("code", "find_the('quokka')"))
    rows = [{"text": f"{FILLER} A narwhal."}, {"text": f"{FILLER} An okapi."}]
    (path / "f.json").write_text(json.dumps(rows))
    (path / "g.json").write_text(json.dumps({"text": f"{FILLER} A tapir."}))
    (path / "h.txt").write_text(
        f"{'蜜蜂跳舞,指出花在哪里。' * 9}最后一个词是银杏。\n", encoding="utf-8"
    )
    (path / "i.md").write_text(f"# Guide\n\n{FILLER}\n\n## Install\n\n{FILLER}\n\nAn axolotl.")
    packed = pa.compress(json.dumps({"text": f"{FILLER} An ibex."}).encode(), "zstd", asbytes=True)
    (path / "j.jsonl.zst").write_bytes(packed)
    docx(path / "k.docx", "Пчёлы танцуют. " * 30, "Последней идёт медовуха.")
    (path / "l.xyz").write_text(FILLER)
    (path / "m.json").write_text('{"some": "settings"}')
    whole = (path / "a.docx").read_bytes()
    (path / "n.docx").write_bytes(whole[: len(whole) // 2])
    return path


def test_every_document_of_a_folder_is_found_and_the_others_are_named(
    folder, tmp_path, monkeypatch, capsys, tiny_lm_folder
):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder).backend_tokenizer
    model, out = tmp_path / "model", tmp_path / "index"
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)]).save(str(model))

    def revela(*arguments):
        monkeypatch.setattr(sys, "argv", ["revela", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as stop:
            assert not stop.code, capsys.readouterr().err
        return capsys.readouterr().out

    said = revela("index", folder, "--model", model, "--out", out, "--max-bad-share", 0.1)
    assert "read 12 documents, " in said
    assert 'not read: 1 .xyz (no reader); 1 .json (no text field "text")\n' in said
    assert "skipped 1: damaged or encrypted .docx (n.docx: File is not a zip file)\n" in said
    index = Index.open(out)
    for name, word in LAST.items():
        assert [hit.id for hit in index.search(word, 9, "lexical")] == [name], word
    assert index.search("axolotl", 1, "lexical")[0].title == "Guide > Install"
    shown = revela("search", out, "axolotl", "--mode", "lexical")
    assert shown.startswith("1. Guide > Install (i.md)  [") and "An axolotl." in shown


def test_workers_read_the_same_and_name_the_same(folder):
    here, there = ReadReport(), ReadReport()
    fields = Fields("text", "title")
    whole = list(read_sources([folder], fields, here))
    parts, reader = parts_of([folder], there, size=1), DocumentReader(fields)
    assert len(parts) > 5
    read = []
    for part in parts:
        report = ReadReport()
        sent = pickle.loads(pickle.dumps((reader, part)))
        read += sent[0].documents(sent[1], report)
        there.add(pickle.loads(pickle.dumps(report)))
    assert read == whole
    assert there.unread == here.unread and there.skipped == here.skipped and there.unread


def test_headings_are_titles_of_rows_and_no_part_of_their_texts(tmp_path):
    docs = [Document("a.md", "# abc\n\nabcd efgh.\n\n## def\n\nefgh abcd.", "hhh")]
    index = build(tmp_path / "index", docs)
    assert rows_of(index) == [
        ("a.md", 0, "hhh # abc\n\n"),
        ("a.md", 1, "hhh > abc abcd efgh.\n\n"),
        ("a.md", 2, "hhh > abc ## def\n\n"),
        ("a.md", 3, "hhh > abc > def efgh abcd."),
    ]
    (hit,) = index.search("def efgh", 1)
    assert hit.title in ("hhh > abc > def", "hhh > abc") and not hit.text.startswith(("hhh", ">"))
    assert extend(index, docs).unchanged == 1


def test_only_markdown_of_an_older_index_is_encoded_again(tmp_path, monkeypatch):
    docs = [Document("a.md", "# abc\n\nabcd efgh."), Document("b.txt", "# abc\n\nabcd efgh.")]
    with monkeypatch.context() as older:
        older.setattr(encode_corpus, "has_headings", lambda name: False)
        index = build(tmp_path / "index", docs)
    added = extend(index, docs)
    assert (added.replaced, added.unchanged) == (1, 1)
