"""Words without context: the tokens of texts, how often they occur, and their input embeddings.

A token's lexical row is its input embedding, whitened over the corpus's tokens and of unit length,
times the token's weight. The mean of a text's rows is the lexical half of a fitted retriever
(fit.py), and by itself a vector for which no layer is run (``lexical_vectors``).

Shapes: N texts, T tokens, V vocabulary, S tokens that occur, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

from revela.terminal import progress_bar
from revela.text.spool import vectors_on_disk
from revela.training.retriever.static_trainable import TrainableTable
from revela.types import Vectors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXTS = 1024  # texts that are tokenized at once
ROWS = 8192  # of an embedding table, whitened at once
COUNTED = 20_000  # maximum number of texts to count token frequencies on
RIDGE = 1e-2  # of the mean eigenvalue; keeps directions that the sample never uses small


@torch.no_grad()
def lexical_vectors(
    model: SentenceTransformer, texts: Sequence[str], token_weighting: float
) -> Vectors:
    """(N, D) unit vectors of the texts' words, on disk; no layer is run.

    A vector is the weighted mean of the tokens' lexical rows, or of a trainable table's rows as
    they are. Texts are read twice.
    """
    if isinstance(model[0], TrainableTable):
        table_VD = model[0].table_VD()
        weight_V = torch.ones(len(table_VD))
    else:
        counts_V = token_counts(model.tokenizer, texts[:: max(1, len(texts) // COUNTED)])
        weight_V = token_weights(model.tokenizer, counts_V, token_weighting)
        table_VD = lexical_table(model, counts_V, weight_V)
    vectors_ND = vectors_on_disk(len(texts), table_VD.shape[1])
    shown = progress_bar("reading words", "text", total=len(texts))
    for start in range(0, len(texts), TEXTS):
        batch = texts[start : start + TEXTS]
        shown.update(len(batch))
        sums_ND, _ = sums_of_rows(model.tokenizer, batch, table_VD, weight_V)
        vectors_ND[start : start + TEXTS] = F.normalize(sums_ND, dim=1).numpy()
    shown.close()
    return vectors_ND


def token_counts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """The count of each token, (V,)."""
    counts_V = torch.zeros(len(tokenizer), dtype=torch.long)
    for start in range(0, len(texts), TEXTS):
        ids = [i for row in token_ids(tokenizer, texts[start : start + TEXTS]) for i in row]
        counts_V += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=len(tokenizer))
    return counts_V.float()


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, without special ones."""
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def token_weights(tokenizer: PreTrainedTokenizerFast, counts_V: Tensor, a: float) -> Tensor:
    """a / (a + p(token)), (V,); 0 for a token without a letter or digit. All 1 if a is 0."""
    if not a:
        return torch.ones(len(counts_V))
    texts = tokenizer.batch_decode([[i] for i in range(len(counts_V))])
    # A token that is a part of a letter's bytes is decoded as a replacement character.
    part = "\N{REPLACEMENT CHARACTER}"
    word_V = torch.tensor([any(c.isalnum() or c == part for c in text) for text in texts])
    return torch.where(word_V, a / (a + counts_V / counts_V.sum()), 0.0)


def lexical_table(model: SentenceTransformer, counts_V: Tensor, weight_V: Tensor) -> Tensor:
    """Each token's whitened input embedding, of unit length, times its weight; (V, D)."""
    embeddings_VD = model[0].model.get_input_embeddings().weight.float().cpu()
    whiten = whitening_of(embeddings_VD, counts_V)
    table_VD = torch.empty(len(counts_V), embeddings_VD.shape[1])
    for start in range(0, len(table_VD), ROWS):  # a copy of all in fp64 would be gigabytes
        rows = slice(start, min(start + ROWS, len(table_VD)))
        table_VD[rows] = weight_V[rows, None] * whiten(embeddings_VD[rows]).float()
    return table_VD


def whitening_of(rows_VD: Tensor, counts_V: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that whitens rows by the rows of a corpus, all first brought to unit length."""
    seen_S = counts_V.nonzero().squeeze(1)
    share_S1 = (counts_V[seen_S] / counts_V.sum()).double()[:, None]
    unit_SD = F.normalize(rows_VD[seen_S], dim=1).double()
    mean_D = (share_S1 * unit_SD).sum(dim=0)
    centred_SD = unit_SD - mean_D
    whitening_DD = inverse_power(centred_SD.T @ (share_S1 * centred_SD), 0.5)

    def whiten(rows_RD: Tensor) -> Tensor:
        unit_RD = F.normalize(rows_RD, dim=1).double()
        return F.normalize((unit_RD - mean_D) @ whitening_DD, dim=1)

    return whiten


def inverse_power(covariance_DD: Tensor, power: float) -> Tensor:
    """C ** -power of a covariance, in fp64, with a ridge."""
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    values_D = values_D.clamp(min=0) + RIDGE * values_D.clamp(min=0).mean().clamp(min=1e-12)
    power_DD: Tensor = vectors_DD @ torch.diag(values_D.pow(-power)) @ vectors_DD.T
    return power_DD


def sums_of_rows(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], table_VD: Tensor, weight_V: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of the table's rows over each text's tokens, (N, D), and of their weights, (N,)."""
    sums_ND, weights_N = torch.zeros(len(texts), table_VD.shape[1]), torch.zeros(len(texts))
    for start in range(0, len(texts), TEXTS):
        rows = token_ids(tokenizer, texts[start : start + TEXTS])
        ids_T = torch.tensor([i for row in rows for i in row], dtype=torch.long)
        ends_N = torch.tensor([len(row) for row in rows]).cumsum(0)
        begins_N = F.pad(ends_N[:-1], (1, 0))
        place = slice(start, start + len(rows))
        sums_ND[place] = F.embedding_bag(ids_T, table_VD, begins_N, mode="sum")
        weights_N[place] = F.embedding_bag(ids_T, weight_V[:, None], begins_N, mode="sum")[:, 0]
    return sums_ND, weights_N
