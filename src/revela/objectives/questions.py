"""Candidates read once, and questions that continue them: where DREAM's loss begins, and all that looks at query-focused heads.

Shapes: P tokens of the candidates' text, T tokens of the questions and answers, R of them question rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from revela.data.prompts import QUESTION


@dataclass(frozen=True)
class Questions:
    """One group's questions and answers as an LM goes on with them."""

    memory: Any  # what the LM left of the candidates' text
    document_P: Tensor  # the candidate that each of its tokens belongs to; -1: none
    tails: Any  # questions and answers, packed
    role_T: Tensor  # of each of their tokens
    rows_R: Tensor  # places of the question rows among the T rows
    counts: list[int]  # question rows of each question


def of_group(prompt: dict[str, Tensor], tail: dict[str, Tensor], group: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One group's prompt, and the tails of its questions."""
    mine_Q = tail["group"] == group
    return {k: v[group : group + 1] for k, v in prompt.items()}, {k: v[mine_Q] for k, v in tail.items() if k != "group"}


def by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The heads of each layer that has some, from (layer, head) pairs."""
    found: dict[int, list[int]] = {}
    for layer, head in heads:
        found.setdefault(layer, []).append(head)
    return found


def read_candidates(lm: Any, prompt: dict[str, Tensor], tail: dict[str, Tensor], layers: Sequence[int]) -> Questions:
    """Have these layers of the LM read the candidates, and lay out what follows; ``prompt`` and ``tail`` as for ``Dream``, of one group."""
    memory = lm.read(lm.pack(prompt["input_ids"], prompt["attention_mask"]), layers)
    document_P = prompt["document"][prompt["attention_mask"].bool()]
    tails = lm.pack(tail["input_ids"], tail["attention_mask"])
    role_T = tail["role"][tail["attention_mask"].bool()]
    rows_R = (role_T == QUESTION).nonzero().squeeze(1)
    return Questions(memory, document_P, tails, role_T, rows_R, (tail["role"] == QUESTION).sum(dim=1).tolist())
