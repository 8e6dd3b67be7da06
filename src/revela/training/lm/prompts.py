"""Prompts about a group: an LM reads its chunks as candidates, then a question, then its answer.

Used by DREAM and to find its query-focused heads. A prompt has two parts:

    Here are some passages.          the candidates, read once per group
    [1] ... [2] ...
    Which passage answers this question? ...
    This one: ...                    a tail, one per question: the question and, for DREAM, the
                                     chunk that answers it

Each piece is tokenized on its own, so that each token belongs to one piece.

Batches are padded on the right:
- prompt: ``input_ids``, ``attention_mask``, and ``document``, each token's candidate (-1: none),
  all (groups, P);
- tail: ``input_ids``, ``attention_mask``, and each token's ``role`` (QUESTION, ANSWER, 0: padding),
  all (Q, N); the ``group`` of each question, (Q,).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from revela.training.device import Tensors, on_cpu, sent
from revela.training.lm.language_model import KVCache, LanguageModel, Packed
from revela.types import Chunk

INTRODUCTION = "Here are some passages.\n\n"
ASK = "Which passage answers this question? "
LEAD = "\nThis one:\n"
NULL_QUESTION = "N/A"  # QRHead subtracts the attention that this question gets
QUESTION_TOKENS = 64  # maximum length of a question
QUESTION, ANSWER = 1, 2  # roles of a tail's tokens
Marked = tuple[list[int], list[int]]
"""Token ids, and a mark for each of them."""


class PromptMaker:
    """Makes batches of prompts and tails for groups of ``group_size`` texts.

    Candidates and answers are truncated to ``lm_tokens``.
    """

    def __init__(self, tokenizer: Any, lm_tokens: int, group_size: int) -> None:
        self.tokenizer, self.lm_tokens, self.group_size = tokenizer, lm_tokens, group_size

    def candidates(self, texts: Sequence[str]) -> Marked:
        """The candidates of a group; each token is marked with its candidate, or -1."""
        ids = [*start_ids(self.tokenizer), *self._ids(INTRODUCTION)]
        document = [-1] * len(ids)
        for i, text in enumerate(texts):
            part = self._ids(f"[{i + 1}] ") + self._ids(text.strip())[: self.lm_tokens]
            between = self._ids("\n\n")
            ids += part + between
            document += [i] * len(part) + [-1] * len(between)
        return ids, document

    def tail(self, question: str, answer: str = "") -> Marked:
        """A question with what leads to its answer, and the answer; tokens have their roles."""
        question_ids = self._ids(question.strip())[:QUESTION_TOKENS]
        ids = [*self._ids(ASK), *question_ids, *self._ids(LEAD)]
        answer_ids = self._ids(answer.strip())[: self.lm_tokens]
        return ids + answer_ids, [QUESTION] * len(ids) + [ANSWER] * len(answer_ids)

    def _ids(self, text: str) -> list[int]:
        return plain_ids(self.tokenizer, text)

    def with_answers(
        self, texts: Sequence[str], questions: Sequence[tuple[str, int]]
    ) -> tuple[Tensors, Tensors]:
        """(prompt, tail) with each question's answer.

        Args:
            texts: of consecutive groups.
            questions: (question, index of the text that answers it) pairs, by group.
        """
        tails = [self.tail(question, texts[i]) for question, i in questions]
        return self._batches(texts, tails, [i // self.group_size for _, i in questions])

    def head_example(self, members: Sequence[Chunk]) -> tuple[Tensors, Tensors, Tensor]:
        """(prompt, tail, answer of each question) of one group, for ``score_query_heads``: without
        the answers in the tail, and with "N/A" as the last question.
        """
        answers = [i for i, member in enumerate(members) if member.query]
        questions = [*(members[i].query for i in answers), NULL_QUESTION]
        tails = [self.tail(question) for question in questions]
        prompt, tail = self._batches([member.text for member in members], tails, [0] * len(tails))
        return prompt, tail, torch.tensor(answers)

    def _batches(
        self, texts: Sequence[str], tails: Sequence[Marked], groups: Sequence[int]
    ) -> tuple[Tensors, Tensors]:
        starts = range(0, len(texts), self.group_size)
        prompts = [self.candidates(texts[i : i + self.group_size]) for i in starts]
        tail = {**self._padded(tails, "role", 0), "group": torch.tensor(groups)}
        return self._padded(prompts, "document", -1), tail

    def _padded(self, texts: Sequence[Marked], name: str, no_mark: int) -> Tensors:
        ids, marks = ([torch.tensor(row) for row in rows] for rows in zip(*texts, strict=True))
        return {
            "input_ids": pad_sequence(ids, True, self.tokenizer.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
            name: pad_sequence(marks, True, no_mark),
        }


@dataclass(frozen=True)
class Questions:
    """One group after the LM has read its candidates: P tokens, S of them in the candidates' texts.
    The Q tails have T tokens, R of them in questions.
    """

    memory: KVCache  # the candidates' keys and values
    places_S: Tensor  # of the candidates' tokens among the P, one candidate after another
    lengths: list[int]  # tokens per candidate
    tails: Packed
    role_T: Tensor  # of the tails' tokens, on the CPU
    rows_R: Tensor  # of the questions' tokens among the T
    counts: list[int]  # question rows per question


def read_candidates(lm: LanguageModel, prompt: Tensors, tail: Tensors) -> Questions:
    """Run the LM over the candidates of one group, and pack its tails."""
    prompt, tail = ({k: on_cpu(v) for k, v in side.items()} for side in (prompt, tail))
    packed = lm.pack(prompt["input_ids"], prompt["attention_mask"])
    memory = lm.prefill(packed, range(lm.n_layers))
    document_P = prompt["document"][prompt["attention_mask"].bool()]
    places_S = (document_P >= 0).nonzero().squeeze(1)
    lengths = document_P[places_S].bincount().tolist()
    tails = lm.pack(tail["input_ids"], tail["attention_mask"])
    role_T = tail["role"][tail["attention_mask"].bool()]
    rows_R = (role_T == QUESTION).nonzero().squeeze(1)
    counts = (tail["role"] == QUESTION).sum(dim=1).tolist()
    places_S, rows_R = (sent(places, tails.ids_1T.device) for places in (places_S, rows_R))
    return Questions(memory, places_S, lengths, tails, role_T, rows_R, counts)


def of_group(prompt: Tensors, tail: Tensors, group: int) -> tuple[Tensors, Tensors]:
    """The prompt and the tails of one group, on the CPU."""
    mine_Q = on_cpu(tail["group"]) == group
    tails = {k: on_cpu(v)[mine_Q] for k, v in tail.items() if k != "group"}
    return {k: on_cpu(v)[group : group + 1] for k, v in prompt.items()}, tails


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def start_ids(tokenizer: Any) -> list[int]:
    """The BOS token if this tokenizer puts one before a text; otherwise empty."""
    return [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]
