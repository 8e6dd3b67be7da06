"""What objectives share: the parts they are built from, the retriever's two sides of a batch,
cosines per group with a temperature, GradCache, and the KL of two rankings.

An objective is one file: its settings (a frozen dataclass, ``settings.Objective``), its batches and
its loss. docs/objectives.md shows how to write one.

Shapes: N texts of a batch, n of one of its groups, D width of a vector.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.corpus.arrow_list import ArrowList
from revela.device import on_cpu
from revela.errors import RevelaError
from revela.groups.query_lm import QueriesInTraining
from revela.objectives.gradcache import embed
from revela.retriever.context import FirstStage
from revela.settings import Recipe
from revela.types import Chunk, Document, evenly

TARGET_SCALE = 2.0  # factor of the standard scores of a teacher, before their softmax
KEPT = 2**26  # numbers in the vectors of a retriever's start that are kept: 256 MiB

Row = Mapping[str, Any]
Batch = dict[str, Tensor]
Side = dict[str, Tensor]
Collate = Callable[[Sequence[Row]], Batch]


@dataclass(frozen=True)
class Parts:
    """What an objective is built from."""

    recipe: Recipe
    model: Any
    "The retriever, a SentenceTransformer."
    documents: Sequence[Document]
    rows: ArrowList[Chunk]
    "What groups are made of; without their queries where ``written`` has these."
    device: torch.device
    bf16: bool
    count: Callable[[int], None] = lambda tokens: None
    "Called with the number of tokens that the retriever reads, per side of a batch."
    first_stage: FirstStage | None = None
    "Of a retriever with slots for a context."
    corpora: Sequence[int] = ()
    "Where corpora but the first begin: numbers of documents; a row's document counts on."
    relevant: Mapping[int, Collection[int]] = field(default_factory=dict)
    "Documents that answer a query, by its number, where queries are judged."
    mined: Callable[[Sequence[Row]], Sequence[Sequence[int]]] | None = None
    "For each row of a batch, other rows that are mined as negatives of its query."
    folder: Path = Path()
    "What the retriever was opened from."
    written: QueriesInTraining | None = None
    "Queries that are written as training comes to their chunks."

    @property
    def batching(self) -> dict[str, Any]:
        """``group_size`` and ``retriever_batch``, as RetrieverLoss takes them."""
        recipe = self.recipe
        size, batch = recipe.groups.group_size, recipe.training.retriever_batch
        return {"group_size": size, "retriever_batch": batch}

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Batch:
        """Both sides as the retriever reads them: query_input_ids, passage_input_ids and so on."""
        from revela.retriever.encode import passage_prompt_of, query_prompt_of

        batch: Batch = {}
        for name, texts, prompt in (
            ("query", queries, query_prompt_of(self.model)),
            ("passage", passages, passage_prompt_of(self.model)),
        ):
            features = self.model.preprocess(list(texts), prompt=prompt or None)
            tensors = {k: v for k, v in features.items() if isinstance(v, Tensor)}
            batch.update({f"{name}_{k}": v for k, v in tensors.items()})
            self.count(int(features["attention_mask"].sum()))
        return batch


class RetrieverLoss(nn.Module):
    """Base class of the losses: embeds texts, and compares those of a group by cosine.

    Args:
        model: the retriever; called on tokenized texts, gives ``sentence_embedding``.
        tau: temperature; ``learn_tau`` makes it a parameter (its logarithm, so it stays positive).
        group_size: texts per group; a batch may hold several groups. 0: a batch is one group.
        retriever_batch: texts per forward pass of the retriever; see gradcache.embed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tau: float,
        learn_tau: bool = False,
        group_size: int = 0,
        retriever_batch: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.group_size, self.retriever_batch = model, group_size, retriever_batch
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)), requires_grad=learn_tau)

    @property
    def tau(self) -> Tensor:
        """The temperature."""
        return self.log_tau.exp()

    def embed(self, side: Side) -> Tensor:
        """(N, D) vectors of tokenized texts, of any norm."""
        return embed(self.model, side, self.retriever_batch)

    def unit(self, side: Side) -> Tensor:
        """(N, D) vectors of tokenized texts, of length one."""
        return F.normalize(self.embed(side), dim=-1)

    def groups(self, rows_N: Tensor) -> tuple[Tensor, ...]:
        """The rows of each group of the batch."""
        return torch.split(rows_N, self.group_size or len(rows_N))

    def places(self, count: int) -> list[slice]:
        """Where each group is among the rows of the batch."""
        size = self.group_size or count
        return [slice(start, start + size) for start in range(0, count, size)]

    def cosines(self, query: Side, passage: Side) -> list[Tensor]:
        """(n, n) cosines of each group's queries, in rows, and passages."""
        return self.cosines_of(self.unit(query), self.unit(passage))

    def cosines_of(self, query_ND: Tensor, passage_ND: Tensor) -> list[Tensor]:
        """``cosines`` of vectors of length one."""
        with torch.autocast(query_ND.device.type, enabled=False):
            pairs = zip(self.groups(query_ND), self.groups(passage_ND), strict=True)
            return [query_nD @ passage_nD.T for query_nD, passage_nD in pairs]


