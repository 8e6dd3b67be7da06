"""DREAM: a retriever's scores steer an LM's attention where the LM looks for an answer.

    w   = softmax_i( cos(q, d_i) / tau )
    A~  = w_i * (A within D_i, normalised to sum to 1) on the tokens of D_i; 0 outside candidates
    A'  = (1 - g) A + g A~
    L   = mean over questions of the mean over answer tokens of
          -log p(token | what precedes it)                               (eq. 10)

- q, d_i: the retriever's vectors of the question and of candidate chunk D_i.
- A: the LM's attention in the rows of the question and in the query-focused heads, those that look
  from a question to its answer (training/methods/find_heads.py). A' replaces it.
- g, tau: the gate and the temperature, both trained.

A frozen LM reads the candidates, then a question, then the chunk that answers it. A retriever that
gives the answer more weight lowers the loss. A~ times the values is document attention.

Ours: the candidates are read once, without a graph, and all questions continue that reading. This
is exact, because nothing before a question depends on w. docs/papers.md lists what the paper leaves
open.

Cost: one reading of all candidates, and one forward and backward pass over questions and answers.
When to use it: with written queries, and an LM that answers by its query-focused heads.

Shapes: Q questions, B candidates of a group, S tokens of the candidates' texts, T tokens of the
questions and answers, R of them question rows; N candidates of a batch, K of H heads, G key-value
heads, D width of a head or of a vector.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.training.device import on_cpu, sent
from revela.training.lm.document_attention import (
    EPSILON,
    DocumentWeights,
    Kernel,
    by_layer,
    document_attention,
    select_heads,
)
from revela.training.lm.language_model import LanguageModel
from revela.training.lm.prompts import (
    ANSWER,
    QUESTION_TOKENS,
    PromptMaker,
    Questions,
    of_group,
    read_candidates,
)
from revela.training.methods.base import (
    Batch,
    BuildContext,
    Collate,
    Heads,
    RetrieverLoss,
    Row,
    Side,
    detached_backward,
    load_lm,
)
from revela.training.methods.find_heads import heads_from_file, query_heads
from revela.training.settings import Dream

log = logging.getLogger(__name__)


def build(settings: Dream, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``dream`` and its collator."""
    lm, tokenizer, folder = load_lm(parts)
    recipe, size = parts.recipe, parts.recipe.groups.group_size
    tokens = recipe.lm.lm_tokens
    max_length = (size + 1) * (tokens + 8) + QUESTION_TOKENS
    if lm.max_tokens is not None and max_length > lm.max_tokens:
        raise RevelaError(
            f"{size} candidates of {tokens} tokens may take {max_length:,} tokens, more than the "
            f"{lm.max_tokens:,} that {recipe.lm.lm} reads: lower --lm-tokens or --group-size"
        )

    prompts = PromptMaker(tokenizer, tokens, size)

    def best_heads() -> Heads:
        if settings.heads:
            ranking = heads_from_file(Path(settings.heads), "questions", folder)
        else:
            seed, source = recipe.training.seed, recipe.queries.queries
            ranking = query_heads(lm, prompts, folder, parts.rows, parts.written, seed, source)
        return [(layer, head) for layer, head, _ in ranking[: settings.query_heads]]

    heads = parts.heads(best_heads)
    names = " ".join(f"{layer}-{head}" for layer, head in heads)
    log.info(f"{len(heads)} heads that look from questions to answers: {names}")
    tau, gate, kernel = settings.tau, settings.gate, settings.kernel
    loss = DreamLoss(parts.model, lm, heads, tau=tau, gate=gate, kernel=kernel, **parts.batching)
    return loss, PromptBatches(parts, prompts)


@dataclass(frozen=True)
class PromptBatches:
    """Collates queries and candidates for the retriever, and prompts for the LM."""

    parts: BuildContext
    prompts: PromptMaker

    def __call__(self, rows: Sequence[Row]) -> Batch:
        questions = [(row["query"], i) for i, row in enumerate(rows) if row["query"]]
        texts = [row["text"] for row in rows]
        prompt, tail = self.prompts.with_answers(texts, questions)
        return {
            **self.parts.sides([query for query, _ in questions], texts),
            **{f"prompt_{k}": v for k, v in prompt.items()},
            **{f"tail_{k}": v for k, v in tail.items()},
        }


