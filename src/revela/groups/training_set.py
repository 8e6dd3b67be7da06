"""What is trained on: documents -> chunks -> rows -> the groups of each epoch, and what is held
out.

Rows are what groups are made of: the chunks; chunks with queries, for objectives that read queries;
several chunks joined, to crop from or to hide spans in; or whole documents with judged queries.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.corpus.chunk import chunk_all
from revela.corpus.judgements import judged, pair_rows
from revela.corpus.read import read_for
from revela.corpus.text_queries import (
    number_of_query,
    with_authors_words,
    with_first_sentences,
    with_telling_sentences,
    with_titles,
)
from revela.corpus.written_queries import (
    PROMPTINGS,
    REPEATED,
    Answer,
    QueryFile,
    documents_with_chunks,
    without_repeats,
    write_queries,
)
from revela.errors import RevelaError
from revela.groups.documents import Groups
from revela.groups.folder import GroupFolder, is_group_folder
from revela.groups.order import (
    IterativeGroups,
    Model,
    order_of_groups,
    similar_order,
    stored_order,
    vectors_of_beginnings,
)
from revela.groups.ready import holds_groups
from revela.processes import cores, count
from revela.settings import Recipe
from revela.silence import waiting
from revela.types import Chunk, Document, Encoder
from revela.weights import find_weights, fingerprint

log = logging.getLogger(__name__)

WRITING_BATCH = 32
NO_QUERY = "no chunk has a query: try another --queries than {}, or another --query-lm"
# Chunks whose queries are written at a time while a retriever trains, at first and later: steps
# wait for a block, and the language model is opened anew for each.
FIRST_BLOCK, LARGEST_BLOCK = 64, 256


class TrainingSet:
    """Chunks, the groups of each epoch, the documents for the fit and what is held out.

    Args:
        recipe: how documents are cut and grouped.
        source: documents, or a folder of groups that were made of them.
        held_out: documents that are not trained on.
        queries_file: keeps the queries that a language model writes.

    Attributes:
        documents: what the heads' probe and the test for capitals read; a sample if groups are
            stored.
        n_documents: how many the chunks come from.
        corpora: where corpora that share no group begin, but the first: numbers of documents.
        groups_per_epoch: set by ``groups``; at most so many with queries that
            are written in training.
        by_similarity: the rows, similar ones next to each other; set by ``groups`` for clusters.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Sequence[Document] | GroupFolder,
        held_out: Sequence[Document] = (),
        queries_file: Path | None = None,
    ) -> None:
        self.recipe, self.queries_file = recipe, queries_file
        self.folder = source if isinstance(source, GroupFolder) else None
        if self.folder is None:
            _refuse_several_readers()
        elif judged(recipe):
            raise RevelaError(
                f"--pairs needs whole documents, and {self.folder.folder} holds groups of chunks: "
                "give the corpus itself"
            )
        if isinstance(source, GroupFolder):
            self.documents: Sequence[Document] = source.documents
            self.held_out: Sequence[Document] = source.held_out
            self.n_documents = int(source.settings["documents"])
            self.corpora: list[int] = source.settings.get("corpora", [])
        else:
            self.documents, self.held_out, self.n_documents = source, held_out, len(source)
            self.corpora = []
        self.groups_per_epoch = 0
        self._writes_late = self.folder is None and writes_late(recipe)
        self.by_similarity: NDArray[np.int64] | None = None

    @classmethod
    def read(
        cls, recipe: Recipe, sources: Sequence[Path], queries_file: Path | None = None
    ) -> TrainingSet:
        """The training set of a corpus, or of one folder of groups.

        Args:
            recipe: how it is read.
            sources: files and folders, or hub:owner/name.
            queries_file: keeps written queries; default: a file beside the first source.

        Raises:
            RevelaError: a source cannot be read, or holds groups that are not stored; several
                processes read a corpus.
        """
        kept = queries_file or default_queries_file(sources, recipe)
        if len(sources) == 1 and is_group_folder(sources[0]):
            return cls(recipe, GroupFolder(sources[0]), queries_file=kept)
        _refuse_several_readers()
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
        return cls(recipe, rest, held_out, kept)

    def but(self, recipe: Recipe) -> TrainingSet:
        """The same documents for another recipe."""
        if recipe == self.recipe:
            return self
        source: Any = self.documents if self.folder is None else self.folder
        return TrainingSet(recipe, source, self.held_out, self.queries_file)

    @cached_property
    def fingerprint(self) -> str:
        """Tells one training set from another: of titles, texts and judged queries, or of the
        stored groups.
        """
        if self.folder is not None:
            return self.folder.fingerprint
        return _digest(self.documents, self.asked if judged(self.recipe) else ())

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
        if self._writes_late:
            return chunks_to_ask(self.recipe, self.chunks)
        return training_rows(self.recipe, self.documents, self.chunks, self.queries_file)

    @cached_property
    def written(self) -> QueriesInTraining | None:
        """The queries of ``rows``, if a language model writes them as training comes to them."""
        if not self._writes_late:
            return None
        return QueriesInTraining(QueryLM(self.recipe, self.queries_file), self.rows)

    def write_queries(self) -> None:
        """Have all queries written now that training would wait for."""
        self._writes_late = False
        _ = self.rows

    def row(self, index: int) -> Chunk:
        """One of ``rows``, with its query; a late one is there once ``groups`` gave its group."""
        return self.written.row(index) if self.written else self.rows[index]

    @cached_property
    def asked(self) -> ArrowList[Chunk]:
        """The rows that are dealt to groups: all, but for documents that no judged query asks for.

        These come last, so that a row has the same number here and in ``rows``.
        """
        if not judged(self.recipe):
            return self.rows
        return self.rows.chosen(np.flatnonzero(self.rows.column("query") != ""))

    @cached_property
    def relevant(self) -> dict[int, set[int]]:
        """The documents that answer each judged query, by its number; none without judgements."""
        found: dict[int, set[int]] = {}
        if judged(self.recipe):
            asked = zip(self.asked.column("query"), self.asked.column("document"), strict=True)
            for query, document in asked:
                found.setdefault(number_of_query(query), set()).add(int(document))
        return found

    def groups(self, model: SentenceTransformer, encoder: Encoder, folder: Path) -> Groups:
        """epoch -> its groups, as indices of ``rows``. The first epoch is built once.

        Args:
            model: the untrained retriever.
            encoder: the same, as it is when a round of iterative groups begins.
            folder: where rounds of iterative groups are kept, until the run ends.

        Raises:
            RevelaError: there are too few rows for a group.
        """
        recipe, rows = self.recipe, self.asked
        if len(rows) < recipe.groups.group_size:
            raise RevelaError(self._no_group())
        if self.folder is not None:
            build = stored_order(recipe, self.folder)
        elif recipe.groups.kind == "iterative":
            build = order_of_groups(recipe, rows)
        else:
            build = self.similar_groups(lambda: model)
        first = list(build(0))
        if not first:
            raise RevelaError(self._no_group())
        self.groups_per_epoch = len(first)
        made = "" if len(rows) == len(self.chunks) else f" -> {len(rows):,} to train on"
        log.info(
            f"{self.n_documents:,} documents -> {len(self.chunks):,} chunks{made} "
            f"-> {len(first):,} groups of {recipe.groups.group_size} per epoch"
        )
        if recipe.groups.kind == "iterative":
            return IterativeGroups(recipe, rows, encoder, folder)

        def groups(epoch: int) -> Iterator[list[int]]:
            return iter(first) if epoch == 0 else build(epoch)

        if self.written is None:
            return groups
        if missing := self.written.missing():
            log.info(f"{self.written.lm} as training comes to them: {missing:,} or fewer")
        return self.written.groups(groups)

    def similar_groups(self, model: Model) -> Groups:
        """epoch -> groups of a corpus, with the vectors or the order that similar ones need.

        Args:
            model: gives the untrained retriever; called only if its token embeddings are needed.
        """
        recipe, rows = self.recipe, self.asked
        if recipe.groups.kind == "cluster":
            self.by_similarity = similar_order(recipe, rows, model)
            return order_of_groups(recipe, rows, order_N=self.by_similarity)
        if recipe.groups.kind == "document" and recipe.groups.neighbours == "similar":
            vectors_ND = vectors_of_beginnings(recipe, self.documents, model)
            return order_of_groups(recipe, rows, vectors_ND, unasked=self._writes_late)
        return order_of_groups(recipe, rows, unasked=self._writes_late)

    def _no_group(self) -> str:
        size, queries = self.recipe.groups.group_size, self.recipe.queries
        reads = self.recipe.objective.reads
        if judged(self.recipe):
            return (
                f"{len(self.asked)} pairs are fewer than a group of {size}: lower --group-size, or "
                "give more judgements"
            )
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


