"""A judged collection: documents, queries and judgements, read from a folder in BEIR layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from revela.corpus.judgements import check_unknown, read_judgements, read_rows
from revela.errors import RevelaError
from revela.index.bm25 import BM25
from revela.index.calibration import SentenceTest
from revela.index.exact import rankings_of
from revela.index.manifest import Calibration
from revela.index.search import Scores
from revela.types import Encoder, Vectors, evenly_spaced

DEPTH = 1000  # of the dense and lexical rankings, as MAP is usually computed at 1000


@dataclass(frozen=True)
class Collection:
    """A test collection; ``qrels`` are judgements by query id and document id, ``sources`` the ids
    of the documents that passages are of (``revela queries --out``), if these are known.
    """

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]
    language: str = "auto"
    sources: Sequence[str] = ()

    @property
    def relevant(self) -> list[str]:
        """The ids of all relevant documents."""
        judged = chain.from_iterable(row.items() for row in self.qrels.values())
        return list(dict.fromkeys(document for document, grade in judged if grade > 0))

    def by_document(self) -> Collection:
        """The same passages, each by the id of its document, which is as good as the best one."""
        source = dict(zip(self.document_ids, self.sources, strict=True))
        qrels: dict[str, dict[str, int]] = {query: {} for query in self.qrels}
        for query, row in self.qrels.items():
            for passage, grade in row.items():
                document = source[passage]
                qrels[query][document] = max(grade, qrels[query].get(document, grade))
        return replace(self, document_ids=list(self.sources), qrels=qrels, sources=())

    @cached_property
    def lexical(self) -> list[Scores]:
        """BM25's ranking for each query: at most 1000 documents, which all hold a word of it."""
        found = rankings_of(*self.bm25.top_k(self.queries, DEPTH))
        return [{d: score for d, score in ranking.items() if score > 0} for ranking in found]

    @cached_property
    def among_documents(self) -> frozenset[str]:
        """Queries that are documents too, under the same id, as in ArguAna and Quora. As in BEIR,
        they do not find themselves. The texts are compared, since ids may coincide.
        """
        texts = dict(zip(self.document_ids, self.documents, strict=True))
        return frozenset(
            name
            for name, query in zip(self.query_ids, self.queries, strict=True)
            if " ".join(query.split()) in " ".join(texts.get(name, "").split())
            and self.qrels[name].get(name, 0) <= 0
        )

    def calibrate(self, encoder: Encoder, vectors_ND: Vectors) -> Calibration:
        """How well words and an encoder's vectors, (N, D), find the documents."""
        return self._test(encoder, vectors_ND[evenly_spaced(len(vectors_ND))])

    @cached_property
    def _test(self) -> SentenceTest:
        return SentenceTest(sample(self), self.bm25.terms.language)

    @cached_property
    def bm25(self) -> BM25:
        return BM25(self.documents, self.language)


def load_collection(folder: Path, split: str = "test", language: str = "auto") -> Collection:
    """Read a folder in BEIR layout; queries without a relevant document are dropped."""
    rows = {str(row["_id"]): row for row in read_rows(folder, "corpus.jsonl")}
    corpus = {name: f"{r.get('title') or ''} {r['text']}".strip() for name, r in rows.items()}
    if not corpus:
        raise RevelaError(f"{folder}: corpus.jsonl is empty")
    queries, qrels = read_judgements(folder, split)
    path = folder / "qrels" / f"{split}.tsv"
    check_unknown(path, "corpus-id", {d for row in qrels.values() for d in row}, corpus)
    kept = {q: qrels[q] for q in queries}
    texts = list(queries.values())
    documents = list(corpus), list(corpus.values())
    sources = [str(row["document_id"]) for row in rows.values() if "document_id" in row]
    known = sources if len(sources) == len(rows) else ()
    return Collection(folder.name, *documents, list(queries), texts, kept, language, known)


def sample(collection: Collection) -> list[str]:
    """At most a thousand documents, evenly spaced."""
    return [collection.documents[i] for i in evenly_spaced(len(collection.documents))]
