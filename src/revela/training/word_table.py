"""Train a table of words on raw text: titles, docstrings and runs of words should find their text.

    L = mean over tau of -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = i

- q_i: a query. In up to half of a batch it is the title or docstring of a text, if the corpus has
  them; in the rest 5 to 20 consecutive words (random crops; Izacard et al., TMLR 2022).
- d_i: its passage, the text without the query. The other d_j of the batch are negatives, except
  those with the same title or docstring.
- tau: a low temperature weights the nearest negatives, a high one all of them.

Training moves one half of each row, and the weight of both halves
(training/retriever/static_trainable.py).

Shapes: N texts, B texts of a batch, T words, S stems, V tokens, D width of a row, W of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from revela.ranking.queries import with_docstrings_or_titles
from revela.terminal import progress_bar
from revela.text.analyzer import Analyzer, detect
from revela.text.chunk import chunk
from revela.text.spool import LazyTexts
from revela.training.methods.contrastive import info_nce
from revela.training.retriever.fit import WORDS_TO_VECTORS, fit_to_corpus
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.static_from_words import (
    WordTable,
    build_word_table,
    idf_weights,
    stem_frequencies,
)
from revela.training.retriever.static_trainable import LexicalAndDense
from revela.training.training_set import TrainingSet
from revela.types import Chunk, Document, evenly_spaced

WINDOW_WORDS, MAX_TEXTS = 240, 100_000
TAUS = (0.05, 0.2)
BATCH = 512  # texts
MAX_AUTHORED = 0.5  # share of a batch; the rest are crops
EPOCHS, MAX_STEPS = 35, 500
LEARNING_RATE = 1e-4  # of Adam, times a factor per parameter
WARMUP = 10  # steps
MIN_WORDS, MAX_WORDS = 5, 20  # per query

Stems = NDArray[np.int64]


class Examples(NamedTuple):
    """Training data of a table: texts, and passages with their authors' queries."""

    texts: Sequence[str]
    authored: Sequence[Chunk] = ()

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Examples:
        """Windows of the documents, each text after its title; at most ``MAX_TEXTS`` of each kind,
        evenly spaced.
        """
        windows = [
            window
            for i in evenly_spaced(len(documents), MAX_TEXTS).tolist()
            for window in chunk(documents[i], i, WINDOW_WORDS)
        ]
        authored = list(with_docstrings_or_titles(windows, documents))
        texts = [f"{documents[window.document].title} {window.text}".strip() for window in windows]
        return cls(
            [texts[i] for i in evenly_spaced(len(texts), MAX_TEXTS)],
            [authored[i] for i in evenly_spaced(len(authored), MAX_TEXTS)],
        )


class TableBatch(NamedTuple):
    """B queries, their passages, and a mask of the passages that each query is compared with."""

    queries: Sequence[Stems]
    passages: Sequence[Stems]
    allowed_BB: Tensor


def tables(
    lm: Path,
    documents: Sequence[Document],
    held_out: Sequence[Document] = (),
    *,
    language: str = "auto",
    steps: int | None = None,
    seed: int = 0,
) -> tuple[WordTable, WordTable]:
    """Build a table of the words of ``documents`` and ``held_out``, and train it on ``documents``.

    Returns:
        The untrained and the trained table; the same table twice if nothing was trained.
    """
    examples = Examples.of(documents)
    terms = Analyzer(detect(examples.texts) if language == "auto" else language)
    table = build_word_table(lm, [*examples.texts, *Examples.of(held_out).texts], terms)
    return table, train_table(table, examples, steps=steps, seed=seed)


