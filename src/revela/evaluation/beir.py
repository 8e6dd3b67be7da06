"""Score retrievers on local folders in BEIR layout, alone and fused with BM25, beside BM25.

A folder holds corpus.jsonl and queries.jsonl (each may be .gz), and qrels/test.tsv with the columns
query-id, corpus-id and score (judgements.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.corpus.judgements import read_judgements, read_rows, refuse_unknown
from revela.errors import RevelaError
from revela.evaluation.metrics import means, per_query
from revela.evaluation.results import SystemScores
from revela.evaluation.significance import standings
from revela.index.bm25 import BM25
from revela.index.calibration import Calibration, SentenceTest
from revela.index.contexts import Choice, Context, refuse_without_slots, slots_of
from revela.index.exact import top_k
from revela.index.fusion import DEPTH as FUSED
from revela.index.fusion import check_weight, fuse_scores, reciprocal_rank_fusion
from revela.index.language import check_language
from revela.index.rerank import (
    READ,
    RERANKED,
    Rerank,
    Reranking,
    encode_packed,
    term_weights,
    with_reranker,
    with_tokens,
)
from revela.settings import Precision, Retriever
from revela.types import Encoder, Reranker, TokenEncoder, Vectors, evenly

DEPTH = 1000  # of the dense and lexical rankings, as MAP is usually computed at 1000

Ranking = dict[int, float]
"""Documents (their indices) and scores for a query, best first."""


@dataclass(frozen=True)
class Collection:
    """A test collection: documents (title and text), queries, and graded judgements by query id and
    document id.
    """

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: dict[str, dict[str, int]]
    language: str = "auto"  # of its words

    @cached_property
    def lexical(self) -> list[Ranking]:
        """BM25's ranking for each query: at most 1000 documents, all of which hold a word of it."""
        found = _rankings(*self.bm25.top_k(self.queries, DEPTH))
        return [{d: score for d, score in ranking.items() if score > 0} for ranking in found]

    @cached_property
    def best_lexical(self) -> Vectors:
        """(Q,): the highest BM25 score that a document could have."""
        return self.bm25.best(self.queries)

    @cached_property
    def among_documents(self) -> frozenset[str]:
        """Queries that are documents too, under the same id, as in ArguAna and Quora: there, as in
        BEIR, no query finds itself. The texts are compared, as many collections number queries and
        documents apart.
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
        return self._test(encoder, vectors_ND[evenly(len(vectors_ND))])

    @cached_property
    def _test(self) -> SentenceTest:
        return SentenceTest(sample(self), self.bm25.terms.language)

    @cached_property
    def bm25(self) -> BM25:
        return BM25(self.documents, self.language)


@dataclass(frozen=True)
class Outcome:
    """Results of one system: metrics of each judged query, and the id of the document it ranks
    first, if it finds any.
    """

    scores: dict[str, dict[str, float]]
    first: dict[str, str]

    def means(self) -> dict[str, float]:
        """Metrics averaged over the queries."""
        return means(self.scores)


@dataclass(frozen=True)
class Evaluation:
    """A collection, the models that were scored on it, and the outcomes of all systems."""

    name: str
    collection: Collection
    models: list[str]
    outcomes: dict[str, Outcome]
    contexts: dict[str, str] = field(default_factory=dict)
    """What each model with slots reads as its context."""

    @property
    def references(self) -> list[str]:
        """Systems that others are tested against: BM25 and, of several models, the first."""
        return ["BM25", *(self.models[:1] if len(self.models) > 1 else ())]

    @cached_property
    def scores(self) -> dict[str, SystemScores]:
        """Scores by system, with intervals and p values."""
        return standings(self.outcomes, self.references)


def evaluate(
    models: Sequence[str | Path],
    on: Sequence[str | Path],
    *,
    rerank: Rerank | None = None,
    lm: str = Retriever.offline_model,
    max_tokens: int | None = None,
    precision: Precision = "auto",
    progress: bool = False,
    context: Choice | None = None,
    context_seed: int = 0,
    language: str = "auto",
    weight: float | None = None,
) -> dict[str, dict[str, SystemScores]]:
    r"""Score retrievers on judged collections, beside BM25 and their fusion with it.

    Args:
        models: Sentence-Transformers folders, hub ids or embedded:minilm-l6; none scores BM25 only.
        on: folders in BEIR layout: corpus.jsonl, queries.jsonl, qrels/test.tsv.
        rerank: re-rank the fusion with BM25 as one more system, by token vectors ("tokens") or by
            the attention heads of a language model ("heads").
        lm: language model of ``rerank="heads"``.
        max_tokens: truncate texts to this length.
        precision: arithmetic; "auto" is bf16 where the hardware has it.
        progress: show progress bars.
        context: of models that read one: "corpus" draws it from the documents of each collection
            (the default), "saved" is the one of their training, "none" has no documents; or texts,
            or a file with a text per line.
        context_seed: of the draw.
        language: of the words, as ``Analyzer`` takes it; "auto" finds it in each collection.
        weight: of the vectors in the fusion by score, 0 to 1; None: by the rule of fusion.py.

    Returns:
        {collection: {system: scores}}. Systems are "BM25", each model, "MODEL + BM25" (fused by
        score) and "MODEL + BM25 (RRF)"; p values are against BM25 and, of several models, the
        first.

    Raises:
        RevelaError: a model or a folder cannot be read, the language is unknown, or a model gives
            vectors that are not finite.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "sea")
        >>> (folder / "qrels").mkdir(parents=True)
        >>> rows = '{"_id": "a", "text": "The sea is salt."}\n{"_id": "b", "text": "A hill."}\n'
        >>> _ = (folder / "corpus.jsonl").write_text(rows)
        >>> _ = (folder / "queries.jsonl").write_text('{"_id": "q", "text": "ocean water"}\n')
        >>> _ = (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
        >>> scores = evaluate(["embedded:minilm-l6"], [folder])
        >>> scores["sea"]["embedded:minilm-l6"].means["ndcg@10"]
        1.0
    """
    how = (rerank, lm, max_tokens, precision, progress, context, context_seed, language, weight)
    done = evaluations(models, on, *how)
    return {evaluation.name: evaluation.scores for evaluation in done}


def evaluations(
    models: Sequence[str | Path],
    on: Sequence[str | Path],
    rerank: Rerank | None,
    lm: str,
    max_tokens: int | None,
    precision: Precision,
    progress: bool,
    context: Choice | None = None,
    context_seed: int = 0,
    language: str = "auto",
    weight: float | None = None,
) -> Iterator[Evaluation]:
    """``evaluate``, a collection at a time and with the outcome of every query."""
    from revela.retriever.load import load_encoder
    from revela.weights import resolve

    check_language(language)
    check_weight(weight)
    encoders = {
        label: load_encoder(resolve(name), precision, max_tokens)
        for label, name in labelled(models).items()
    }
    known = Context.of("corpus" if context is None else context, context_seed)
    if context is not None:
        refuse_without_slots(list(encoders.values()))
    # All folders are read before the first is scored, so that a bad one costs nothing.
    collections = {
        name: load_collection(Path(folder), language=language)
        for name, folder in labelled(on).items()
    }
    reranking: Reranking | None = None if rerank == "heads" else rerank
    if rerank == "heads" and collections:
        from revela.index.listwise import load_query_heads

        reranking = load_query_heads(lm, lambda: sample(next(iter(collections.values()))))
    for name, collection in collections.items():
        texts = collection.documents
        readers = {label: known.into(encoder, texts) for label, encoder in encoders.items()}
        found = outcomes(collection, readers, rerank=reranking, progress=progress, weight=weight)
        contexts = {
            label: f"a context of {encoder.slots} slots, {known.describe()}"
            for label, encoder in encoders.items()
            if slots_of(encoder)
        }
        yield Evaluation(name, collection, list(encoders), found, contexts)


def labelled(names: Sequence[str | Path]) -> dict[str, str]:
    """Paths or hub ids by their last part, or in full where several have the same last part."""
    short = [Path(name).name for name in names]
    return {
        brief if short.count(brief) == 1 else str(name): str(name)
        for brief, name in zip(short, names, strict=True)
    }


def load_collection(folder: Path, split: str = "test", language: str = "auto") -> Collection:
    """Read a folder in BEIR layout; queries without a relevant document are dropped.

    Raises:
        RevelaError: a file is missing or damaged, or the qrels name ids that the corpus or the
            queries lack.
    """
    corpus = {
        str(r["_id"]): f"{r.get('title') or ''} {r['text']}".strip()
        for r in read_rows(folder, "corpus.jsonl")
    }
    if not corpus:
        raise RevelaError(f"{folder}: corpus.jsonl is empty")
    queries, qrels = read_judgements(folder, split)
    path = folder / "qrels" / f"{split}.tsv"
    refuse_unknown(path, "corpus-id", {d for row in qrels.values() for d in row}, corpus)
    kept = {q: qrels[q] for q in queries}
    texts = list(queries.values())
    documents = list(corpus), list(corpus.values())
    return Collection(folder.name, *documents, list(queries), texts, kept, language)


def sample(collection: Collection) -> list[str]:
    """At most a thousand documents, evenly spaced."""
    return [collection.documents[i] for i in evenly(len(collection.documents))]


def mean_outcomes(
    collection: Collection, encoders: Mapping[str, Encoder]
) -> dict[str, dict[str, float]]:
    """Mean metrics of ``outcomes``: {system: {metric: score}}."""
    return {name: outcome.means() for name, outcome in outcomes(collection, encoders).items()}


def outcomes(
    collection: Collection,
    encoders: Mapping[str, Encoder],
    *,
    rerank: Reranking | None = None,
    progress: bool = False,
    weight: float | None = None,
) -> dict[str, Outcome]:
    """Outcomes by system: BM25, and each encoder alone, fused with BM25 by score, and by rank
    (RRF).

    Args:
        collection: documents and judged queries.
        encoders: by name.
        rerank: also re-rank the fusion by score, by token vectors (of encoders that give them) or
            by a listwise re-ranker.
        progress: show a bar.
        weight: of the vectors in the fusion by score; None: by the rule.

    Raises:
        RevelaError: an encoder gives vectors that are not finite.
    """
    found = {"BM25": _outcome(collection, collection.lexical)}
    for name, encoder in encoders.items():
        reader = encoder if rerank == "tokens" and isinstance(encoder, TokenEncoder) else None
        tokens: list[bytes] = []
        if reader:
            passages, tokens = encode_packed(reader, collection.documents)
        else:
            passages = encoder.encode_passages(collection.documents, progress=progress)
        queries = encoder.encode_queries(collection.queries)
        dense, cosines = top_k(queries, passages, DEPTH)
        found[name] = _outcome(collection, _rankings(dense, cosines))
        odds = collection.calibrate(encoder, passages).odds
        by_score, by_rank = hybrid(collection, queries, passages, dense, odds, weight)
        fused = {f"{name} + BM25": by_score, f"{name} + BM25 (RRF)": by_rank}
        if reader:
            fused[f"{name} + BM25 + tokens"] = reranked(collection, reader, by_score, tokens, odds)
        elif rerank is not None and rerank != "tokens":
            again = read_again(collection, rerank, by_score, progress)
            fused[f"{name} + BM25 + heads"] = list(again)
        found |= {label: _outcome(collection, rankings) for label, rankings in fused.items()}
    return found


def reranked(
    collection: Collection,
    encoder: TokenEncoder,
    rankings: Sequence[Mapping[int, float]],
    tokens: Sequence[bytes],
    odds: float,
) -> list[Ranking]:
    """Rankings whose first documents are re-ranked by token vectors.

    Args:
        collection: documents and queries.
        encoder: of the tokens.
        rankings: of each query.
        tokens: ``packed_signs`` of each document.
        odds: of the corpus.
    """
    again, bm25 = [], collection.bm25
    for query, ranking in zip(collection.queries, rankings, strict=True):
        first = [tokens[document] for document in list(ranking)[:RERANKED]]
        weights = term_weights(query, bm25.terms, bm25.idf)
        (read,) = encoder.query_tokens([query])
        scores = with_tokens(read, list(ranking.values()), first, weights, odds)
        again.append(dict(sorted(zip(ranking, scores, strict=True), key=lambda pair: -pair[1])))
    return again


def read_again(
    collection: Collection,
    reranker: Reranker,
    rankings: Sequence[Mapping[int, float]],
    progress: bool = False,
) -> Iterator[Ranking]:
    """Rankings whose first documents are re-ranked by a listwise re-ranker; arguments as for
    ``reranked``.
    """
    queries = tqdm(collection.queries, unit="query", disable=not progress)
    for query, ranking in zip(queries, rankings, strict=True):
        first = [collection.documents[document] for document in list(ranking)[:READ]]
        yield with_reranker(query, ranking, first, reranker)


def hybrid(
    collection: Collection,
    queries: Vectors,
    passages: Vectors,
    dense: NDArray[np.int64],
    odds: float,
    weight: float | None = None,
) -> tuple[list[Ranking], list[Ranking]]:
    """Fusions of dense and lexical rankings by score and by rank, a ranking per query.

    Args:
        collection: documents and queries.
        queries: (Q, D) vectors.
        passages: (N, D) vectors.
        dense: (Q, K) nearest documents of each query, best first.
        odds, weight: as for ``fuse_scores``.
    """
    by_score, by_rank = [], []
    for query, near, lexical, best in zip(
        queries, dense, collection.lexical, collection.best_lexical, strict=True
    ):
        shares = {d: float(score / best) for d, score in islice(lexical.items(), FUSED)}
        nearest = near[:FUSED].tolist()
        by_score.append(fuse(query, passages, nearest, shares, odds, weight))
        by_rank.append(reciprocal_rank_fusion([nearest, list(shares)]))
    return by_score, by_rank


def fuse(
    query_D: Vectors,
    passages_ND: Vectors,
    near: Sequence[int],
    shares: Mapping[int, float],
    odds: float,
    weight: float | None = None,
) -> Ranking:
    """The fusion by score for one query.

    Args:
        query_D: its vector.
        passages_ND: all vectors.
        near: the passages nearest to the query.
        shares: the passages that BM25 finds, with their shares of the highest possible score.
        odds, weight: as for ``fuse_scores``.
    """
    candidates = list(dict.fromkeys([*near, *shares]))
    cosines = dict(zip(candidates, (passages_ND[candidates] @ query_D).tolist(), strict=True))
    return fuse_scores(cosines, shares, odds, weight)


def _rankings(indices_QK: NDArray[np.int64], scores_QK: Vectors) -> list[Ranking]:
    """A ranking per query."""
    rows = zip(indices_QK.tolist(), scores_QK.tolist(), strict=True)
    return [dict(zip(indices, scores, strict=True)) for indices, scores in rows]


def _outcome(collection: Collection, rankings: Sequence[Ranking]) -> Outcome:
    """The outcome of a ranking per query; a query that is a document too does not find itself."""
    ids, itself = collection.document_ids, collection.among_documents
    run = {
        query: {ids[d]: s for d, s in ranking.items() if ids[d] != query or query not in itself}
        for query, ranking in zip(collection.query_ids, rankings, strict=True)
    }
    first = {query: next(iter(ranking)) for query, ranking in run.items() if ranking}
    return Outcome(per_query(collection.qrels, run), first)
