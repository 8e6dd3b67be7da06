"""Train a table of words on raw text: a few words of a text should find the rest of it.

    L = mean over tau of -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = i

A query q_i is a run of 5 to 20 words of a text, its passage d_i the text without them, and the
other passages of the batch are what it is told from (random crops; Izacard et al., TMLR 2022). The
low temperature weighs a query's nearest rivals, the high one all of them.

A word's row is two halves side by side: the row that it had before, which stays, and a copy, which
is trained and so learns what the first half does not find. Without the first half, rows of rare
words forget which word they are, and small corpora lose by training (docs/results.md). The word's
weight, which both halves share, is trained too.

Shapes: N texts, B texts of a batch, T words, S stems, D numbers of a row, W of a text's vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from revela.corpus.chunk import chunk
from revela.index.language import Analyzer, detect
from revela.objectives.contrastive import info_nce
from revela.retriever.word_table import WordTable, word_table
from revela.silence import waiting
from revela.types import Document, evenly

WINDOW_WORDS, MOST_TEXTS = 240, 100_000
TAUS = (0.05, 0.2)
BATCH = 512  # texts
EPOCHS, MOST_STEPS = 35, 500
LEARNING_RATE, OF_WEIGHTS = 1e-3, 5e-3  # of Adam: of rows, and of the logarithms of weights
WARMUP = 10  # steps
SHORTEST, LONGEST = 5, 20  # words of a query
LEAST_WEIGHT = 1e-4

Stems = NDArray[np.int64]


def texts_of(documents: Sequence[Document]) -> list[str]:
    """What a table is made of and learns from: windows of the documents, each after its title; an
    even sample of very many.
    """
    some = [(i, documents[i]) for i in evenly(len(documents), MOST_TEXTS).tolist()]
    windows = [
        f"{document.title} {window.text}".strip()
        for i, document in some
        for window in chunk(document, i, WINDOW_WORDS)
    ]
    return [windows[i] for i in evenly(len(windows), MOST_TEXTS)]


def tables(
    lm: Path,
    documents: Sequence[Document],
    held_out: Sequence[Document] = (),
    *,
    language: str = "auto",
    steps: int | None = None,
    seed: int = 0,
) -> tuple[WordTable, WordTable]:
    """The table of the words of all documents, and the same trained on those that are not held out.

    Args:
        lm: folder of a language model.
        documents: to learn from.
        held_out: others, whose words get rows.
        language: of the words, as ``Analyzer`` takes it; "auto" finds it.
        steps, seed: as for ``train_table``.
    """
    texts = texts_of(documents)
    terms = Analyzer(detect(texts) if language == "auto" else language)
    table = word_table(lm, [*texts, *texts_of(held_out)], terms)
    return table, train_table(table, texts, steps=steps, seed=seed)


def train_table(
    table: WordTable, texts: Sequence[str], *, steps: int | None = None, seed: int = 0
) -> WordTable:
    """Train the rows and weights of a table.

    Args:
        table: as ``word_table`` makes it; it is not changed.
        texts: to learn from; those of fewer than ten words are left out.
        steps: of Adam; None: ``EPOCHS`` epochs, but ``MOST_STEPS`` at most.
        seed: of the draws.

    Returns:
        A table of twice the width; the same table if there are not two texts to learn from.
    """
    known = [stems_T for stems_T in table.stems(texts) if len(stems_T) >= 2 * SHORTEST]
    if steps is None:
        steps = min(MOST_STEPS, math.ceil(EPOCHS * len(known) / BATCH))
    if len(known) < 2 or not steps:
        return table
    fixed_SD, rows_SD = table.rows_SD, table.rows_SD.clone().requires_grad_()
    log_weight_S = table.weight_S.clamp(min=LEAST_WEIGHT).log().requires_grad_()
    optimizer = torch.optim.Adam(
        [dict(params=[rows_SD], lr=LEARNING_RATE), dict(params=[log_weight_S], lr=OF_WEIGHTS)],
        fused=True,
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    batches = crops(known, min(BATCH, len(known)), np.random.default_rng(seed))
    for _ in waiting("training", "step", range(steps)):
        queries, passages = next(batches)
        texts_BW = vectors([fixed_SD, rows_SD], log_weight_S.exp(), [*queries, *passages])
        optimizer.zero_grad()
        crop_loss(*texts_BW.chunk(2)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warm_up.step()
    both_SW = torch.cat([fixed_SD, rows_SD.detach()], dim=1)
    return replace(table, rows_SD=both_SW, weight_S=log_weight_S.detach().exp())


def crop_loss(query_BW: Tensor, passage_BW: Tensor) -> Tensor:
    """L of the module's head, in nats; query i belongs to passage i."""
    target_B = torch.arange(len(query_BW))
    losses = [info_nce(query_BW, passage_BW, target_B, tau) for tau in TAUS]
    return torch.stack(losses).mean()


def vectors(halves: Sequence[Tensor], weight_S: Tensor, texts: Sequence[Stems]) -> Tensor:
    """(B, W): the weighted sum of each text's rows, of each (S, D) of ``halves``, side by side."""
    flat_T = torch.from_numpy(np.concatenate(texts))
    starts_B = torch.from_numpy(np.cumsum([0, *map(len, texts[:-1])]))
    weight_T = weight_S[flat_T]
    sums = [
        F.embedding_bag(flat_T, rows_SD, starts_B, mode="sum", per_sample_weights=weight_T)
        for rows_SD in halves
    ]
    return torch.cat(sums, dim=1)


def crops(
    texts: Sequence[Stems], size: int, rng: np.random.Generator
) -> Iterator[tuple[list[Stems], list[Stems]]]:
    """Batches without end: a run of each text's words, and the text without it."""
    order = list[int]()
    while True:
        while len(order) < size:
            order += rng.permutation(len(texts)).tolist()
        batch, order = [texts[i] for i in order[:size]], order[size:]
        queries, passages = list[Stems](), list[Stems]()
        for text_T in batch:
            length = min(int(rng.integers(SHORTEST, LONGEST + 1)), len(text_T) // 2)
            start = int(rng.integers(0, len(text_T) - length + 1))
            queries.append(text_T[start : start + length])
            passages.append(np.delete(text_T, slice(start, start + length)))
        yield queries, passages
