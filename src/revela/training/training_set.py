"""Training data: documents -> chunks -> rows -> the groups of each epoch, and held-out documents.

A row is what groups consist of: a chunk; a chunk with a query, for methods that read queries; a
window of joined chunks, for crops and hidden spans; or a whole document with a judged query.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import random
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from revela.encoders.prompts import Prompts, read_prompts
from revela.errors import RevelaError
from revela.files import cache_folder
from revela.ranking.queries import (
    query_hash,
    with_authors_words,
    with_first_sentences,
    with_telling_sentences,
    with_titles,
)
from revela.terminal import counted, progress_bar
from revela.text.chunk import chunk_all, packed
from revela.text.dedupe import near_duplicates
from revela.text.judgements import in_domains, pair_rows, queries_by_id
from revela.text.load import Reading, read_corpus, split_held_out
from revela.text.readers import Source
from revela.text.readers.common import ReadReport
from revela.text.spool import ArrowList, LazyTexts, arrow_list
from revela.text.words import count_words
from revela.training.distributed import cores, world_size
from revela.training.generated_queries import (
    NO_QUERY,
    GeneratedQueries,
    QueryLM,
    draw_targets,
    generate_queries,
    sample_chunks,
    with_questions,
)
from revela.training.groups.order import ORDER, Model, encoders_by, load_or_make, similar_order
from revela.training.groups.prebuilt import holds_groups
from revela.training.groups.store import GroupFolder, is_group_folder
from revela.training.groups.strategies import (
    QUERIES_PER_DOCUMENT,
    Groups,
    document_groups,
    groups_along,
    interleaved_groups,
    random_groups,
    spread_groups,
    with_queries,
)
from revela.training.recipe import Recipe
from revela.training.retriever.fit import lexical_vectors
from revela.training.settings import Corpus
from revela.types import Chunk, Document, hash64

log = logging.getLogger(__name__)

BEGINNING = 2000  # characters of a document that its vector is computed from
# The kinds of stored groups that these values of --groups accept; the others accept any.
STORED = {"interleaved": {"interleaved"}, "split": {"split"}, "cluster": {"cluster", "ready"}}


class TrainingSet:
    """Chunks, the groups of each epoch, the documents for the fit, and held-out documents.

    Args:
        source: documents, or stored groups.
        lazy_queries: let a language model write queries during training, if possible.
        corpora: as the attribute, if ``source`` is documents.

    Attributes:
        documents: all documents; of stored groups a sample.
        n_documents: number of documents that the chunks come from.
        corpora: index of the first document of each corpus after the first, if no group spans two
            corpora.
        has_written_queries: whether a language model writes the queries of rows, for this run.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Sequence[Document] | GroupFolder,
        held_out: Sequence[Document] = (),
        queries_file: Path | None = None,
        lazy_queries: bool = True,
        corpora: Sequence[int] = (),
    ) -> None:
        self.recipe, self.queries_file, self.corpora = recipe, queries_file, list(corpora)
        self.folder = source if isinstance(source, GroupFolder) else None
        if isinstance(source, GroupFolder):
            check_stored(recipe, source)
            self.n_documents = int(source.settings["documents"])
            self.corpora = source.settings.get("corpora", [])
            held_out, source = source.held_out, source.documents
        else:
            self.n_documents = len(source)
        self.documents, self.held_out = source, held_out
        self.has_written_queries = recipe.has_written_queries and self.folder is None
        self.lazy_queries = (
            lazy_queries
            and self.has_written_queries
            and not recipe.negatives  # these need all queries first, as do
            and recipe.groups.groups != "cluster"  # groups by similarity
        )

    @classmethod
    def read(
        cls,
        recipe: Recipe,
        sources: Sequence[Source],
        queries_file: Path | None = None,
        lazy_queries: bool = True,
    ) -> TrainingSet:
        """Read the training set of a corpus, or of one folder of groups."""
        queries_file = queries_file or default_queries_file(sources, recipe.queries.queries_file)
        if (stored := check_sources(recipe, sources)) is not None:
            return cls(recipe, stored, queries_file=queries_file)
        pairs = recipe.pairs
        parts = [[source] for source in sources] if len(pairs) > 1 else [sources]
        read = [_read_part(recipe, some, pairs[i : i + 1]) for i, some in enumerate(parts)]
        if len(read) == 1:
            return cls(recipe, *read[0], queries_file, lazy_queries)
        rest, held_out = (in_domains(part) for part in zip(*read, strict=True))
        corpora = [*accumulate(len(documents) for documents, _ in read[:-1])]
        return cls(recipe, rest, held_out, queries_file, lazy_queries, corpora)

    def replace(self, recipe: Recipe) -> TrainingSet:
        """The same documents with another recipe; RevelaError if its corpus settings differ."""
        if recipe == self.recipe:
            return self
        if recipe.corpus != self.recipe.corpus:
            raise RevelaError(
                "the corpus was read with other settings of [corpus]: read it by TrainingSet.read"
            )
        source: Any = self.documents if self.folder is None else self.folder
        return TrainingSet(recipe, source, self.held_out, self.queries_file, corpora=self.corpora)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of titles, texts, judged queries and their prompts, or of the stored groups."""
        if self.folder is not None:
            return self.folder.fingerprint
        digest = hashlib.blake2b(digest_size=8)
        brings_queries = self.recipe.pairs or self.recipe.queries.questions
        for document in self.documents:
            digest.update(f"{document.title}\0{document.text}\0".encode())
        for row in self.grouped_rows if brings_queries else ():
            digest.update(f"{row.document}\0{row.query}\0".encode())
        digest.update("".join(chain(*self._prompts)).encode())
        return digest.hexdigest()

    @cached_property
    def chunks(self) -> ArrowList[Chunk]:
        """All chunks, in the order of the corpus; a title is the first line of its document."""
        if self.folder is not None:
            return self.folder.rows
        titled = (
            dataclasses.replace(d, text=f"{d.title}\n\n{d.text}") if d.title else d
            for d in progress_bar("chunking", "document", self.documents)
        )
        words, threads = self.recipe.corpus.chunk_words, self.recipe.training.threads
        groups, documents = self.recipe.groups, len(self.documents)
        parts = groups.group_size if groups.groups == "split" else 0
        chunks = arrow_list(Chunk, chunk_all(titled, words, cores(threads), parts))
        if parts and (short := documents - len(chunks) // parts):
            log.info(f"too short to be split, left out: {short:,} of {documents:,} documents")
        return chunks

    @cached_property
    def rows(self) -> ArrowList[Chunk]:
        """The rows that groups consist of, and documents without a query; without the queries of
        ``generated_queries``.
        """
        if self.folder is not None:
            return self.folder.rows
        recipe, method, chunks = self.recipe, self.recipe.method, self.chunks
        if recipe.pairs:
            return pair_rows(self.documents, recipe.pairs, others=recipe.negatives > 0)
        if method.reads == "windows":
            return arrow_list(Chunk, windows(chunks, method.window_words(recipe.lm.lm_tokens)))
        if method.reads == "chunks":
            return chunks
        queries, targets, seed = recipe.queries, recipe.queries.targets, recipe.training.seed
        if queries.questions:
            rows = with_questions(chunks, Path(queries.questions))
        elif queries.queries == "lm":
            rows = sample_chunks(chunks, queries.max_queries, targets)
            if self.lazy_queries:
                return rows
            return generate_queries(self.query_lm(), rows, draw_targets(rows, targets, seed))
        else:
            made = {
                "title": with_titles(chunks, self.documents),
                "first-sentence": with_first_sentences(chunks),
                "telling-sentence": with_telling_sentences(chunks),
                "authors-words": with_authors_words(chunks, self.documents),
            }
            rows = arrow_list(Chunk, made[queries.queries])
        if not targets:
            return rows
        pairs = zip(rows, draw_targets(rows, targets, seed), strict=True)
        kept = (dataclasses.replace(row, query=row.query if is_on else "") for row, is_on in pairs)
        return arrow_list(Chunk, kept)

    @cached_property
    def is_target_R(self) -> NDArray[np.bool_]:
        """Which ``rows`` are asked about."""
        return draw_targets(self.rows, self.recipe.queries.targets, self.recipe.training.seed)

    def query_lm(self) -> QueryLM:
        """The language model that writes queries, with the file of its answers."""
        recipe, sections = self.recipe, (self.recipe.queries, self.recipe.lm)
        return QueryLM(self.queries_file, *sections, recipe.retriever, recipe.training)

    @cached_property
    def generated_queries(self) -> GeneratedQueries | None:
        """The queries of ``rows``, if a language model writes them during training."""
        if not self.lazy_queries:
            return None
        return GeneratedQueries(self.query_lm(), self.rows, self.is_target_R)

    @cached_property
    def grouped_rows(self) -> ArrowList[Chunk]:
        """Rows with a query, if queries are judged; otherwise all. Documents without a query are
        stored after them, so indices agree with ``rows``.
        """
        if not self.recipe.pairs:
            return self.rows
        return self.rows.select(np.flatnonzero(self.rows.column("query") != ""))

    @cached_property
    def relevant(self) -> dict[int, set[int]]:
        """``query_hash`` of each judged query -> the documents of ``rows`` that answer it, and
        copies of documents that do: near-duplicates, and those with the same text.
        """
        relevant: dict[int, set[int]] = {}
        if not self.recipe.pairs:
            return relevant
        queries_of = queries_by_id(self.recipe.pairs)
        read = chain(self.documents, self.held_out)
        judged = arrow_list(Document, (document for document in read if document.id in queries_of))
        near = self.recipe.corpus.near_duplicates
        first = near_duplicates(judged, near) if near else {}
        copies: dict[int, int] = {}  # text -> the first text that it is similar to, both hashed
        queries: dict[int, set[int]] = {}
        for row, document in enumerate(judged):
            text = hash64(judged[first.get(row, row)].full_text)
            copies.setdefault(hash64(document.full_text), text)
            queries.setdefault(text, set()).update(map(query_hash, queries_of[document.id]))
        for chunk in self.rows:
            text = hash64(chunk.text)
            for query in queries.get(copies.get(text, text), ()):
                relevant.setdefault(query, set()).add(chunk.document)
        return relevant

    def prompts(self, document: int) -> Prompts:
        """The prompts of a document's domain, from its folder of judged queries."""
        return self._prompts[bisect(self.corpora, document)] if self._prompts else Prompts()

    @cached_property
    def _prompts(self) -> list[Prompts]:
        return [read_prompts(folder) for folder in self.recipe.pairs]

    def groups(self, model: SentenceTransformer, folder: Path) -> tuple[Groups, int]:
        """Group the rows.

        Args:
            model: the untrained retriever.
            folder: stores the order of clusters until the run ends.

        Returns:
            Epoch -> groups, as indices of rows; and the number of groups in the first epoch, an
            upper bound if queries are written during training.
        """
        size, rows = self.recipe.groups.group_size, self.grouped_rows
        if len(rows) < size:
            raise RevelaError(self.no_group())
        if self.folder is not None:
            build = self._stored_groups(self.folder)
        else:
            build = self.corpus_groups(lambda: model, folder)
        first = np.fromiter(chain.from_iterable(build(0)), np.int64).reshape(-1, size)
        if not (number := len(first)):
            raise RevelaError(self.no_group())

        def groups(epoch: int) -> Iterator[list[int]]:
            return map(np.ndarray.tolist, first) if epoch == 0 else build(epoch)

        made = "" if len(rows) == len(self.chunks) else f", {len(rows):,} texts to train on"
        log.info(
            f"{counted(self.n_documents, 'document')}, {counted(len(self.chunks), 'chunk')}"
            f"{made}, {counted(number, 'group')} of {size} per epoch"
        )
        if (queries := self.generated_queries) is not None:
            asked = self.rows.select(np.flatnonzero(self.is_target_R))
            if missing := queries.lm.missing(row.text for row in asked):
                log.info(f"{queries.lm} during training: at most {len(missing):,}")
            return queries.groups(groups), number
        return groups, number

    def corpus_groups(self, model: Model, folder: Path | None = None) -> Groups:
        """Epoch -> groups of a corpus; ``model`` loads the untrained retriever, if needed.

        On a GPU, k-means gives different clusters in each call: ``folder`` keeps the first. No
        group spans two folders of judged queries.
        """
        rows, file = self.grouped_rows, None if folder is None else folder / ORDER
        if not (self.corpora and self.recipe.pairs):
            return self._groups_of(rows, model, file)
        corpus_R = np.searchsorted(self.corpora, rows.column("document"), side="right")
        of_corpora = list[tuple[NDArray[np.int64], Groups]]()
        for i in range(len(self.corpora) + 1):
            part = np.flatnonzero(corpus_R == i)
            own = file and file.with_stem(f"{file.stem}-{i}")
            of_corpora.append((part, self._groups_of(rows.select(part), model, own)))

        def groups(epoch: int) -> Iterator[list[int]]:
            mixed = [part[group].tolist() for part, build in of_corpora for group in build(epoch)]
            random.Random(f"{self.recipe.training.seed}/{epoch}").shuffle(mixed)
            yield from mixed

        return groups

    def _groups_of(self, rows: ArrowList[Chunk], model: Model, file: Path | None) -> Groups:
        """``corpus_groups`` of rows of one corpus; ``file`` keeps their order by similarity."""
        recipe, settings = self.recipe, self.recipe.groups
        size, seed, reads = settings.group_size, recipe.training.seed, recipe.method.reads
        weighting = recipe.fit.token_weighting
        groups: Groups
        if settings.groups == "random":
            groups = partial(random_groups, len(rows), size, seed)
        elif settings.groups == "interleaved":
            owners, passages = rows.column("document"), settings.interleaved_passages
            groups = partial(interleaved_groups, owners, size, passages, seed)
        elif settings.groups == "cluster":

            def order() -> NDArray[np.int64]:
                precision = recipe.training.precision
                encoders = encoders_by(settings, precision, model, weighting)
                return similar_order(rows, encoders, settings, seed, reads)

            order_R = order() if file is None else load_or_make(file, order)
            groups = groups_along(order_R, rows, size, seed, reads)
        else:
            vectors_ND = None
            if settings.groups == "document":
                texts = LazyTexts(self.documents, lambda document: document.full_text[:BEGINNING])
                vectors_ND = lexical_vectors(model(), texts, weighting)
            shares_queries = reads == "queries" and recipe.queries.queries in QUERIES_PER_DOCUMENT
            spread = reads == "windows" or shares_queries or recipe.pairs
            build = spread_groups if spread else document_groups
            groups = partial(build, rows.column("document"), size, seed, vectors_ND=vectors_ND)
        return groups if self.lazy_queries else with_queries(rows, groups, reads)

    def _stored_groups(self, folder: GroupFolder) -> Groups:
        """Epoch -> groups of a folder, ordered by the recipe's seed."""
        training, size = self.recipe.training, self.recipe.groups.group_size
        if self.recipe.groups.groups == "random":
            groups: Groups = partial(random_groups, len(folder.rows), size, training.seed)
        else:
            groups = folder.order(training.seed, training.fixed_groups_per_batch, size)
        return with_queries(folder.rows, groups, self.recipe.method.reads)

    def no_group(self) -> str:
        """The reason why the rows give no group, and what to do."""
        size, method = self.recipe.groups.group_size, self.recipe.method
        if self.recipe.pairs:
            n_pairs = len(self.grouped_rows)
            return f"{n_pairs} pairs are fewer than a group of {size}: lower --group-size"
        has_queries = any(self.rows.column("query")) or method.reads != "queries"
        if len(self.rows) >= size and not has_queries:
            return NO_QUERY.format(self.recipe.queries.queries)
        return (
            f"{len(self.rows):,} chunks give no group of {size}: "
            "add text, or lower --chunk-words or --group-size"
        )


