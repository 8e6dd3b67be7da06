"""What an LM reads in DREAM, as token ids with their parts marked: candidates, then a question,
then the chunk that answers it.

Every part is tokenized on its own, so that each token belongs to one part. With ``chat`` the LM's
own chat template goes around the candidates and the question, and the answer is the assistant's
turn. What the writer of queries needs too stands at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from revela.errors import RevelaError
from revela.types import Chunk

INTRODUCTION = "Here are some passages.\n\n"
ASK = "Which passage answers this question? "
LEAD = "\nThis one:\n"
QUESTION, ANSWER = 1, 2  # roles of a tail's tokens
_MARK = "\x1f"
Roles = list[int]


class Prompts:
    """Builds the prompts for one LM.

    Args:
        tokenizer: the LM's.
        candidate_tokens: longest candidate or answer, in tokens.
        question_tokens: longest question.
        chat: use the tokenizer's chat template.

    Raises:
        RevelaError: there is no chat template.
    """

    def __init__(
        self, tokenizer: Any, candidate_tokens: int, question_tokens: int, chat: bool
    ) -> None:
        self.tokenizer, self.candidate_tokens, self.question_tokens = (
            tokenizer,
            candidate_tokens,
            question_tokens,
        )
        self.head, self.foot = start_ids(tokenizer), list[int]()
        if chat:
            head, foot = in_chat(tokenizer, "", "", "--lm-prompt plain")
            self.head, self.foot = self._ids(head), self._ids(foot)

    def candidates(self, texts: Sequence[str]) -> tuple[list[int], Roles]:
        """(token ids, the candidate that each token belongs to, or -1) of the text before the
        question.
        """
        ids = [*self.head, *self._ids(INTRODUCTION)]
        document = [-1] * len(ids)
        for i, text in enumerate(texts):
            part = self._ids(f"[{i + 1}] ") + self._ids(text.strip())[: self.candidate_tokens]
            between = self._ids("\n\n")
            ids += part + between
            document += [i] * len(part) + [-1] * len(between)
        return ids, document

    def tail(self, question: str, answer: str = "") -> tuple[list[int], Roles]:
        """(token ids, roles) of a question, up to the answer's first token, and of the answer."""
        asked = [
            *self._ids(ASK),
            *self._ids(question.strip())[: self.question_tokens],
            *self.foot,
            *self._ids(LEAD),
        ]
        said = self._ids(answer.strip())[: self.candidate_tokens]
        return asked + said, [QUESTION] * len(asked) + [ANSWER] * len(said)

    def _ids(self, text: str) -> list[int]:
        return plain_ids(self.tokenizer, text)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text alone."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def start_ids(tokenizer: Any) -> list[int]:
    """The BOS token, if this tokenizer puts it before a text."""
    return [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]


def in_chat(tokenizer: Any, before: str, after: str, instead: str) -> tuple[str, str]:
    """What comes before and after a text that is said between ``before`` and ``after`` in a user's
    turn, up to the answer.

    Raises:
        RevelaError: the tokenizer has no chat template; it says what to use ``instead``.
    """
    if not tokenizer.chat_template:
        raise RevelaError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template: use {instead}"
        )
    said = [{"role": "user", "content": before + _MARK + after}]
    before, _, after = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, tokenize=False
    ).partition(_MARK)
    return before, after


QUESTION_TOKENS = 64  # longest question


NOTHING = "N/A"  # a question whose attention is that of no question (QRHead)


Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Questions:
    """One group's questions and answers as an LM goes on with them."""

    memory: Any  # what the LM left of the candidates' text
    document_P: Tensor  # the candidate that each of its tokens belongs to; -1: none
    tails: Any  # questions and answers, packed
    role_T: Tensor  # of each of their tokens
    rows_R: Tensor  # places of the question rows among the T rows
    counts: list[int]  # question rows of each question


