"""The label-free check: score an encoder, and BM25, on tasks cut from held-out documents
(groups/held_out.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from revela.corpus.arrow_list import ArrowList
from revela.evaluation.beir import fuse
from revela.evaluation.metrics import mean_scores, top_k
from revela.groups.held_out import Ask, Task, split_held_out, tasks
from revela.index.bm25 import BM25
from revela.index.fusion import Geometry
from revela.settings import Recipe
from revela.types import Document, Encoder, Vectors

TINY = 1e-9
DEPTH = 110  # enough for nDCG@10 and recall@100 after the excluded chunk is dropped


def hold_out(
    documents: ArrowList[Document], recipe: Recipe, ask: Ask | None = None
) -> tuple[ArrowList[Document], HeldOutCheck]:
    """Documents to train on, and the check by the others; ``ask`` writes its questions."""
    rest, held = split_held_out(documents, recipe.corpus.held_out, recipe.corpus.held_out_at_most)
    return rest, check_by(held, recipe, ask)


def check_by(held: Sequence[Document], recipe: Recipe, ask: Ask | None = None) -> HeldOutCheck:
    """The check by these documents; ``ask`` writes its questions."""
    return HeldOutCheck(
        tasks(
            held,
            recipe.corpus.chunk_words,
            recipe.training.check_queries,
            recipe.training.check_passages,
            recipe.training.seed,
            recipe.training.check_questions,
            ask,
        )
    )


class HeldOutCheck:
    """nDCG@10 of each task: of any encoder, alone and fused with BM25 by score
    (``with_bm25(task)``), and of BM25.

    What is chosen by this check is chosen by both, as an index is searched by both, and as BM25 may
    know already what the vectors learn.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self._lexical = [_lexical(task) for task in self.tasks]

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        """nDCG@10 by task name, without and with BM25."""
        scores: dict[str, float] = {}
        texts: list[str] = []
        for task, lexical in zip(self.tasks, self._lexical, strict=True):
            if task.passages != texts:  # sibling, title and question search the same passages
                texts, passages = task.passages, encoder.encode_passages(task.passages)
                geometry = Geometry.of(passages)
            queries = encoder.encode_queries(task.queries)
            dense = _rankings(task, *top_k(queries, passages, DEPTH))
            scores[task.name] = _score(task, dense)
            fused = [
                fuse(
                    query,
                    passages,
                    list(near),
                    {d: share for d, share in words.items() if share > 0},
                    geometry,
                )
                for query, near, words in zip(queries, dense, lexical, strict=True)
            ]
            scores[with_bm25(task.name)] = _score(task, fused)
        return scores

    def bm25(self) -> dict[str, float]:
        """The same of BM25 alone."""
        return {
            task.name: _score(task, lexical)
            for task, lexical in zip(self.tasks, self._lexical, strict=True)
        }

    def describe(self) -> str:
        return "; ".join(
            f"{t.name}: {len(t.queries)} queries over {len(t.passages)} passages"
            for t in self.tasks
        )


def _lexical(task: Task) -> list[dict[int, float]]:
    """BM25's ranking for each query, in shares of the best possible score."""
    bm25 = BM25(task.passages)
    indices, scores = bm25.top_k(task.queries, DEPTH)
    best_Q1 = np.maximum(bm25.best(task.queries), TINY)[:, None]  # 0 for a query without a word
    return _rankings(task, indices, (scores / best_Q1).astype(np.float32))


def with_bm25(task: str) -> str:
    """The name of a task's score by the fusion with BM25."""
    return f"{task} + BM25"


def _rankings(task: Task, indices: NDArray[np.int64], values: Vectors) -> list[dict[int, float]]:
    """Passages and scores of each query, best first, without what is excluded."""
    return [
        {int(d): float(s) for d, s in zip(row, scores, strict=True) if d not in excluded}
        for row, scores, excluded in zip(indices, values, task.excluded, strict=True)
    ]


def _score(task: Task, rankings: Sequence[dict[int, float]]) -> float:
    qrels = {str(q): {str(d): 1 for d in relevant} for q, relevant in enumerate(task.relevant)}
    run = {
        str(q): {str(d): score for d, score in ranking.items()}
        for q, ranking in enumerate(rankings)
    }
    return mean_scores(qrels, run)["ndcg@10"]
