"""Corpora -> a folder of groups: what a training run does before its first step, done once."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

from sentence_transformers import SentenceTransformer

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.errors import RevelaError
from revela.groups.documents import mixed_groups
from revela.groups.folder import KEPT, GroupFolder, Member, refuse_out, save_groups
from revela.groups.ready import group_members, holds_groups
from revela.groups.training_set import TrainingSet, split_held_out
from revela.retriever.build import untrained_retriever
from revela.settings import Recipe
from revela.silence import silence_libraries
from revela.types import Chunk, Document
from revela.weights import find_weights

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Domain:
    """One corpus's share: its documents, those held out, the rows of its chunks, and its groups as
    indices of these.
    """

    documents: ArrowList[Document]
    held_out: Sequence[Document]
    rows: ArrowList[Chunk]
    groups: Iterator[list[int]]


def build_groups(
    recipe: Recipe,
    sources: Sequence[Path],
    out: Path,
    shares: Sequence[float],
    queries_file: Path | None,
    shards: int = 0,
) -> GroupFolder:
    """Read corpora, group their chunks as the recipe says, and store the groups.

    Args:
        recipe: how.
        sources: corpora, or files that hold groups already.
        out: a folder that does not exist yet.
        shares: what share each source has of the groups, as weights; none: all groups of all.
        queries_file: keeps the queries that a language model writes, for objectives that need them.
        shards: number of files; 0: as many as usual.

    Raises:
        RevelaError: a source cannot be read or gives no group, ``out`` is in the way.
    """
    refuse_out(recipe, out)
    if shares and (len(shares) != len(sources) or min(shares) <= 0):
        raise RevelaError(
            f"--shares gives {len(shares)} numbers for {len(sources)} corpora: give each one "
            "above 0"
        )
    silence_libraries()
    ready = [source for source in sources if holds_groups(source)]
    # No group has chunks of two corpora.
    apart = bool(shares or ready or recipe.groups.kind == "cluster")
    domains = [
        _ready(recipe, some[0]) if some[0] in ready else _domain(recipe, some, queries_file)
        for some in ([[s] for s in sources] if apart else [list(sources)])
    ]
    rows, documents = _joined(domains)
    parts = [
        _moved(domain.groups, sum(len(d.rows) for d in domains[:i]))
        for i, domain in enumerate(domains)
    ]
    seed = recipe.training.seed
    settings = {
        "sources": [str(source) for source in sources],
        "shares": list(shares),
        "documents": len(documents),
        "corpora": list(accumulate(len(domain.documents) for domain in domains[:-1])),
        "groups": ["ready" if source in ready else recipe.groups.kind for source in sources],
        "objective": recipe.objective.name,
        "chunk_words": recipe.corpus.chunk_words,
        "neighbours": recipe.groups.neighbours,
        "surrogate": recipe.groups.surrogate,
        "seed": seed,
    }
    kept = random.Random(seed).sample(range(len(documents)), min(KEPT, len(documents)))
    return save_groups(
        out,
        rows,
        mixed_groups(parts, shares, seed) if shares else chain(*parts),
        documents,
        size=recipe.groups.group_size,
        sample=sorted(kept),
        held_out=[document for domain in domains for document in domain.held_out],
        settings=settings,
        shards=shards,
    )


def _domain(recipe: Recipe, sources: Sequence[Path], queries_file: Path | None) -> Domain:
    data = TrainingSet.read(recipe, sources, queries_file)
    data.write_queries()
    documents, rows, held = data.documents, data.rows, data.held_out
    assert isinstance(documents, ArrowList)
    log.info(
        f"{len(documents):,} documents -> {len(data.chunks):,} chunks; "
        f"{len(held):,} documents held out"
    )

    @functools.cache
    def model() -> SentenceTransformer:
        return untrained_retriever(
            recipe, find_weights(recipe.retriever.model, recipe.retriever.offline_model), documents
        )

    groups = data.similar_groups(model)(0)
    first = next(groups, None)
    if first is None:
        names = ", ".join(map(str, sources))
        raise RevelaError(
            f"{names}: {len(rows):,} chunks give no group of {recipe.groups.group_size}: add "
            "text, or lower --chunk-words or --group-size"
        )
    return Domain(documents, held, rows, chain([first], groups))


def _ready(recipe: Recipe, source: Path) -> Domain:
    """Groups that are ready: a row is a group, and counts as a document."""
    size = recipe.groups.group_size
    members = arrow_list(Member, group_members(source, size))  # the source is read once
    rows_of_source = zip(*[iter(members)] * size, strict=True)
    documents, held = split_held_out(
        arrow_list(
            Document,
            (Document(row[0].name, "\n\n".join(m.text for m in row)) for row in rows_of_source),
        ),
        recipe.corpus.held_out,
        recipe.corpus.held_out_at_most,
    )
    left_out = {document.id for document in held}
    texts = (member.text for member in members if member.name not in left_out)
    rows = arrow_list(Chunk, (Chunk(i // size, text) for i, text in enumerate(texts)))
    log.info(
        f"read {len(documents) + len(held):,} groups from {source}; {len(held):,} of them held out"
    )
    return Domain(
        documents,
        held,
        rows,
        (list(range(start, start + size)) for start in range(0, len(rows), size)),
    )


def _joined(domains: Sequence[Domain]) -> tuple[ArrowList[Chunk], ArrowList[Document]]:
    if len(domains) == 1:
        return domains[0].rows, domains[0].documents
    firsts = [sum(len(domain.documents) for domain in domains[:i]) for i in range(len(domains))]
    rows = (
        dataclasses.replace(row, document=row.document + first)
        for domain, first in zip(domains, firsts, strict=True)
        for row in domain.rows
    )
    return arrow_list(Chunk, rows), arrow_list(
        Document, chain.from_iterable(domain.documents for domain in domains)
    )


def _moved(groups: Iterator[list[int]], first: int) -> Iterator[list[int]]:
    return ([i + first for i in group] for group in groups)
