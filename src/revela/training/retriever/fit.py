"""Fit a model's pooling to raw text without labels, as stock modules.

``revela fit`` does so, and ``revela train`` before its first step. Five steps, in the order of
``fit_to_corpus``:

1. Token weights a / (a + p(token)) in the mean (SIF; Arora, Liang & Ma, ICLR 2017). Tokens without
   a letter or digit get 0, as in BM25: in code every other token is one. So do the tokens of
   prompts, as a decoder turns its first tokens into attention sinks, and special tokens.
2. Whitening x -> (x - mean) C^-p (Su et al., 2021), with C taken over tokens: the vectors of a raw
   LM share a few large directions that do not depend on the text, and pooled vectors are too few
   and too alike to find them.
3. Lexical half: the mean of the tokens' input embeddings, whitened over the corpus's tokens and
   each of unit length, so that a rare word is found by itself. ``revela fit`` also trains it
   (training/word_table.py).
4. Rotation of the whole vector to its principal axes over the corpus, so that the first numbers
   carry most and a vector can be truncated. It changes no cosine of whole vectors.
5. Insertion of all this into the model.

Together they gain more than most training (research/notebook.md).

A token's lexical row is its input embedding, whitened over the corpus's tokens and of unit length,
times the token's weight. The mean of a text's rows is the lexical half, and by itself a vector for
which no layer is run (``lexical_vectors``).

Shapes: N texts, T tokens, D numbers of the contextual vectors or of a lexical row, W of the whole
vectors, V vocabulary, S tokens that occur.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.encoders.base import batches_by_length
from revela.encoders.load import resolve
from revela.encoders.torch_model import add_missing_rows, tokens_per_batch
from revela.errors import RevelaError
from revela.terminal import progress_bar, show_log
from revela.text.spool import vectors_on_disk
from revela.training.device import on_cpu, sent
from revela.training.retriever.build import build_retriever, set_parts
from revela.training.retriever.module import RetrieverModule
from revela.training.retriever.static_trainable import TrainableTable
from revela.training.settings import COUNTED, Fit, Retriever
from revela.types import Vectors, items_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
FITTING_SAMPLE = 1500  # chunks or texts that a model is fitted to
TEXTS = 1024  # texts that are tokenized at once
ROWS = 8192  # of an embedding table, whitened at once
RIDGE = 1e-2  # of the mean eigenvalue; keeps directions that the sample never uses small
ONE_TOKEN = ("lasttoken", "cls")
MEANS = ("mean", "weightedmean")
WORDS_TO_VECTORS = 2.5
"""Minimum of W / V (ranking/fusion.py) of a fitted model: calibration by sentences overrates its
vectors, as they hold the words of the text."""
# The stock one prints the whole vocabulary.
modules.WordWeights.__repr__ = lambda self: f"WordWeights({len(self.vocab)} tokens)"
TrainRows = Callable[[Tensor], Tensor]
"""Trains the rows of the LM's tokens, (V, D) -> (V, W); the rows of tokens without weight are 0."""


@show_log()
def fit(
    model: SentenceTransformer | str | Path,
    texts: Iterable[str],
    *,
    token_weighting: float = Fit.token_weighting,
    whitening: float = Fit.whitening,
    lexical: float = Fit.lexical,
    seed: int = 0,
) -> SentenceTransformer:
    """Fit a model to raw texts in seconds to minutes, without labels or a gradient step.

    It makes retrievers of raw language models: six layers of SmolLM2-135M go from nDCG@10 0.453
    to 0.551 on CoNaLa, and from 0.205 to 0.622 on CosQA. It harms embedders: MiniLM falls from
    0.729 to 0.679 and from 0.795 to 0.739.

    Args:
        model: changed in place, to fp32; or a name (a folder, a hub id, embedded:smollm2-135m),
            of which a language model's lower layers are taken, as ``revela train`` does.
        texts: what will be searched, or a part of it; 1,500 of them are drawn.
        token_weighting: see docs/command-line.md, as for whitening and lexical; 0: off.
        whitening: exponent.
        lexical: weight of the lexical half.
        seed: of the draw.

    Returns:
        The model, of stock modules: ``save_pretrained`` saves it.

    Raises:
        RevelaError: it is not made of a transformer, a pooling and a normalisation, or there are
            fewer than two texts with words.
    """
    texts = list(items_of(texts, "texts"))
    if not isinstance(model, SentenceTransformer):
        model = build_retriever(resolve(str(model)), Retriever())
    _check_parts(model)
    with_words = [text for text in texts if any(map(str.isalnum, text))]
    if len(with_words) < 2:
        raise RevelaError(f"{len(with_words)} of {len(texts)} texts have words: give at least two")
    add_missing_rows(model[0])
    settings = Fit(token_weighting=token_weighting, whitening=whitening, lexical=lexical)
    model.similarity_fn_name = "cosine"
    fit_to_corpus(RetrieverModule(model.float()), with_words, settings, seed=seed)
    return model


