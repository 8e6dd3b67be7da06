"""Find the heads of an LM that an objective uses, by a probe; the ranking is cached per LM and
text.

Revela gates heads that look to a related document. DREAM injects into heads that look from a
question to its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from revela.encoders.torch_model import uses_bf16
from revela.text.spool import ArrowList
from revela.text.words import joined, words
from revela.training.device import compute_device
from revela.training.distributed import is_rank_zero
from revela.training.find_model import find_weights
from revela.training.groups.dataset import TrainingSet
from revela.training.groups.strategies import (
    QUERIES_PER_DOCUMENT,
    Groups,
    document_groups,
    spread_groups,
    with_queries,
)
from revela.training.lm.heads import (
    Head,
    cached_ranking,
    probe_heads,
    ranked_heads,
    score_query_heads,
)
from revela.training.lm.language_model import LanguageModel
from revela.training.lm.load import load_language_model, load_tokenizer
from revela.training.lm.prompts import PromptMaker
from revela.training.methods.base import tokenize
from revela.training.queries.generated import GeneratedQueries
from revela.training.settings import Dream, Objective, Recipe
from revela.types import Chunk, Document

PROBE_GROUPS = 5
PROBE_PIECES = 4  # documents per group, and pieces per document
MIN_WORDS, MAX_WORDS = 6, 48  # of a piece
PROBE_QUESTIONS = 64  # for query-focused heads


def kind_of(objective: Objective) -> str:
    """The kind of heads (``lm.heads.KINDS``) that an objective uses."""
    return "questions" if isinstance(objective, Dream) else "siblings"


def rank_heads(
    recipe: Recipe, documents: Sequence[Document], queries_file: Path | None
) -> tuple[Path, list[Head]]:
    """The LM's folder, and the ranking of its heads for the recipe's objective."""
    folder = find_weights(recipe.lm.lm, recipe.retriever.offline_model)
    device = compute_device()
    bf16 = uses_bf16(recipe.training.precision, device)
    lm = load_language_model(folder, bf16=bf16, name=recipe.lm.lm).to(device)
    tokenizer = load_tokenizer(folder)
    lm_tokens, seed = recipe.lm.lm_tokens, recipe.training.seed
    if kind_of(recipe.objective) == "siblings":
        return folder, sibling_heads(lm, tokenizer, folder, documents, lm_tokens, seed)
    data = TrainingSet(recipe, documents, queries_file=queries_file)
    prompts = PromptMaker(tokenizer, lm_tokens, recipe.groups.group_size)
    rows, written, source = data.rows, data.generated_queries, recipe.queries.queries
    return folder, query_heads(lm, prompts, folder, rows, written, seed, source)


def sibling_heads(
    lm: LanguageModel,
    tokenizer: Any,
    folder: Path,
    documents: Sequence[Document],
    lm_tokens: int,
    seed: int,
) -> list[Head]:
    """Rank heads by how they look to a related document, by Revela's label-free probe.

    Empty if no document is long enough. Pieces of documents are truncated to ``lm_tokens``.
    """
    probed = list(_probe_groups(documents, seed))

    def probe() -> list[Head]:
        groups = []
        for texts, owners in probed:
            tokens = tokenize(tokenizer, texts, lm_tokens)
            packed = lm.pack(tokens["input_ids"], tokens["attention_mask"])
            groups.append((packed, torch.tensor(owners)))
        progress = tqdm(groups, unit="group", disable=not is_rank_zero())
        return ranked_heads(probe_heads(lm, progress)) if groups else []

    return cached_ranking("siblings", lm, folder, [lm_tokens, probed], probe)


def query_heads(
    lm: LanguageModel,
    prompts: PromptMaker,
    folder: Path,
    rows: ArrowList[Chunk],
    written: GeneratedQueries | None,
    seed: int,
    source: str,
) -> list[Head]:
    """Rank heads by how they look from a question to its answer, in nDCG@10.

    ``written`` has the queries of ``rows`` if they are written during training; ``source`` is
    ``--queries``.
    """
    spread = source in QUERIES_PER_DOCUMENT
    groups = list(_groups_with_questions(rows, written, prompts.group_size, seed, spread))

    def probe() -> list[Head]:
        shown = tqdm(groups, unit="group", disable=not is_rank_zero())
        return ranked_heads(score_query_heads(lm, map(prompts.head_example, shown)))

    probed = [[(member.text, member.query) for member in group] for group in groups]
    return cached_ranking("questions", lm, folder, [prompts.lm_tokens, probed], probe)


def _probe_groups(
    documents: Sequence[Document], seed: int
) -> Iterator[tuple[list[str], list[int]]]:
    """(pieces, document of each) of groups of four documents cut in four.

    Every piece has siblings and others. No group if all documents are too short.
    """
    pieces: list[list[str]] = []
    for i in random.Random(seed).sample(range(len(documents)), len(documents)):
        all_words = words(documents[i].text)
        size = min(MAX_WORDS, len(all_words) // PROBE_PIECES)
        if size >= MIN_WORDS:
            starts = range(0, PROBE_PIECES * size, size)
            pieces.append([joined(all_words[start : start + size]) for start in starts])
        if len(pieces) == PROBE_GROUPS * PROBE_PIECES:
            break
    for start in range(0, len(pieces), PROBE_PIECES):
        members = pieces[start : start + PROBE_PIECES]
        if len(members) > 1:
            yield (
                [t for texts in members for t in texts],
                [i for i, texts in enumerate(members) for _ in texts],
            )


def _groups_with_questions(
    rows: ArrowList[Chunk], written: GeneratedQueries | None, size: int, seed: int, spread: bool
) -> Iterator[list[Chunk]]:
    """The chunks of each group, until they have enough questions."""
    # Stored groups are in another order.
    rows = rows.select(np.argsort(rows.column("document"), kind="stable"))
    strategy = spread_groups if spread else document_groups
    groups: Groups = partial(strategy, rows.column("document"), size, seed)
    row: Callable[[int], Chunk] = rows.__getitem__
    if written is None:
        groups = with_queries(rows, groups, "queries")
    else:  # a copy: training must not depend on the questions asked here
        probed = GeneratedQueries(written.lm, rows)
        groups, row = probed.groups(groups), probed.row
    n_questions = 0
    for group in groups(0):
        members = [row(i) for i in group]
        yield members
        n_questions += sum(bool(member.query) for member in members)
        if n_questions >= PROBE_QUESTIONS:
            return
