"""The label-free check as an evaluator of sentence-transformers, for any trainer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator

from revela.errors import RevelaError
from revela.evaluation.label_free import MIN_QUERIES, HeldOutCheck, tasks
from revela.training.retriever.module import RetrieverEncoder
from revela.training.settings import Corpus, Training
from revela.types import Document, items_of


class LabelFreeEvaluator(BaseEvaluator):
    """Evaluates a model on tasks made from raw documents: nDCG@10, alone and fused with BM25.

    The first half of a chunk should find the rest of its document, a title its document, and a
    docstring its function. Queries and passages get the model's own prompts.

    Args:
        texts: held-out documents: strings, or ``revela.Document`` with titles and, for Python
            source, kind="code".
        name: prefix of the metrics.
        chunk_words: maximum words per chunk.
        queries: maximum number of queries per task.
        passages: maximum number of passages per task.
        seed: seed of the sampled queries.

    Attributes:
        primary_metric: the mean of all scores, by which ``revela train`` keeps the best state.
        bm25: task -> nDCG@10 of BM25.

    Examples:
        >>> from sentence_transformers import SentenceTransformer
        >>> text = "House {} is very old now. It was built of {} stone long ago."
        >>> texts = [text.format(letter, letter) for letter in "abcdefgh"]
        >>> evaluator = LabelFreeEvaluator(texts, chunk_words=8)
        >>> scores = evaluator(SentenceTransformer("my-retriever"))
        >>> sorted(scores)
        ['mean_ndcg@10', 'sibling_ndcg@10', 'sibling_with_bm25_ndcg@10']
    """

    def __init__(
        self,
        texts: Sequence[str | Document],
        name: str = "",
        *,
        chunk_words: int = Corpus.chunk_words,
        queries: int = Training.check_queries,
        passages: int = Training.check_passages,
        seed: int = Training.seed,
    ) -> None:
        super().__init__()
        documents = [
            Document(str(i), text) if isinstance(text, str) else text
            for i, text in enumerate(items_of(texts, "texts", (str, Document)))
        ]
        self.name = name
        self.about = dict(documents=len(documents), chunk_words=chunk_words, seed=seed)
        self.check = HeldOutCheck(tasks(documents, chunk_words, queries, passages, seed))
        if not self.check.tasks:
            raise RevelaError(
                f"{len(documents)} texts make no task of the label-free check: give {MIN_QUERIES} "
                f"at least that are longer than chunk_words={chunk_words} or have titles"
            )
        self.bm25 = self.check.bm25()
        self.primary_metric = "mean_ndcg@10"

    def __call__(
        self,
        model: SentenceTransformer,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
    ) -> dict[str, float]:
        """Score a model: {metric: nDCG@10}; the metrics are added to its model card."""
        scores = self.check(RetrieverEncoder(model, bf16=False))
        metrics = {
            f"{task.replace(' + BM25', '_with_bm25')}_ndcg@10": score
            for task, score in scores.items()
        }
        metrics["mean_ndcg@10"] = fmean(scores.values())
        named: dict[str, float] = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, named, epoch, steps)
        return named

    def get_config_dict(self) -> dict[str, Any]:
        """This evaluator's settings, for the model card."""
        return {**self.about, "bm25": {task: round(s, 4) for task, s in self.bm25.items()}}
