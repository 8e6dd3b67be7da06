"""Score retrievers on BEIR-layout folders, offline, beside BM25 and the fusion of both.

A folder holds corpus.jsonl, queries.jsonl (each also .gz) and qrels/test.tsv (query-id, corpus-id,
score; header line).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.corpus.readers.opened import opened_text
from revela.errors import RevelaError
from revela.evaluation.metrics import means, per_query, top_k
from revela.index.bm25 import BM25
from revela.index.fusion import DEPTH as FUSED
from revela.index.fusion import Geometry, evenly, fuse_scores, reciprocal_rank_fusion
from revela.index.rerank import READ, RERANKED, Reranking, encode_packed, with_reranker, with_tokens
from revela.index.statistics import Statistics
from revela.types import Encoder, Reranker, TokenEncoder, Vectors

DEPTH = 1000  # of the dense and lexical runs, as MAP is computed at 1000 by custom

Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Collection:
    """A test collection: texts with the title in front, judged queries, and graded judgements."""

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]

    @cached_property
    def lexical(self) -> tuple[NDArray[np.int64], Vectors]:
        """What BM25 finds for each query: indices and scores, (Q, at most 1000). Made once, however
        many runs are scored.
        """
        return self._bm25.top_k(self.queries, DEPTH)

    @cached_property
    def best_lexical(self) -> Vectors:
        """(Q,): the best BM25 score that a document could have."""
        return self._bm25.best(self.queries)

    @cached_property
    def _bm25(self) -> BM25:
        return BM25(self.documents)


def load_collection(folder: Path, split: str = "test") -> Collection:
    """Read a BEIR-layout folder; only queries with a relevant document are kept.

    Raises:
        RevelaError: a file is missing or damaged, or the qrels name ids that the corpus or the
            queries lack.
    """
    corpus = {
        str(r["_id"]): f"{r.get('title') or ''} {r['text']}".strip()
        for r in _rows(folder, "corpus.jsonl")
    }
    queries = {str(r["_id"]): str(r["text"]) for r in _rows(folder, "queries.jsonl")}
    qrels = _read_qrels(folder / "qrels" / f"{split}.tsv")
    if not corpus or not qrels:
        raise RevelaError(
            f"{folder}: {'corpus.jsonl' if not corpus else f'qrels/{split}.tsv'} is empty"
        )
    for kind, known, named in (
        ("corpus-id", corpus, {d for judged in qrels.values() for d in judged}),
        ("query-id", queries, set(qrels)),
    ):
        if unknown := sorted(named - known.keys()):
            where = "corpus.jsonl" if kind == "corpus-id" else "queries.jsonl"
            raise RevelaError(
                f"{folder / 'qrels' / f'{split}.tsv'} names {len(unknown)} {kind}s that {where} lacks (first: {unknown[0]}): "
                "mend the one or the other"
            )
    judged = [q for q in qrels if any(score > 0 for score in qrels[q].values())]
    if not judged:
        raise RevelaError(
            f"{folder}: no query has a relevant document in qrels/{split}.tsv: give scores above 0 to what should be found"
        )
    if empty := [q for q in judged if not queries[q].strip()]:
        raise RevelaError(
            f"{folder}: {len(empty)} judged queries of queries.jsonl are empty (first: {empty[0]}): write them, or drop them from the qrels"
        )
    return Collection(
        folder.name,
        list(corpus),
        list(corpus.values()),
        judged,
        [queries[q] for q in judged],
        {q: qrels[q] for q in judged},
    )


def sample(collection: Collection) -> list[str]:
    """At most a thousand documents, evenly chosen."""
    return [collection.documents[i] for i in evenly(len(collection.documents))]


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise RevelaError(f"{folder} is not a BEIR-layout folder: it has no {name} (nor {name}.gz)")
    rows = []
    with opened_text(path) as handle:
        try:
            for line in handle:
                if line.strip():
                    row = json.loads(line)
                    row["_id"], row["text"]  # both are needed; a missing one is reported below
                    rows.append(row)
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise RevelaError(
                f"{path}: line {len(rows) + 1} or so cannot be read ({type(error).__name__}: {error})"
            ) from error
    return rows


def _read_qrels(path: Path) -> dict[str, dict[str, int]]:
    if not path.is_file():
        raise RevelaError(f"{path} does not exist: a BEIR-layout folder has its judgements there")
    qrels: dict[str, dict[str, int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split("\t")
        if number == 1 and fields[-1].strip() == "score":
            continue
        try:
            query, document, score = fields
            qrels.setdefault(query, {})[document] = int(float(score))
        except ValueError:
            raise RevelaError(
                f"{path}:{number} is not query-id, corpus-id and score with tabs between"
            ) from None
    return qrels


@dataclass(frozen=True)
class Outcome:
    """What one system found: each judged query's metrics, and the id of the document it puts first."""

    scores: dict[str, dict[str, float]]
    first: dict[str, str]

    def means(self) -> dict[str, float]:
        """Metrics averaged over the queries."""
        return means(self.scores)


def evaluate(collection: Collection, encoders: Mapping[str, Encoder]) -> Scores:
    """Metrics of BM25, and of each encoder alone and fused with BM25: {system: {metric: score}}."""
    return {name: outcome.means() for name, outcome in outcomes(collection, encoders).items()}