def _check_parts(model: SentenceTransformer) -> None:
    parts = list(model)
    kinds = (modules.Transformer, modules.Pooling, modules.Normalize)
    fits = len(parts) in (2, 3) and all(map(isinstance, parts, kinds))
    if not fits or parts[1].pooling_mode not in (*MEANS, *ONE_TOKEN):
        found = ", ".join(type(part).__name__ for part in parts)
        if fits:
            found += f", pooling by {parts[1].pooling_mode}"
        raise RevelaError(
            f"this model cannot be fitted ({found}): give one of Transformer, Pooling by one of "
            f"{', '.join((*MEANS, *ONE_TOKEN))}, and Normalize, that is not fitted yet"
        )


@torch.no_grad()
def fit_to_corpus(
    retriever: RetrieverModule,
    texts: Sequence[str],
    settings: Fit,
    *,
    seed: int = 0,
    train_rows: TrainRows | None = None,
) -> dict[str, Tensor]:
    """Fit token weights, whitening, lexical half and rotation to a sample of texts, and insert
    them, in place. Returns the fitted tensors, for ``insert_fit``.

    Args:
        retriever: transformer and pooling, perhaps with a normalisation and weights of slots.
        texts: the corpus's chunks.
        settings: which of the steps, and how much.
        seed: of the sample.
        train_rows: trains the rows of the lexical half; None: they stay.
    """
    texts = random.Random(seed).sample(texts, min(len(texts), FITTING_SAMPLE))
    model, tokenizer, fitted = retriever.model, retriever.tokenizer, dict[str, Tensor]()
    counts_V = token_counts(tokenizer, texts)
    weight_V = token_weights(tokenizer, counts_V, settings.token_weighting)
    weight_V[[*_prompt_ids(model), *tokenizer.all_special_ids]] = 0.0
    if settings.token_weighting or retriever.slots:
        fitted["weight_V"] = weight_V
    _insert_token_weights(model, fitted)  # texts are read with them
    if settings.whitening or settings.lexical:
        pooled_ND, covariance_DD = _read_sample(retriever, texts)
        weight_DD, bias_D = _whitening(pooled_ND, covariance_DD, settings.whitening)
        fitted |= {"weight_DD": weight_DD, "bias_D": bias_D}
        halves = [pooled_ND @ weight_DD.double().T + bias_D]
        if settings.lexical:
            table_VD = lexical_table(model, counts_V, weight_V)
            if train_rows is not None:
                table_VD = train_rows(table_VD)
            sums_ND, weights_N = sums_of_rows(tokenizer, texts, table_VD, weight_V)
            means_ND = sums_ND / weights_N.clamp(min=1e-9)[:, None]
            scale = settings.lexical**0.5 * _to_unit_spread(means_ND)
            halves.append(scale * means_ND.double())
            fitted["table_VD"] = table_VD.mul_(scale)
        fitted["axes_WW"] = _principal_axes(torch.cat(halves, dim=1)).float()
    _append_layers(model, fitted)
    log.info(f"token weights and whitening fitted to {len(texts):,} texts")
    return fitted


def _prompt_ids(model: SentenceTransformer) -> list[int]:
    """Tokens of the prompts, whose weight is 0."""
    prompts = [prompt.rstrip() for prompt in model.prompts.values() if prompt]
    return [i for prompt in prompts for i in token_ids(model.tokenizer, [prompt])[0]]


