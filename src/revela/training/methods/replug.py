"""REPLUG's batch form (Revela, appendix A.3; after Shi et al., 2023): the retriever learns an LM's
ranking by likelihood.

    P_LM(j | i)        = softmax_{j != i}( log P(D_i | D_j) / tau_lm )
    P_retriever(j | i) = softmax_{j != i}( cos(q_i, d_j) / tau )
    L                  = mean_i KL( P_LM(. | i) || P_retriever(. | i) )

- log P(D_i | D_j): the LM's mean log-likelihood of the tokens of chunk i after chunk j.
- q_i, d_j: the retriever's vectors of chunk i as query and chunk j as passage.

On questions (method replug-questions), P_LM(d | q) = softmax_d( log P(D_q | d, q) / tau_lm ), over
all candidates d of a group, the target D_q too. The LM reads a candidate, the question and the
target, a line each. DREAM has such a baseline and does not state its form: this is the simplest
reading. The target is likeliest after itself: by 2.7 to 4.3 nats per token in 8 of 8 questions
about a group (SmolLM2-135M), so at tau_lm 1e-3 the loss is InfoNCE against the group. A --tau-lm of
about 1 lets the other candidates count.

Differs from the appendix, and the preset that makes it equal:
- The start of all methods here, so that only the method differs: replug-paper has all of the
  settings of revela-paper (revela.py: SHARED) but --mix, --lm-lora, --tau and --learning-rate, and
  4,500 steps. Both temperatures (--tau and --tau-lm 1e-3) and the rate (5e-4) are the appendix's in
  both presets.

Differs still, in replug-paper too:
- SmolLM2-135M as retriever: --model.
- The text is the user's, 5 % of it held out, near-duplicates dropped: --held-out 0,
  --near-duplicates 0.
- The appendix sums over all j, i itself too. Here j = i is excluded, as a chunk after itself wins
  trivially. No setting.
- The likelihood is the mean over tokens, without a separator between D_j and D_i, as in REPLUG's
  code; the appendix leaves both open. No setting.

Read next: revela.py (batches), lm/language_model.py (a reading that continues another), base.py;
docs/papers.md has every equation and setting in the order of the paper.

Cost: the frozen LM reads B (B - 1) chunks of a group where Revela's reads 2 B. D_j is read once,
and all D_i continue its key-value cache. On Q questions it reads B Q answers.
Memory: the cache of one group, and a block of rows of logits at a time; no graph of the LM.
When to use it: as a reference.
Measured: eight minutes of one core from a fitted start take SciFact from 0.583 to 0.585 and CosQA
from 0.364 to 0.361.

Shapes: B chunks of a group of at most L tokens, R tokens that are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.encoders.torch_model import special_tokens_of
from revela.training.device import Tensors, on_cpu, sent
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.base import (
    BuildContext,
    Collate,
    Method,
    RetrieverLoss,
    Row,
    load_lm,
    off_diagonal,
    tokenize,
)
from revela.training.methods.revela import SHARED, ChunkBatches, ChunkQueries
from revela.training.settings import PositiveFloat, Preset, Rare, checked

PRESETS: dict[str, Preset] = {
    "replug": {"method": "replug", "learning_rate": 5e-4},
    # As in the appendix: all but the signal is Revela's.
    "replug-paper": SHARED
    | {"method": "replug", "tau": 1e-3, "learning_rate": 5e-4, "max_steps": 4500},
    # A baseline of DREAM, on its questions; no form of it is published.
    "replug-questions": {"method": "replug-questions", "learning_rate": 5e-4},
}


@checked
class Likelihoods(Method):
    """Settings of REPLUG, on chunks and on questions."""

    reads_lm = True

    tau: PositiveFloat = 1e-3
    "Temperature of the cosines."
    tau_lm: Rare[PositiveFloat] = 1e-3
    "Temperature of the LM's mean log-likelihoods."

    def lm_length(self, size: int, tokens: int) -> int:
        return 2 * tokens  # a text after another

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        lm, tokenizer, _ = load_lm(parts)
        before, _ = special_tokens_of(tokenizer)
        tau, tau_lm, lead = self.tau, self.tau_lm, len(before)
        loss = ReplugLoss(parts.model, lm, tau=tau, tau_lm=tau_lm, lead=lead, **parts.batching)
        return loss, self.batches(parts, tokenizer)

    def batches(self, parts: BuildContext, tokenizer: Any) -> Collate:
        """The collator; questions in place of queries from the chunks, unless overridden."""
        return QuestionBatches(parts, tokenizer, "question")


@checked
class Replug(Likelihoods, ChunkQueries):
    """Learn the ranking of chunks by the likelihood of another chunk after each."""

    name = "replug"
    learned_from = "{model} learned to rank texts by how likely {lm} finds another text after each."

    def batches(self, parts: BuildContext, tokenizer: Any) -> Collate:
        return ChunkBatches(parts, tokenizer, self.query_side, self.whole_query_sources)


@checked
class ReplugQuestions(Likelihoods):
    """Learn the ranking of chunks by the likelihood of the answer after each and the question."""

    name = "replug-questions"
    reads = "queries"
    learned_from = "{model} learned to rank texts by how likely {lm} finds an answer after each."


class ReplugLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the frozen language model.
        tau_lm: temperature of the log-likelihoods, in nats per token.
        lead: number of special tokens at the start of a chunk, which is read without them after
            another chunk.
        tau, batching: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        *,
        tau: float,
        tau_lm: float,
        lead: int = 0,
        **batching: int,
    ) -> None:
        super().__init__(model, tau=tau, **batching)
        self.lm, self.tau_lm, self.lead = lm, tau_lm, lead

    def forward(self, features: Sequence[Tensors]) -> Tensor:
        """Loss in nats per chunk; ``features`` are the chunks as queries, passages and LM input.

        With questions as a fourth side, the LM's input, it is in nats per question, the mean over
        groups that have one. The queries are then the questions.
        """
        query, passage, *of_lm = features
        names, losses = ("input_ids", "attention_mask"), []
        tensors = [self.groups(on_cpu(side[name])) for side in of_lm for name in names]
        for cosine_BB, *inputs in zip(self.cosines(query, passage), *tensors, strict=True):
            teacher_BB = likelihoods(self.lm, self.lead, *inputs) / self.tau_lm
            pair = teacher_BB, cosine_BB / self.tau
            if len(inputs) == len(names):
                losses.append(ranking_divergence(*pair))
            elif len(rows_Q := inputs[-1][:, self.lead :].any(dim=1).nonzero()[:, 0]):
                rows_Q = sent(rows_Q, cosine_BB.device)
                losses.append(divergence(*(scores_BB[rows_Q] for scores_BB in pair)))
        return torch.stack(losses).mean()


class QuestionBatches(ChunkBatches):
    """Collates questions in place of queries from the chunks, for the retriever and for the LM."""

    def __call__(self, rows: Sequence[Row]) -> Tensors:
        questions = [f"\n{row['query']}\n" if row["query"] else "" for row in rows]
        tokens = tokenize(self.tokenizer, questions, self.parts.lm.lm_tokens)
        named = {f"question_{name}": tokens[name] for name in ("input_ids", "attention_mask")}
        return {**super().__call__(rows), **named}

    def _queries(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[str]:
        return [row["query"] for row in rows]


def ranking_divergence(teacher_BB: Tensor, student_BB: Tensor) -> Tensor:
    """Mean over rows i of KL(softmax(teacher) || softmax(student)) over j != i (Revela, A.3)."""
    return divergence(off_diagonal(teacher_BB), off_diagonal(student_BB))


def divergence(teacher_QB: Tensor, student_QB: Tensor) -> Tensor:
    """Mean over rows of KL(softmax(teacher) || softmax(student))."""
    student, teacher = (scores.log_softmax(dim=-1) for scores in (student_QB, teacher_QB))
    return F.kl_div(student, teacher.to(student.dtype), reduction="batchmean", log_target=True)


@torch.no_grad()
def likelihoods(
    lm: LanguageModel, lead: int, ids_BL: Tensor, mask_BL: Tensor, *question: Tensor
) -> Tensor:
    """(B, B) log P(D_i | D_j), row i, column j, in nats per token; 0 on the diagonal.

    With ``question`` (ids and mask of a question to each chunk, or none), log P(D_i | D_j, question
    i), on the diagonal too; 0 in rows without a question.

    Padding is on the right; ``lead`` as for ReplugLoss.
    """
    lengths, scored = mask_BL.sum(dim=1).tolist(), mask_BL[:, lead:].sum(dim=1).tolist()
    packed = lm.pack(ids_BL, mask_BL)
    memory = lm.prefill(packed, range(lm.n_layers))
    logprob_BB = torch.zeros(len(lengths), len(lengths), device=packed.ids_1T.device)
    sides = (*question[:1], ids_BL), (*question[1:], mask_BL)
    next_BL, next_mask_BL = (torch.cat([t[:, lead:] for t in side], dim=1) for side in sides)
    is_read_BB = ~torch.eye(len(lengths), dtype=torch.bool)
    if question:
        is_read_BB = question[1][:, lead:].any(dim=1, keepdim=True).expand_as(is_read_BB)
    start = 0
    for j, length in enumerate(lengths if is_read_BB.any() else ()):
        # The last token of D_j predicts the first token that follows, so the tails begin with it.
        last = ids_BL[j, length - 1]
        before = memory.part(start, start + length - 1) if length > 1 else None
        start += length
        read = is_read_BB[:, j].nonzero()[:, 0]
        tails_BL = torch.cat([last.expand(len(read), 1), next_BL[read]], dim=1)
        tail_mask_BL = torch.cat([mask_BL.new_ones(len(read), 1), next_mask_BL[read]], dim=1)
        tails = lm.pack(tails_BL, tail_mask_BL)
        losses_R = lm.token_losses(tails, tails.layout.with_next_R, prefix=before, exact=True)
        parts = torch.split(losses_R, [n - 1 for n in tails.lengths])
        of_chunks = [part[-scored[i] :] for i, part in zip(read.tolist(), parts, strict=True)]
        means = torch.stack([part.mean() for part in of_chunks])
        logprob_BB[:, j].index_copy_(0, sent(read, means.device), -means.to(logprob_BB.dtype))
    return logprob_BB
