"""Training data: documents -> chunks -> rows -> the groups of each epoch, and what is held out.

Rows are what groups are made of: the chunks; chunks with queries, for objectives that read queries;
several chunks joined, to crop from or to hide spans in; or whole documents with judged queries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from revela.corpus.chunk import chunk_all
from revela.corpus.judgements import judged, pair_rows
from revela.corpus.load import read_for
from revela.corpus.spool import ArrowList, arrow_list
from revela.corpus.words import count_words
from revela.distributed import cores, world_size
from revela.errors import RevelaError
from revela.groups.order import (
    IterativeGroups,
    Model,
    order_of_groups,
    similar_order,
    stored_groups,
    vectors_of_beginnings,
)
from revela.groups.prebuilt import holds_groups
from revela.groups.store import GroupFolder, is_group_folder
from revela.groups.strategies import Groups
from revela.queries.from_text import (
    query_hash,
    with_authors_words,
    with_first_sentences,
    with_telling_sentences,
    with_titles,
)
from revela.queries.generated import (
    NO_QUERY,
    GeneratedQueries,
    QueryLM,
    chunks_to_ask,
    writes_late,
    written_queries,
)
from revela.settings import Recipe
from revela.silence import waiting
from revela.types import Chunk, Document, Encoder
from revela.weights import cache_folder

log = logging.getLogger(__name__)


class TrainingSet:
    """Chunks, the groups of each epoch, the documents for the fit and what is held out.

    Args:
        late: let a language model write queries as training comes to their chunks, if it can.

    Attributes:
        documents: a sample of them, if groups are stored.
        n_documents: how many the chunks come from.
        corpora: first document of each corpus but the first, where no group has chunks of two.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Sequence[Document] | GroupFolder,
        held_out: Sequence[Document] = (),
        queries_file: Path | None = None,
        late: bool = True,
    ) -> None:
        self.recipe, self.queries_file = recipe, queries_file
        self.corpora: list[int] = []
        if isinstance(source, GroupFolder):
            if judged(recipe):
                raise RevelaError(
                    f"--pairs needs whole documents, and {source.folder} holds groups of chunks: "
                    "give the corpus itself"
                )
            self.folder: GroupFolder | None = source
            self.documents: Sequence[Document] = source.documents
            self.held_out: Sequence[Document] = source.held_out
            self.n_documents = int(source.settings["documents"])
            self.corpora = source.settings.get("corpora", [])
        else:
            _check_several_readers()
            self.folder = None
            self.documents, self.held_out, self.n_documents = source, held_out, len(source)
        self.late = late and self.folder is None and writes_late(recipe)

    @classmethod
    def read(
        cls,
        recipe: Recipe,
        sources: Sequence[Path],
        queries_file: Path | None = None,
        late: bool = True,
    ) -> TrainingSet:
        """The training set of a corpus, or of one folder of groups."""
        kept = queries_file or default_queries_file(sources, recipe)
        if len(sources) == 1 and is_group_folder(sources[0]):
            return cls(recipe, GroupFolder(sources[0]), queries_file=kept)
        _check_several_readers()
        if ready := next((source for source in sources if holds_groups(source)), None):
            raise RevelaError(
                f"{ready} holds groups: store them by revela groups {ready} --out DIR, "
                "and give that folder"
            )
        documents, report = read_for(recipe, sources)
        for line in report.lines():
            log.info(line)
        share, at_most = recipe.corpus.held_out, recipe.corpus.held_out_at_most
        rest, held_out = split_held_out(documents, share, at_most)
        return cls(recipe, rest, held_out, kept, late)

    def replace(self, recipe: Recipe, late: bool = True) -> TrainingSet:
        """The same documents for another recipe; RevelaError if it would read others."""
        if recipe == self.recipe and (late or not self.late):
            return self
        if recipe.corpus != self.recipe.corpus:
            raise RevelaError(
                "this corpus was read with other settings of [corpus] than the recipe has: read it "
                "again by TrainingSet.read"
            )
        source: Any = self.documents if self.folder is None else self.folder
        return TrainingSet(recipe, source, self.held_out, self.queries_file, late)

    @cached_property
    def fingerprint(self) -> str:
        """Of titles, texts and judged queries, or of the stored groups."""
        if self.folder is not None:
            return self.folder.fingerprint
        digest = hashlib.blake2b(digest_size=8)
        for document in self.documents:
            digest.update(f"{document.title}\0{document.text}\0".encode())
        for row in self.asked if judged(self.recipe) else ():
            digest.update(f"{row.document}\0{row.query}\0".encode())
        return digest.hexdigest()

    @cached_property
    def chunks(self) -> ArrowList[Chunk]:
        """All chunks, in the order of the corpus."""
        if self.folder is not None:
            return self.folder.rows
        return training_chunks(self.recipe, self.documents)

    @cached_property
    def rows(self) -> ArrowList[Chunk]:
        """What groups are made of; without their queries where ``written`` has these."""
        if self.folder is not None:
            return self.folder.rows
        if self.late:
            return chunks_to_ask(self.recipe, self.chunks)
        return training_rows(self.recipe, self.documents, self.chunks, self.queries_file)

    @cached_property
    def written(self) -> GeneratedQueries | None:
        """The queries of ``rows``, if a language model writes them as training comes to them."""
        if not self.late:
            return None
        return GeneratedQueries(QueryLM(self.recipe, self.queries_file), self.rows)

    def row(self, index: int) -> Chunk:
        """One of ``rows``, with its query; a late one is there once its group has been read."""
        return self.written.row(index) if self.written else self.rows[index]

    @cached_property
    def asked(self) -> ArrowList[Chunk]:
        """The rows that are dealt to groups: all but documents that no judged query asks for.

        These come last, so that a row has the same number here and in ``rows``.
        """
        if not judged(self.recipe):
            return self.rows
        return self.rows.select(np.flatnonzero(self.rows.column("query") != ""))

    @cached_property
    def relevant(self) -> dict[int, set[int]]:
        """The documents that answer each judged query, by its number; none without judgements."""
        found: dict[int, set[int]] = {}
        if judged(self.recipe):
            asked = zip(self.asked.column("query"), self.asked.column("document"), strict=True)
            for query, document in asked:
                found.setdefault(query_hash(query), set()).add(int(document))
        return found

    def groups(
        self, model: SentenceTransformer, encoder: Encoder, folder: Path
    ) -> tuple[Groups, int]:
        """The groups of each epoch, as indices of rows, and how many the first one has (at most,
        where queries are written in training).

        Args:
            model: the untrained retriever.
            encoder: the retriever as it is when a round of iterative groups begins.
            folder: where rounds of iterative groups are kept, until the run ends.
        """
        recipe, size = self.recipe, self.recipe.groups.group_size
        if len(self.asked) < size:
            raise RevelaError(self._no_group())
        if self.folder is not None:
            groups, number = stored_groups(recipe, self.folder)
        else:
            groups, number = _with_first_epoch(self.corpus_groups(lambda: model), size)
        if not number:
            raise RevelaError(self._no_group())
        made = "" if len(self.asked) == len(self.chunks) else f" -> {len(self.asked):,} to train on"
        log.info(
            f"{self.n_documents:,} documents -> {len(self.chunks):,} chunks{made} "
            f"-> {number:,} groups of {size} per epoch"
        )
        if recipe.groups.kind == "iterative":
            groups = IterativeGroups(recipe, self.asked, encoder, folder)
        elif self.written is not None:
            if missing := self.written.lm.missing(row.text for row in self.rows):
                log.info(f"{self.written.lm} as training comes to them: {missing:,} or fewer")
            groups = self.written.groups(groups)
        return groups, number

    def corpus_groups(self, model: Model) -> Groups:
        """epoch -> groups of a corpus; ``model`` gives the untrained retriever, if it is needed."""
        recipe, rows = self.recipe, self.asked
        vectors_ND = order_N = None
        if recipe.groups.kind == "cluster":
            order_N = similar_order(recipe, rows, model)
        if recipe.groups.kind == "document":
            vectors_ND = vectors_of_beginnings(recipe, self.documents, model)
        return order_of_groups(recipe, rows, vectors_ND, order_N, unasked=self.late)

    def _no_group(self) -> str:
        size, queries = self.recipe.groups.group_size, self.recipe.queries
        reads = self.recipe.objective.reads
        if judged(self.recipe):
            return f"{len(self.asked)} pairs are fewer than a group of {size}: lower --group-size"
        if reads == "queries" and len(self.rows) >= size and not any(self.rows.column("query")):
            if self.folder is not None:
                return (
                    "these groups were stored without queries: store them again by revela groups "
                    f"... --objective {self.recipe.objective.name} --queries {queries.source}"
                )
            return NO_QUERY.format(queries.source)
        return (
            f"{len(self.rows)} chunks are fewer than a group of {size}: "
            "add text, or lower --chunk-words or --group-size"
        )