def _read_sample(retriever: RetrieverModule, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Pooled vectors of passages, (N, D), and the covariance of their token vectors, in fp64.

    If pooling takes one token, which is unlike the others, the covariance is of pooled vectors.
    """
    model, width = retriever.model, retriever.model[0].get_embedding_dimension()
    prompt_ids = torch.tensor(_prompt_ids(model))
    where = "cpu" if retriever.device.type == "mps" else retriever.device  # which has no fp64
    pooled, order, tokens = list[Tensor](), list[int](), 0
    sum_D = torch.zeros(width, dtype=torch.float64, device=where)
    outer_DD = torch.zeros(width, width, dtype=torch.float64, device=where)
    with retriever.evaluating(), progress_bar("fitting", "chunk", total=len(texts)) as shown:
        read = partial(retriever.tokenize, role="passage")
        for indices, features in batches_by_length(
            texts, read, tokens_per_batch(retriever.device), retriever.limit
        ):
            features = retriever.states(features)
            in_prompt_NT = torch.isin(on_cpu(features["input_ids"]), prompt_ids)
            kept_NT = on_cpu(features["attention_mask"]).bool() & ~in_prompt_NT
            places = sent(kept_NT.flatten().nonzero().squeeze(1), retriever.device)
            states_TD = features["token_embeddings"].flatten(0, 1)[places].to(sum_D)
            tokens += len(states_TD)
            sum_D += states_TD.sum(dim=0)
            outer_DD += states_TD.T @ states_TD
            pooled.append(retriever.pool(features))
            order += indices
            shown.update(len(indices))
    sum_D, outer_DD = sum_D.cpu(), outer_DD.cpu()
    pooled_ND = torch.empty(len(texts), width, dtype=torch.float64)
    pooled_ND[order] = torch.cat(pooled).cpu().double()
    pooling = next(part for part in model if isinstance(part, modules.Pooling))
    if pooling.pooling_mode in ONE_TOKEN:
        return pooled_ND, torch.cov(pooled_ND.T)
    mean_D = sum_D / tokens
    return pooled_ND, outer_DD / tokens - torch.outer(mean_D, mean_D)


def _whitening(pooled_ND: Tensor, covariance_DD: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Weight (D, D) and bias (D,) that centre and whiten pooled vectors, to unit spread."""
    weight_DD, mean_D = inverse_power(covariance_DD, power), pooled_ND.mean(dim=0)
    scale = _to_unit_spread((pooled_ND - mean_D) @ weight_DD)
    return (scale * weight_DD.T).float().contiguous(), (-scale * (mean_D @ weight_DD)).float()


def _to_unit_spread(vectors_ND: Tensor) -> float:
    """1 / sqrt(|C|_F): brings the standard deviation of dot products of unrelated texts to 1.

    The cosine adds the two halves of a vector like two noisy scores, so their noise has to be
    equal. Equal norms do not suffice: training brings contextual vectors closer together at the
    same norm (research/notebook.md).
    """
    return float(torch.cov(vectors_ND.T).norm().clamp(min=1e-12) ** -0.5)


def _principal_axes(vectors_NW: Tensor) -> Tensor:
    """(W, W) orthonormal rows, by their contribution to the cosines."""
    unit_NW = F.normalize(vectors_NW, dim=1)
    axes_WW: Tensor = torch.linalg.eigh(unit_NW.T @ unit_NW)[1].T  # ascending
    return axes_WW.flip(0).contiguous()


def insert_fit(model: SentenceTransformer, fitted: dict[str, Tensor]) -> None:
    """Replace what follows a model's transformer and pooling by fitted modules, in place."""
    _insert_token_weights(model, fitted)
    _append_layers(model, fitted)


def _insert_token_weights(model: SentenceTransformer, fitted: dict[str, Tensor]) -> None:
    """Keep transformer and pooling only, and insert the tokens' weights, if any."""
    transformer = model[0]
    pooling = next(part for part in model if isinstance(part, modules.Pooling))
    parts: list[nn.Module] = [transformer, pooling]
    if "weight_V" in fitted:
        weights = fitted["weight_V"].tolist()
        vocabulary = transformer.tokenizer.convert_ids_to_tokens(range(len(weights)))
        by_word = dict(zip(vocabulary, weights, strict=True))
        # A pooling of one token stays before the weights, which the lexical half still reads.
        place = 2 if pooling.pooling_mode in ONE_TOKEN else 1
        parts.insert(place, modules.WordWeights(vocabulary, by_word))
    set_parts(model, parts)


def _append_layers(model: SentenceTransformer, fitted: dict[str, Tensor]) -> None:
    """Append whitening, lexical half and rotation, if fitted, and a normalisation."""
    parts = list(model)
    if "axes_WW" in fitted:
        added = [_linear(fitted["weight_DD"], fitted["bias_D"])]
        if "table_VD" in fitted:
            # Pooling joins "cls_token_embeddings" to the mean of "token_embeddings".
            added[0].module_output_name = "cls_token_embeddings"
            table = modules.WordEmbeddings(model.tokenizer, fitted["table_VD"])
            both = modules.Pooling(len(fitted["bias_D"]), pooling_mode=("cls", "mean"))
            added = [table, *added, both]
        parts += [*added, _linear(fitted["axes_WW"], None)]
    parts += [modules.Normalize()] if model.similarity_fn_name == "cosine" else []
    set_parts(model, parts)


def _linear(weight_WW: Tensor, bias_W: Tensor | None) -> modules.Dense:
    width, has_bias = len(weight_WW), bias_W is not None
    return modules.Dense(width, width, has_bias, nn.Identity(), weight_WW, bias_W)


@torch.no_grad()
def lexical_vectors(
    model: SentenceTransformer, texts: Sequence[str], token_weighting: float
) -> Vectors:
    """(N, D) unit vectors of the texts' words, on disk; no layer is run.

    A vector is the weighted mean of the tokens' lexical rows, or of a trainable table's rows as
    they are. Texts are read twice.
    """
    if isinstance(model[0], TrainableTable):
        table_VD = model[0].table_VD().cpu()
        weight_V = torch.ones(len(table_VD))
    else:
        counts_V = token_counts(model.tokenizer, texts[:: max(1, len(texts) // COUNTED)])
        weight_V = token_weights(model.tokenizer, counts_V, token_weighting)
        table_VD = lexical_table(model, counts_V, weight_V)
    vectors_ND = vectors_on_disk(len(texts), table_VD.shape[1])
    with progress_bar("reading words", "text", total=len(texts)) as shown:
        for start in range(0, len(texts), TEXTS):
            batch = texts[start : start + TEXTS]
            shown.update(len(batch))
            sums_ND, _ = sums_of_rows(model.tokenizer, batch, table_VD, weight_V)
            vectors_ND[start : start + TEXTS] = F.normalize(sums_ND, dim=1).numpy()
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
