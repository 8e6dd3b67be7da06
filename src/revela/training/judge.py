"""Scores on judged queries while a run goes on. They do not select a state.

Texts are as long as the saved retriever reads them, which may be longer than in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from revela.evaluation.collection import Collection, load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.results import write_json
from revela.evaluation.significance import MEASURE, standings
from revela.text.chunk import PASSAGE_WORDS
from revela.training.checks import Judge
from revela.training.record import START_SCORES, Scores
from revela.training.retriever.context import draw_documents
from revela.training.retriever.module import RetrieverEncoder
from revela.types import Document


def judge_on(folders: Sequence[Path], out: Path) -> Judge:
    """The judge of a run in ``out``: nDCG@10 on each folder in BEIR layout.

    Raises:
        RevelaError: a folder is not one.
    """
    collections = [load_collection(folder) for folder in folders]

    def judge(encoder: RetrieverEncoder, step: int) -> Scores:
        with encoder.retriever.reading(None):
            scores = {
                c.name: standings({"start": outcomes(c, {"": _in_context_of(c, encoder)})[""]}, [])
                for c in collections
            }
        if step == 0:
            write_json(scores, out / START_SCORES)
        return {name: system["start"].means[MEASURE] for name, system in scores.items()}

    return judge


def _in_context_of(collection: Collection, encoder: RetrieverEncoder) -> RetrieverEncoder:
    """The encoder; one with slots reads documents of the collection, as in the paper (CDE)."""
    if not encoder.slots:
        return encoder
    documents = [*map(Document, collection.document_ids, collection.documents)]
    return encoder.in_context(draw_documents(documents, encoder.slots, 0, PASSAGE_WORDS))