class Injection:
    """The ``Mix`` (lm/language_model.py) of DREAM: A' in the question rows of the selected heads.

    Args:
        weights_QB: w.
        questions: the tails, and the key-value cache of the candidates.
        heads: (layer, head) pairs.
        gate: g.
        kernel: see document_attention.
    """

    def __init__(
        self,
        weights_QB: Tensor,
        questions: Questions,
        heads: Sequence[tuple[int, int]],
        gate: Tensor,
        kernel: Kernel = "auto",
    ) -> None:
        lengths, counts = questions.lengths, questions.counts
        self.documents = DocumentWeights(weights_QB, lengths, counts, EPSILON)
        self.questions, self.gate, self.kernel = questions, gate, kernel
        self.heads = by_layer(sorted(heads))

    def __call__(
        self,
        layer: int,
        own_HTD: Tensor,
        query_HTD: Tensor,
        key_GTD: Tensor,
        value_GTD: Tensor,
        scale: float | None,
    ) -> Tensor:
        if layer not in self.heads:
            return own_HTD
        questions = self.questions
        heads_K = sent(torch.tensor(self.heads[layer]), own_HTD.device)
        query_KRD, key_KSD, value_KSD = select_heads(
            heads_K,
            query_HTD[:, questions.rows_R],
            questions.memory.keys[layer][:, questions.places_S],
            questions.memory.values[layer][:, questions.places_S],
        )
        cross_KRD = document_attention(
            query_KRD, key_KSD, value_KSD, self.documents, scale=scale, kernel=self.kernel
        )
        cells = heads_K[:, None], questions.rows_R[None]
        own_KRD = own_HTD[cells]
        mixed_KRD = own_KRD + self.gate.to(own_HTD.dtype) * (cross_KRD.to(own_HTD.dtype) - own_KRD)
        return own_HTD.index_put(cells, mixed_KRD)


class DreamLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the frozen language model.
        heads: (layer, head) pairs to inject into.
        tau: initial temperature; its logarithm is trained, so it stays positive.
        gate: initial g; its logit is trained, so it stays in (0, 1).
        kernel: see document_attention.
        batching: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        heads: Sequence[tuple[int, int]],
        *,
        tau: float,
        gate: float,
        kernel: Kernel = "auto",
        **batching: int,
    ) -> None:
        super().__init__(model, tau=tau, **batching)
        self.lm, self.heads, self.kernel = lm, list(heads), kernel
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)))
        self.gate_logit = nn.Parameter(torch.tensor(math.log(gate / (1 - gate))))

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per token of an answer: the mean over groups of L.

        Args:
            features: questions and candidates for the retriever; prompt and tail for the LM, which
                are each group's candidates, and the questions and answers that follow (see
                training/lm/prompts.py). Groups without a question are skipped.
        """
        question, passage, prompt, tail = features
        question_QD, passage_ND = self.embed(question), self.embed(passage)
        passages = self.groups(passage_ND)
        counts = on_cpu(tail["group"]).bincount(minlength=len(passages)).tolist()
        pairs = zip(torch.split(question_QD, counts), passages, strict=True)
        losses = []
        for i, (own_QD, passage_BD) in enumerate(pairs):
            if not len(own_QD):
                continue
            weights_QB = (own_QD @ passage_BD.T / self.log_tau.exp()).softmax(dim=-1)
            loss_of = partial(self.answer_loss, *of_group(prompt, tail, i))
            losses.append(detached_backward(loss_of, weights_QB, self.gate_logit))
        return torch.stack(losses).mean()

    def answer_loss(
        self,
        prompt: dict[str, Tensor],
        tail: dict[str, Tensor],
        weights_QB: Tensor,
        gate_logit: Tensor,
    ) -> Tensor:
        """L of one group in nats, with the weights w and the logit of g."""
        questions = read_candidates(self.lm, prompt, tail)
        inject = Injection(weights_QB, questions, self.heads, gate_logit.sigmoid(), self.kernel)
        rows_R = on_cpu(questions.tails.layout.with_next_R)
        before_answer_R = sent(rows_R[questions.role_T[rows_R + 1] == ANSWER], weights_QB.device)
        losses_R = self.lm.token_losses(
            questions.tails, before_answer_R, mix=inject, prefix=questions.memory
        )
        counts = (on_cpu(tail["role"]) == ANSWER).sum(dim=1).tolist()
        return torch.stack([losses.mean() for losses in torch.split(losses_R, counts)]).mean()
