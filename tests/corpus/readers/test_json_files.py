"""JSON: an array is read like JSONL, an object is a document, and settings are left alone."""

from __future__ import annotations

import json

import pytest

from revela.corpus.load import Reading, read_corpus
from revela.corpus.readers import common
from revela.errors import RevelaError

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
def test_json_without_documents_is_left_in_a_folder_and_refused_by_name(tmp_path, content):
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "settings.json").write_text(content)
    documents, report = read_corpus([tmp_path], Reading(max_bad_share=0))
    assert len(documents) == 1 and not report.skipped
    assert report.lines()[1:] == ['not read: 1 .json (no text field "text")']
    with pytest.raises(RevelaError, match=r'settings\.json: JSON with no text field "text"; name'):
        read_corpus([tmp_path / "settings.json"])


def test_rows_without_text_and_broken_rows_are_bad(tmp_path):
    rows = [{"text": SENTENCE}, {"body": "x"}, 3]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "torn.json").write_text(json.dumps(rows)[:-20])
    documents, report = read_corpus([tmp_path], Reading(max_bad_share=1))
    assert len(documents) == 1 and report.bad == 3
    assert report.examples == {
        'no text field "text"': ["a.json:2 (has body)"],
        "not a JSON object": ["a.json:3"],
        "broken JSON": ["torn.json"],
    }


def test_large_json_is_data(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "large.json").write_text(json.dumps([{"text": SENTENCE}] * 100))
    assert read_corpus([tmp_path])[1].lines()[1:] == ["not read: 1 .json (over 0 MB)"]
    with pytest.raises(RevelaError, match=r"large\.json: JSON over 0 MB; make it JSONL"):
        read_corpus([tmp_path / "large.json"])