def _refuse_several_readers() -> None:
    if count() > 1:
        raise RevelaError(
            "several processes train on stored groups: make them once with revela groups CORPUS "
            "--out DIR, and give that folder"
        )


def default_queries_file(sources: Sequence[Path], recipe: Recipe) -> Path:
    """Where queries written for a corpus are kept: beside its first source."""
    name = str(sources[0])
    if name.startswith("hub:"):
        name = name.removeprefix("hub:").replace("/", "-").replace(":", "-")
    first = Path(os.path.realpath(name))  # a link to itself is one that cannot be read
    return Path(recipe.queries.queries_file or first.with_name(f"{first.name}.queries.jsonl"))


def _digest(documents: Iterable[Document], asked: Iterable[Chunk] = ()) -> str:
    """Tells one corpus from another, by titles, texts and judged queries."""
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(f"{document.title}\0{document.text}\0".encode())
    for row in asked:
        digest.update(f"{row.document}\0{row.query}\0".encode())
    return digest.hexdigest()


def training_chunks(recipe: Recipe, documents: Iterable[Document]) -> ArrowList[Chunk]:
    """Chunks with a document's title as its first line: the LM predicts it too, and it says what
    the rest is about.
    """
    titled = (
        dataclasses.replace(d, text=f"{d.title}\n\n{d.text}") if d.title else d
        for d in waiting("chunking", "document", documents)
    )
    return arrow_list(
        Chunk,
        chunk_all(titled, recipe.corpus.chunk_words, cores(recipe.training.threads)),
    )


