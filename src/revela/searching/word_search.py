"""Search a text by words only, in memory, while its index is being made.

BM25 first ranks whole documents, so they need not be cut into passages, then the passages of the
best documents. Shapes: T terms of a query, N texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import regex

from revela.errors import QueryError
from revela.ranking.bm25 import BM25, bm25_scores, max_score
from revela.ranking.steps import check_query
from revela.searching.filters import phrases
from revela.searching.highlight import HighlightTerms
from revela.searching.ingest import passages_of
from revela.searching.locations import file_of
from revela.searching.snippets import CHARACTERS, Snippet, snippet
from revela.terminal import counted
from revela.text.analyzer import detect, searched
from revela.text.spool import LazyTexts
from revela.types import Document, Hit, Hits

CUT = 100  # documents whose passages are ranked


class Words:
    """Documents, searched by BM25. ``made`` is the share of their text whose vectors are made.

    Args:
        documents: of a text.
        chunk_words: as for an index.
        sources: folders and files that they were read from.

    Example:
        >>> words = Words([Document("a", "Invoices are kept."), Document("b", "A pond.")], 120)
        >>> [hit.id for hit in words.search("invoice")]
        ['a']
        >>> words.notice
        'By words only: vectors of 2 documents are being made, 0 % of the text is done.'
    """

    def __init__(
        self, documents: Sequence[Document], chunk_words: int, sources: Sequence[Path] = ()
    ) -> None:
        self.made, self._sources = 0.0, sources
        self._documents, self._chunk_words = documents, chunk_words
        self._rows = {document.id: row for row, document in enumerate(documents)}
        texts = LazyTexts(documents, lambda document: document.full_text)
        named = LazyTexts(documents, lambda document: searched(document.id, document.full_text))
        self._bm25 = BM25(named, detect(texts))

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._rows)

    def tell(self, made: float) -> None:
        """Note the share of the text with vectors."""
        self.made = made

    @property
    def notice(self) -> str:
        """A sentence for users: results are by words only, and how far the vectors are."""
        return (
            f"By words only: vectors of {counted(len(self), 'document')} are being made, "
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
            raise QueryError(
                f"{self.notice} Filters need the index: leave it out, or wait", "where"
            )
        terms = self._bm25.terms
        asked = self._bm25.known(terms.of_query(query))
        idf_T = self._bm25.idf(asked)
        (best,) = self._bm25.rankings([query], max(k, CUT))
        wanted = [regex.compile(phrase, regex.IGNORECASE) for phrase in phrases(query)]
        hits = [
            hit
            for row in best
            for hit in self._passages(row)
            if all(phrase.search(f"{hit.title} {hit.text}") for phrase in wanted)
        ]
        # Documents were analysed as a whole: of the best ones each passage is now.
        held = [terms(searched(hit.id, f"{hit.title} {hit.text}")) for hit in hits]
        counts = np.array([[own.count(term) for own in held] for term in asked], np.int64)
        lengths = np.array([len(own) for own in held], np.int64)
        scores = bm25_scores(counts.reshape(len(asked), len(hits)), lengths, idf_T)
        shares = scores / (max_score(idf_T) or 1)
        found = dict[str, Hit]()
        for i in np.argsort(-shares, kind="stable").tolist():
            hit = hits[i]
            if shares[i] and len(found) < k:
                found.setdefault(hit.id, replace(hit, score=float(shares[i])))
        return Hits(found.values())

    def chunks(self, document: str) -> list[Hit]:
        """The passages of a document, as in ``Index.chunks``."""
        row = self._rows.get(document)
        return [] if row is None else list(self._passages(row))

    def file(self, document: str) -> Path | None:
        """The file of a document, as in ``Index.file``."""
        return file_of(self._sources, document)

    def snippets(
        self, query: str, hits: Sequence[Hit], characters: int = CHARACTERS
    ) -> list[Snippet]:
        """The snippet of each hit, as in ``Index.snippets``."""
        terms = HighlightTerms.of(query, self._bm25.terms, self._bm25.idf)
        return [snippet(hit, terms, characters) for hit in hits]

    def _passages(self, row: int) -> Iterable[Hit]:
        document = self._documents[row]
        passages = passages_of(document, self._chunk_words)
        for number, (title, text, start) in enumerate(passages):
            yield Hit(document.id, 0.0, title, text, number, line=start.line, page=start.page)
