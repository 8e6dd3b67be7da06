"""Search a text by words only while its index is being made: BM25 of its passages, which are on the
disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import regex

from revela.errors import QueryError
from revela.ranking.bm25 import BM25, max_score
from revela.ranking.steps import check_query
from revela.searching.filters import NO_PHRASE, phrases
from revela.searching.highlight import HighlightTerms
from revela.searching.ingest import passages_of
from revela.searching.locations import file_of
from revela.searching.snippets import CHARACTERS, Snippet, snippet
from revela.terminal import counted
from revela.text.analyzer import detect, searched
from revela.text.spool import LazyTexts, arrow_list
from revela.types import Document, Hit, Hits, with_title, without_title

MOST = 50  # passages to rank per document wanted, because many may be of one document


@dataclass(frozen=True)
class _Passage:
    """A passage of a document, and where it begins; 0 where that is not known."""

    id: str
    chunk: int
    title: str
    passage: str
    line: int
    page: int

    def hit(self, score: float = 0.0) -> Hit:
        text = without_title(self.title, self.passage)
        line, page = self.line or None, self.page or None
        return Hit(self.id, score, self.title, text, self.chunk, line=line, page=page)


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
        'By words only: 2 documents are being encoded (0 % of the text is done).'
    """

    def __init__(
        self, documents: Sequence[Document], chunk_words: int, sources: Sequence[Path] = ()
    ) -> None:
        self.made, self._sources = 0.0, sources
        self._size, self._first = len(documents), dict[str, int]()  # row of the first passage
        self._passages = arrow_list(_Passage, self._cut(documents, chunk_words))
        texts = LazyTexts(documents, lambda document: document.full_text)
        named = LazyTexts(self._passages, lambda one: searched(one.id, one.passage))
        self._bm25 = BM25(named, detect(texts))

    def _cut(self, documents: Iterable[Document], chunk_words: int) -> Iterator[_Passage]:
        count = 0
        for document in documents:
            self._first[document.id] = count
            for number, (title, text, start) in enumerate(passages_of(document, chunk_words)):
                passage, line, page = with_title(title, text), start.line or 0, start.page or 0
                yield _Passage(document.id, number, title, passage, line, page)
                count += 1

    def __len__(self) -> int:
        """The number of documents."""
        return self._size

    def tell(self, made: float) -> None:
        """Note the share of the text with vectors."""
        self.made = made

    @property
    def notice(self) -> str:
        """A sentence for users: results are by words only, and how far the vectors are."""
        return (
            f"By words only: {counted(len(self), 'document is', 'documents are')} being encoded "
            f"({100 * self.made:.0f} % of the text is done)."
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
                f"{self.notice} Filters need the index: leave the filter out, or wait", "where"
            )
        asked = self._bm25.known(self._bm25.terms.of_query(query))
        greatest = max_score(self._bm25.idf(asked)) or 1
        wanted = [regex.compile(phrase, regex.IGNORECASE) for phrase in phrases(query)]
        (best,) = self._bm25.rankings([query], self._bm25.size if wanted else k * MOST)
        phrased = {
            row: score
            for row, score in best.items()
            if all(phrase.search(self._passages[row].passage) for phrase in wanted)
        }
        found = dict[str, Hit]()
        for row, score in (phrased or best).items():
            passage = self._passages[row]
            found.setdefault(passage.id, passage.hit(score / greatest))
            if len(found) == k:
                break
        hits = Hits(found.values())
        hits.notice = NO_PHRASE if best and not phrased else ""
        return hits

    def chunks(self, document: str) -> list[Hit]:
        """The passages of a document, as in ``Index.chunks``."""
        if (row := self._first.get(document)) is None:
            return []
        rest = (self._passages[i] for i in range(row, len(self._passages)))
        return [one.hit() for one in takewhile(lambda one: one.id == document, rest)]

    def file(self, document: str) -> Path | None:
        """The file of a document, as in ``Index.file``."""
        return file_of(self._sources, document)

    def snippets(
        self, query: str, hits: Sequence[Hit], characters: int = CHARACTERS
    ) -> list[Snippet]:
        """The snippet of each hit, as in ``Index.snippets``."""
        terms = HighlightTerms.of(query, self._bm25.terms, self._bm25.idf)
        return [snippet(hit, terms, characters) for hit in hits]
