"""Queries that a language model writes to chunks: all of them first, or as training comes to their
chunks.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from revela.corpus.judgements import judged
from revela.corpus.spool import ArrowList, arrow_list
from revela.distributed import cores
from revela.errors import RevelaError
from revela.groups.strategies import Groups
from revela.queries.generated import (
    EXAMPLES,
    REPEATED,
    Answer,
    QueryFile,
    Writer,
    without_repeats,
    write_queries,
)
from revela.settings import Recipe
from revela.types import Chunk
from revela.weights import find_weights, fingerprint, name_of

log = logging.getLogger(__name__)

WRITING_BATCH = 32
BLOCK = 64  # chunks whose queries are written at a time while a retriever trains
NO_QUERY = "no chunk has a query: try another --queries than {}, or another --query-lm"


def writes_late(recipe: Recipe) -> bool:
    """Whether a language model may write queries as training comes to their chunks. Groups by
    similarity and mined negatives need the queries of all chunks first.
    """
    objective: Any = recipe.objective
    by_lm = objective.reads == "queries" and recipe.queries.source == "lm" and not judged(recipe)
    mines = bool(getattr(objective, "negatives", False))
    return by_lm and not mines and recipe.groups.kind not in ("cluster", "iterative")


def chunks_to_ask(recipe: Recipe, chunks: ArrowList[Chunk]) -> ArrowList[Chunk]:
    """The chunks of documents drawn until they have ``max_queries``, and of one at least; the same
    in every run, so that queries are written once.
    """
    owners, at_most = chunks.column("document"), recipe.queries.max_queries
    documents, counts = np.unique(owners, return_counts=True)
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    fitting = int((np.cumsum(counts[order]) <= at_most).sum()) if at_most else len(order)
    drawn = documents[order[: max(1, fitting)]]
    return chunks.select(np.flatnonzero(np.isin(owners, drawn)))


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
    """What a language model answers when it is asked for a query to each text; ``of`` is what the
    texts are, for the log.
    """
    lm = QueryLM(recipe, path)
    if missing := lm.missing(texts):
        log.info(f"{lm}: {missing:,}")
    answers = without_repeats(lm.answers(texts))
    del lm
    gc.collect()  # a model of transformers refers to itself
    log.info(_kept(answers, of))
    return answers


def _kept(answers: Collection[Answer], of: str) -> str:
    """How many have a query, and why the others have none."""
    rejected = Counter(a.rejected for a in answers if a.rejected)
    why = ", ".join(f"{n:,} {reason}" for reason, n in rejected.most_common())
    kept = f"queries for {len(answers) - rejected.total():,} of {len(answers):,} {of}"
    return f"{kept}; rejected: {why}" if why else kept


class QueryLM:
    """A language model that is asked for queries, and the ``QueryFile`` of its answers. The model
    is opened for the first text without an answer, and stays in memory.

    Raises:
        RevelaError: the model cannot be found, or the file cannot be used.
    """

    def __init__(self, recipe: Recipe, path: Path | None) -> None:
        if path is None:
            raise RevelaError("written queries need a file to be kept in: give --queries-file")
        self.recipe, name = recipe, recipe.queries.query_lm or recipe.lm.model
        self.folder = find_weights(name, recipe.retriever.offline_model)
        by = f"{fingerprint(self.folder)}, examples"
        self.file = QueryFile(path, by)

    def __str__(self) -> str:
        return f"{name_of(self.folder)} writes queries into {self.file.path}"

    def missing(self, texts: Iterable[str]) -> int:
        """How many of these texts have no answer yet."""
        return len({text for text in texts if self.file.get(text) is None})

    def answers(self, texts: Sequence[str]) -> list[Answer]:
        """The answer to each text; missing ones are written."""
        if missing := self.missing(texts):
            torch.set_num_threads(cores(self.recipe.training.threads))
            with tqdm(total=missing, desc="writing queries", unit="query", leave=False) as bar:
                write_queries(texts, self.file, self._writer, WRITING_BATCH, bar.update)
        return [self.file.get(text) or Answer() for text in texts]

    @cached_property
    def _writer(self) -> Writer:
        from revela.lm.generate import writer

        tokens, precision = self.recipe.lm.lm_tokens, self.recipe.training.precision
        return writer(self.folder, EXAMPLES, tokens, precision)


class GeneratedQueries:
    """Queries that are written when training comes to their chunks, a block of groups at a time.

    A question to several chunks is dropped from every chunk read after the last of them is known;
    later chunks may still repeat it. What the file holds already makes no other queries, so a run
    that is resumed or repeated reads the same.
    """

    def __init__(self, lm: QueryLM, rows: ArrowList[Chunk]) -> None:
        self.lm, self.rows = lm, rows
        self._answers, self._chunks_of = dict[int, Answer](), dict[str, set[int]]()

    def row(self, index: int) -> Chunk:
        """A row of a group that ``groups`` has given, with its query."""
        return dataclasses.replace(self.rows[index], query=self._answers[index].query)

    def groups(self, order: Groups) -> Groups:
        """epoch -> those groups of ``order`` in which a chunk has a query; RevelaError if none."""

        def of_epoch(epoch: int) -> Iterator[list[int]]:
            groups, none = order(epoch), True
            for group in groups:
                block = [group, *islice(groups, max(0, BLOCK // len(group) - 1))]
                self._write(sorted({row for group in block for row in group}))
                for group in block:
                    if any(self._answers[row].query for row in group):
                        none = False
                        yield group
            if none:
                raise RevelaError(NO_QUERY.format(self.lm.recipe.queries.source))

        return of_epoch

    def kept(self) -> str:
        """How many of the chunks that were read have a query, and why the others have none."""
        return _kept(self._answers.values(), "chunks")

    def _write(self, rows: Sequence[int]) -> None:
        found = dict(zip(rows, self.lm.answers([self.rows[i].text for i in rows]), strict=True))
        for i, answer in found.items():
            self._chunks_of.setdefault(answer.query.lower(), set()).add(i)
        for i, answer in found.items():
            is_repeated = answer.query and len(self._chunks_of[answer.query.lower()]) > 1
            self._answers[i] = REPEATED if is_repeated else answer
