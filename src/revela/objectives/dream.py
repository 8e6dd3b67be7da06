"""DREAM: a retriever's scores replace an LM's own attention where the LM looks for an answer.

A frozen LM reads candidate chunks, then a question, then the chunk that answers it; the loss is
that of the answer's tokens. In some heads, those that look from a question to its answer
(heads.py), and in the question's rows only, the attention A becomes

    A' = (1 - g) A + g A~
    A~ = w_i * (A within D_i, made to sum to 1) over the tokens of D_i, 0 outside the candidates
    w  = softmax_i( cos(q, d_i) / tau )

so a retriever that gives the answer more weight lowers the loss. A~ times the values is document
attention.

Ours: the candidates are read once, without a graph, for the questions to all of them, which
continue that one reading; nothing before a question depends on w. What the paper leaves open and
we chose stands in presets/dream.toml and docs/papers.md.

Cost: one reading of all candidates, and one forward and backward pass over questions and answers.
When to use it: with written queries, and an LM that answers by its query-focused heads.

Shapes: Q questions, B candidates of a group, P tokens of the candidates' text, T tokens of the
questions and answers, R of them question rows; H heads, D head width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revela.device import on_cpu, sent
from revela.errors import RevelaError
from revela.lm.document_attention import (
    EPSILON,
    DocumentWeights,
    Kernel,
    document_attention,
    select_heads,
)
from revela.lm.language_model import LanguageModel
from revela.lm.prompts import (
    ANSWER,
    QUESTION_TOKENS,
    PromptMaker,
    Questions,
    by_layer,
    of_group,
    read_candidates,
)
from revela.objectives.base import (
    Batch,
    BuildContext,
    Collate,
    RetrieverLoss,
    Row,
    Side,
    language_model,
)
from revela.objectives.gradcache import detached_backward
from revela.settings import Dream, QueryFocused

log = logging.getLogger(__name__)
MakePrompts = Callable[[Sequence[str], Sequence[tuple[str, int]]], tuple[Batch, Batch]]


def build(settings: Dream, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``dream``, and what makes its batches."""
    lm, heads, make = focused(settings, parts, answers=1)
    how: dict[str, Any] = dict(tau=settings.tau, kernel=settings.kernel, **parts.batching)
    loss = DreamLoss(parts.model, lm, heads, gate=settings.gate, **how)
    return loss, PromptBatches(parts, make.with_answers)


def focused(
    settings: QueryFocused, parts: BuildContext, answers: int
) -> tuple[LanguageModel, list[tuple[int, int]], PromptMaker]:
    """The LM, its query-focused heads, and what makes its prompts; ``answers`` is the number of
    passages that follow a question.
    """
    from revela.lm.heads import heads_from_file
    from revela.objectives.find_heads import query_heads

    lm, tokenizer, folder = language_model(parts)
    recipe, size = parts.recipe, parts.recipe.groups.group_size
    tokens = recipe.lm.lm_tokens
    context = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    longest = (size + answers) * (tokens + 8) + QUESTION_TOKENS
    if context is not None and longest > context:
        raise RevelaError(
            f"{size} candidates of {tokens} tokens may take {longest:,} tokens, more than the "
            f"{context:,} that {recipe.lm.model} reads: lower --lm-tokens or --group-size"
        )
    if settings.heads:
        ranking = heads_from_file(Path(settings.heads), folder)
    else:
        ranking = query_heads(recipe, lm, tokenizer, folder, parts.rows, parts.written)
    heads = [(layer, head) for layer, head, _ in ranking[: settings.query_heads]]
    named = " ".join(f"{layer}-{head}" for layer, head in heads)
    log.info(f"{len(heads)} heads that look from questions to answers: {named}")
    return lm, heads, PromptMaker(tokenizer, tokens, size)


