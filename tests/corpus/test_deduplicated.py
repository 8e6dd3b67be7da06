"""What datatrove and NeMo Curator leave of a corpus is read as it is (docs/scale.md)."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from revela.corpus.read import read_corpus

TEXT = "Bees dance to show where flowers are."


def datatrove_jsonl(folder, expanded):
    """As JsonlWriter of datatrove 0.10.1 writes it, a file per task."""
    about = {"title": "Bees", "year": 2001, "file_path": "/data/corpus/a.jsonl"}
    for task in range(2):
        row = {"text": f"{TEXT} {task}", "id": f"d{task}"}
        row |= about if expanded else {"metadata": about}
        with gzip.open(folder / f"{task:05}.jsonl.gz", "wt") as file:
            file.write(json.dumps(row) + "\n")


def curator_parquet(folder, _):
    """As TextDuplicatesRemovalWorkflow of NeMo Curator 1.4 writes it: the input's columns and an
    id of its own.
    """
    for part, name in enumerate(("0c3f", "b71e")):
        row = {"id": f"d{part}", "title": "Bees", "text": f"{TEXT} {part}", "year": 2001}
        table = pa.Table.from_pylist([{**row, "_curator_dedup_id": part}])
        pq.write_table(table, folder / f"{name}.parquet")


@pytest.mark.parametrize(
    ("write", "expanded"),
    [(datatrove_jsonl, True), (datatrove_jsonl, False), (curator_parquet, True)],
)
def test_deduplicated_documents_keep_ids_titles_and_metadata(tmp_path, write, expanded):
    write(tmp_path, expanded)
    documents, report = read_corpus([tmp_path], near=0, metadata=["year"])
    assert not report.skipped
    assert [document.id for document in documents] == ["d0", "d1"]
    assert [document.text for document in documents] == [f"{TEXT} 0", f"{TEXT} 1"]
    # Without expand_metadata=True datatrove hides the title, which docs/scale.md therefore sets.
    assert {document.title for document in documents} == {"Bees" if expanded else ""}
    assert [document.metadata.get("year") for document in documents] == [
        2001 * expanded or None
    ] * 2