def check_sources(recipe: Recipe, sources: Sequence[Source]) -> GroupFolder | None:
    """Refuse sources that cannot be trained on; returns the folder of groups, if they are one."""
    paths = [source for source in sources if isinstance(source, Path)]
    groups = [path for path in paths if is_group_folder(path)]
    if groups and len(sources) > 1:
        raise RevelaError(f"{groups[0]} holds groups: train on it alone, without other sources")
    if groups:
        stored = GroupFolder(groups[0])
        check_stored(recipe, stored)
        return stored
    if world_size() > 1 and sources and not recipe.pairs:
        raise RevelaError("several processes need stored groups: make them with revela groups")
    if prebuilt := next(filter(holds_groups, paths), None):
        raise RevelaError(f"{prebuilt} holds groups: give the folder that revela groups makes")
    if len(recipe.pairs) > 1 and sources and len(recipe.pairs) != len(sources):
        raise RevelaError(
            f"--pairs gives {len(recipe.pairs)} folders for {len(sources)} corpora: give one each"
        )
    return None


def check_stored(recipe: Recipe, stored: GroupFolder) -> None:
    """Refuse stored groups that the recipe cannot read."""
    kind, size, folder = recipe.groups.groups, recipe.groups.group_size, stored.folder
    first = stored.members(range(stored.size))
    if recipe.pairs:
        raise RevelaError(f"--pairs needs documents, and {folder} holds groups: give the corpus")
    if kind in STORED and STORED[kind].isdisjoint(stored.settings.get("groups", ())):
        raise RevelaError(
            f"{folder} holds groups of another kind: make others by revela groups --groups {kind}"
        )
    if kind != "random" and size > stored.size:
        raise RevelaError(f"{folder} has groups of {stored.size}: give --group-size {stored.size}")
    # Groups that are stored for a method that reads queries have one each.
    if recipe.method.reads == "queries" and not any(row.query for row in first):
        raise RevelaError(
            f"{folder} holds groups without queries: store them again by revela groups ... "
            f"--method {recipe.method.name} --queries {recipe.queries.queries}"
        )


