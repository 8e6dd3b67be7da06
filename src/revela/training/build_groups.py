"""Build a folder of groups from corpora, to train on several times or in several processes."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, islice
from operator import attrgetter
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from revela.errors import RevelaError
from revela.files import check_free
from revela.quiet_libraries import silence_libraries
from revela.terminal import counted
from revela.text.load import split_held_out
from revela.text.spool import ArrowList, arrow_list
from revela.training.check_settings import check_groups
from revela.training.groups.order import Model, encode_both_sides, encoders_by
from revela.training.groups.prebuilt import group_members, holds_groups
from revela.training.groups.store import (
    GroupedCorpus,
    GroupFolder,
    Member,
    is_group_folder,
    save_groups,
)
from revela.training.groups.strategies import mixed_groups
from revela.training.models import find_weights
from revela.training.recipe import Recipe
from revela.training.retriever.build import untrained_retriever
from revela.training.settings import Corpus, Retriever
from revela.training.training_set import TrainingSet, default_queries_file
from revela.types import Chunk, Document

log = logging.getLogger(__name__)
SCORED = 4096  # rows whose negatives are scored


def build_groups(
    recipe: Recipe, sources: Sequence[Path], out: Path, weights: Sequence[float]
) -> GroupFolder:
    """Read corpora, group their chunks by the recipe, and store the groups.

    Args:
        sources: corpora, or files of prebuilt groups.
        out: a new folder.
        weights: sampling weight of each source; empty: use all groups.
    """
    check_free(out)
    if recipe.pairs:
        raise RevelaError(
            "stored groups have no judgements: give --pairs and the corpus itself to revela train"
        )
    check_groups(recipe.groups, recipe.queries, recipe.method)
    if weights and (len(weights) != len(sources) or min(weights) <= 0):
        raise RevelaError(f"give --weights a number above 0 for each of the {len(sources)} corpora")
    if stored := next(filter(is_group_folder, sources), None):
        raise RevelaError(f"{stored} holds groups already: give the text that they were made of")
    silence_libraries()
    prebuilt = [source for source in sources if holds_groups(source)]
    seed, size = recipe.training.seed, recipe.groups.group_size
    queries_file = default_queries_file(sources, recipe.queries.queries_file)
    corpora = [sources]
    if weights or prebuilt or recipe.groups.groups == "cluster":  # no group spans two corpora
        corpora = [[source] for source in sources]
    parts = [
        _prebuilt(read[0], size, recipe.corpus)
        if read[0] in prebuilt
        else _grouped(TrainingSet.read(recipe, read, queries_file, lazy_queries=False), read)
        for read in corpora
    ]
    corpus = _joined(parts, weights, seed)
    settings = {
        "sources": [str(source) for source in sources],
        "shares": list(weights),
        "documents": len(corpus.documents),
        "corpora": list(accumulate(len(part.documents) for part in parts[:-1])),
        "groups": ["ready" if source in prebuilt else recipe.groups.groups for source in sources],
        "method": recipe.method.name,
        "corpus": dataclasses.asdict(recipe.corpus),
        "surrogate": recipe.groups.surrogate,
        "seed": seed,
    }
    return save_groups(out, corpus, size, settings)


def _grouped(data: TrainingSet, sources: Sequence[Path]) -> GroupedCorpus:
    """Group the chunks of the corpus that was read from ``sources``."""
    documents, rows, held_out = data.documents, data.rows, data.held_out
    assert isinstance(documents, ArrowList)
    log.info(
        f"{counted(len(documents), 'document')}, {counted(len(data.chunks), 'chunk')}; "
        f"{counted(len(held_out), 'document')} held out"
    )

    groups = iter(data.corpus_groups(_model(data.recipe.retriever, documents))(0))
    first = next(groups, None)
    if first is None:
        raise RevelaError(f"{', '.join(map(str, sources))}: {data.no_group()}")
    return GroupedCorpus(documents, held_out, rows, chain([first], groups))


def _model(settings: Retriever, documents: ArrowList[Document]) -> Model:
    """Loads the untrained retriever once."""

    @functools.cache
    def model() -> SentenceTransformer:
        folder = find_weights(settings.model, settings.offline_model)
        return untrained_retriever(settings, folder, documents)

    return model


def hardness(recipe: Recipe, folder: GroupFolder) -> float:
    """The mean score of the negatives of a query (or chunk) in its group: the cosine by the
    surrogate, or by word vectors without one, over a sample of groups.
    """
    count, size, settings = max(1, SCORED // folder.size), folder.size, recipe.training
    groups = [*islice(folder.order(settings.seed)(0), count)]
    rows = folder.rows.select(np.concatenate(groups))
    model, weighting = _model(recipe.retriever, folder.documents), recipe.fit.token_weighting
    encoders = encoders_by(recipe.groups, settings.precision, model, weighting)
    queries_RD, passages_RD = encode_both_sides(rows, encoders, recipe.method.reads)
    passage_GND = passages_RD.reshape(len(groups), size, -1)
    query_GND = passage_GND if queries_RD is None else queries_RD.reshape(passage_GND.shape)
    all_G = (query_GND.sum(axis=1) * passage_GND.sum(axis=1)).sum(axis=1)
    own_G = (query_GND * passage_GND).sum(axis=(1, 2))
    return float((all_G - own_G).mean()) / (size * (size - 1))


def _prebuilt(source: Path, size: int, corpus: Corpus) -> GroupedCorpus:
    """Read prebuilt groups, each row as one document, which has one group or more."""
    members = arrow_list(Member, group_members(source, size))
    by_row = (list(row) for _, row in groupby(members, attrgetter("document")))
    documents, held_out = split_held_out(
        arrow_list(Document, (Document(r[0].name, "\n\n".join(m.text for m in r)) for r in by_row)),
        corpus.held_out,
        corpus.held_out_at_most,
    )
    held_out_ids = {document.id for document in held_out}
    left = (member for member in members if member.name not in held_out_ids)
    numbered = enumerate(row for _, row in groupby(left, attrgetter("document")))
    rows = arrow_list(Chunk, (Chunk(i, member.text) for i, row in numbered for member in row))
    log.info(f"{source}: {len(documents):,} rows of groups, and {len(held_out):,} held out")
    starts = range(0, len(rows), size)
    return GroupedCorpus(documents, held_out, rows, (list(range(i, i + size)) for i in starts))


def _joined(parts: Sequence[GroupedCorpus], weights: Sequence[float], seed: int) -> GroupedCorpus:
    """Join corpora into one; no group spans two of them."""
    if len(parts) == 1:
        (part,) = parts
        groups = mixed_groups([part.groups], weights, seed) if weights else part.groups
        return dataclasses.replace(part, groups=groups)
    first_documents = accumulate((len(part.documents) for part in parts), initial=0)
    first_rows = accumulate((len(part.rows) for part in parts), initial=0)
    shifted = [_shifted(part.groups, first) for part, first in zip(parts, first_rows, strict=False)]
    rows = (
        dataclasses.replace(row, document=row.document + first)
        for part, first in zip(parts, first_documents, strict=False)
        for row in part.rows
    )
    return GroupedCorpus(
        arrow_list(Document, chain.from_iterable(part.documents for part in parts)),
        [document for part in parts for document in part.held_out],
        arrow_list(Chunk, rows),
        mixed_groups(shifted, weights, seed) if weights else chain(*shifted),
    )


def _shifted(groups: Iterable[list[int]], first: int) -> Iterator[list[int]]:
    return ([i + first for i in group] for group in groups)
