"""A frozen LM as a listwise re-ranker, by the attention of its query-focused heads (QRHead; Zhang
et al., 2025); no labels.

    s(q, d) = mean over heads of  A(q, d) - A("N/A", d)        A: the attention mass that a
    question's rows put on d, mean over rows

The LM reads all candidates in one prompt, once; the query and "N/A" both continue that reading.
Which heads: a ranking that is kept for this LM, or is made, once, by questions taken from text: of
20 passages each one's most telling sentence, cut out of it, has to find the rest. rerank.py says
how s joins the fused score.

Shapes: B candidates, K heads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from revela.corpus.text_queries import with_telling_sentences
from revela.device import compute_device, uses_bf16
from revela.errors import RevelaError
from revela.index.rerank import READ
from revela.lm.head_ranking import cached_ranking, ranked_heads
from revela.lm.language_model import LanguageModel, load_language_model, load_tokenizer
from revela.lm.prompts import QUESTION_TOKENS, Batch, PromptMaker
from revela.lm.query_heads import candidate_scores, score_query_heads
from revela.silence import silence_libraries
from revela.types import Chunk
from revela.weights import resolve

HEADS = 8
TOKENS, LEAST_TOKENS = 130, 32  # longest candidate: as many as the LM's context leaves room for
QUESTIONS = 3 * READ  # that heads are found by; READ of them at the least


class QueryHeads:
    """The ``Reranker`` of an LM; threads may share it.

    Args:
        lm: frozen.
        make: its prompts, of ``READ`` candidates.
        heads: (layer, head) pairs.
    """

    def __init__(
        self, lm: LanguageModel, make: PromptMaker, heads: Sequence[tuple[int, int]]
    ) -> None:
        self.lm, self.make, self.heads = lm, make, list(heads)
        self._lock = threading.Lock()  # one prompt at a time is held in memory

    def score(self, query: str, passages: Sequence[str]) -> NDArray[np.float64]:
        """s of each of at most ``READ`` passages, (B,)."""
        prompt, tail = (
            {k: v.to(self.lm.device) for k, v in side.items()}
            for side in self.make.with_null_question(passages, [(query, 0)])
        )
        with self._lock:
            scores_KB = candidate_scores(self.lm, prompt, tail, self.heads)[:, 0]
        scores_B: NDArray[np.float64] = scores_KB.mean(dim=0).double().cpu().numpy()
        return scores_B


def load_query_heads(name: str, passages: Callable[[], Sequence[str]]) -> QueryHeads:
    """Load an LM with its best heads; where no ranking of them is kept, they are found by these
    passages, once.

    Args:
        name: the LM: a folder, a hub id or a name of ``EMBEDDED``.
        passages: text to find heads by.

    Raises:
        RevelaError: the LM cannot be had or read so, or the passages give too few questions.
    """
    silence_libraries()
    folder, device = resolve(name), compute_device()
    lm = load_language_model(folder, bf16=uses_bf16("auto", device), name=name).to(device)
    context = (
        getattr(lm.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    )
    # Twice the question's tokens for it and what stands around, and 8 around each candidate.
    longest = min(TOKENS, (context - 2 * QUESTION_TOKENS) // READ - 8)
    if longest < LEAST_TOKENS:
        raise RevelaError(
            f"{name} reads {context} tokens, too few for {READ} passages of {LEAST_TOKENS}: give an LM that reads 1,024 or more"
        )
    make = PromptMaker(load_tokenizer(folder), longest, READ)

    def probe() -> list[tuple[int, int, float]]:
        return ranked_heads(score_query_heads(lm, telling_questions(passages(), make, name)))

    ranking = cached_ranking("questions", lm, folder, probe)
    return QueryHeads(lm, make, [(layer, head) for layer, head, _ in ranking[:HEADS]])


def telling_questions(
    passages: Sequence[str], make: PromptMaker, name: str
) -> Iterator[tuple[Batch, Batch, Tensor]]:
    """Examples for ``score_query_heads``: ``READ`` passages at a time, each asked for by its most
    telling sentence, cut out of it.

    Raises:
        RevelaError: fewer than ``READ`` of the passages have a sentence to spare.
    """
    rows = [
        row
        for row in with_telling_sentences([Chunk(i, text) for i, text in enumerate(passages)])
        if row.query
    ][:QUESTIONS]
    if len(rows) < READ:
        raise RevelaError(
            f"{len(rows)} passages of several sentences are too few to find the heads of {name} by: "
            f"find them in other text, once, by revela heads CORPUS --objective dream --queries telling-sentence --lm {name}"
        )
    for start in range(0, len(rows), READ):
        yield make.head_example(rows[start : start + READ])