def default_queries_file(sources: Sequence[Source], queries_file: str) -> Path:
    """The file of a corpus's queries: the one that is set, or one in the cache, named by the path
    of the first source.
    """
    if queries_file:
        return Path(queries_file)
    source = str(sources[0])
    name = source.removeprefix("hub:").replace("/", "-").replace(":", "-")
    # Path.resolve raises on a link to itself, which cannot be read anyway.
    first = Path(os.path.realpath(name if source.startswith("hub:") else source))
    place = source if source.startswith("hub:") else str(first)
    digest = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    return cache_folder() / "queries" / f"{first.name[:50]}-{digest}.jsonl"


def windows(chunks: Iterable[Chunk], words: int) -> Iterator[Chunk]:
    """Join consecutive chunks of a document into windows of at most this many words."""
    for document, some in groupby(chunks, attrgetter("document")):
        pieces = ((chunk.text, count_words(chunk.text)) for chunk in some)
        yield from (Chunk(document, text) for text, _ in packed(pieces, words))


def _read_part(
    recipe: Recipe, sources: Sequence[Source], pairs: Sequence[Path]
) -> tuple[Sequence[Document], Sequence[Document]]:
    """The documents to train on, and those that are held out."""
    corpus = recipe.corpus
    documents, report = read_for(corpus, sources, pairs)
    for line in report.lines():
        log.info(line)
    return split_held_out(documents, corpus.held_out, corpus.held_out_at_most)


def read_for(
    corpus: Corpus, sources: Sequence[Source | str], pairs: Sequence[Path] = ()
) -> tuple[ArrowList[Document], ReadReport]:
    """``read_corpus`` with the settings of a recipe; ``pairs`` is a folder of judged queries, if
    any, whose documents are kept.
    """
    return read_corpus(
        sources,
        Reading(corpus.text_field, corpus.title_field, corpus.join_titles),
        near=corpus.near_duplicates,
        max_bad_share=corpus.max_bad_share,
        judged=queries_by_id(pairs) if pairs else (),
    )