def training_rows(
    recipe: Recipe,
    documents: Sequence[Document],
    chunks: ArrowList[Chunk],
    queries_file: Path | None,
) -> ArrowList[Chunk]:
    """What groups are made of: the chunks; with queries, if the objective asks for them; for crops
    and spans, longer runs of a document; whole documents, if queries are judged.
    """
    objective: Any = recipe.objective
    if folder := judged(recipe):
        return pair_rows(documents, Path(folder), others=objective.negatives > 0)
    if objective.reads == "windows":
        return arrow_list(Chunk, windows(chunks, objective.window_words(recipe)))
    if objective.reads == "chunks":
        return chunks
    if recipe.queries.source == "title":
        return arrow_list(Chunk, with_titles(chunks, documents))
    if recipe.queries.source == "first-sentence":
        return arrow_list(Chunk, with_first_sentences(chunks))
    if recipe.queries.source == "telling-sentence":
        return arrow_list(Chunk, with_telling_sentences(chunks))
    if recipe.queries.source == "authors-words":
        return arrow_list(Chunk, with_authors_words(chunks, documents))
    return written_queries(recipe, chunks, queries_file)


def windows(chunks: Iterable[Chunk], words: int) -> Iterator[Chunk]:
    """Neighbouring chunks of a document joined, up to this many words, to crop from."""
    document, parts, total = -1, list[str](), 0
    for chunk in chunks:
        size = len(chunk.text.split())
        if parts and (chunk.document != document or total + size > words):
            yield Chunk(document, "".join(parts))
            parts, total = [], 0
        document, total = chunk.document, total + size
        parts.append(chunk.text)
    if parts:
        yield Chunk(document, "".join(parts))


