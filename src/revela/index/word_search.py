"""A text that is searched by its words alone, in memory, while its index is being made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from revela.errors import QueryError
from revela.index.bm25 import BM25
from revela.index.fusion import DEPTH
from revela.index.ingest import passages_of
from revela.index.search import check_query
from revela.types import Document, Hit, Hits


class Words:
    """Documents, searched by BM25 over their passages. ``made`` is the share of their text whose
    vectors are made.

    Args:
        documents: of a text.
        chunk_words: as for an index.

    Example:
        >>> words = Words([Document("a", "Invoices are kept."), Document("b", "A pond.")], 120)
        >>> [hit.id for hit in words.search("invoice")]
        ['a']
        >>> words.notice
        'By words only: vectors of 2 passages are being made, 0 % of the text is done.'
    """

    def __init__(self, documents: Iterable[Document], chunk_words: int) -> None:
        self.made = 0.0
        self._hits = [
            Hit(document.id, 0.0, title, text, number)
            for document in documents
            for number, (title, text) in enumerate(passages_of(document, chunk_words))
        ]
        passages = [f"{hit.title} {hit.text}" if hit.title else hit.text for hit in self._hits]
        self._bm25 = BM25(passages)

    def __len__(self) -> int:
        """The number of passages."""
        return len(self._hits)

    def tell(self, made: float) -> None:
        """Note how much is made."""
        self.made = made

    @property
    def notice(self) -> str:
        """What a reader of these results must know."""
        return (
            f"By words only: vectors of {len(self):,} passages are being made, "
            f"{100 * self.made:.0f} % of the text is done."
        )

    def search(
        self,
        query: str,
        k: int = 10,
        where: Mapping[str, object] | None = None,
        min_score: float | None = None,
    ) -> Hits:
        """The k best documents, each with its best passage. Scores are BM25 as a share of its
        maximum: ``min_score``, of an index's scores, leaves none of them out.

        Raises:
            QueryError: as for ``Index.search``, or there is a filter, for which an index is needed.
        """
        check_query(query)
        if where:
            raise QueryError(f"{self.notice} Filters are for then: leave it out, or wait", "filter")
        rows, scores = self._bm25.top_k([query], max(10 * k, DEPTH))
        best = float(self._bm25.max_scores([query])[0]) or 1.0
        found = dict[str, Hit]()
        for row, score in zip(rows[0].tolist(), scores[0].tolist(), strict=True):
            hit = self._hits[row]
            if score > 0 and len(found) < k:
                shown = Hit(hit.id, score / best, hit.title, hit.text, hit.chunk)
                found.setdefault(hit.id, shown)
        return Hits(found.values())

    def chunks(self, document: str) -> list[Hit]:
        """The passages of a document by its id, as of an index."""
        return [hit for hit in self._hits if hit.id == document]
