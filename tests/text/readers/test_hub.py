"""Datasets of the hub, tested on local folders that the datasets library reads the same way."""

from __future__ import annotations

import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import Reading, read_corpus
from tests.collection_folder import write_lines


def write(path, count, start=0):
    rows = ({"id": str(i), "text": f"{SENTENCE} {i}", "x": 1} for i in range(start, start + count))
    write_lines(path, rows)


@pytest.fixture
def dataset(tmp_path):
    """Two configurations, the second with two splits."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    write(folder / "one.jsonl", 700)
    write(folder / "two.jsonl", 3, 1000)
    write(folder / "test.jsonl", 2, 2000)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: one.jsonl\n"
        "- config_name: two\n  data_files:\n"
        "  - split: train\n    path: two.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
    )
    return folder


@pytest.mark.parametrize(("tail", "ids"), [(":one", range(700)), (":two:test", range(2000, 2002))])
def test_a_configuration_and_a_split_are_streamed(dataset, tail, ids):
    documents, report = read_corpus([f"hub:{dataset}{tail}"])
    assert [d.id for d in documents] == [str(i) for i in ids] and not report.skipped


MISSING = [
    ("", {}, r"choose one of its configurations \['one', 'two'\], as hub:owner/name:conf"),
    (":three", {}, r"\['one', 'two'\]"),
    (":two:dev", {}, "dev.*; check hub:owner/name:configuration:split"),
    (":one", {"text_field": "body"}, r'no column "body"; name one .* \(has id, text, x\)'),
    (":a:b:c", {}, "is not a dataset: write hub:owner/name"),
]


@pytest.mark.parametrize(("tail", "fields", "message"), MISSING)
def test_what_is_missing_is_one_sentence(dataset, tail, fields, message):
    with pytest.raises(RevelaError, match=message) as found:
        read_corpus([f"hub:{dataset}{tail}"], Reading(**fields))
    assert "\n" not in str(found.value)


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = r"hub:no-one/nothing cannot be read: the hub cannot be reached"
    with pytest.raises(RevelaError, match=said):
        read_corpus(["hub:no-one/nothing"])


def test_a_dataset_that_was_saved_to_disk_is_a_folder_like_any_other(tmp_path):
    import datasets

    rows = [{"id": str(i), "text": f"{SENTENCE} {i}"} for i in range(20)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert [d.id for d in read_corpus([tmp_path / "saved"])[0]] == [r["id"] for r in rows]
