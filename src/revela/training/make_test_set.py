"""Make a test set of one's own text: queries about its passages, as a folder in BEIR layout."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from revela.errors import RevelaError
from revela.evaluation.collection import Collection, save_collection
from revela.files import atomic_write
from revela.training.generated_queries import write_queries
from revela.training.training_set import TrainingSet

T = TypeVar("T")


def make_test_set(data: TrainingSet, out: Path) -> list[tuple[str, str]]:
    """Write queries about a corpus, and its passages, to a new folder.

    ``data.recipe`` says where queries come from, and how many there are. ``document_id`` of a
    passage is the id of its document in an index.

    Returns:
        (query, its first passage) of each query.
    """
    recipe, documents = data.recipe, [*data.documents, *data.held_out]
    data = TrainingSet(recipe, documents, queries_file=data.queries_file, lazy_queries=False)
    passages, max_queries, seed = data.chunks, recipe.queries.max_queries, recipe.training.seed
    answers_of = defaultdict[str, list[int]](list)  # query -> the passages that answer it
    if recipe.queries.queries == "lm" and not recipe.queries.questions:
        drawn = _sample(range(len(passages)), max_queries, seed)
        written = write_queries(data.query_lm(), [passages[i].text for i in drawn])
        pairs: Iterable[tuple[int, str]] = zip(drawn, written, strict=True)
    else:
        passages = data.rows
        pairs = enumerate(passages.column("query"))
    for i, query in pairs:
        answers_of[query].append(i)
    answers_of.pop("", None)
    answered = _sample(list(answers_of.items()), max_queries, seed)
    if not answered:
        raise RevelaError("no passage has a query: give more text, or another --queries")
    count, ids, sources = Counter[str](), list[str](), list[str]()
    for passage in passages:
        sources.append(documents[passage.document].id)
        name = re.sub(r"\s+", "_", sources[-1])
        ids.append(f"{name}#{count[name]}")
        count[name] += 1
    texts = {name: passage.text.strip() for name, passage in zip(ids, passages, strict=True)}
    named = ((f"q{n}", q, [ids[i] for i in rows]) for n, (q, rows) in enumerate(answered))
    with atomic_write(out) as temporary:
        save_collection(Collection.of(out.name, texts, named, sources), temporary)
    return [(query, passages[rows[0]].text) for query, rows in answered]


def _sample(items: Sequence[T], count: int, seed: int) -> list[T]:
    """``count`` random items, in their order."""
    count = min(count or len(items), len(items))
    indices = random.Random(seed).sample(range(len(items)), count)
    return [items[i] for i in sorted(indices)]
