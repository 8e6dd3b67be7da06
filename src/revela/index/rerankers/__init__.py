"""Re-rankers, which order the first results of a search again, without labels.

tokens.py compares the token vectors of query and passages. Other re-rankers are listwise
(``revela.types.Reranker``): they score the passages of one query together, and listwise.py joins
these scores with those of the search. heads.py is one. To add another, write its file and name it
below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from revela.errors import RevelaError, extra

if TYPE_CHECKING:
    from revela.types import Reranker

Rerank = Literal["tokens", "heads"]
"""A re-ranker by name."""
TOKENS_DEPTH, HEADS_DEPTH = 50, 20  # results that are re-ranked: by tokens, by others


def load_reranker(name: str, lm: str, passages: Callable[[], Sequence[str]]) -> Reranker:
    """Load a listwise re-ranker by its name; ``passages`` gives text like that to be re-ranked."""
    if name == "heads":
        with extra("train", "re-ranking by the heads of a language model"):
            from revela.index.rerankers.heads import load_query_heads
        return load_query_heads(lm, passages)
    raise RevelaError(f'there is no re-ranker "{name}": give tokens, heads or none')