def _with_first_epoch(build: Groups, size: int) -> tuple[Groups, int]:
    """The same groups, of which the first epoch is built here and kept, and how many it has."""
    first = np.fromiter(chain.from_iterable(build(0)), np.int64).reshape(-1, size)

    def groups(epoch: int) -> Iterator[list[int]]:
        return (group.tolist() for group in first) if epoch == 0 else build(epoch)

    return groups, len(first)


def _check_several_readers() -> None:
    if world_size() > 1:
        raise RevelaError(
            "several processes train on stored groups: make them once with revela groups CORPUS "
            "--out DIR, and give that folder"
        )


def default_queries_file(sources: Sequence[Path], recipe: Recipe) -> Path:
    """Where queries written for a corpus are cached, by the place of its first source."""
    if recipe.queries.queries_file:
        return Path(recipe.queries.queries_file)
    source = str(sources[0])
    name = source.removeprefix("hub:").replace("/", "-").replace(":", "-")
    # A link to itself is one that cannot be read.
    first = Path(os.path.realpath(name if source.startswith("hub:") else source))
    place = source if source.startswith("hub:") else str(first)
    digest = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    return cache_folder() / "queries" / f"{first.name[:50]}-{digest}.jsonl"


def training_chunks(recipe: Recipe, documents: Iterable[Document]) -> ArrowList[Chunk]:
    """Chunks with a document's title as its first line, which says what the rest is about."""
    titled = (
        dataclasses.replace(d, text=f"{d.title}\n\n{d.text}") if d.title else d
        for d in waiting("chunking", "document", documents)
    )
    workers = cores(recipe.training.threads)
    return arrow_list(Chunk, chunk_all(titled, recipe.corpus.chunk_words, workers))


