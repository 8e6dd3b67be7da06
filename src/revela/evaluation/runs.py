"""Runs (a ranking per query): make them by searching indexes, read and write them as TREC files."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from revela.errors import RevelaError
from revela.evaluation.collection import Collection
from revela.evaluation.metrics import Run
from revela.files import atomic_write
from revela.ranking.steps import QUERY_CHARACTERS, Rerank
from revela.terminal import counted
from revela.text.readers.common import numbered_lines
from revela.types import Hits

log = logging.getLogger(__name__)

TOP = 100  # documents per query


class SearchableIndex(Protocol):
    """The methods of an index (``revela.Index``) that an evaluation calls."""

    def search_many(self, queries: Iterable[str], **options: Any) -> Iterator[Hits]: ...

    def ids_among(self, documents: Sequence[str]) -> Set[str]:
        """The ids in ``documents`` that the index has."""

    def example_ids(self) -> list[str]:
        """Some ids of the index."""


def search_runs(
    collection: Collection, indexes: Mapping[str, SearchableIndex], rerank: Rerank | None
) -> Iterator[tuple[str, Run]]:
    """The run of each index; with ``rerank="late-interaction"`` also a re-ranked run."""
    queries = [query[:QUERY_CHARACTERS] for query in collection.queries]
    if indexes and (cut := sum(a != b for a, b in zip(queries, collection.queries, strict=True))):
        log.warning(
            f"{counted(cut, 'query is', 'queries are')} cut to {QUERY_CHARACTERS:,} characters, "
            f"the maximum for an index ({collection.name})"
        )
    for name, index in indexes.items():
        for how in (None, rerank) if rerank == "late-interaction" else (None,):
            results = index.search_many(queries, k=TOP, rerank=how)
            pairs = zip(collection.query_ids, results, strict=True)
            run = {query: {hit.id: hit.score for hit in hits} for query, hits in pairs}
            yield f"{name} + late interaction" if how else name, run


def with_ids_of(
    collection: Collection, indexes: Mapping[str, SearchableIndex], runs: Mapping[str, Run]
) -> Collection:
    """The collection with ids of passages or of documents, whichever the indexes and runs have.

    Raises:
        RevelaError: an index or a run has neither.
    """
    forms = [collection, *([collection.by_document()] if collection.sources else [])]
    for name in (*indexes, *runs):
        if name in indexes:
            shared = [form for form in forms if indexes[name].ids_among(form.relevant)]
            ids = indexes[name].example_ids()
        else:
            ids = list(chain.from_iterable(runs[name].values()))
            shared = [form for form in forms if not {*ids}.isdisjoint(form.document_ids)]
        if not shared:
            raise RevelaError(
                f"{name} does not have the documents of {collection.name} (it has ids such as "
                f"{', '.join(ids[:1])} instead of {forms[0].relevant[0]}): index its corpus.jsonl"
            )
        forms = shared
        if name in indexes:
            held = indexes[name].ids_among(forms[0].relevant)
            if missing := len(forms[0].relevant) - len(held):
                lacks = counted(missing, "relevant document")
                log.warning(f"{name} lacks {lacks} of {collection.name}")
    if forms[0] is not collection:
        log.info(f"{collection.name}: finding a passage's document counts as finding the passage")
    return forms[0]


def check_ids(names: Iterable[str]) -> None:
    """Raise RevelaError for ids with spaces, which separate the columns of a run file."""
    if bad := next((name for name in names if len(name.split()) != 1), None):
        raise RevelaError(
            f"the id {bad!r} has a space, which a TREC run cannot have: give other ids"
        )


def check_run(run: Run, name: str, collection: Collection) -> None:
    """Raise RevelaError if a run has no judged query; log how many it lacks."""
    missing = [query for query in collection.query_ids if query not in run]
    if len(missing) == len(collection.query_ids):
        raise RevelaError(
            f"{name} has queries such as {next(iter(run))} instead of {missing[0]}: give a run of "
            f"{collection.name}"
        )
    if missing:
        lacks = counted(len(missing), "query", "queries")
        log.warning(f"{name} lacks {lacks} of {collection.name}, scored as 0")


def read_candidates(path: Path, collection: Collection) -> Run:
    """Read a run of a collection, with a ranking for each of its queries."""
    run, documents, name = read_run(path), {*collection.document_ids}, collection.name
    for number, columns in _rows_of(path):
        if (document := columns[2]) not in documents:
            raise RevelaError(f"{path}:{number}: {name} has no {document}: give a run of {name}")
    if missing := [query for query in collection.query_ids if query not in run]:
        raise RevelaError(f"{path} lacks the query {missing[0]} of {name}: give a run of all")
    return run


def file_name(system: str) -> str:
    """A system's name without characters that are special in a shell.

    >>> file_name("minilm-l6 + BM25 (RRF)")
    'minilm-l6-BM25-RRF'
    """
    return "-".join(re.findall(r"[\w.]+", system))


def write_run(path: Path, run: Run, system: str) -> None:
    """Write a run file: query-id, Q0, document-id, rank, score and the system's name."""
    check_ids(chain(run, chain.from_iterable(run.values())))
    name = file_name(system)
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(
            f"{query} Q0 {document} {rank} {score} {name}\n"
            for query, ranking in run.items()
            for rank, (document, score) in enumerate(ranking.items(), 1)
        )


def _rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number, columns) of the lines that are not blank."""
    for number, line in numbered_lines(path):
        if columns := line.split():
            yield number, columns


def read_run(path: Path) -> Run:
    """Read a run file: query id -> document id -> score, best first."""
    run: dict[str, dict[str, float]] = {}
    for number, columns in _rows_of(path):
        try:
            query, _, document, _, given, _ = columns
            score = float(given)
            if not math.isfinite(score):
                raise ValueError
        except ValueError:
            raise RevelaError(
                f"{path}:{number} is not a TREC run: give query-id Q0 document-id rank score name"
            ) from None
        if document in run.setdefault(query, {}):
            raise RevelaError(
                f"{path}:{number} ranks {document} for {query} again: give each system its own file"
            )
        run[query][document] = score
    if not run:
        raise RevelaError(f"{path} is empty: give a TREC run, a model or an index")
    return {
        query: dict(sorted(scores.items(), key=lambda pair: -pair[1]))
        for query, scores in run.items()
    }