def writes_late(recipe: Recipe) -> bool:
    """Whether a language model may write queries as training comes to their chunks: groups by
    similarity, and negatives that are mined, need those of all chunks before.
    """
    objective: Any = recipe.objective
    asks = objective.reads == "queries" and recipe.queries.source == "lm" and not judged(recipe)
    mines = bool(getattr(objective, "negatives", False))
    return asks and not mines and recipe.groups.kind in ("document", "random")


def chunks_to_ask(recipe: Recipe, chunks: ArrowList[Chunk]) -> ArrowList[Chunk]:
    """The chunks of as many documents as ``max_queries`` allows."""
    owners = chunks.column("document")
    chosen = documents_with_chunks(
        owners.tolist(), recipe.queries.max_queries, seed=0
    )  # one seed for all runs: queries are written once
    return chunks.chosen(i for i, owner in enumerate(owners) if int(owner) in chosen)


def written_queries(
    recipe: Recipe, chunks: ArrowList[Chunk], path: Path | None
) -> ArrowList[Chunk]:
    """The ``chunks_to_ask``, with queries by a language model; kept in ``path``."""
    mine = chunks_to_ask(recipe, chunks)
    answers = written_answers(recipe, [c.text for c in mine], path)
    return arrow_list(
        Chunk, (dataclasses.replace(c, query=a.query) for c, a in zip(mine, answers, strict=True))
    )


def written_answers(
    recipe: Recipe, texts: Sequence[str], path: Path | None, of: str = "chunks"
) -> list[Answer]:
    """What a language model answers when it is asked for a query to each text, logged.

    Args:
        recipe, path: as for ``QueryLM``.
        texts: as they are to be found.
        of: what the texts are, for that line.

    Raises:
        RevelaError: the language model or the file cannot be used.
    """
    lm = QueryLM(recipe, path)
    if missing := lm.missing(texts):
        log.info(f"{lm}: {missing:,}")
        with tqdm(total=missing, unit="query") as bar:
            lm.write(texts, bar.update)
    answers = without_repeats([lm.file.get(t) or Answer() for t in texts])
    log.info(_kept(answers, of))
    return answers


def _kept(answers: Collection[Answer], of: str) -> str:
    """How many have a query, and why the others have none."""
    rejected = Counter(a.rejected for a in answers if a.rejected)
    why = ", ".join(f"{n:,} {reason}" for reason, n in rejected.most_common())
    kept = f"queries for {len(answers) - rejected.total():,} of {len(answers):,} {of}"
    return f"{kept}; rejected: {why}" if why else kept


class QueryLM:
    """A language model that is asked for queries, and the file of its answers.

    Args:
        recipe: which one, and how it is asked.
        path: of the ``QueryFile``; what is there is not written again.

    Raises:
        RevelaError: it cannot be found, or the file cannot be used.
    """

    def __init__(self, recipe: Recipe, path: Path | None) -> None:
        if path is None:
            raise RevelaError("written queries need a file to be kept in: give --queries-file")
        self.recipe, self.name = recipe, recipe.queries.query_lm or recipe.lm.model
        self.folder = find_weights(self.name, recipe.retriever.offline_model)
        by = f"{fingerprint(self.folder)}, {recipe.queries.query_prompting}"
        self.file = QueryFile(path, by)

    def __str__(self) -> str:
        return f"{self.name} writes queries into {self.file.path}"

    def missing(self, texts: Iterable[str]) -> int:
        """How many of these texts it has not been asked about."""
        return len({text for text in texts if self.file.get(text) is None})

    def write(self, texts: Sequence[str], progress: Callable[[int], object]) -> None:
        """Ask for a query to each text without an answer; the LM is in memory only meanwhile.

        Args:
            texts: as they are to be found.
            progress: called with the number of texts after each batch.

        Raises:
            RevelaError: the language model or the file cannot be used.
        """
        from revela.lm.generate import writer

        if not self.missing(texts):
            return
        recipe = self.recipe
        torch.set_num_threads(cores(recipe.training.threads))
        write = writer(
            self.folder,
            PROMPTINGS[recipe.queries.query_prompting],
            recipe.lm.lm_tokens,
            recipe.training.precision,
        )
        write_queries(texts, self.file, write, WRITING_BATCH, progress)
        del write
        gc.collect()  # a model of transformers refers to itself


