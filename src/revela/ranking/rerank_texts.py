"""Re-rank texts without an index: ``revela.rerank``, and the computation of the server's routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from revela.encoders.base import TextEncoder
from revela.encoders.embedded import MINILM
from revela.ranking.bm25 import Weight
from revela.ranking.fusion import similarities
from revela.ranking.late_interaction import encode_packed, match_by_tokens, rerank_by_tokens
from revela.ranking.steps import check_query
from revela.types import QueryTokens, Vectors, items_of


def rerank(
    query: str, documents: Iterable[str], model: str | Path | TextEncoder = MINILM
) -> list[tuple[int, float]]:
    """Rank documents by token vectors (late interaction) and text vectors: (index, score), best
    first.

    Scores are comparable within one call only.

    Args:
        query: the query.
        documents: texts; the model truncates long ones.
        model: a retriever: a folder, a hub id, embedded:minilm-l6 or ``Retriever(...).encoder``.
            The last model used stays loaded.

    Raises:
        QueryError: the query is empty or too long, or the model has no vectors of tokens.

    Examples:
        >>> from revela import rerank
        >>> texts = ["The garden opens at nine.", "Invoices are kept for ten years."]
        >>> (best, score), (other, lower) = rerank("how long are bills kept", texts, "my-retriever")
        >>> score >= lower
        True
    """
    documents = list(items_of(documents, "documents"))
    check_query(query)
    if not documents:
        return []
    if isinstance(model, str | Path):
        model = _retriever(str(model))
    passages = list(zip(*encode_packed(model, documents), strict=True))
    (read,) = model.query_tokens([query])
    return list(by_tokens(read, passages, [(0, len(query), 1.0)]).items())


def by_tokens(
    query: QueryTokens, passages: Sequence[tuple[Vectors, bytes]], weights: Sequence[Weight]
) -> dict[int, float]:
    """Indices of passages and their scores, at most 1, best first: (cosine + 0.75 m) / 1.75,
    with m of late_interaction.py.

    Args:
        query: as a retriever reads it.
        passages: the vector of each, (D,), and the ``packed_signs`` of its tokens.
        weights: of the parts of the query.
    """
    cosines = {i: float(vector @ query.vector) for i, (vector, _) in enumerate(passages)}
    matches = match_by_tokens(query, [signs for _, signs in passages], weights)
    return rerank_by_tokens(cosines, similarities(dict(enumerate(matches.tolist())), 0.0))


@lru_cache(1)
def _retriever(model: str) -> TextEncoder:
    from revela.encoders.load import load_encoder, resolve

    return load_encoder(resolve(model), "auto")
