"""Queries that a language model writes to chunks: all of them first, or as training comes to their
chunks.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.corpus.judgements import judged
from revela.corpus.written_queries import (
    PROMPTINGS,
    REPEATED,
    Answer,
    QueryFile,
    Writer,
    documents_with_chunks,
    without_repeats,
    write_queries,
)
from revela.errors import RevelaError
from revela.groups.documents import Groups
from revela.processes import cores
from revela.settings import Recipe
from revela.types import Chunk
from revela.weights import find_weights, fingerprint, name_of

log = logging.getLogger(__name__)

WRITING_BATCH = 32
NO_QUERY = "no chunk has a query: try another --queries than {}, or another --query-lm"
# Chunks whose queries are written at a time while a retriever trains, at first and later: steps
# wait for a block.
FIRST_BLOCK, LARGEST_BLOCK = 64, 256


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
        lm.close()
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
        self.recipe, name = recipe, recipe.queries.query_lm or recipe.lm.model
        self.folder = find_weights(name, recipe.retriever.offline_model)
        by = f"{fingerprint(self.folder)}, {recipe.queries.query_prompting}"
        self.file = QueryFile(path, by)

    def __str__(self) -> str:
        return f"{name_of(self.folder)} writes queries into {self.file.path}"

    def missing(self, texts: Iterable[str]) -> int:
        """How many of these texts it has not been asked about."""
        return len({text for text in texts if self.file.get(text) is None})

    def write(self, texts: Sequence[str], progress: Callable[[int], object]) -> None:
        """Ask for a query to each text without an answer; the LM is opened for the first, and stays
        in memory until ``close``.

        Args:
            texts: as they are to be found.
            progress: called with the number of texts after each batch.

        Raises:
            RevelaError: the language model or the file cannot be used.
        """
        if not self.missing(texts):
            return
        torch.set_num_threads(cores(self.recipe.training.threads))
        write_queries(texts, self.file, self._writer, WRITING_BATCH, progress)

    @cached_property
    def _writer(self) -> Writer:
        from revela.lm.generate import writer

        prompting = PROMPTINGS[self.recipe.queries.query_prompting]
        tokens, precision = self.recipe.lm.lm_tokens, self.recipe.training.precision
        return writer(self.folder, prompting, tokens, precision)

    def close(self) -> None:
        """Free the LM's memory."""
        self.__dict__.pop("_writer", None)
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