class QueriesInTraining:
    """Queries that are written when training comes to their chunks, a block of groups at a time.

    A question that several chunks have is one to none of them: to none that is read after the last
    of these, since the chunks that are still to come are not known. What was kept or written before
    makes no other queries, so a run that is resumed, or repeated, reads the same.

    Args:
        lm: writes them.
        rows: chunks, whose own queries are empty.

    Attributes:
        progress: called with the number of queries that were written, and of those that have to be
            before training goes on, before and after each batch.
    """

    def __init__(self, lm: QueryLM, rows: ArrowList[Chunk]) -> None:
        self.lm, self.rows, self.answers = lm, rows, dict[int, Answer]()
        self.progress: Callable[[int, int], object] = lambda written, left: None
        self._asked, self._written = dict[str, set[int]](), 0

    def missing(self) -> int:
        """How many texts have no answer yet."""
        return self.lm.missing(row.text for row in self.rows)

    def row(self, index: int) -> Chunk:
        """A row of a group that ``groups`` has given, with its query."""
        return dataclasses.replace(self.rows[index], query=self.answers[index].query)

    def groups(self, order: Groups, largest: int = 0) -> Groups:
        """epoch -> those groups in which a chunk has a query.

        Args:
            order: epoch -> all groups.
            largest: chunks of a block; 0: ``LARGEST_BLOCK``.

        Raises:
            RevelaError: an epoch has none, or the language model or the file cannot be used.
        """

        def of_epoch(epoch: int) -> Iterator[list[int]]:
            none = True
            for some in _blocks(order(epoch), largest or LARGEST_BLOCK):
                self._write(sorted({row for group in some for row in group}))
                for group in some:
                    if any(self.answers[row].query for row in group):
                        none = False
                        yield group
            if none:
                raise RevelaError(NO_QUERY.format(self.lm.recipe.queries.source))

        return of_epoch

    def kept(self) -> str:
        """How many of the chunks that were read have a query, and why the others have none."""
        return _kept(self.answers.values(), "chunks")

    def _write(self, rows: Sequence[int]) -> None:
        texts = [self.rows[i].text for i in rows]
        left = self.lm.missing(texts)

        def batch(count: int) -> None:
            nonlocal left
            self._written, left = self._written + count, left - count
            self.progress(self._written, left)

        if left:
            batch(0)
        self.lm.write(texts, batch)
        found = {i: self.lm.file.get(text) or Answer() for i, text in zip(rows, texts, strict=True)}
        for i, answer in found.items():
            self._asked.setdefault(answer.query.lower(), set()).add(i)
        for i, answer in found.items():
            is_repeated = answer.query and len(self._asked[answer.query.lower()]) > 1
            self.answers[i] = REPEATED if is_repeated else answer


def _blocks(groups: Iterator[list[int]], largest: int) -> Iterator[list[list[int]]]:
    """Groups of ``FIRST_BLOCK`` chunks, then of twice as many, up to ``largest``."""
    block = FIRST_BLOCK
    for group in groups:
        yield [group, *islice(groups, max(0, block // len(group) - 1))]
        block = min(2 * block, largest)


def split_held_out(
    documents: ArrowList[Document], share: float, at_most: int
) -> tuple[ArrowList[Document], list[Document]]:
    """Training documents and held-out documents, chosen by a hash of title and text.

    The choice does not depend on the order of the documents, the run or the seed.

    Args:
        documents: all documents.
        share: fraction to hold out, 0 to 0.5.
        at_most: maximum number of held-out documents.
    """
    digests = [hashlib.blake2b(d.full_text.encode(), digest_size=8).digest() for d in documents]
    ranked = sorted(range(len(digests)), key=digests.__getitem__)
    held = sorted(ranked[: min(at_most, int(share * len(digests)))])
    rest = sorted(ranked[len(held) :])
    return documents.chosen(rest), list(documents.chosen(held))
