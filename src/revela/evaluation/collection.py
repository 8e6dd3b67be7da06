"""Read a judged collection from a folder in BEIR layout: documents, queries and judgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from revela.errors import RevelaError
from revela.ranking.bm25 import BM25
from revela.ranking.calibration import Calibration
from revela.ranking.fusion import Scores
from revela.ranking.sentence_test import SentenceTest
from revela.text.judgements import check_unknown, read_judgements, read_rows
from revela.types import Encoder, Vectors, evenly_spaced

DEPTH = 1000  # documents per ranking, as MAP is usually computed at 1000


@dataclass(frozen=True)
class Collection:
    """A test collection.

    Attributes:
        qrels: query id -> document id -> grade.
        sources: the document id of each passage, if known (``revela queries --out``).
        titles: each document's title, with which it begins, if known.
    """

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]
    language: str = "auto"
    sources: Sequence[str] = ()
    titles: Sequence[str] = ()

    @property
    def relevant(self) -> list[str]:
        """The ids of all relevant documents."""
        judged = chain.from_iterable(grades.items() for grades in self.qrels.values())
        return list(dict.fromkeys(document for document, grade in judged if grade > 0))

    def by_document(self) -> Collection:
        """The same passages with their documents' ids. A document has its best passage's grade."""
        source = dict(zip(self.document_ids, self.sources, strict=True))
        qrels: dict[str, dict[str, int]] = {query: {} for query in self.qrels}
        for query, grades in self.qrels.items():
            for passage, grade in grades.items():
                document = source[passage]
                qrels[query][document] = max(grade, qrels[query].get(document, grade))
        return replace(self, document_ids=list(self.sources), qrels=qrels, sources=())

    @cached_property
    def lexical(self) -> list[Scores]:
        """BM25's ranking per query: at most 1000 documents, each with a word of the query."""
        return self.bm25.rankings(self.queries, DEPTH)

    @cached_property
    def among_documents(self) -> frozenset[str]:
        """Ids of queries that are documents, too, as in ArguAna and Quora; as in BEIR, they do not
        count as results of themselves. Texts are compared, as equal ids may be a coincidence.
        """
        texts = dict(zip(self.document_ids, self.documents, strict=True))
        return frozenset(
            name
            for name, query in zip(self.query_ids, self.queries, strict=True)
            if " ".join(query.split()) in " ".join(texts.get(name, "").split())
            and self.qrels[name].get(name, 0) <= 0
        )

    def calibrate(
        self,
        encoder: Encoder,
        vectors_ND: Vectors,
        *,
        by_tokens: bool = False,
        scored: bool = False,
    ) -> Calibration:
        """Test how well words and an encoder's vectors (N, D) find the documents; ``by_tokens`` and
        ``scored`` as for ``SentenceTest``.
        """
        some_ND = vectors_ND[evenly_spaced(len(vectors_ND))]
        return self._test(encoder, some_ND, by_tokens=by_tokens, scored=scored)

    @cached_property
    def _test(self) -> SentenceTest:
        sources, rows = self.sources or self.document_ids, evenly_spaced(len(self.documents))
        titles = [self.titles[i] for i in rows] if self.titles else ()
        documents, language = [sources[i] for i in rows], self.bm25.terms.language
        return SentenceTest(sample(self), language, titles=titles, documents=documents)

    @cached_property
    def bm25(self) -> BM25:
        return BM25(self.documents, self.language)


def load_collection(folder: Path, split: str = "test", language: str = "auto") -> Collection:
    """Read a folder in BEIR layout; queries without a relevant document are dropped."""
    rows = {str(row["_id"]): row for row in read_rows(folder, "corpus.jsonl")}
    titles = {name: str(row.get("title") or "").strip() for name, row in rows.items()}
    corpus = {name: f"{titles[name]} {row['text']}".strip() for name, row in rows.items()}
    if not corpus:
        raise RevelaError(f"{folder}: corpus.jsonl is empty")
    queries, qrels = read_judgements(folder, split)
    path = folder / "qrels" / f"{split}.tsv"
    check_unknown(path, "corpus-id", set(chain.from_iterable(qrels.values())), corpus)
    sources = [str(row["document_id"]) for row in rows.values() if "document_id" in row]
    return Collection(
        folder.name,
        document_ids=list(corpus),
        documents=list(corpus.values()),
        query_ids=list(queries),
        queries=list(queries.values()),
        qrels={query: qrels[query] for query in queries},
        language=language,
        sources=sources if len(sources) == len(rows) else (),
        titles=list(titles.values()),
    )


def sample(collection: Collection) -> list[str]:
    """At most a thousand documents, evenly spaced."""
    return [collection.documents[i] for i in evenly_spaced(len(collection.documents))]