def of_group(
    prompt: dict[str, Tensor], tail: dict[str, Tensor], group: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One group's prompt, and the tails of its questions."""
    mine_Q = tail["group"] == group
    return {k: v[group : group + 1] for k, v in prompt.items()}, {
        k: v[mine_Q] for k, v in tail.items() if k != "group"
    }


def by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The heads of each layer that has some, from (layer, head) pairs."""
    found: dict[int, list[int]] = {}
    for layer, head in heads:
        found.setdefault(layer, []).append(head)
    return found


def read_candidates(
    lm: Any, prompt: dict[str, Tensor], tail: dict[str, Tensor], layers: Sequence[int]
) -> Questions:
    """Have these layers of the LM read the candidates, and lay out what follows; ``prompt`` and
    ``tail`` as for ``Dream``, of one group.
    """
    memory = lm.read(lm.pack(prompt["input_ids"], prompt["attention_mask"]), layers)
    document_P = prompt["document"][prompt["attention_mask"].bool()]
    tails = lm.pack(tail["input_ids"], tail["attention_mask"])
    role_T = tail["role"][tail["attention_mask"].bool()]
    rows_R = (role_T == QUESTION).nonzero().squeeze(1)
    return Questions(
        memory, document_P, tails, role_T, rows_R, (tail["role"] == QUESTION).sum(dim=1).tolist()
    )


class PromptMaker:
    """A group's candidates as an LM reads them, and the questions that follow: with their answers,
    or with "N/A" as one more question.

    Args:
        tokenizer: the LM's.
        lm_tokens: longest candidate, in tokens.
        group_size: candidates per group.
        chat: use the LM's chat template.
    """

    def __init__(self, tokenizer: Any, lm_tokens: int, group_size: int, chat: bool = False) -> None:
        self.prompts = Prompts(tokenizer, lm_tokens, QUESTION_TOKENS, chat)
        self.pad, self.group_size = tokenizer.pad_token_id, group_size

    def with_answers(
        self, texts: Sequence[str], questions: Sequence[tuple[str, int]]
    ) -> tuple[Batch, Batch]:
        """Prompts of the groups that these texts make, and tails of (question, index of the text
        that answers it) pairs.
        """
        tails = [self.prompts.tail(question, texts[i]) for question, i in questions]
        return self._batches(texts, tails, [i // self.group_size for _, i in questions])

    def with_nothing_asked(
        self, texts: Sequence[str], questions: Sequence[tuple[str, int]]
    ) -> tuple[Batch, Batch]:
        """The same without answers; the last question of every group is "N/A"."""
        groups = [i // self.group_size for _, i in questions]
        asked = [(group, question) for group, (question, _) in zip(groups, questions, strict=True)]
        asked = sorted(
            [*asked, *((group, NOTHING) for group in set(groups))], key=lambda pair: pair[0]
        )  # a stable sort
        return self._batches(
            texts,
            [self.prompts.tail(question) for _, question in asked],
            [group for group, _ in asked],
        )

    def to_find_heads(self, members: Sequence[Chunk]) -> tuple[Batch, Batch, Tensor]:
        """A group for ``score_query_heads``: its chunks, the queries that some of them have, and
        which chunk answers each.
        """
        answers = [i for i, member in enumerate(members) if member.query]
        prompt, tail = self.with_nothing_asked(
            [member.text for member in members], [(members[i].query, i) for i in answers]
        )
        return prompt, tail, torch.tensor(answers)

    def _batches(
        self,
        texts: Sequence[str],
        tails: Sequence[tuple[list[int], list[int]]],
        groups: Sequence[int],
    ) -> tuple[Batch, Batch]:
        prompts = [
            self.prompts.candidates(texts[i : i + self.group_size])
            for i in range(0, len(texts), self.group_size)
        ]
        return self._padded(prompts, "document", -1), {
            **self._padded(tails, "role", 0),
            "group": torch.tensor(groups),
        }

    def _padded(
        self, texts: Sequence[tuple[list[int], list[int]]], name: str, nothing: int
    ) -> Batch:
        longest = max(len(ids) for ids, _ in texts)
        return {
            "input_ids": torch.tensor(
                [ids + [self.pad] * (longest - len(ids)) for ids, _ in texts]
            ),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in texts]
            ),
            name: torch.tensor([marks + [nothing] * (longest - len(marks)) for _, marks in texts]),
        }