@torch.enable_grad()  # a fit runs without gradients
def train_table(
    table: WordTable, examples: Examples, *, steps: int | None = None, seed: int = 0
) -> WordTable:
    """Train a table: twice the width; the same table if fewer than two texts have ten words.

    ``steps`` defaults to ``EPOCHS`` epochs, at most ``MAX_STEPS``.
    """
    usable = [stems for stems in table.stems(examples.texts) if len(stems) >= 2 * MIN_WORDS]
    if steps is None:
        steps = min(MAX_STEPS, math.ceil(EPOCHS * len(usable) / BATCH))
    if len(usable) < 2 or not steps:
        return table
    halves = LexicalAndDense(table.rows_SD, table.weight_S)
    multipliers = halves.learning_rate_multipliers()
    rates = [dict(params=[p], lr=factor * LEARNING_RATE) for p, factor in multipliers.items()]
    optimizer = torch.optim.Adam(rates, fused=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    batches = batches_of(usable, authored_pairs(table, examples.authored), seed)
    for _ in progress_bar("training", "step", range(steps)):
        batch = next(batches)
        both = [*batch.queries, *batch.passages]
        starts = np.cumsum([0, *map(len, both[:-1])])
        texts_BW = halves(torch.from_numpy(np.concatenate(both)), torch.from_numpy(starts))
        optimizer.zero_grad()
        query_BW, passage_BW = F.normalize(texts_BW, dim=1).chunk(2)
        loss = table_loss(query_BW, passage_BW, batch.allowed_BB)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warm_up.step()
    return replace(table, rows_SD=halves.rows_SW(), weight_S=halves.weight_S().detach())


def fit_encoder(encoder: RetrieverEncoder, data: TrainingSet, steps: int | None = None) -> None:
    """Fit a language model to the chunks (training/retriever/fit.py), and train the lexical half
    of its vectors by ``train_pieces``.
    """
    seed, tokenizer = data.recipe.training.seed, encoder.model.tokenizer.backend_tokenizer
    texts = LazyTexts(data.chunks, lambda c: c.text)

    def train_rows(rows_VD: Tensor) -> Tensor:
        examples = Examples.of(data.documents)
        return train_pieces(tokenizer, rows_VD, examples, steps=steps, seed=seed)

    fit_to_corpus(encoder.retriever, texts, data.recipe.fit, seed=seed, train_rows=train_rows)
    encoder.words_to_vectors = WORDS_TO_VECTORS


def train_pieces(
    tokenizer: Any, rows_VD: Tensor, examples: Examples, *, steps: int | None = None, seed: int = 0
) -> Tensor:
    """Train a table of a language model's tokens by ``train_table``.

    Args:
        tokenizer: a tokenizer of the ``tokenizers`` library.
        rows_VD: whitened rows of the tokens; 0 for ignored tokens.

    Returns:
        (V, 2D): the rows times their trained weights. A token in no text gets the weight of a token
        in a single text. If there is nothing to learn from, the same rows, (V, D).
    """
    norm_V = rows_VD.norm(dim=1)
    each_V = np.where(norm_V > 0, np.arange(len(rows_VD)), -1)
    _, texts_V = stem_frequencies(WordTable(tokenizer, each_V, rows_VD, norm_V), examples.texts)
    seen_S = np.flatnonzero(texts_V)
    stem_V = np.full(len(rows_VD), -1)
    stem_V[seen_S] = np.arange(len(seen_S))
    weight_S = idf_weights(texts_V[seen_S], len(examples.texts))
    table = WordTable(tokenizer, stem_V, rows_VD[seen_S] / norm_V[seen_S, None], weight_S)
    trained = train_table(table, examples, steps=steps, seed=seed)
    if trained is table:
        return rows_VD
    # In place: with 262,144 tokens each copy takes most of a gigabyte.
    norm_V1 = norm_V.clamp(min=1e-12)[:, None]
    both_VW = rows_VD.repeat(1, 2).div_(norm_V1).mul_(weight_S.max())
    both_VW[seen_S] = trained.rows_SD * trained.weight_S[:, None]
    return both_VW


def table_loss(query_BW: Tensor, passage_BW: Tensor, allowed_BB: Tensor) -> Tensor:
    """L in nats, of unit vectors; passage i is the positive of query i, ``allowed_BB`` its mask."""
    target_B = torch.arange(len(query_BW))
    losses = [info_nce(query_BW, passage_BW, target_B, tau, allowed_BB) for tau in TAUS]
    return torch.stack(losses).mean()


def authored_pairs(table: WordTable, authored: Sequence[Chunk]) -> list[tuple[int, Stems, Stems]]:
    """(number, query, passage) of each pair as words of the table; equal queries share a number.
    Pairs without a known word in the query or the passage are left out.
    """
    numbers = {query: i for i, query in enumerate(dict.fromkeys(c.query for c in authored))}
    queries = table.stems([c.query for c in authored])
    passages = table.stems([c.text for c in authored])
    return [
        (numbers[c.query], query, passage)
        for c, query, passage in zip(authored, queries, passages, strict=True)
        if len(query) and len(passage)
    ]


def batches_of(
    texts: Sequence[Stems], authored: Sequence[tuple[int, Stems, Stems]], seed: int
) -> Iterator[TableBatch]:
    """Endless batches of authored pairs and crops, ``BATCH`` in all or as many as there are texts.
    Authored pairs have the same share as in the data, at most ``MAX_AUTHORED``.
    """
    size = min(BATCH, len(texts))
    share = min(MAX_AUTHORED, len(authored) / (len(authored) + len(texts)))
    n_authored = round(share * size)
    drawn = index_batches(len(authored), n_authored, np.random.default_rng([seed, 1]))
    for queries, passages in crops(texts, size - n_authored, np.random.default_rng(seed)):
        # Crops are numbered from -1 down, so that each differs from all other queries.
        number_B = -1 - torch.arange(size)
        for i in next(drawn):
            number_B[len(queries)] = authored[i][0]
            queries.append(authored[i][1])
            passages.append(authored[i][2])
        differ_BB = number_B[:, None] != number_B
        yield TableBatch(queries, passages, differ_BB | torch.eye(size, dtype=torch.bool))


def crops(
    texts: Sequence[Stems], size: int, rng: np.random.Generator
) -> Iterator[tuple[list[Stems], list[Stems]]]:
    """Endless batches: some consecutive words of each text, and the text without them."""
    for indices in index_batches(len(texts), size, rng):
        queries, passages = list[Stems](), list[Stems]()
        for text_T in (texts[i] for i in indices):
            length = min(int(rng.integers(MIN_WORDS, MAX_WORDS + 1)), len(text_T) // 2)
            start = int(rng.integers(0, len(text_T) - length + 1))
            queries.append(text_T[start : start + length])
            passages.append(np.delete(text_T, slice(start, start + length)))
        yield queries, passages


def index_batches(count: int, size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Endless batches of indices below ``count``, each index once an epoch."""
    order = list[int]()
    while True:
        while len(order) < size:
            order += rng.permutation(count).tolist()
        batch, order = order[:size], order[size:]
        yield batch
