"""Rows of a batch -> what an objective reads, as tensors. One collator an objective (Revela and
REPLUG read the same).

The names of the tensors begin with the side they belong to ("query_", "passage_", ...); Sentence
Transformers' trainer hands each side to the objective as one dict, in the order of the sides.
Everything is padded at the right.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela.lm.prompts import Batch
from revela.objectives.crops import crop
from revela.retriever.encode import passage_prompt_of, query_prompt_of
from revela.types import Encoder

Row = dict[str, Any]


class Collator:
    """What all of them share: the retriever's two sides. ``count`` is told how many tokens the
    retriever reads.
    """

    valid_label_columns: Sequence[str] = ()  # the trainer asks

    def __init__(self, model: SentenceTransformer, count: Callable[[int], None]) -> None:
        self.model, self.count = model, count

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Batch:
        batch: Batch = {}
        for name, texts, prompt in (
            ("query", queries, query_prompt_of(self.model)),
            ("passage", passages, passage_prompt_of(self.model)),
        ):
            features = self.model.preprocess(list(texts), prompt=prompt or None)
            batch.update({f"{name}_{k}": v for k, v in features.items() if isinstance(v, Tensor)})
            self.count(int(features["attention_mask"].sum()))
        return batch


class ChunkCollator(Collator):
    """For Revela and REPLUG: a group's chunks as queries, as passages, and as the LM reads them.

    A query is the first half of the chunk's tokens (Revela, section 4; "first-half"), as many of
    them from a random place on ("random-span"; the same whenever the same batch comes again), or
    the whole chunk.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        count: Callable[[int], None],
        lm_tokenizer: PreTrainedTokenizerBase,
        lm_tokens: int,
        query_side: str,
        seed: int,
    ) -> None:
        super().__init__(model, count)
        self.lm_tokenizer, self.lm_tokens, self.query_side, self.seed = (
            lm_tokenizer,
            lm_tokens,
            query_side,
            seed,
        )

    def __call__(self, rows: Sequence[Row]) -> Batch:
        texts = [row["text"] for row in rows]
        chunk = self.lm_tokenizer(
            texts,
            truncation=True,
            max_length=self.lm_tokens,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        read = {f"chunk_{k}": chunk[k] for k in ("input_ids", "attention_mask")}
        documents = torch.tensor([row["document"] for row in rows])
        return {**self.sides(self._queries(texts), texts), **read, "chunk_document": documents}

    def _queries(self, texts: Sequence[str]) -> Sequence[str]:
        tokenizer = self.model.tokenizer
        if self.query_side == "first-half":
            return [first_half(text, tokenizer, self.lm_tokens) for text in texts]
        if self.query_side == "random-span":
            rng = seeded_by(texts, self.seed)
            return [random_half(text, tokenizer, self.lm_tokens, rng) for text in texts]
        return texts


def seeded_by(texts: Sequence[str], seed: int) -> random.Random:
    """Random numbers that are the same whenever the same batch comes again: a resumed run goes on
    as an unbroken one.
    """
    return random.Random(zlib.crc32("\0".join(texts).encode(), seed))


def first_half(text: str, tokenizer: Any, max_tokens: int) -> str:
    """The text up to the middle of its tokens, after truncation to ``max_tokens``."""
    offsets = _offsets(text, tokenizer, max_tokens)
    return text[: offsets[len(offsets) // 2 - 1][1]] if len(offsets) > 1 else text


def random_half(text: str, tokenizer: Any, max_tokens: int, rng: random.Random) -> str:
    """As many tokens as ``first_half`` has, in one piece, from any place on."""
    offsets = _offsets(text, tokenizer, max_tokens)
    if len(offsets) < 2:
        return text
    length = len(offsets) // 2
    start = rng.randint(0, len(offsets) - length)
    return text[offsets[start][0] : offsets[start + length - 1][1]]


def _offsets(text: str, tokenizer: Any, max_tokens: int) -> list[tuple[int, int]]:
    """Where each token begins and ends in the text."""
    spans = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        truncation=True,
        max_length=max_tokens,
    )
    offsets: list[tuple[int, int]] = spans["offset_mapping"]
    return offsets


class PairCollator(Collator):
    """What the contrastive ones share: beside the two sides, their vectors by a ``surrogate``, if
    there is one.
    """

    def __init__(
        self, model: SentenceTransformer, count: Callable[[int], None], surrogate: Encoder | None
    ) -> None:
        super().__init__(model, count)
        self.surrogate = surrogate

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Batch:
        batch = super().sides(queries, passages)
        if self.surrogate is not None:
            batch["query_surrogate"] = torch.from_numpy(self.surrogate.encode_queries(queries))
            batch["passage_surrogate"] = torch.from_numpy(self.surrogate.encode_passages(passages))
        return batch


class QueryCollator(PairCollator):
    """For InfoNCE: the queries that there are, each with the index of its passage, and all
    passages.
    """

    def __call__(self, rows: Sequence[Row]) -> Batch:
        asked = [i for i, row in enumerate(rows) if row["query"]]
        batch = self.sides([rows[i]["query"] for i in asked], [row["text"] for row in rows])
        return {**batch, "query_target": torch.tensor(asked)}


class CropCollator(PairCollator):
    """For random crops: two of each text, independent of each other, the same whenever the same
    batch comes again.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        count: Callable[[int], None],
        surrogate: Encoder | None,
        least: float,
        most: float,
        deletion: float,
        seed: int,
    ) -> None:
        super().__init__(model, count, surrogate)
        self.settings, self.seed = (least, most, deletion), seed

    def __call__(self, rows: Sequence[Row]) -> Batch:
        rng = seeded_by([row["text"] for row in rows], self.seed)
        first, second = ([crop(row["text"], *self.settings, rng) for row in rows] for _ in range(2))
        return {**self.sides(first, second), "query_target": torch.arange(len(rows))}


MakePrompts = Callable[[Sequence[str], Sequence[tuple[str, int]]], tuple[Batch, Batch]]


class PromptCollator(Collator):
    """For DREAM and attention distillation: queries and candidates for the retriever, and all of it
    for the LM.

    ``make`` is one of a PromptMaker's methods.
    """

    def __init__(
        self, model: SentenceTransformer, count: Callable[[int], None], make: MakePrompts
    ) -> None:
        super().__init__(model, count)
        self.make = make

    def __call__(self, rows: Sequence[Row]) -> Batch:
        asked = [(row["query"], i) for i, row in enumerate(rows) if row["query"]]
        texts = [row["text"] for row in rows]
        batch = self.sides([query for query, _ in asked], texts)
        prompt, tail = self.make(texts, asked)
        return {
            **batch,
            **{f"prompt_{k}": v for k, v in prompt.items()},
            **{f"tail_{k}": v for k, v in tail.items()},
        }
