"""A folder in BEIR layout as a task of mteb, which needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from revela.evaluation.collection import load_collection


def folder_task(folder: Path) -> Any:
    collection = load_collection(folder)
    titles = collection.titles
    texts = [d[len(t) + 1 :] if t else d for d, t in zip(collection.documents, titles, strict=True)]
    documents = {"id": collection.document_ids, "title": titles, "text": texts}
    queries = {"id": collection.query_ids, "text": collection.queries}
    qrels = collection.qrels

    class FolderTask(AbsTaskRetrieval):
        ignore_identical_ids = bool(collection.among_documents)
        metadata = TaskMetadata(
            name=collection.name,
            description=f"{len(collection.documents)} documents, {len(collection.queries)} queries",
            type="Retrieval",
            dataset={"path": collection.name, "revision": "1"},
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, **_: Any) -> None:
            split = {
                "corpus": Dataset.from_dict(documents),
                "queries": Dataset.from_dict(queries),
                "relevant_docs": qrels,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return FolderTask()