class Start:
    """What a retriever was before training: its vectors then, without dropout.

    Args:
        at_start: a context in which the objective's model is what it was.
        keep: keep the vector of each text, so that it is computed once; only for a model whose
            vector of a text depends on nothing else. A resumed run reads the texts again, beside
            others maybe, so that the last bits of these vectors may be others.
    """

    def __init__(
        self, at_start: Callable[[], AbstractContextManager[None]], keep: bool = False
    ) -> None:
        self.at_start, self.keep = at_start, keep
        self.kept: dict[bytes, Tensor] = {}

    @classmethod
    def of(cls, parts: Parts) -> Start:
        """The retriever without its LoRA, or its rows as they were."""
        from revela.retriever.lora import before_training

        keep = parts.first_stage is None and not parts.recipe.retriever.matryoshka
        return cls(partial(before_training, parts.model), keep)

    @torch.no_grad()
    def unit(self, objective: RetrieverLoss, side: Side) -> Tensor:
        """(N, D) vectors of tokenized texts, of length one."""
        read = zip(on_cpu(side["input_ids"]), on_cpu(side["attention_mask"]).bool(), strict=True)
        texts = [blake2b(ids[mask].numpy(), digest_size=16).digest() for ids, mask in read]
        if self.kept.keys() >= set(texts):
            return torch.stack([self.kept[text] for text in texts])
        model = objective.model
        was_training = model.training
        model.eval()
        with self.at_start():
            unit_ND = objective.unit(side)
        model.train(was_training)
        if self.keep and len(self.kept) * unit_ND.shape[1] < KEPT:
            self.kept.update(zip(texts, unit_ND, strict=True))
        return unit_ND


def softmax_of_others(scores_nn: Tensor) -> Tensor:
    """The softmax of each row over j != i; 0 on the diagonal, rows sum to 1."""
    diagonal_nn = torch.eye(len(scores_nn), dtype=torch.bool, device=scores_nn.device)
    return scores_nn.masked_fill(diagonal_nn, -torch.inf).softmax(dim=-1)


def others(scores_nn: Tensor) -> Tensor:
    """(n, n - 1): the rows without the diagonal; a GPU is not asked how many numbers there are."""
    size = len(scores_nn)
    rows = scores_nn.flatten()[1:].view(size - 1, size + 1)[:, :-1]
    return rows.reshape(size, size - 1)


def standard(scores: Tensor) -> Tensor:
    """Standard scores over the last dimension; 0 where all are equal."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)


def ranking_loss(
    cosine_QB: Tensor,
    tau: float | Tensor,
    teacher_QB: Tensor,
    start_QB: Tensor,
) -> Tensor:
    """KL of the retriever's ranking from that of an LM and its own start: mean over rows, in nats.

        t = z( z(teacher) + z(start) )
        L = KL( softmax(2 t) || softmax(cos / tau) )

    z gives standard scores (``standard``).

    Args:
        cosine_QB: the retriever's cosines.
        tau: their temperature.
        teacher_QB: the LM's scores of the same pairs.
        start_QB: the cosines before training.
    """
    with torch.autocast(cosine_QB.device.type, enabled=False):
        target_QB = TARGET_SCALE * standard(standard(teacher_QB) + standard(start_QB))
        return F.kl_div(
            (cosine_QB / tau).log_softmax(dim=-1), target_QB.softmax(dim=-1), reduction="batchmean"
        )


def language_model(parts: Parts, trained: bool = False) -> tuple[Any, Any, Path]:
    """The recipe's LM on the device, its tokenizer and its folder.

    Args:
        parts: of the objective.
        trained: put LoRA on it, of the retriever's rank; otherwise it is frozen.
    """
    from revela.lm.language_model import load_language_model, load_tokenizer
    from revela.retriever.fit import COUNTED, token_ids
    from revela.weights import find_weights

    recipe, retriever = parts.recipe, parts.recipe.retriever
    if recipe.lm.shard_lm and trained:
        raise RevelaError("--shard-lm is for a frozen LM: leave it, or --lm-lora, out")
    folder = find_weights(recipe.lm.model, retriever.offline_model)
    lora = dict(
        rank=retriever.lora_rank, alpha=retriever.lora_alpha, dropout=retriever.lora_dropout
    )
    lm = load_language_model(
        folder, bf16=parts.bf16, lora=lora if trained else None, name=recipe.lm.model
    )
    if recipe.lm.shard_lm:
        lm.shard()
    lm, tokenizer = lm.to(parts.device), load_tokenizer(folder)
    if recipe.lm.loss_tokens == "corpus":
        some = [parts.rows[i].text for i in evenly(len(parts.rows), COUNTED).tolist()]
        lm.score_only(torch.tensor([i for ids in token_ids(tokenizer, some) for i in ids]))
    return lm, tokenizer, folder


@dataclass(frozen=True)
class ChunkBatches:
    """A group's chunks as queries, as passages, and as the LM reads them (revela, gains, replug).

    A query is the first half of the chunk's tokens (Revela, section 4), as many of them from a
    random place on ("random-span"), or the whole chunk.
    """

    parts: Parts
    tokenizer: Any
    query_side: str

    def __call__(self, rows: Sequence[Row]) -> Batch:
        texts = [row["text"] for row in rows]
        read = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.parts.recipe.lm.lm_tokens,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        return {
            **self.parts.sides(self._queries(rows, texts), texts),
            **{f"chunk_{name}": read[name] for name in ("input_ids", "attention_mask")},
            "chunk_document": torch.tensor([row["document"] for row in rows]),
        }

    def _queries(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[str]:
        from revela.retriever.tokens import halves

        if self.query_side == "whole":
            return texts
        recipe, seed = self.parts.recipe, self.parts.recipe.training.seed
        anywhere = self.query_side == "random-span"
        draws = [row_random(row, seed) for row in rows] if anywhere else None
        return halves(texts, self.parts.model.tokenizer, recipe.lm.lm_tokens, draws)


def row_random(row: Row, seed: int) -> random.Random:
    """Random numbers of a row in an epoch; they do not depend on what else is in its batch."""
    return random.Random(f"{seed}/{row['epoch']}/{row['row']}")
