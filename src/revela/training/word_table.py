"""Train a table of words on raw text: a few words of a text should find the rest of it.

    L = mean over tau of -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = i

- q_i: a query, 5 to 20 consecutive words of a text (random crops; Izacard et al., TMLR 2022).
- d_i: its passage, the text without those words. The other d_j of the batch are negatives.
- tau: a low temperature weighs the nearest negatives, a high one all of them.

Training moves one half of each row, and the weight of both halves (retriever/static_trainable.py).

Shapes: N texts, B texts of a batch, T words, S stems, V tokens, D width of a row, W of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revela.corpus.chunk import chunk
from revela.index.language import Analyzer, detect
from revela.objectives.contrastive import info_nce
from revela.retriever.static_from_words import (
    WordTable,
    build_word_table,
    idf_weights,
    stem_frequencies,
)
from revela.retriever.static_trainable import TwoHalves
from revela.silence import progress_bar
from revela.types import Document, evenly_spaced

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from revela.retriever.fit import TrainRows

WINDOW_WORDS, MAX_TEXTS = 240, 100_000
TAUS = (0.05, 0.2)
BATCH = 512  # texts
EPOCHS, MAX_STEPS = 35, 500
LEARNING_RATE = 1e-4  # of Adam, times a factor per parameter
WARMUP = 10  # steps
MIN_WORDS, MAX_WORDS = 5, 20  # of a query

Stems = NDArray[np.int64]


def texts_of(documents: Sequence[Document]) -> list[str]:
    """Windows of the documents, each after its title; at most ``MAX_TEXTS``, evenly spaced."""
    sample = [(i, documents[i]) for i in evenly_spaced(len(documents), MAX_TEXTS).tolist()]
    windows = [
        f"{document.title} {window.text}".strip()
        for i, document in sample
        for window in chunk(document, i, WINDOW_WORDS)
    ]
    return [windows[i] for i in evenly_spaced(len(windows), MAX_TEXTS)]


def tables(
    lm: Path,
    documents: Sequence[Document],
    held_out: Sequence[Document] = (),
    *,
    language: str = "auto",
    steps: int | None = None,
    seed: int = 0,
) -> tuple[WordTable, WordTable]:
    """The table of all documents' words, and the same trained on those not held out."""
    texts = texts_of(documents)
    terms = Analyzer(detect(texts) if language == "auto" else language)
    table = build_word_table(lm, [*texts, *texts_of(held_out)], terms)
    return table, train_table(table, texts, steps=steps, seed=seed)


@torch.enable_grad()  # a fit runs without gradients
def train_table(
    table: WordTable, texts: Sequence[str], *, steps: int | None = None, seed: int = 0
) -> WordTable:
    """A trained table of twice the width; the same table if fewer than two texts have ten words.

    ``steps`` defaults to ``EPOCHS`` epochs, at most ``MAX_STEPS``.
    """
    usable = [stems_T for stems_T in table.stems(texts) if len(stems_T) >= 2 * MIN_WORDS]
    if steps is None:
        steps = min(MAX_STEPS, math.ceil(EPOCHS * len(usable) / BATCH))
    if len(usable) < 2 or not steps:
        return table
    halves = TwoHalves(table.rows_SD, table.weight_S)
    multipliers = halves.learning_rate_multipliers()
    rates = [dict(params=[p], lr=factor * LEARNING_RATE) for p, factor in multipliers.items()]
    optimizer = torch.optim.Adam(rates, fused=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    batches = crops(usable, min(BATCH, len(usable)), np.random.default_rng(seed))
    for _ in progress_bar("training", "step", range(steps)):
        queries, passages = next(batches)
        both = [*queries, *passages]
        starts = np.cumsum([0, *map(len, both[:-1])])
        texts_BW = halves(torch.from_numpy(np.concatenate(both)), torch.from_numpy(starts))
        optimizer.zero_grad()
        crop_loss(*texts_BW.chunk(2)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warm_up.step()
    return replace(table, rows_SD=halves.rows_SW(), weight_S=halves.weight_S().detach())


def row_trainer(
    model: SentenceTransformer,
    documents: Sequence[Document],
    *,
    steps: int | None = None,
    seed: int = 0,
) -> TrainRows:
    """``train_pieces`` on documents, for the lexical half of a fit (retriever/fit.py)."""
    texts, tokenizer = texts_of(documents), model.tokenizer.backend_tokenizer
    return partial(train_pieces, tokenizer, texts=texts, steps=steps, seed=seed)


def train_pieces(
    tokenizer: Any,
    rows_VD: Tensor,
    texts: Sequence[str],
    *,
    steps: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Train a table of a language model's tokens by ``train_table``.

    Args:
        tokenizer: of the ``tokenizers`` library.
        rows_VD: whitened rows of the tokens; 0 for a token that does not count.

    Returns:
        (V, 2D): the rows times their trained weights. A token in no text gets the weight of one in
        a single text. (V, D), the same rows, if there is nothing to learn from.
    """
    norm_V = rows_VD.norm(dim=1)
    each_V = np.where(norm_V > 0, np.arange(len(rows_VD)), -1)
    _, texts_V = stem_frequencies(WordTable(tokenizer, each_V, rows_VD, norm_V), texts)
    seen_S = np.flatnonzero(texts_V)
    stem_V = np.full(len(rows_VD), -1)
    stem_V[seen_S] = np.arange(len(seen_S))
    weight_S = idf_weights(texts_V[seen_S], len(texts))
    table = WordTable(tokenizer, stem_V, rows_VD[seen_S] / norm_V[seen_S, None], weight_S)
    trained = train_table(table, texts, steps=steps, seed=seed)
    if trained is table:
        return rows_VD
    # In place: with 262,144 tokens each copy takes most of a gigabyte.
    norm_V1 = norm_V.clamp(min=1e-12)[:, None]
    both_VW = rows_VD.repeat(1, 2).div_(norm_V1).mul_(weight_S.max())
    both_VW[seen_S] = trained.rows_SD * trained.weight_S[:, None]
    return both_VW


def crop_loss(query_BW: Tensor, passage_BW: Tensor) -> Tensor:
    """L in nats; query i belongs to passage i."""
    target_B = torch.arange(len(query_BW))
    losses = [info_nce(query_BW, passage_BW, target_B, tau) for tau in TAUS]
    return torch.stack(losses).mean()


def crops(
    texts: Sequence[Stems], size: int, rng: np.random.Generator
) -> Iterator[tuple[list[Stems], list[Stems]]]:
    """Endless batches: a run of each text's words, and the text without it."""
    order = list[int]()
    while True:
        while len(order) < size:
            order += rng.permutation(len(texts)).tolist()
        batch, order = [texts[i] for i in order[:size]], order[size:]
        queries, passages = list[Stems](), list[Stems]()
        for text_T in batch:
            length = min(int(rng.integers(MIN_WORDS, MAX_WORDS + 1)), len(text_T) // 2)
            start = int(rng.integers(0, len(text_T) - length + 1))
            queries.append(text_T[start : start + length])
            passages.append(np.delete(text_T, slice(start, start + length)))
        yield queries, passages
