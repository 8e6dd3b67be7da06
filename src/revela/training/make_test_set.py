"""Make a test set of one's own text: queries about its passages, as a folder in BEIR layout."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.training.groups.dataset import TrainingSet
from revela.training.queries.generated import generate_answers
from revela.types import Chunk, Document

T = TypeVar("T")
Relevant = dict[str, list[int]]
"""Query -> the passages that answer it."""


def make_test_set(data: TrainingSet, out: Path) -> list[tuple[str, str]]:
    """Write queries about a corpus, and its passages, to a new folder.

    ``data.recipe`` says where queries come from, and how many there are.

    Returns:
        (query, its first passage) of each query.
    """
    recipe, documents = data.recipe, [*data.documents, *data.held_out]
    data = TrainingSet(recipe, documents, queries_file=data.queries_file, lazy_queries=False)
    passages = data.chunks
    relevant: Relevant = {}
    count, seed = recipe.queries.max_queries, recipe.training.seed
    if recipe.queries.queries == "lm":
        places = _sample(range(len(passages)), count, seed)
        texts = [passages[i].text for i in places]
        answers = generate_answers(data.query_lm(), texts)
        relevant = {a.query: [i] for i, a in zip(places, answers, strict=True) if a.query}
    else:
        passages = data.rows
        for number, row in enumerate(passages):
            relevant.setdefault(row.query, []).append(number)
        relevant.pop("", None)
        relevant = dict(_sample(list(relevant.items()), count, seed))
    if not relevant:
        raise RevelaError("no passage has a query: give more text, or another --queries")
    with atomic_write(out) as temporary:
        temporary.mkdir()
        _write_collection(temporary, documents, passages, relevant)
    return [(query, passages[numbers[0]].text) for query, numbers in relevant.items()]


def _sample(items: Sequence[T], count: int, seed: int) -> list[T]:
    """``count`` random items, in their order."""
    count = min(count or len(items), len(items))
    indices = random.Random(seed).sample(range(len(items)), count)
    return [items[i] for i in sorted(indices)]


def _write_collection(
    folder: Path, documents: Sequence[Document], passages: Sequence[Chunk], relevant: Relevant
) -> None:
    """Write BEIR layout. ``document_id`` is the id of the passage's document in an index."""
    count, ids, corpus = Counter[str](), list[str](), list[dict[str, str]]()
    for passage in passages:
        document = documents[passage.document].id
        name = re.sub(r"\s+", "_", document)
        ids.append(f"{name}#{count[name]}")
        count[name] += 1
        corpus.append({"_id": ids[-1], "text": passage.text.strip(), "document_id": document})
    queries = ({"_id": f"q{n}", "text": query} for n, query in enumerate(relevant))
    qrels = (f"q{n}\t{ids[i]}\t1\n" for n, numbers in enumerate(relevant.values()) for i in numbers)
    _write_lines(folder / "corpus.jsonl", corpus)
    _write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    text = "query-id\tcorpus-id\tscore\n" + "".join(qrels)
    (folder / "qrels" / "test.tsv").write_text(text, encoding="utf-8")


def _write_lines(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