def outcomes(
    collection: Collection,
    encoders: Mapping[str, Encoder],
    *,
    rerank: Reranking | None = None,
    progress: bool = False,
) -> dict[str, Outcome]:
    """What BM25 finds, and each encoder alone and fused with BM25 (by score, and by rank: RRF), by
    system.

    Args:
        collection: documents and judged queries.
        encoders: by name.
        rerank: order what the fusion by score found again, as one more system: by tokens, for
            encoders that give them, or by the heads of an LM.
        progress: show a bar.

    Raises:
        RevelaError: an encoder gives vectors that are not finite.
    """
    found = {"BM25": _outcome(collection, *collection.lexical)}
    for name, encoder in encoders.items():
        reader = encoder if rerank == "tokens" and isinstance(encoder, TokenEncoder) else None
        tokens: list[bytes] = []
        if reader:
            passages, tokens = encode_packed(reader, collection.documents)
        else:
            passages = encoder.encode_passages(collection.documents, progress=progress)
        queries = encoder.encode_queries(collection.queries)
        dense, cosines = top_k(queries, passages, DEPTH)
        found[name] = _outcome(collection, dense, cosines)
        by_score, by_rank = hybrid(collection, queries, passages, dense)
        fused = {f"{name} + BM25": by_score, f"{name} + BM25 (RRF)": by_rank}
        if reader:
            fused[f"{name} + BM25 + tokens"] = reranked(collection, reader, by_score, tokens)
        elif rerank is not None and rerank != "tokens":
            fused[f"{name} + BM25 + heads"] = list(
                read_again(collection, rerank, by_score, progress)
            )
        for label, rankings in fused.items():
            found[label] = _outcome(
                collection, rankings, (ranking.values() for ranking in rankings)
            )
    return found


def reranked(
    collection: Collection,
    encoder: TokenEncoder,
    rankings: Sequence[Mapping[int, float]],
    tokens: Sequence[bytes],
) -> list[dict[int, float]]:
    """Rankings whose first documents are ordered again by their tokens.

    Args:
        collection: documents and queries.
        encoder: of the tokens.
        rankings: of each query, documents and scores, best first.
        tokens: ``packed_signs`` of each document.
    """
    with tempfile.TemporaryDirectory() as scratch:
        words = Statistics(Path(scratch))
        words.add(collection.documents)
        again = []
        for query, ranking in zip(collection.queries, rankings, strict=True):
            first = [tokens[document] for document in list(ranking)[:RERANKED]]
            scores = with_tokens(query, list(ranking.values()), first, encoder, words.idf)
            again.append(dict(sorted(zip(ranking, scores, strict=True), key=lambda pair: -pair[1])))
        return again


def read_again(
    collection: Collection,
    reranker: Reranker,
    rankings: Sequence[Mapping[int, float]],
    progress: bool = False,
) -> Iterator[dict[int, float]]:
    """Rankings whose first documents an LM has read, and ordered again; arguments as above."""
    for query, ranking in zip(
        tqdm(collection.queries, unit="query", disable=not progress), rankings, strict=True
    ):
        yield with_reranker(
            query,
            ranking,
            [collection.documents[document] for document in list(ranking)[:READ]],
            reranker,
        )


def hybrid(
    collection: Collection, queries: Vectors, passages: Vectors, dense: NDArray[np.int64]
) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    """Both fusions of what the vectors find with what BM25 finds, by score and by rank: for each
    query, documents and scores, best first.

    Args:
        collection: documents and queries.
        queries, passages: their vectors.
        dense: the nearest documents of each query, best first.
    """
    by_score, by_rank = [], []
    geometry = Geometry.of(passages)
    for query, near, lexical, scores, best in zip(
        queries, dense, *collection.lexical, collection.best_lexical, strict=True
    ):
        shares = {
            int(d): float(s / best) for d, s in zip(lexical[:FUSED], scores, strict=False) if s > 0
        }
        by_score.append(fuse(query, passages, near[:FUSED].tolist(), shares, geometry))
        by_rank.append(reciprocal_rank_fusion([near[:FUSED].tolist(), list(shares)]))
    return by_score, by_rank


def fuse(
    query_D: Vectors,
    passages: Vectors,
    near: Sequence[int],
    shares: Mapping[int, float],
    geometry: Geometry,
) -> dict[int, float]:
    """The fusion by score for one query: passages and scores, best first.

    Args:
        query_D: its vector.
        passages: all vectors, (N, D).
        near: the passages nearest to it.
        shares: those that BM25 finds, with their shares of the best possible score.
        geometry: of the passages.
    """
    candidates = list(dict.fromkeys([*near, *shares]))
    cosines = dict(zip(candidates, (passages[candidates] @ query_D).tolist(), strict=True))
    return fuse_scores(cosines, shares, float(query_D @ geometry.mean), geometry.spread)


def _outcome(
    collection: Collection, indices: Iterable[Iterable[int]], values: Iterable[Iterable[float]]
) -> Outcome:
    """Metrics of rankings, best first: for each query the documents' indices and their scores."""
    ids = collection.document_ids
    run = {
        query: {ids[d]: float(s) for d, s in zip(row, scores, strict=True)}
        for query, row, scores in zip(collection.query_ids, indices, values, strict=True)
    }
    return Outcome(
        per_query(collection.qrels, run),
        {query: next(iter(ranking)) for query, ranking in run.items()},
    )
