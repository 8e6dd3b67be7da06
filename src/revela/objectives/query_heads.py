"""Which heads of an LM look from a question to the passage that answers it? (QRHead; Zhang et al., 2025, as DREAM uses it.)

The LM reads candidates and a question. A head's score for a candidate is the attention mass that the question's rows put on it,
mean over rows, less the same for the question "N/A". A head is as good as it ranks the answer: nDCG@10, mean over questions.

Shapes: Q questions, B candidates, P tokens of their text, R question rows, L layers, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from revela.objectives.questions import Questions, read_candidates

OUTLIERS = 2.0  # standard deviations below a candidate's mean, past which QRHead drops a token
DEPTH = 10  # of nDCG


class AttentionMass:
    """A ``Mix`` that changes nothing and notes what question rows attend to in the text before them.

    ``by_layer[l]`` is (Q, H, P), the mean over a question's rows.
    """

    def __init__(self, asked: Questions) -> None:
        self.memory, self.rows_R = asked.memory, asked.rows_R
        self.text_T = torch.repeat_interleave(torch.tensor(asked.tails.lengths)).to(asked.role_T.device)
        self.question_R = self.text_T[self.rows_R]
        self.by_layer: dict[int, Tensor] = {}

    def __call__(self, layer: int, own_HTD: Tensor, query_HTD: Tensor, key_GTD: Tensor, value_GTD: Tensor, scale: float | None) -> Tensor:
        n_heads, n_tokens, width = query_HTD.shape
        query_HRD = query_HTD[:, self.rows_R].float() * (width**-0.5 if scale is None else scale)
        earlier_HPD, key_HTD = (keys.float().repeat_interleave(n_heads // len(keys), dim=0) for keys in (self.memory.keys[layer], key_GTD))
        places_T = torch.arange(n_tokens, device=query_HTD.device)
        hidden_RT = (self.text_T[self.rows_R][:, None] != self.text_T) | (places_T > self.rows_R[:, None])
        earlier_HRP = query_HRD @ earlier_HPD.transpose(1, 2)
        own_HRT = (query_HRD @ key_HTD.transpose(1, 2)).masked_fill(hidden_RT, -torch.inf)
        total_HR1 = torch.cat([earlier_HRP, own_HRT], dim=2).logsumexp(dim=2, keepdim=True)
        mass_RHP = (earlier_HRP - total_HR1).exp().transpose(0, 1)
        counts_Q = self.question_R.bincount()
        sums_QHP = mass_RHP.new_zeros(len(counts_Q), *mass_RHP.shape[1:]).index_add(0, self.question_R, mass_RHP)
        self.by_layer[layer] = sums_QHP / counts_Q[:, None, None]
        return own_HTD


@torch.no_grad()
def score_query_heads(
    lm: Any, examples: Iterable[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]], drop_outliers: bool = False
) -> Tensor:
    """nDCG@10 of every head, (L, H).

    Args:
        lm: a language model.
        examples: (prompt, tail, answer) triples; prompt and tail as for ``Dream``, the last question being "N/A", and the index of
            the candidate that answers each of the others, (Q - 1,).
        drop_outliers: leave out a candidate's tokens whose mass is far below its mean, as QRHead does.
    """
    gains_LH = torch.zeros(lm.n_layers, lm.n_heads)
    count = 0
    for prompt, tail, answer_Q in examples:
        prompt, tail = ({k: v.to(lm.device) for k, v in side.items()} for side in (prompt, tail))
        answer_Q = answer_Q.to(lm.device)
        asked = read_candidates(lm, prompt, tail)
        mass = AttentionMass(asked)
        lm.predict(asked.tails, mix=mass, before=asked.memory)
        for layer, mass_QHP in mass.by_layer.items():
            scores_QHB = by_document(mass_QHP[:-1] - mass_QHP[-1:], asked.document_P, drop_outliers)
            rank_QH = (scores_QHB > scores_QHB.gather(2, answer_Q[:, None, None].expand(-1, lm.n_heads, 1))).sum(dim=2)
            gains_LH[layer] += torch.where(rank_QH < DEPTH, 1 / (rank_QH + 2.0).log2(), 0.0).sum(dim=0).cpu()
        count += len(answer_Q)
    return gains_LH / max(1, count)


def by_document(mass_QHP: Tensor, document_P: Tensor, drop_outliers: bool) -> Tensor:
    """Sum over each candidate's tokens, (Q, H, B)."""
    sums = []
    for j in range(int(document_P.max()) + 1):
        mass_QHM = mass_QHP[..., document_P == j]
        if drop_outliers and mass_QHM.shape[-1] > 1:
            least = mass_QHM.mean(dim=-1, keepdim=True) - OUTLIERS * mass_QHM.std(dim=-1, keepdim=True)
            mass_QHM = mass_QHM.masked_fill(mass_QHM < least, 0.0)
        sums.append(mass_QHM.sum(dim=-1))
    return torch.stack(sums, dim=-1)
