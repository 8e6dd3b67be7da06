"""What an LM reads in DREAM, as token ids with their parts marked: candidates, then a question,
then the chunk that answers it.

Every part is tokenized on its own, so that each token belongs to one part. With ``chat`` the LM's
own chat template goes around the candidates and the question, and the answer is the assistant's
turn. What the writer of queries needs too stands at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from revela.errors import RevelaError

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
