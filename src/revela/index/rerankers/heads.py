"""A frozen LM as a listwise re-ranker, by the attention of its query-focused heads (QRHead; Zhang
et al., 2025); no labels.

    s(q, d) = mean over heads of  A(q, d) - A("N/A", d)

A(q, d) is the attention mass that the rows of a query put on candidate d, mean over rows. The LM
reads all candidates in one prompt, once; the query and "N/A" both continue that prompt.
``rerank_listwise`` (listwise.py) joins s with the fused score.

The best heads are found once and cached for this LM, by questions taken from the index: the most
telling sentence of each of 20 passages has to find the rest of its passage.

Shapes: B candidates, K heads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from revela.device import compute_device, uses_bf16
from revela.errors import RevelaError
from revela.index.rerankers import HEADS_DEPTH
from revela.lm.heads import cached_ranking, candidate_scores, ranked_heads, score_query_heads
from revela.lm.language_model import LanguageModel
from revela.lm.load import load_language_model, load_tokenizer
from revela.lm.prompts import QUESTION_TOKENS, Batch, PromptMaker
from revela.model_files import resolve
from revela.queries.from_text import with_telling_sentences
from revela.silence import silence_libraries
from revela.types import Chunk

HEADS = 8
TOKENS, LEAST_TOKENS = 130, 32  # of a candidate, as the LM's context leaves room
QUESTIONS = 3 * HEADS_DEPTH  # maximum that heads are ranked by


class QueryHeads:
    """The ``Reranker`` of a frozen LM by some of its heads, (layer, head); threads may share it."""

    def __init__(
        self, lm: LanguageModel, make: PromptMaker, heads: Sequence[tuple[int, int]]
    ) -> None:
        self.lm, self.make, self.heads = lm, make, list(heads)
        self._lock = threading.Lock()  # one prompt at a time is in memory

    def score(self, query: str, passages: Sequence[str]) -> NDArray[np.float64]:
        """s(q, d) of each of at most ``HEADS_DEPTH`` passages, (B,)."""
        prompt, tail = (
            {k: v.to(self.lm.device) for k, v in side.items()}
            for side in self.make.with_null_question(passages, [(query, 0)])
        )
        with self._lock:
            scores_KB = candidate_scores(self.lm, prompt, tail, self.heads)[:, 0]
        scores_B: NDArray[np.float64] = scores_KB.mean(dim=0).double().cpu().numpy()
        return scores_B


def load_query_heads(name: str, passages: Callable[[], Sequence[str]]) -> QueryHeads:
    """Load an LM as a re-ranker by its best heads; ``passages`` gives text to rank the heads by, if
    no ranking is cached.
    """
    silence_libraries()
    folder, device = resolve(name), compute_device()
    lm = load_language_model(folder, bf16=uses_bf16("auto", device), name=name).to(device)
    config = lm.model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize
    # Twice a question's tokens for it and the prompt's own words, and 8 around each candidate.
    longest = min(TOKENS, (context - 2 * QUESTION_TOKENS) // HEADS_DEPTH - 8)
    if longest < LEAST_TOKENS:
        raise RevelaError(
            f"{name} reads {context} tokens, too few for {HEADS_DEPTH} passages of {LEAST_TOKENS}: "
            "give an LM that reads 1,024 or more"
        )
    make = PromptMaker(load_tokenizer(folder), longest, HEADS_DEPTH)

    def probe() -> list[tuple[int, int, float]]:
        return ranked_heads(score_query_heads(lm, telling_questions(passages(), make, name)))

    ranking = cached_ranking("questions", lm, folder, probe)
    return QueryHeads(lm, make, [(layer, head) for layer, head, _ in ranking[:HEADS]])


def telling_questions(
    passages: Sequence[str], make: PromptMaker, name: str
) -> Iterator[tuple[Batch, Batch, Tensor]]:
    """Examples for ``score_query_heads`` of ``HEADS_DEPTH`` passages each. The most telling
    sentence of a passage is removed and becomes its question.
    """
    chunks = [Chunk(i, text) for i, text in enumerate(passages)]
    rows = [row for row in with_telling_sentences(chunks) if row.query][:QUESTIONS]
    if len(rows) < HEADS_DEPTH:
        raise RevelaError(
            f"{len(rows)} passages of several sentences are too few to rank the heads of {name} "
            "by: rank them on other text, once, with revela heads CORPUS --objective dream "
            f"--queries telling-sentence --lm {name}"
        )
    for start in tqdm(range(0, len(rows), HEADS_DEPTH), unit="prompt"):
        yield make.head_example(rows[start : start + HEADS_DEPTH])
