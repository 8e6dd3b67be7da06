"""Re-rank texts that are in no index: ``revela.rerank``, and what the server's routes compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from revela.errors import RevelaError
from revela.index.rerankers import HEADS_DEPTH, load_reranker
from revela.index.rerankers.tokens import Weight, encode_packed, rerank_by_tokens
from revela.settings import OFFLINE_EMBEDDER, OFFLINE_MODEL
from revela.types import QueryTokens, Reranker, TokenEncoder, Vectors, refuse_text

if TYPE_CHECKING:
    from revela.retriever.load import Loaded


def rerank(
    query: str,
    documents: Sequence[str],
    model: str | Path | TokenEncoder | Reranker | None = None,
    by: Literal["tokens", "heads"] = "tokens",
) -> list[tuple[int, float]]:
    """The place of each document in the list and its score, best first.

    Scores are comparable within one call only.

    Args:
        query: what is looked for.
        documents: texts, of which the model reads as much as it can; by heads at most 20.
        model: by tokens a retriever (a folder, a hub id, embedded:minilm-l6 or
            ``Retriever(...).encoder``); by heads a language model (embedded:smollm2-135m) whose
            heads ``revela heads`` or a search has ranked. The last one stays loaded.
        by: the vectors of "tokens" (late interaction) and of whole texts; or the attention "heads"
            of a language model, which take seconds.

    Raises:
        RevelaError: the query is empty, or the model cannot do this.

    Examples:
        >>> from revela import rerank
        >>> texts = ["The garden opens at nine.", "Invoices are kept for ten years."]
        >>> (best, score), (other, lower) = rerank("how long are bills kept", texts, "my-retriever")
        >>> score >= lower
        True
    """
    refuse_text(documents, "documents")
    if not query.strip():
        raise RevelaError("the query is empty: give some words to rank by")
    if not documents:
        return []
    if by == "heads":
        if len(documents) > HEADS_DEPTH:
            raise RevelaError(
                f"{len(documents):,} documents are too many for by='heads': "
                f"give at most {HEADS_DEPTH} at a time"
            )
        if model is None or isinstance(model, str | Path):
            model = _heads(str(model or OFFLINE_MODEL))
        assert isinstance(model, Reranker)
        scores = by_heads(query, documents, model)
    else:
        if model is None or isinstance(model, str | Path):
            model = _retriever(str(model or OFFLINE_EMBEDDER))
        assert isinstance(model, TokenEncoder)
        passages = list(zip(*encode_packed(model, documents), strict=True))
        (read,) = model.query_tokens([query])
        scores = by_tokens(read, passages, [(0, len(query), 1.0)])
    return list(scores.items())


def by_tokens(
    query: QueryTokens, passages: Sequence[tuple[Vectors, bytes]], weights: Sequence[Weight]
) -> dict[int, float]:
    """Indices of passages and their scores, at most 1, best first: (cosine + c m) / (1 + c) of
    tokens.py.

    Args:
        query: as a retriever reads it.
        passages: the vector of each, (D,), and the ``packed_signs`` of its tokens.
        weights: of the parts of the query.
    """
    cosines = {i: float(vector @ query.vector) for i, (vector, _) in enumerate(passages)}
    return rerank_by_tokens(query, cosines, [signs for _, signs in passages], weights)


def by_heads(query: str, passages: Sequence[str], reranker: Reranker) -> dict[int, float]:
    """Indices of passages and their scores s(q, d) of heads.py, best first."""
    scores = reranker.score(query, passages)
    return {int(i): float(scores[i]) for i in (-scores).argsort(kind="stable")}


@lru_cache(1)
def _retriever(model: str) -> Loaded:
    from revela.model_files import resolve
    from revela.retriever.load import load_encoder

    return load_encoder(resolve(model), "auto")


@lru_cache(1)
def _heads(model: str) -> Reranker:
    return load_reranker("heads", model, list)
