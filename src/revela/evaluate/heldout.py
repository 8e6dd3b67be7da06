"""The label-free check: score an encoder, and BM25, on tasks cut from held-out documents (data/heldout.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from revela.config import Recipe
from revela.data.heldout import Ask, Task, split_held_out, tasks
from revela.data.store import Stored
from revela.search.dense import top_k
from revela.search.lexical import BM25
from revela.search.metrics import mean_scores
from revela.types import Document, Encoder, Vectors

DEPTH = 110  # enough for nDCG@10 and recall@100 after the excluded chunk is dropped


def hold_out(documents: Stored[Document], recipe: Recipe, ask: Ask | None = None) -> tuple[Stored[Document], HeldOutCheck]:
    """Documents to train on, and the check by the others; ``ask`` writes its questions."""
    rest, held = split_held_out(documents, recipe.held_out, recipe.held_out_at_most)
    return rest, check_by(held, recipe, ask)


def check_by(held: Sequence[Document], recipe: Recipe, ask: Ask | None = None) -> HeldOutCheck:
    """The check by these documents; ``ask`` writes its questions."""
    return HeldOutCheck(
        tasks(held, recipe.chunk_words, recipe.check_queries, recipe.check_passages, recipe.seed, recipe.check_questions, ask)
    )


class HeldOutCheck:
    """nDCG@10 of each task, for any encoder and for BM25."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        """nDCG@10 by task name."""
        scores: dict[str, float] = {}
        texts: list[str] = []
        for task in self.tasks:
            if task.passages != texts:  # sibling, title and question search the same passages
                texts, passages = task.passages, encoder.encode_passages(task.passages)
            indices, values = top_k(encoder.encode_queries(task.queries), passages, DEPTH)
            scores[task.name] = _score(task, indices, values)
        return scores

    def bm25(self) -> dict[str, float]:
        """The same for BM25."""
        return {task.name: _score(task, *BM25(task.passages).top_k(task.queries, DEPTH)) for task in self.tasks}

    def describe(self) -> str:
        return "; ".join(f"{t.name}: {len(t.queries)} queries over {len(t.passages)} passages" for t in self.tasks)


def _score(task: Task, indices: NDArray[np.int64], values: Vectors) -> float:
    qrels = {str(q): {str(d): 1 for d in relevant} for q, relevant in enumerate(task.relevant)}
    run = {
        str(q): {str(d): float(s) for d, s in zip(row, score, strict=True) if d not in task.excluded[q]}
        for q, (row, score) in enumerate(zip(indices, values, strict=True))
    }
    return mean_scores(qrels, run)["ndcg@10"]
