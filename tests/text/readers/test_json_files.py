"""JSON: an array is read like JSONL, an object is a document, and settings are left alone."""

from __future__ import annotations

import json

import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.text.readers import common, json_files


def test_an_array_is_rows_and_an_object_is_a_document(reads):
    rows = [{"_id": "x", "title": "T", "text": f"{SENTENCE} One."}, {"text": f"{SENTENCE} Two."}]
    one = json.dumps({"text": f"{SENTENCE} Three.", "year": 2020})
    files = {"a.json": "\ufeff" + json.dumps(rows, indent=1), "b.json": one}
    documents, report = reads(files, metadata=["year"])
    assert [(d.id, d.title) for d in documents] == [("x", "T"), ("a.json:2", ""), ("b.json", "")]
    assert documents[2].metadata == {"year": 2020} and not report.unread


WITHOUT_DOCUMENTS = [
    "",
    "[]",
    '{"compilerOptions": {}, // as tsc has it\n}',
    '{"text": 3, // as tsc has it\n}',
    '{"text": "a \\"name", /* as tsc has it */ }',
    '{"name": "text", "text": 3}',
    '["text", "text"]',
    '{"rows": [{"text": "deeper than rows are"}]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", WITHOUT_DOCUMENTS)
def test_json_without_documents_is_one_document(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    for source in (tmp_path, tmp_path / "settings.json"):
        documents, report = read_corpus([source, source], distinct=False, min_words=0)
        assert [(d.id, d.text, d.kind) for d in documents][1:] == [
            ("settings.json", content, "code")
        ]
        assert not report.skipped and not report.unread


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16"])
def test_lines_of_objects_are_rows_with_a_mark_or_without(reads, name, codec):
    texts = [f"{SENTENCE} é {i}" for i in (1, 2, 3)]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    documents, _ = reads({name: lines.encode(codec)})
    found = [(d.id, d.text) for d in documents]
    assert found == [(f"{name}:{i}", text) for i, text in enumerate(texts, 1)]


def test_rows_without_text_and_broken_rows_are_bad(reads):
    rows = json.dumps([{"text": f"{SENTENCE} http://"}, {"body": "x"}, 3])
    documents, report = reads({"a.json": rows, "torn.json": rows[:-20]}, max_bad_share=1)
    assert len(documents) == 1 and report.bad == 3
    assert report.examples == {
        'no text field "text"': ["a.json:2 (has body)"],
        "not a JSON object": ["a.json:3"],
        "broken JSON": ["torn.json"],
    }


def test_large_json_is_data(reads, tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "LARGEST", 10)
    (tmp_path / "b.json").write_text('{"body": "without the field"}')
    with pytest.raises(RevelaError, match=r'b\.json: JSON of data: no text field "text"'):
        read_corpus([tmp_path / "b.json"])
    (tmp_path / "b.json").unlink()
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    files = {"a.txt": SENTENCE, "large.json": json.dumps([{"text": SENTENCE}] * 100)}
    assert reads(files)[1].lines()[1] == "not read: 1 .json (over 0 MB)"
    with pytest.raises(RevelaError, match=r"large\.json: JSON over 0 MB; convert it to JSONL"):
        read_corpus([tmp_path / "large.json"])


def test_an_export_of_messages_counts_as_text_and_data_does_not(reads, monkeypatch):
    monkeypatch.setattr(json_files, "LARGEST", 1000)
    said = ["when does the canteen close?", "蜜蜂在花丛之间跳舞", "Когда закрывается столовая"]
    spoken = [{"id": n, "text": [{"type": "plain"}, t]} for n, t in enumerate(said)]
    exports = {
        "telegram": {"messages": spoken},
        "chatgpt": [{"mapping": {"0": {"content": {"parts": said}}}}],
        "discord": {"messages": [{"content": said[0]}]},
        "chinese": {"messages": [{"content": said[1]}]},
    }
    files = {
        f"{name}.json": json.dumps(["x" * 1000, rows], ensure_ascii=name == "chatgpt")
        for name, rows in exports.items()
    }
    points = json.dumps({"points": [[1.5, 2.5]] * 1000, "name": "a map"})
    _, report = reads({"a.txt": SENTENCE, "geo.json": points, **files})
    assert report.bytes_unread == sum(len(file.encode()) for file in files.values())
    assert report.unread == {('data: no text field "text"', ".json"): 5}
