"""Rankings that no model makes here: of an index, as it is searched, and of run files in TREC's
format.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from revela.corpus.readers.common import numbered_lines
from revela.errors import RevelaError
from revela.evaluation.metrics import Run
from revela.files import atomic_write
from revela.index.manifest import INFO

if TYPE_CHECKING:
    from revela.evaluation.collection import Collection
    from revela.index.index import Index
    from revela.index.rerankers import Rerank

log = logging.getLogger(__name__)

TOP = 100  # documents that an index is asked for


def is_index(name: str) -> bool:
    """Whether this is the folder of an index, not of a model."""
    return (Path(name) / INFO).is_file()


def searched(
    collection: Collection, indexes: Mapping[str, Index], rerank: Rerank | None
) -> Iterator[tuple[str, Run]]:
    """What each index finds, as it is searched, and re-ranked."""
    for name, index in indexes.items():
        for how in dict.fromkeys((None, rerank)):
            hits = index.search_many(collection.queries, k=TOP, rerank=how)
            found = zip(collection.query_ids, hits, strict=True)
            run = {query: {hit.id: hit.score for hit in some} for query, some in found}
            yield f"{name} + {how}" if how else name, run


def by_known_ids(
    collection: Collection, indexes: Mapping[str, Index], runs: Mapping[str, Run]
) -> Collection:
    """The collection, or the documents of its passages: whichever ids the indexes and runs have.

    Raises:
        RevelaError: they have no relevant document of either, or no document at all.
    """
    both = [collection, *([collection.by_document()] if collection.sources else [])]
    for name in (*indexes, *runs):
        if name in indexes:
            known = [some for some in both if indexes[name].table.digests(some.relevant)]
            own = indexes[name].table.sample("id")["id"].to_pylist()[:1]
        else:
            own = list(chain.from_iterable(runs[name].values()))
            known = [some for some in both if not {*own}.isdisjoint(some.document_ids)]
        if not known:
            raise RevelaError(
                f"{name} does not have the documents of {collection.name}: its ids are such as "
                f"{', '.join(own[:1])}, those of {collection.name} such as "
                f"{both[0].relevant[0]}; index the corpus.jsonl of {collection.name}"
            )
        both = known
        if name in indexes:
            held = indexes[name].table.digests(both[0].relevant)
            if lacks := len(both[0].relevant) - len(held):
                log.warning(f"{name} lacks {lacks:,} relevant documents of {collection.name}")
    if both[0] is not collection:
        log.info(f"{collection.name}: passages count as their documents, which are searched for")
    return both[0]


def check_ids(names: Iterable[str]) -> None:
    """Refuse ids that cannot stand in a run file."""
    if bad := next((name for name in names if len(name.split()) != 1), None):
        raise RevelaError(
            f"the id {bad!r} has a space, which separates the columns of a TREC run: give other ids"
        )


def check_run(run: Run, name: str, collection: Collection) -> None:
    """Refuse a run of other queries; say how many judged queries it lacks."""
    lacks = [query for query in collection.query_ids if query not in run]
    if len(lacks) == len(collection.query_ids):
        raise RevelaError(
            f"{name} ranks no judged query of {collection.name}: its queries are such as "
            f"{next(iter(run))}, those of {collection.name} such as {lacks[0]}"
        )
    if lacks:
        log.warning(f"{name} lacks {len(lacks):,} queries of {collection.name}, which count as 0")


def file_name(system: str) -> str:
    """A system's name without what a shell reads.

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


def read_run(path: Path) -> Run:
    """Scores by query id and document id, best first."""
    run: dict[str, dict[str, float]] = {}
    for number, (query, document, score) in _rows(path):
        if document in run.setdefault(query, {}):
            raise RevelaError(
                f"{path}:{number} names {document} for {query} a second time: give each system a "
                "file of its own"
            )
        run[query][document] = score
    if not run:
        raise RevelaError(f"{path} is empty: give a TREC run, a model or an index")
    return {
        query: dict(sorted(found.items(), key=lambda pair: -pair[1]))
        for query, found in run.items()
    }


def _rows(path: Path) -> Iterator[tuple[int, tuple[str, str, float]]]:
    for number, line in numbered_lines(path):
        try:
            query, _, document, _, given, _ = line.split()
            score = float(given)
            if not math.isfinite(score):
                raise ValueError
        except ValueError:
            raise RevelaError(
                f"{path}:{number} is no line of a TREC run, which has six columns: query-id, Q0, "
                "document-id, rank, score, name"
            ) from None
        yield number, (query, document, score)
