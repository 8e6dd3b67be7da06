"""An encoder by letter counts, a small corpus in chunks of two words, and the search that an index
must agree with.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np

from revela.encoders.base import TextEncoder
from revela.ranking.bm25 import BM25, max_score
from revela.ranking.exact import top_k
from revela.ranking.fusion import DEPTH, FusionRule, chance_of, fuse_scores
from revela.searching.index import Index
from revela.searching.ingest import Counts
from revela.searching.manifest import Indexing, Info
from revela.searching.rows import metadata_columns
from revela.searching.state import State
from revela.text.chunk import chunk
from revela.text.spool import arrow_list
from revela.types import Document, QueryTokens

WORDS = 3


class Letters(TextEncoder):
    """``seen`` are the passages that it was asked for."""

    def __init__(self):
        self.seen = []

    def encode_passages(self, texts, progress=False):
        self.seen += [text for text in texts if text != "."]
        counts = np.array([[t.count(c) for c in "abcdefgh"] for t in texts], np.float32) + 1e-3
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    encode_queries = encode_passages

    def encode_batch(self, features, role, with_tokens):
        raise NotImplementedError

    def encode_with_tokens(self, texts):
        """A token is a word, in the letters that it has."""
        return self.encode_passages(texts), [self._tokens(text) for text in texts]

    def query_tokens(self, queries):
        spans = [[word.span() for word in re.finditer(r"\S+", query)] for query in queries]
        read = (self.encode_queries(queries), map(self._tokens, queries), spans)
        return [QueryTokens(*found) for found in zip(*read, strict=True)]

    @staticmethod
    def _tokens(text):
        rows = [[word.count(c) - 0.5 for c in "abcdefgh"] for word in text.split()]
        vectors = np.array(rows, np.float32).reshape(-1, 8)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def documents(count: int, seed: int = 0) -> list[Document]:
    """Words of the letters that ``Letters`` counts, up to four chunks a document."""
    rng = np.random.default_rng(seed)
    texts = [
        " ".join(
            "".join(rng.choice(list("abcdefgh"), 4)) for _ in range(rng.integers(2, 4 * WORDS))
        ).replace(" ", ". ")
        for _ in range(count)
    ]
    return [
        Document(f"d{i}", text, f"title {i}" if i % 2 else "", metadata={"year": 2000 + i % 30})
        for i, text in enumerate(texts)
    ]


def begun(folder: Path, encoder=None, columns=None, **settings) -> Index:
    settings = Indexing(**{"chunk_words": WORDS, **settings})
    info = Info("model", "0123", settings.dimensions or 8, settings, columns or {})
    return Index.begin(folder, info, encoder or Letters())


def build(folder: Path, docs: list[Document], encoder=None, metadata=(), **settings) -> Index:
    index = begun(folder, encoder, metadata_columns(docs, metadata), **settings)
    index.add(arrow_list(Document, docs))
    return index


def extend(index: Index, docs: list[Document], encoder=None) -> Counts:
    index._encoder = encoder or Letters()
    return index.add(arrow_list(Document, docs))


def reopen(folder: Path) -> Index:
    return Index.open(folder, encoder=Letters())


def rows_of(index: Index) -> list[tuple[str, int, str]]:
    """(document, chunk, passage) of every row, in order."""
    found = index.table.lance.search().select(["id", "chunk", "passage"]).limit(10**6).to_list()
    return sorted((row["id"], row["chunk"], row["passage"]) for row in found)


def wanted_rows(docs: list[Document]) -> list[tuple[str, int, str]]:
    return sorted(
        (d.id, n, f"{d.title} {c.text}" if d.title else c.text)
        for d in docs
        for n, c in enumerate(chunk(d, 0, WORDS))
    )


def counts_of(state: State) -> dict[int, int]:
    """How many chunks hold each term, by its hash."""
    return dict(state._database.execute("select hash, n from terms").fetchall())


def max_bm25(bm25: BM25, query: str) -> float:
    """The maximum BM25 score for a query."""
    return max_score(bm25.idf(bm25.terms.of_query(query, likely=True)))


def oracle(
    docs: list[Document], query: str, mode: str, k: int, rule: FusionRule | None = None
) -> list[tuple[str, str, float]]:
    """(document, best passage, score) by numpy and bm25s, by score."""
    rows = [(d.id, passage) for d in docs for name, _, passage in wanted_rows([d])]
    texts = [passage for _, passage in rows]
    vectors, vector = Letters().encode_passages(texts), Letters().encode_queries([query])
    nearest = (found[0].tolist() for found in top_k(vector, vectors, DEPTH))
    ranking = dict(zip(*nearest, strict=True))
    if mode != "dense":
        bm25 = BM25(texts)
        indices, scores = bm25.top_k([query], DEPTH)
        lexical = {int(i): float(s) for i, s in zip(indices[0], scores[0], strict=True) if s > 0}
        cosines = {row: float(vectors[row] @ vector[0]) for row in {*ranking, *lexical}}
        shares = {row: score / max_bm25(bm25, query) for row, score in lexical.items()}
        # Sentences of three words are too short to measure the weight of words by.
        rule = rule or FusionRule(chance=chance_of(vectors))
        ranking = lexical if mode == "lexical" else fuse_scores(cosines, shares, rule)
    best: dict[str, tuple[str, float]] = {}
    for row, score in ranking.items():
        best.setdefault(rows[row][0], (rows[row][1], score))
    if mode == "hybrid":
        sizes = Counter(name for name, _ in rows)
        factors = {name: (21 / (20 + size)) ** 0.1 for name, size in sizes.items()}
        best = {name: (text, score * factors[name]) for name, (text, score) in best.items()}
    found = sorted(best.items(), key=lambda pair: -pair[1][1])
    return [(name, *hit) for name, hit in found[:k]]
