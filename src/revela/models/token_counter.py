"""How many tokens a retriever reads of a text, counted beside the retriever: by a copy of its tokenizer that any thread may use."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from sentence_transformers import SentenceTransformer

from revela.models.retriever import passage_prompt_of, query_prompt_of


class TokenCounter:
    """A copy of a model's tokenizer that neither cuts nor pads.

    The model's own sets its cutting and padding at every call, which another thread must not meet.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        tokenizer = copy.deepcopy(getattr(model.tokenizer, "backend_tokenizer", model.tokenizer))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._query_prompt, self._passage_prompt = tokenizer, query_prompt_of(model), passage_prompt_of(model)
        self.limit: int | None = model.max_seq_length
        "Tokens that the model reads of a text; what follows is cut off. None: no limit."

    def count_queries(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a query: with its prompt and the special ones, uncut."""
        return self._count(self._query_prompt, texts)

    def count_passages(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a passage: with its prompt and the special ones, uncut."""
        return self._count(self._passage_prompt, texts)

    def _count(self, prompt: str, texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch_fast([prompt + text for text in texts])]