def training_rows(
    recipe: Recipe,
    documents: Sequence[Document],
    chunks: ArrowList[Chunk],
    queries_file: Path | None,
) -> ArrowList[Chunk]:
    """What groups are made of; see the top of this file."""
    objective: Any = recipe.objective
    if folder := judged(recipe):
        return pair_rows(documents, Path(folder), others=objective.negatives > 0)
    if objective.reads == "windows":
        return arrow_list(Chunk, windows(chunks, objective.window_words(recipe)))
    if objective.reads == "chunks":
        return chunks
    if recipe.queries.source == "lm":
        return written_queries(recipe, chunks, queries_file)
    rows = {
        "title": with_titles(chunks, documents),
        "first-sentence": with_first_sentences(chunks),
        "telling-sentence": with_telling_sentences(chunks),
        "authors-words": with_authors_words(chunks, documents),
    }
    return arrow_list(Chunk, rows[recipe.queries.source])


def windows(chunks: Iterable[Chunk], words: int) -> Iterator[Chunk]:
    """Neighbouring chunks of a document joined, up to this many words, to crop from."""
    document, parts, total = -1, list[str](), 0
    for chunk in chunks:
        size = count_words(chunk.text)
        if parts and (chunk.document != document or total + size > words):
            yield Chunk(document, "".join(parts))
            parts, total = [], 0
        document, total = chunk.document, total + size
        parts.append(chunk.text)
    if parts:
        yield Chunk(document, "".join(parts))


def split_held_out(
    documents: ArrowList[Document], share: float, at_most: int
) -> tuple[ArrowList[Document], list[Document]]:
    """Training documents and held-out documents (a share, and ``at_most`` so many), chosen by a
    hash of title and text: the same in any order, run and seed.
    """
    digests = [hashlib.blake2b(d.full_text.encode(), digest_size=8).digest() for d in documents]
    ranked = sorted(range(len(digests)), key=digests.__getitem__)
    held = sorted(ranked[: min(at_most, int(share * len(digests)))])
    rest = sorted(ranked[len(held) :])
    return documents.select(rest), list(documents.select(held))
