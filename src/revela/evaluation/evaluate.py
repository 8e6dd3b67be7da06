"""Score retrievers on local folders in BEIR layout, alone and fused with BM25, and BM25.

Fusion and re-ranking are as in ``Index.search`` (ranking/steps.py), but over documents, not chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from revela.encoders.base import TextEncoder
from revela.encoders.prompts import OWN, GivenPrompts
from revela.errors import RevelaError
from revela.evaluation import runs
from revela.evaluation.collection import Collection, last_part, load_collection
from revela.evaluation.metrics import QueryScores, Run, per_query
from revela.evaluation.results import SystemScores
from revela.evaluation.significance import standings
from revela.ranking.fusion import FusionRule, Scores, check_weight
from revela.ranking.late_interaction import encode_packed
from revela.ranking.steps import MemoryStore, Rerank, SearchOptions
from revela.text.analyzer import check_language
from revela.types import Precision


class Evaluation(NamedTuple):
    """The scores of all systems on one collection.

    Attributes:
        references: the systems that others are tested against: BM25, and the first of several
            models.
        scores: by system, with intervals and p values.
    """

    name: str
    collection: Collection
    references: list[str]
    scores: dict[str, SystemScores]


@dataclass(frozen=True)
class EvalOptions:
    """Options of ``evaluate``.

    Args:
        rerank: "late-interaction" adds a system: the fusion with BM25, re-ranked by token vectors.
        max_tokens: truncate texts to this number of tokens instead of the models' own limits.
        precision: arithmetic; "auto" is the fastest of int8, bf16 and fp32 on this hardware.
        progress: show progress bars.
        language: language of the texts, as for ``Analyzer``; "auto" detects it per collection.
        weight: weight of the vectors in the fusion by score, 0 to 1; None: by the rule of
            fusion.py.
        runs: folder for TREC run files, one per system and collection.
        candidates: a TREC run per collection: only its best documents for a query are ranked; none:
            all documents.
        depth: candidates per query.
        prompts: prefixes of queries and of passages; None keeps the models' own.
    """

    rerank: Rerank | None = None
    max_tokens: int | None = None
    precision: Precision = "auto"
    progress: bool = False
    language: str = "auto"
    weight: float | None = None
    runs: Path | None = None
    prompts: GivenPrompts = OWN
    candidates: Sequence[Path] = ()
    depth: int = 1024


def evaluations(
    models: Sequence[str | Path],
    on: Sequence[str | Path],
    options: EvalOptions,
    indexes: Mapping[str, runs.SearchableIndex],
) -> Iterator[Evaluation]:
    """``revela.evaluate``, one collection at a time. ``indexes`` are those of the models that are
    indexes, by name.
    """
    from revela.encoders.load import load_encoder, resolve

    check_language(options.language)
    check_weight(options.weight)
    labelled = short_names(models)
    run_files = {
        label: runs.read_run(Path(name)) for label, name in labelled.items() if Path(name).is_file()
    }
    searched = {label: indexes[name] for label, name in labelled.items() if name in indexes}
    how = options.precision, options.max_tokens, options.prompts
    encoders = {
        label: load_encoder(resolve(name), *how, as_compared=True)
        for label, name in labelled.items()
        if label not in {*run_files, *searched}
    }
    if options.candidates and ({*run_files, *searched} or len(options.candidates) != len(on)):
        raise RevelaError("--candidates needs models and one run per folder of --on, in order")
    # Read all folders before scoring any, so that a bad one is refused at once.
    collections = {
        name: runs.with_ids_of(load_collection(Path(folder), options.language), searched, run_files)
        for name, folder in short_names(on).items()
    }
    for path, (name, whole) in zip(options.candidates, [*collections.items()], strict=False):
        collections[name] = whole.among(runs.read_candidates(path, whole), options.depth)
    for collection in collections.values():
        for label, run in run_files.items():
            runs.check_run(run, label, collection)
        if options.runs is not None:
            runs.check_ids(chain(collection.query_ids, collection.document_ids))
    references = ["BM25", *([*labelled][:1] if len(labelled) > 1 else ())]
    for name, collection in collections.items():
        own = rankings(collection, encoders, options.rerank, options.progress, options.weight)
        searches = runs.search_runs(collection, searched, options.rerank)
        scores = {}
        for system, run in chain(own, searches, run_files.items()):
            filtered = without_themselves(collection, run)
            scores[system] = per_query(collection.qrels, filtered)
            if options.runs is not None:
                path = options.runs / runs.file_name(name) / f"{runs.file_name(system)}.trec"
                runs.write_run(path, filtered, system)
        yield Evaluation(name, collection, references, standings(scores, references))


def short_names(names: Sequence[str | Path]) -> dict[str, str]:
    """Short name -> path or hub id. The short name is the last part, if no other name has it."""
    last = [last_part(Path(name)) for name in names]
    return {
        part if last.count(part) == 1 else str(name): str(name)
        for part, name in zip(last, names, strict=True)
    }


def outcomes(
    collection: Collection, encoders: Mapping[str, TextEncoder], rerank: Rerank | None = None
) -> dict[str, QueryScores]:
    """{system: scores} of ``rankings``."""
    return {
        system: per_query(collection.qrels, without_themselves(collection, run))
        for system, run in rankings(collection, encoders, rerank)
    }


def rankings(
    collection: Collection,
    encoders: Mapping[str, TextEncoder],
    rerank: Rerank | None = None,
    progress: bool = False,
    weight: float | None = None,
) -> Iterator[tuple[str, Run]]:
    """Rankings of BM25, and of each encoder: alone, fused with BM25 by score, and by rank (RRF).
    Dot products have no fixed scale, so they are fused by rank only.

    With ``rerank="late-interaction"``, also the fusion by score, re-ranked by token vectors.
    """
    yield "BM25", by_id(collection, collection.lexical)
    for name, encoder in encoders.items():
        by_tokens = rerank == "late-interaction" and not encoder.by_dot
        store = store_of(collection, encoder, by_tokens, progress)
        vectors = encoder.encode_queries(collection.queries)
        dense = collection.nearest(vectors, store.vectors_ND)
        yield name, by_id(collection, dense)
        asked = collection.queries, vectors, dense, collection.lexical
        if not encoder.by_dot:
            by_score = SearchOptions(weight=weight)
            yield f"{name} + BM25", by_id(collection, store.rankings(*asked, by_score))
        by_rank = SearchOptions(fusion="rank")
        yield f"{name} + BM25 (RRF)", by_id(collection, store.rankings(*asked, by_rank))
        if by_tokens:
            tokens = (encoder.query_tokens([query])[0] for query in collection.queries)
            options = SearchOptions(weight=weight, rerank="late-interaction")
            found = store.rankings(*asked, options, tokens)
            yield f"{name} + BM25 + late interaction", by_id(collection, found)


def store_of(
    collection: Collection, encoder: TextEncoder, by_tokens: bool = False, progress: bool = False
) -> MemoryStore:
    """Encode a collection, with token vectors if ``by_tokens``, and join it with its BM25."""
    packed: list[bytes] = []
    if by_tokens:
        vectors_ND, packed = encode_packed(encoder, collection.documents, progress)
    else:
        vectors_ND = encoder.encode_passages(collection.documents, progress=progress)
    rule = FusionRule()
    if not encoder.by_dot:
        rule = collection.calibrate(encoder, vectors_ND, by_tokens=by_tokens).rule
    return MemoryStore(collection.bm25, vectors_ND, rule, packed, collection.document_ids)


def by_id(collection: Collection, rankings: Sequence[Scores]) -> Run:
    """Rankings of rows as a run of ids. Of several passages with the same id the first counts."""
    ids = collection.document_ids
    run: dict[str, dict[str, float]] = {query: {} for query in collection.query_ids}
    for scores, ranking in zip(run.values(), rankings, strict=True):
        for row, score in ranking.items():
            scores.setdefault(ids[row], score)
    return run


def without_themselves(collection: Collection, run: Run) -> Run:
    """The run of the judged queries. A query that is a document does not find itself."""
    documents = collection.among_documents
    return {
        query: {d: s for d, s in run.get(query, {}).items() if d != query or query not in documents}
        for query in collection.query_ids
    }
