"""Search a text by words only, in memory, while its index is being made.

BM25 first ranks whole documents, so they need not be cut into passages, then the passages of the
best documents. Shapes: T terms of a query, N texts.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from revela.errors import QueryError
from revela.ranking.bm25 import K1, B, idf, max_score
from revela.ranking.steps import check_query
from revela.searching.highlight import HighlightTerms
from revela.searching.ingest import passages_of
from revela.searching.rows import searched
from revela.searching.snippets import CHARACTERS, Snippet, snippet
from revela.terminal import counted
from revela.text.analyzer import Analyzer, detect
from revela.text.spool import LazyTexts
from revela.types import Document, Hit, Hits, Vectors

CUT = 100  # documents whose passages are ranked


class Words:
    """Documents, searched by BM25. ``made`` is the share of their text whose vectors are made.

    Args:
        documents: of a text.
        chunk_words: as for an index.

    Example:
        >>> words = Words([Document("a", "Invoices are kept."), Document("b", "A pond.")], 120)
        >>> [hit.id for hit in words.search("invoice")]
        ['a']
        >>> words.notice
        'By words only: vectors of 2 documents are being made, 0 % of the text is done.'
    """

    def __init__(self, documents: Sequence[Document], chunk_words: int) -> None:
        self.made = 0.0
        self._documents, self._chunk_words = documents, chunk_words
        self._terms = Analyzer(detect(LazyTexts(documents, lambda document: document.full_text)))
        self._numbers = defaultdict[str, int](count().__next__)  # of terms
        self._rows = dict[str, int]()
        held, ends = array("i"), array("q")  # the terms of all documents, and where each one's end
        for row, document in enumerate(documents):
            self._rows[document.id] = row
            text = searched(document.id, document.full_text)
            held.extend(map(self._numbers.__getitem__, self._terms(text)))
            ends.append(len(held))
        self._held, self._ends_N = np.array(held, np.int32), np.array(ends, np.int64)

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
            raise QueryError(f"{self.notice} Filters are for then: leave it out, or wait", "filter")
        asked = [term for term in self._terms.of_query(query) if term in self._numbers]
        counts_TN = self._counts(asked)
        frequencies_T = np.count_nonzero(counts_TN, axis=1)
        idf_T, best = idf(frequencies_T, len(self)), max_score(frequencies_T, len(self))
        scores_N = bm25(counts_TN, np.diff(self._ends_N, prepend=0), idf_T)
        order = np.argsort(-scores_N, kind="stable")[: max(k, CUT)]
        hits = [hit for row in order.tolist() if scores_N[row] for hit in self._passages(row)]
        terms = [self._terms(searched(hit.id, f"{hit.title} {hit.text}")) for hit in hits]
        counts = np.array([[held.count(term) for held in terms] for term in asked], np.int64)
        lengths = np.array([len(held) for held in terms], np.int64)
        shares = bm25(counts.reshape(len(asked), len(hits)), lengths, idf_T) / (best or 1)
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

    def snippets(
        self, query: str, hits: Sequence[Hit], characters: int = CHARACTERS
    ) -> list[Snippet]:
        """The snippet of each hit, as in ``Index.snippets``."""
        terms = HighlightTerms.of(query, self._terms, self._idf)
        return [snippet(hit, terms, characters) for hit in hits]

    def _idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        known = [term for term in terms if term in self._numbers]
        frequencies = dict(zip(known, np.count_nonzero(self._counts(known), axis=1), strict=True))
        return idf(np.array([frequencies.get(term, 0) for term in terms]), len(self))

    def _counts(self, terms: Iterable[str]) -> NDArray[np.int64]:
        """The frequency of each term in each document, (T, N)."""
        counts = [np.zeros((0, len(self)), np.int64)]
        for term in terms:
            places = np.flatnonzero(self._held == self._numbers[term])
            rows = np.searchsorted(self._ends_N, places, side="right")
            counts.append(np.bincount(rows, minlength=len(self))[None])
        return np.concatenate(counts)

    def _passages(self, row: int) -> Iterable[Hit]:
        document = self._documents[row]
        passages = passages_of(document, self._chunk_words)
        for number, (title, text, start) in enumerate(passages):
            yield Hit(document.id, 0.0, title, text, number, line=start.line, page=start.page)


def bm25(
    counts_TN: NDArray[np.int64], lengths_N: NDArray[np.int64], idf_T: NDArray[np.float64]
) -> Vectors:
    """The scores of texts with so many of each term of a query, and so many terms in all, (N,)."""
    mean = lengths_N.mean() if lengths_N.any() else 1.0
    norms_N = K1 * (1 - B + B * lengths_N / mean)
    scores: Vectors = ((K1 + 1) * counts_TN / (counts_TN + norms_N) * idf_T[:, None]).sum(axis=0)
    return scores