@dataclass(frozen=True)
class PromptBatches:
    """Queries and candidates for the retriever, and all of it for the LM; ``make`` is a method of a
    PromptMaker.
    """

    parts: BuildContext
    make: MakePrompts

    def __call__(self, rows: Sequence[Row]) -> Batch:
        questions = [(row["query"], i) for i, row in enumerate(rows) if row["query"]]
        texts = [row["text"] for row in rows]
        prompt, tail = self.make(texts, questions)
        return {
            **self.parts.sides([query for query, _ in questions], texts),
            **{f"prompt_{k}": v for k, v in prompt.items()},
            **{f"tail_{k}": v for k, v in tail.items()},
        }


class Injection:
    """Puts document attention with the weights w into the question rows of these (layer, head)
    pairs: the ``Mix`` (streams.py) of DREAM.
    """

    def __init__(
        self,
        weights_QB: Tensor,
        asked: Questions,
        heads: Sequence[tuple[int, int]],
        gate: Tensor,
        kernel: Kernel = "torch",
    ) -> None:
        self.documents = DocumentWeights(weights_QB, asked.lengths, asked.counts, EPSILON)
        self.asked, self.gate, self.kernel = asked, gate, kernel
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
        asked = self.asked
        heads_K = sent(torch.tensor(self.heads[layer]), own_HTD.device)
        query_KRD, key_KSD, value_KSD = select_heads(
            heads_K,
            query_HTD[:, asked.rows_R],
            asked.memory.keys[layer][:, asked.places_S],
            asked.memory.values[layer][:, asked.places_S],
        )
        cross_KRD = document_attention(
            query_KRD, key_KSD, value_KSD, self.documents, scale=scale, kernel=self.kernel
        )
        cells = heads_K[:, None], asked.rows_R[None]
        own_KRD = own_HTD[cells]
        mixed_KRD = own_KRD + self.gate.to(own_HTD.dtype) * (cross_KRD.to(own_HTD.dtype) - own_KRD)
        return own_HTD.index_put(cells, mixed_KRD)


class DreamLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model, frozen.
        heads: (layer, head) pairs to inject into.
        tau: the temperature at the start; its logarithm is trained, so it stays positive.
        gate: g at the start; its logit is trained, so it stays in (0, 1).
        kernel: see document_attention.
        shared: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        heads: Sequence[tuple[int, int]],
        *,
        tau: float,
        gate: float,
        kernel: Kernel = "torch",
        **shared: Any,
    ) -> None:
        super().__init__(model, tau=tau, **shared)
        self.lm, self.heads, self.kernel = lm, list(heads), kernel
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)))
        self.gate_logit = nn.Parameter(torch.tensor(math.log(gate / (1 - gate))))

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per token of an answer; a group that asks nothing is left out.

        ``features`` are questions and candidates as the retriever reads them; ``prompt``, each
        group's candidates as the LM reads them; and ``tail``, the questions and answers that follow
        (see lm/prompts.py).
        """
        question, passage, prompt, tail = features
        question_QD, passage_ND = self.unit(question), self.unit(passage)
        passages = self.groups(passage_ND)
        counts = on_cpu(tail["group"]).bincount(minlength=len(passages)).tolist()
        pairs = zip(torch.split(question_QD, counts), passages, strict=True)
        losses = []
        for i, (mine_QD, passage_BD) in enumerate(pairs):
            if not len(mine_QD):
                continue
            with torch.autocast(question_QD.device.type, enabled=False):
                weights_QB = (mine_QD @ passage_BD.T / self.log_tau.exp()).softmax(dim=-1)
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
        """Mean cross-entropy (nats) of the answers' tokens under these weights, the candidates read
        first.
        """
        asked = read_candidates(self.lm, prompt, tail, range(self.lm.n_layers))
        inject = Injection(weights_QB, asked, self.heads, gate_logit.sigmoid(), self.kernel)
        rows_R = on_cpu(asked.tails.layout.with_next_R)
        before_answer_R = sent(rows_R[asked.role_T[rows_R + 1] == ANSWER], weights_QB.device)
        return self.lm.token_losses(
            asked.tails, before_answer_R, mix=inject, prefix=asked.memory
        ).mean()
