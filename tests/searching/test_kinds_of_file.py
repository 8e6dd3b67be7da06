"""Every document of a folder of many kinds of file is found by its last word."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from revela import Index
from tests.text.readers.test_office import docx, epub, notebook, pptx, xlsx

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


def write_kinds(path: Path) -> Path:
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
    (path / "o.png").write_text(FILLER)
    (path / "m.json").write_text('{"some": "settings"}')
    whole = (path / "a.docx").read_bytes()
    (path / "n.docx").write_bytes(whole[: len(whole) // 2])
    return path


def test_every_document_of_a_folder_is_found_or_is_named(tmp_path, succeeds, static_folder):
    folder, out = write_kinds(tmp_path / "folder"), tmp_path / "index"
    said = succeeds("index", folder, "--model", static_folder, "--out", out)
    assert "read 14 documents, " in said
    assert "not read: 1 .png (no text)\n" in said
    assert "skipped 1: damaged or encrypted .docx (n.docx: " in said
    index = Index.open(out)
    for name, word in LAST.items():
        assert [hit.id for hit in index.search(word, 9, "lexical")] == [name], word
    assert index.search("axolotl", 1, "lexical")[0].title == "Guide > Install"
    shown = succeeds("search", out, "axolotl", "--mode", "lexical")
    assert "/i.md:9)  [" in shown and "An axolotl." in shown


def test_rows_that_share_an_id_are_named_by_their_places(tmp_path, succeeds, static_folder):
    out = tmp_path / "index"
    for file, names in {"a": "121", "b": "11"}.items():
        rows = [json.dumps({"_id": name, "text": f"{FILLER} {file}"}) for name in names]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(rows))
    succeeds("index", tmp_path / "a.jsonl", "--model", static_folder, "--out", out)
    said = succeeds("index", tmp_path / "b.jsonl", "--out", out, "--append")
    assert "1: rows with the id of another row or file: their place is their id (b.jsonl:2)" in said
    ids = {row["id"] for row in Index.open(out).table.lance.to_arrow().to_pylist()}
    assert ids == {"1", "2", "a.jsonl:3", "b.jsonl:2"}
