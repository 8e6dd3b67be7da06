"""Test collections of queries, passages and judgements: read from a folder in BEIR layout, or made
from a text without labels (label_free.py, training/make_test_set.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.evaluation.metrics import Run
from revela.ranking.bm25 import BM25
from revela.ranking.calibration import Calibration
from revela.ranking.exact import ranking_of, rankings_of, top_k
from revela.ranking.fusion import Scores
from revela.ranking.sentence_test import SentenceTest
from revela.text.judgements import check_unknown, read_judgements, read_rows
from revela.types import Vectors, evenly_spaced

DEPTH = 1000  # documents per ranking, as MAP is usually computed at 1000

Asked = tuple[str, str, Sequence[str]]
"""A query: its id, its text, and the ids of the passages that answer it."""


@dataclass(frozen=True)
class Collection:
    """A test collection. The ``documents`` that are searched may be passages of longer documents.

    Attributes:
        qrels: query id -> document id -> grade.
        sources: the id of each passage's document, if known (``revela queries --out``).
        titles: each document's title, if known; the document starts with it.
        candidates: the rows that are ranked for each query; None: all.
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
    candidates: Sequence[Sequence[int]] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        passages: Mapping[str, str],
        queries: Iterable[Asked],
        sources: Sequence[str] = (),
    ) -> Collection:
        """Make a collection of passages (id -> text); all relevant passages have grade 1."""
        asked = list(queries)
        return cls(
            name,
            document_ids=list(passages),
            documents=list(passages.values()),
            query_ids=[query for query, _, _ in asked],
            queries=[text for _, text, _ in asked],
            qrels={query: dict.fromkeys(relevant, 1) for query, _, relevant in asked},
            sources=sources,
        )

    def sampled(self, count: int, rng: random.Random) -> Collection:
        """The same passages with at most ``count`` random queries, in the order of all queries."""
        if len(self.queries) <= count:
            return self
        chosen = sorted(rng.sample(range(len(self.queries)), count))
        ids, queries = ([texts[i] for i in chosen] for texts in (self.query_ids, self.queries))
        return replace(self, query_ids=ids, queries=queries, qrels={q: self.qrels[q] for q in ids})

    @property
    def relevant(self) -> list[str]:
        """The ids of all relevant documents."""
        judged = chain.from_iterable(grades.items() for grades in self.qrels.values())
        return list(dict.fromkeys(document for document, grade in judged if grade > 0))

    def by_document(self) -> Collection:
        """The same passages with the ids of their documents; a document has its best grade."""
        source = dict(zip(self.document_ids, self.sources, strict=True))
        qrels: dict[str, dict[str, int]] = {query: {} for query in self.qrels}
        for query, grades in self.qrels.items():
            for passage, grade in grades.items():
                document = source[passage]
                qrels[query][document] = max(grade, qrels[query].get(document, grade))
        return replace(self, document_ids=list(self.sources), qrels=qrels, sources=())

    def among(self, run: Run, depth: int) -> Collection:
        """The collection with each query's best ``depth`` documents of a run as its candidates."""
        row_of = {name: row for row, name in enumerate(self.document_ids)}
        best = (islice(run[query], depth) for query in self.query_ids)
        return replace(self, candidates=[sorted(map(row_of.__getitem__, names)) for names in best])

    @cached_property
    def lexical(self) -> list[Scores]:
        """BM25's ranking per query: of the best 1000 documents, or of the candidates, those with a
        word of the query.
        """
        return self.bm25.rankings(self.queries, DEPTH, self.candidates)

    def nearest(self, queries_QD: Vectors, documents_ND: Vectors) -> list[Scores]:
        """The ranking per query by inner products: the best 1000 documents, or the candidates."""
        if self.candidates is None:
            return rankings_of(*top_k(queries_QD, documents_ND, DEPTH))
        pairs = zip(self.candidates, queries_QD, strict=True)
        return [ranking_of(rows, documents_ND[rows] @ query_D) for rows, query_D in pairs]

    @cached_property
    def among_documents(self) -> frozenset[str]:
        """Ids of queries that are also documents, as in ArguAna and Quora; as in BEIR, a query
        is not a result of itself. Texts are compared, as equal ids may be a coincidence.
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
        encoder: TextEncoder,
        vectors_ND: Vectors,
        *,
        by_tokens: bool = False,
        scored: bool = False,
    ) -> Calibration:
        """Measure how well words and an encoder's vectors (N, D) find the documents; ``by_tokens``
        and ``scored`` as for ``SentenceTest``.
        """
        some_ND = vectors_ND[evenly_spaced(len(vectors_ND))]
        return self._test(encoder, some_ND, by_tokens=by_tokens, scored=scored)

    @cached_property
    def _test(self) -> SentenceTest:
        sources, rows = self.sources or self.document_ids, evenly_spaced(len(self.documents))
        titles = [self.titles[i] for i in rows] if self.titles else ()
        texts, documents = ([given[i] for i in rows] for given in (self.documents, sources))
        language = self.bm25.terms.language
        return SentenceTest(texts, language, titles=titles, documents=documents)

    @cached_property
    def bm25(self) -> BM25:
        return BM25(self.documents, self.language)


def last_part(path: Path) -> str:
    """The last part of a path; of . and .., the name of the folder."""
    return path.name if path.name.strip(".") else path.resolve().name


def load_collection(folder: Path, language: str = "auto") -> Collection:
    """Read a folder in BEIR layout; queries without a relevant document are dropped."""
    rows = read_rows(folder, "corpus.jsonl")
    titles = {name: str(row.get("title") or "").strip() for name, row in rows.items()}
    corpus = {name: f"{titles[name]} {row['text']}".strip() for name, row in rows.items()}
    if not corpus:
        raise RevelaError(f"{folder}: corpus.jsonl is empty")
    queries, qrels = read_judgements(folder, "test")
    check_unknown(
        folder / "qrels" / "test.tsv", "corpus-id", set(chain.from_iterable(qrels.values())), corpus
    )
    sources = [str(row["document_id"]) for row in rows.values() if "document_id" in row]
    return Collection(
        last_part(folder),
        document_ids=list(corpus),
        documents=list(corpus.values()),
        query_ids=list(queries),
        queries=list(queries.values()),
        qrels={query: qrels[query] for query in queries},
        language=language,
        sources=sources if len(sources) == len(rows) else (),
        titles=list(titles.values()),
    )


def save_collection(collection: Collection, folder: Path) -> None:
    """Write a new folder in BEIR layout, without a column of titles."""
    (folder / "qrels").mkdir(parents=True)
    sources = [collection.sources] if collection.sources else []
    files = {
        "corpus": zip(collection.document_ids, collection.documents, *sources, strict=True),
        "queries": zip(collection.query_ids, collection.queries, strict=True),
    }
    for name, rows in files.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                fields = dict(zip(("_id", "text", "document_id"), row, strict=False))
                file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    with (folder / "qrels" / "test.tsv").open("w", encoding="utf-8") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        for query, grades in collection.qrels.items():
            file.writelines(f"{query}\t{name}\t{grade}\n" for name, grade in grades.items())
