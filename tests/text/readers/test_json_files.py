"""JSON: an array is read like JSONL, an object is a document, and settings are left alone."""

from __future__ import annotations

import json

import pytest

from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.text.readers import common, json_files

SENTENCE = "A sentence that has more than five words."


def test_an_array_is_rows_and_an_object_is_a_document(tmp_path):
    rows = [{"_id": "x", "title": "T", "text": f"{SENTENCE} One."}, {"text": f"{SENTENCE} Two."}]
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps({"text": f"{SENTENCE} Three.", "year": 2020}))
    documents, report = read_corpus([tmp_path], metadata=["year"])
    assert [(d.id, d.title) for d in documents] == [("x", "T"), ("a.json:2", ""), ("b.json", "")]
    assert documents[2].metadata == {"year": 2020} and not report.unread


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"compilerOptions": {}, // as tsc has it\n}',
        '{"name": "text", "text": 3}',
        '["text", "text"]',
        '{"rows": [{"text": "deeper than rows are"}]}',
        "[" * 100_000,
    ],
)
def test_json_without_documents_is_one_document(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    for source in (tmp_path, tmp_path / "settings.json"):
        documents, report = read_corpus([source, source], distinct=False, min_words=0)
        assert [(d.id, d.text, d.kind) for d in documents][1:] == [
            ("settings.json", content, "code")
        ]
        assert not report.skipped and not report.unread


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
def test_lines_with_a_mark_are_rows(tmp_path, codec):
    rows = [{"text": f"{SENTENCE} é {i}"} for i in range(3)]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_bytes(lines.encode(codec))
    assert [d.text for d in read_corpus([tmp_path])[0]] == [row["text"] for row in rows]


def test_lines_of_objects_are_rows(tmp_path):
    rows = [{"text": f"{SENTENCE} {i}"} for i in range(3)]
    (tmp_path / "a.json").write_text("\r\n".join(map(json.dumps, rows)))
    assert [d.id for d in read_corpus([tmp_path])[0]] == [f"a.json:{i}" for i in (1, 2, 3)]


def test_rows_without_text_and_broken_rows_are_bad(tmp_path):
    rows = [{"text": SENTENCE}, {"body": "x"}, 3]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "torn.json").write_text(json.dumps(rows)[:-20])
    documents, report = read_corpus([tmp_path], max_bad_share=1)
    assert len(documents) == 1 and report.bad == 3
    assert report.examples == {
        'no text field "text"': ["a.json:2 (has body)"],
        "not a JSON object": ["a.json:3"],
        "broken JSON": ["torn.json"],
    }


def test_large_json_is_data(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "LARGEST", 10)
    (tmp_path / "b.json").write_text('{"body": "without the field"}')
    with pytest.raises(RevelaError, match=r'b\.json: JSON of data: no text field "text"'):
        read_corpus([tmp_path / "b.json"])
    (tmp_path / "b.json").unlink()
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "large.json").write_text(json.dumps([{"text": SENTENCE}] * 100))
    assert read_corpus([tmp_path])[1].lines()[1] == "not read: 1 .json (over 0 MB)"
    with pytest.raises(RevelaError, match=r"large\.json: JSON over 0 MB; make it JSONL"):
        read_corpus([tmp_path / "large.json"])


def test_an_export_of_messages_counts_as_text_and_data_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "LARGEST", 1000)
    (tmp_path / "a.txt").write_text(SENTENCE)
    said = [
        "when does the canteen close today?",
        "蜜蜂在花丛之间跳舞",
        "Когда закрывается столовая",
    ]
    exports = {
        "telegram": {
            "messages": [{"id": n, "text": [{"type": "plain"}, t]} for n, t in enumerate(said)]
        },
        "chatgpt": [{"mapping": {"0": {"content": {"parts": said}}}}],
        "discord": {"messages": [{"content": said[0]}]},
        "chinese": {"messages": [{"content": said[1]}]},
    }
    for name, value in exports.items():
        value = {"padding": "x" * 1000, "rows": value}
        (tmp_path / f"{name}.json").write_text(json.dumps(value, ensure_ascii=name == "chatgpt"))
    (tmp_path / "geo.json").write_text(json.dumps({"points": [[1.5, 2.5]] * 1000, "name": "a map"}))
    _, report = read_corpus([tmp_path])
    sizes = sum((tmp_path / f"{name}.json").stat().st_size for name in exports)
    assert report.bytes_unread == sizes
    assert report.unread == {('data: no text field "text"', ".json"): 5}
