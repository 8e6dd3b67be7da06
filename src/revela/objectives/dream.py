"""DREAM: a retriever's scores stand in for an LM's own attention where the LM looks for what
answers a question.

A frozen LM reads candidate chunks, then a question, then the chunk that answers it; the loss is
that of the answer's tokens. In some heads, those that look from a question to its answer
(query_heads.py), and in the question's rows only, the attention A becomes

    A' = (1 - g) A + g A~        A~ over the tokens of D_i: w_i * (A within D_i, made to sum to 1);
    0 outside the candidates w  = softmax_i(cos(q, d_i) / tau)

so that a retriever which gives the answer more weight is a lower loss. A~ times the values is
document attention.

Ours: the candidates are read once, without a graph, for the questions to all of them, which
continue that one reading; nothing before a question depends on w. What the paper leaves open and we
chose stands in settings.py and docs/papers.md.

Shapes: Q questions, B candidates of a group, P tokens of the candidates' text, T tokens of the
questions and answers, R of them question rows; H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.lm.document_attention import Kernel, document_attention
from revela.lm.prompts import ANSWER, by_layer, of_group, read_candidates
from revela.objectives.gradcache import backward_now, embed


class Injection:
    """Puts document attention into some heads' question rows (a ``Mix`` of language_model.py).

    Args:
        weights_QB: w.
        memory: what the LM left of the candidates' text.
        document_P: the candidate that each of its tokens belongs to; -1: none.
        rows_R: places of the question rows among the T rows.
        counts: question rows of each of the Q questions.
        heads: (layer, head) pairs.
        gate: g.
        epsilon, kernel: see document_attention.
    """

    def __init__(
        self,
        weights_QB: Tensor,
        memory: Any,
        document_P: Tensor,
        rows_R: Tensor,
        counts: Sequence[int],
        heads: Sequence[tuple[int, int]],
        gate: Tensor,
        *,
        epsilon: float = 0.0,
        kernel: Kernel = "torch",
    ) -> None:
        self.weights_QB, self.memory, self.rows_R, self.counts, self.gate = (
            weights_QB,
            memory,
            rows_R,
            counts,
            gate,
        )
        self.epsilon, self.kernel = epsilon, kernel
        self.places_S = (document_P >= 0).nonzero().squeeze(1)
        self.lengths = document_P[self.places_S].bincount(minlength=weights_QB.shape[1]).tolist()
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
        heads_K = torch.tensor(self.heads[layer], device=own_HTD.device)
        cross_KRD = document_attention(
            query_HTD[:, self.rows_R],
            self.memory.keys[layer][:, self.places_S],
            self.memory.values[layer][:, self.places_S],
            self.weights_QB,
            self.lengths,
            rows=self.counts,
            heads=heads_K,
            scale=scale,
            epsilon=self.epsilon,
            kernel=self.kernel,
        )
        cells = heads_K[:, None], self.rows_R[None]
        own_KRD = own_HTD[cells]
        mixed_KRD = own_KRD + self.gate.to(own_HTD.dtype) * (cross_KRD.to(own_HTD.dtype) - own_KRD)
        return own_HTD.index_put(cells, mixed_KRD)


class Dream(nn.Module):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model: the retriever; called on tokenized features, gives ``sentence_embedding``.
        lm: the language model, frozen.
        heads: (layer, head) pairs to inject into.
        tau: temperature of the cosines; ``learn_tau`` makes it a parameter (kept positive by its
            logarithm).
        gate: g; ``learn_gate`` makes it a parameter (kept in (0, 1) by its logit).
        group_size: candidates a group; a batch may hold several groups.
        retriever_batch: texts that the retriever reads at a time; see gradcache.embed.
        epsilon, kernel: see document_attention.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: Any,
        heads: Sequence[tuple[int, int]],
        *,
        tau: float,
        gate: float,
        group_size: int,
        learn_tau: bool = True,
        learn_gate: bool = True,
        retriever_batch: int = 0,
        epsilon: float = 0.0,
        kernel: Kernel = "torch",
    ) -> None:
        super().__init__()
        self.model, self.lm, self.heads = model, lm, list(heads)
        self.group_size, self.retriever_batch, self.epsilon, self.kernel = (
            group_size,
            retriever_batch,
            epsilon,
            kernel,
        )
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)), requires_grad=learn_tau)
        self.gate_logit = nn.Parameter(
            torch.tensor(math.log(gate / (1 - gate))), requires_grad=learn_gate
        )

    def forward(
        self, features: Sequence[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Loss (nats a token of an answer). ``features``:

        questions and candidates as the retriever reads them; ``prompt``: each group's candidates as
        the LM reads them, with the ``document`` (0 to B - 1, or -1) of each token; ``tail``:
        questions and answers that follow it, with the ``role`` of each token and the ``group`` of
        each question.
        """
        question, passage, prompt, tail = features
        question_QD, passage_ND = (
            F.normalize(embed(self.model, side, self.retriever_batch), dim=-1)
            for side in (question, passage)
        )
        losses = []
        for i, passage_BD in enumerate(torch.split(passage_ND, self.group_size)):
            mine_Q = (tail["group"] == i).nonzero().squeeze(1)
            if not len(mine_Q):
                continue
            with torch.autocast(question_QD.device.type, enabled=False):
                weights_QB = (question_QD[mine_Q] @ passage_BD.T / self.log_tau.exp()).softmax(
                    dim=-1
                )
            texts = of_group(prompt, tail, i)
            losses.append(
                backward_now(
                    lambda w, g, texts=texts: self.answer_loss(w, g, *texts),
                    weights_QB,
                    self.gate_logit,
                )
            )
        return torch.stack(losses).mean()

    def answer_loss(
        self,
        weights_QB: Tensor,
        gate_logit: Tensor,
        prompt: dict[str, Tensor],
        tail: dict[str, Tensor],
    ) -> Tensor:
        """Mean cross-entropy (nats) of the answers' tokens under these weights, the candidates read
        first.
        """
        asked = read_candidates(self.lm, prompt, tail, range(self.lm.n_layers))
        inject = Injection(
            weights_QB,
            asked.memory,
            asked.document_P,
            asked.rows_R,
            asked.counts,
            self.heads,
            gate_logit.sigmoid(),
            epsilon=self.epsilon,
            kernel=self.kernel,
        )
        before_answer = asked.tails.layout.has_next_T & (asked.role_T.roll(-1) == ANSWER)
        loss: Tensor = self.lm.token_losses(
            asked.tails, before_answer.nonzero().squeeze(1), mix=inject, before=asked.memory
        ).mean()
        return loss
